"""`dataplane run`: a daemon, one question, its answer, and where the time went.

The rule that holds here: whatever happens (an error, Ctrl-C, a signal, a daemon that hangs), the
daemon and what it started are gone before this returns, and so is the directory of its socket.
"""

import asyncio
import http.client
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from dataplane.cli import ask as cli_client
from dataplane.cli.prompts import ByteCodec, model_codec
from dataplane.config import API_KEY_VARIABLE, SOCKET_NAME
from dataplane.errors import UnavailableError
from dataplane.kinds import Address, parse_address

# The daemon itself gives a runtime 120 s to be ready.
READY_WITHIN_S = 150.0
END_WITHIN_S = 15.0
DRAIN_S = 5
_WINDOW_S = 10
_MEASURED_WITHIN_S = 1.0

_READY = re.compile(r"ready quic=(\S+) admin=(\S+) runtime=(\S+) slots=(\d+) context=(\d+) ca=(.+)")


class Ready(NamedTuple):
    """What a daemon says of itself once it serves."""

    quic: str
    admin: Address
    runtime: str
    slots: int
    context: int
    ca: Path


def parse_ready(line: str) -> Ready | None:
    """Read a daemon's `ready` line; None if it is another line."""
    match = _READY.fullmatch(line.rstrip("\n"))
    if match is None:
        return None
    quic, admin, runtime, slots, context, ca = match.groups()
    return Ready(quic, parse_address(admin), runtime, int(slots), int(context), Path(ca))


class ChildDaemon:
    """A daemon that lives as long as the `with` block.

    It is a session of its own: Ctrl-C reaches this process only, which then ends it in order, and
    the last resort reaches all that it started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ChildDaemon":
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # stderr is shown as it comes
            start_new_session=True,
            # The key is for asking other daemons; this one takes whoever starts it.
            env={name: text for name, text in os.environ.items() if name != API_KEY_VARIABLE},
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        process = self._process
        if process is None:
            return
        try:
            process.terminate()
            process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            print("dataplane: the daemon does not end; it is killed", file=sys.stderr)
        finally:  # also after a second Ctrl-C
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    @property
    def pid(self) -> int:
        """Its process, once started."""
        assert self._process is not None
        return self._process.pid

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> Ready:
        """Wait for the `ready` line.

        Raises:
            UnavailableError: The daemon ended first, or took too long.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + within_s
        rest = b""
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while selector.select(max(0.0, deadline - time.monotonic())):
                data = os.read(pipe, 65536)
                if not data:
                    code = self._process.wait(END_WITHIN_S)
                    raise UnavailableError(f"the daemon ended with code {code} before it was ready")
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    ready = parse_ready(line.decode(errors="replace"))
                    if ready is not None:
                        return ready
        raise UnavailableError(f"the daemon was not ready within {within_s:g} s")


def _fetch_pickup(admin: Address) -> int | None:
    """The one request's pickup time, in microseconds, as the daemon measured it."""
    deadline = time.monotonic() + _MEASURED_WITHIN_S
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(*admin, timeout=_MEASURED_WITHIN_S)
        try:
            connection.request("GET", f"/health?latency99&window={_WINDOW_S}")
            latency = json.loads(connection.getresponse().read())
            if latency["count"]:
                return int(latency["pickup"]["p50"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return None  # a table without this line is still worth showing
        finally:
            connection.close()
        time.sleep(0.05)
    return None


def _end_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _serve_command(runtime: str, state_dir: Path, socket: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "dataplane",
        "serve",
        "--listen=localhost:0",
        "--admin=localhost:0",
        f"--runtime={runtime}",
        f"--state-dir={state_dir}",
        f"--socket={socket}",
        f"--drain-timeout={DRAIN_S}",
    ]


def run(runtime: str, prompt: str, max_output: int, state_dir: Path) -> int:
    """Serve, ask, show, stop.

    Returns:
        The exit code, as `dataplane client` has it.

    Raises:
        DataplaneError: The daemon does not start, or the model is missing.
    """
    codec = ByteCodec() if runtime == "echo" else model_codec(state_dir)
    question = cli_client.Question(
        ids=codec.encode(prompt), text=codec.stream(), max_output=max_output
    )
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end_on_signal)
    with tempfile.TemporaryDirectory(prefix="dataplane-") as directory:
        command = _serve_command(runtime, state_dir, Path(directory) / SOCKET_NAME)
        return ask_child(command, question)


def ask_child(command: Sequence[str], question: cli_client.Question) -> int:
    """Start a daemon with `command`, ask it, show answer and times, and end it."""
    with ChildDaemon(command) as daemon:
        ready = daemon.wait_ready()
        print(f"dataplane: asking {ready.quic}", file=sys.stderr, flush=True)
        child = cli_client.Daemon(ready.quic, ready.ca)
        show = cli_client.show_on_stdout
        outcome = asyncio.run(cli_client.ask(child, question, show))
        cli_client.end_line(outcome)
        cli_client.complain(outcome)
        if outcome.answered:
            times = dict(outcome.timings_us or {})
            times["pickup"] = _fetch_pickup(ready.admin)
            cli_client.show_times(times)
    return outcome.exit_code
