"""HTTP/3 clients that others wrote, ready to ask; where one is missing the test is skipped."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import chromium
import pytest

BINARY = {"content-type": "application/octet-stream"}


@contextlib.contextmanager
def curl_session(ca: Path, within: float) -> Iterator[Any]:
    """curl_cffi's, over HTTP/3 alone; a request may take so many seconds."""
    library = pytest.importorskip("curl_cffi", reason="curl_cffi is not installed")
    with library.Session(http_version="v3only", verify=str(ca), timeout=within) as session:
        yield session


@contextlib.contextmanager
def niquests_session(port: int) -> Iterator[Any]:
    """niquests', which asks `localhost:port` over HTTP/3."""
    pytest.importorskip("qh3", reason="qh3, niquests' HTTP/3, is not installed")
    library = pytest.importorskip("niquests", reason="niquests is not installed")
    with library.Session(disable_http1=True, disable_http2=True, disable_ipv6=True) as session:
        session.quic_cache_layer.add_domain("localhost", port, port)
        yield session


@contextlib.contextmanager
def chromium_tab(ca: Path, profile: Path, port: int) -> Iterator[chromium.Tab]:
    """A tab of Chromium's on a page of the daemon whose CA it is, at 127.0.0.1:port."""
    program = chromium.find()
    if program is None:
        pytest.skip("chromium is not installed")
    certificate = ca.parent / "server.pem"
    with chromium.chromium(program, profile, port, certificate) as browser:
        yield browser.open(f"https://127.0.0.1:{port}/health")


def ngtcp2_pages(port: int, names: Sequence[str], folder: Path, within: float) -> dict[str, Any]:
    """Fetch pages on one connection with ngtcp2's own client: the documents, by their names."""
    program = shutil.which("gtlsclient")
    if program is None:
        pytest.skip("gtlsclient is not installed (apt-get install ngtcp2-client)")
    done = subprocess.run(
        [
            program, "--quiet", "--exit-on-all-streams-close", f"--download={folder}",
            "127.0.0.1", str(port), *(f"https://localhost:{port}/{name}" for name in names),
        ],
        capture_output=True, text=True, timeout=within, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name: json.loads((folder / name).read_bytes()) for name in names}
