"""A daemon as a process of its own: started, asked over its admin port, ended, and looked after.

Everything waits with a deadline and for a reason; nothing sleeps for luck. A daemon's processes
carry a mark in their environment, so that whatever is left of it is found, orphans too.
"""

import asyncio
import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")

WITHIN_S = 20.0
POLL_S = 0.02
ENGINES: dict[str, tuple[str, ...]] = {"pump": (), "aioquic": ("--no-pump",)}
"""What a daemon runs its packets on, and the flags that say so."""
_MARK = "TEST_DAEMON_MARK"
_READY = re.compile(
    r"ready quic=127\.0\.0\.1:(\d+) admin=127\.0\.0\.1:(\d+) runtime=([\w-]+)"
    r" slots=(\d+) context=(\d+) ca=(.+)"
)


def run(coroutine: Coroutine[Any, Any, T], within: float = WITHIN_S) -> T:
    """Run a coroutine to its end, which has to come within so many seconds."""

    async def bounded() -> T:
        async with asyncio.timeout(within):
            return await coroutine

    return asyncio.run(bounded())


def wait_until(what: str, condition: Callable[[], T | None], within: float = WITHIN_S) -> T:
    """Poll until `condition` is true, and return what it said."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"within {within:g} s it never came true: {what}"
        time.sleep(POLL_S)
    return value


async def until(what: str, condition: Callable[[], T | None], within: float = WITHIN_S) -> T:
    """`wait_until` for a coroutine."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"within {within:g} s it never came true: {what}"
        await asyncio.sleep(POLL_S)
    return value


def open_fds(pid: int) -> int:
    """Return how many descriptors a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def _marked(mark: str) -> Iterator[int]:
    """Every process, but this one, that was started with a mark in its environment."""
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


class Chosen:
    """The engine of the daemons that are started now, where their arguments do not say."""

    engine = "pump"


class DaemonProcess:
    """A daemon that said it is ready.

    Attributes:
        pid: Its process.
        port, admin_port: On 127.0.0.1.
        runtime, slots_count, context: As its `ready` line has them.
        ca: The file to verify it with.
        socket: Where runtimes attach.
    """

    def __init__(self, process: "subprocess.Popen[str]", line: str, mark: str, log: Path) -> None:
        found = _READY.fullmatch(line)
        assert found, line
        self._process = process
        self._mark = mark
        self._log = log
        self.pid = process.pid
        self.port, self.admin_port = int(found[1]), int(found[2])
        self.runtime = found[3]
        self.slots_count, self.context = int(found[4]), int(found[5])
        self.ca = Path(found[6])
        self.socket = Path()
        self._killed = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def stderr(self) -> str:
        """What it and its children wrote there so far."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    # Asking.

    def get(self, target: str) -> tuple[int, str]:
        """GET a page of the admin port: its status and text."""
        url = f"http://127.0.0.1:{self.admin_port}{target}"
        try:
            with urllib.request.urlopen(url, timeout=WITHIN_S) as page:
                return page.status, page.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def health(self) -> dict[str, Any]:
        """Return `GET /health`."""
        status, text = self.get("/health")
        assert status == 200
        page: dict[str, Any] = json.loads(text)
        return page

    def slots(self) -> list[dict[str, Any]]:
        """Return the rows of `GET /slots`."""
        status, text = self.get("/slots")
        assert status == 200
        rows: list[dict[str, Any]] = json.loads(text)["slots"]
        return rows

    def states(self) -> list[str]:
        """Return every slot's state."""
        return [row["state"] for row in self.slots()]

    def wait_for_status(self, status: str) -> None:
        """Wait for what `/health` says."""
        wait_until(f"the status is {status!r}", lambda: self.health()["status"] == status)

    def wait_for_states(self, *states: str) -> None:
        """Wait until these are the states of the slots that are not FREE."""
        wanted = sorted(states)
        wait_until(
            f"the slots are {wanted}",
            lambda: sorted(state for state in self.states() if state != "FREE") == wanted,
        )

    def wait_idle(self) -> None:
        """Wait until nothing is in flight and every slot is FREE."""
        wait_until("nothing is in flight", lambda: self.health()["in_flight"] == 0)
        self.wait_for_states()

    # Its processes.

    def processes(self) -> list[int]:
        """Return the daemon, its children and theirs, also when their parent is gone."""
        return list(_marked(self._mark))

    def children(self) -> list[int]:
        return [pid for pid in self.processes() if pid != self.pid]

    def send(self, number: int) -> None:
        """Send the daemon a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it as the kernel does when memory is short: no word to anybody."""
        self._killed = True
        self._process.kill()
        self._process.wait(WITHIN_S)

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self._process.terminate()
        return self._process.wait(WITHIN_S)

    def wait_for_exit(self) -> int:
        return self._process.wait(WITHIN_S)

    def finish(self) -> None:
        """End it, if that has not happened, and hold it to leaving nothing behind."""
        if self._killed:
            return
        if self._process.poll() is None:
            for pid in self.processes():
                assert not _maps_shared_files(pid), f"process {pid} maps a file of /dev/shm"
            self.stop()
        assert self._process.returncode == 0, self.stderr
        assert self.processes() == [], self.stderr
        assert not self.socket.exists(), f"{self.socket} is left"

    def clean_up(self) -> None:
        """End whatever is left, however the test went."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(WITHIN_S)


def _maps_shared_files(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return "/dev/shm/" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return False


def command(directory: Path, *arguments: str, program: Path | None = None) -> list[str]:
    """Return the command that serves on free ports with its state in `directory`.

    Arguments that are given take the place of these; `program` that of `dataplane`.
    """
    base = {
        "--listen": "localhost:0",
        "--admin": "localhost:0",
        "--state-dir": str(directory),
        "--socket": str(directory / "runtime.sock"),
    }
    given = {argument.split("=", 1)[0] for argument in arguments}
    defaults = [f"{flag}={value}" for flag, value in base.items() if flag not in given]
    runs = ["-m", "dataplane"] if program is None else [str(program)]
    return [sys.executable, *runs, "serve", *defaults, *arguments]


def first_line(stream: IO[str], within: float) -> str:
    """Read one line from a pipe; what there is of it at the end of the file or of the time."""
    data = b""
    deadline = time.monotonic() + within
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not data.endswith(b"\n") and selector.select(deadline - time.monotonic()):
            part = os.read(stream.fileno(), 1)
            if not part:
                break
            data += part
    return data.decode()


@contextlib.contextmanager
def daemon_process(
    directory: Path, *arguments: str, program: Path | None = None
) -> Iterator[DaemonProcess]:
    """Serve in a process of its own; it has to end well and leave nothing behind."""
    mark = uuid.uuid4().hex
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("DATAPLANE_")
    }
    log = directory / f"stderr-{mark[:8]}.txt"
    if not {"--no-pump", "--busy-poll"} & set(arguments):
        arguments += ENGINES[Chosen.engine]
    line = command(directory, *arguments, program=program)
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            line,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**environment, _MARK: mark},
        )
    daemon = None
    try:
        assert process.stdout is not None
        with process.stdout:
            ready = first_line(process.stdout, WITHIN_S)
            if not ready.endswith("\n"):
                raise AssertionError(f"no `ready` line came:\n{log.read_text()}")
            daemon = DaemonProcess(process, ready.rstrip("\n"), mark, log)
            daemon.socket = Path(
                next(part for part in line if part.startswith("--socket=")).split("=", 1)[1]
            )
            yield daemon
            daemon.finish()
    finally:
        if daemon is not None:
            daemon.clean_up()
        else:
            process.kill()
            process.wait(WITHIN_S)
