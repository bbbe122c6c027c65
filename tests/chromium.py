"""Headless Chromium, told what to do over its DevTools pipe; every request goes over QUIC."""

import base64
import contextlib
import hashlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

_WITHIN_S = 30.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find() -> str | None:
    """Where it is, or None."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def key_hash(certificate: Path) -> str:
    """How its flag names a certificate's key."""
    key = x509.load_pem_x509_certificate(certificate.read_bytes()).public_key()
    encoded = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(hashlib.sha256(encoded).digest()).decode()


class Browser:
    """A running browser; messages are JSON with a zero behind each."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out = to_browser
        self._in = from_browser
        self._data = b""
        self._count = 0

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Call a DevTools method and wait for its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _WITHIN_S
        while b"\0" not in self._data:
            left = deadline - time.monotonic()
            assert left > 0, "the browser says nothing"
            assert select.select([self._in], [], [], left)[0], "the browser says nothing"
            part = os.read(self._in, 65536)
            assert part, "the browser is gone"
            self._data += part
        message, _, self._data = self._data.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def open(self, url: str) -> "Tab":
        """Open a page and wait until it is there."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable", session)
        navigated = self.call("Page.navigate", session, url=url)
        assert "errorText" not in navigated, navigated
        return Tab(self, session)


class Tab:
    """A page, in which JavaScript can run."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def run(self, script: str) -> Any:
        """Run the body of an async function; what it returns."""
        result = self._browser.call(
            "Runtime.evaluate",
            self._session,
            expression=f"(async () => {{ {script} }})()",
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")


@contextlib.contextmanager
def chromium(program: str, directory: Path, port: int, certificate: Path) -> Iterator[Browser]:
    """Start it; it trusts this certificate's key and speaks QUIC to `127.0.0.1:port`."""
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--remote-debugging-pipe",
        f"--user-data-dir={directory}",
        f"--origin-to-force-quic-on=127.0.0.1:{port}",
        f"--ignore-certificate-errors-spki-list={key_hash(certificate)}",
    ]
    # The pipe has to be descriptors 3 and 4 of the browser.
    script = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", program, *flags],
        pass_fds=(read_commands, write_answers),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(write_commands, read_answers)
    finally:
        os.close(write_commands)
        os.close(read_answers)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
