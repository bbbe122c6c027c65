"""Servers as processes of their own: pinned, accounted for with all their children, and ended.

The rules that hold here:

- A server is a session of its own, so that Ctrl-C reaches this program only, which ends it in
  order; whatever it started and left behind is killed.
- Its CPU is that of every thread of it and of its descendants, from the scheduler's own
  accounting. Threads are told apart, so that one which ended cannot make the sum shrink.
- What it says goes to a file; when it fails, the end of that is the error's text.
"""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.measure import SERVER_CORE, pin
from bench.results import ROOT

START_WITHIN_S = 60.0
END_WITHIN_S = 10.0
_SHOWN_LINES = 3
_PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to connections, so that none takes one meanwhile."""

Threads = dict[tuple[int, int], int]


class LaunchError(Exception):
    """A server did not start, or ended."""


class Cpu(NamedTuple):
    """CPU time in ns by thread: of a system's processes, and of the runtimes among them."""

    all: Threads
    runtimes: Threads


class _Process(NamedTuple):
    pid: int
    parent: int
    started: int


def family_of(root: int) -> list[_Process]:
    """Return a process and all that descend from it, whatever session they are in.

    Those that have ended and only wait for someone to read their status are not among them.
    """
    found: dict[int, _Process] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                # Behind the name, which may hold anything.
                text = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace")
                fields = text.rpartition(")")[2].split()
                if fields[0] != "Z":
                    found[int(entry)] = _Process(int(entry), int(fields[1]), int(fields[19]))
    family = [found[root]] if root in found else []
    for member in family:  # it grows meanwhile
        family += [other for other in found.values() if other.parent == member.pid]
    return family


def family_cpu(root: int) -> Cpu:
    """Read what every thread of a process and of its descendants has used."""
    cpu = Cpu({}, {})
    for pid, _, _ in family_of(root):
        with contextlib.suppress(OSError):
            threads = _threads(pid)
            cpu.all.update(threads)
            if b"\0runtime\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                cpu.runtimes.update(threads)
    return cpu


def _threads(pid: int) -> Threads:
    found: Threads = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError, IndexError):
            text = Path(f"/proc/{pid}/task/{task}/schedstat").read_text(encoding="ascii")
            found[pid, int(task)] = int(text.split()[0])
    return found


def spent_s(before: Threads, after: Threads) -> float:
    """Return the CPU seconds between two readings."""
    return sum(ns - before.get(thread, 0) for thread, ns in after.items()) / 1e9


class Server:
    """A server that runs."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self._process = process
        self._log = log

    def cpu(self) -> Cpu:
        return family_cpu(self._process.pid)

    def output(self) -> str:
        """Return what it has said."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_output(self, pattern: str, within_s: float = START_WITHIN_S) -> re.Match[str]:
        """Wait until it says something.

        Raises:
            LaunchError: It ended, or did not say it in time.
        """
        for _ in self._tries(within_s, f"did not say {pattern!r}"):
            found = re.search(pattern, self.output())
            if found:
                return found
        raise AssertionError("unreachable")

    def wait_tcp(self, port: int, within_s: float = START_WITHIN_S) -> None:
        """Wait until it takes connections.

        Raises:
            LaunchError: It ended, or did not in time.
        """
        for _ in self._tries(within_s, f"did not listen on port {port}"):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return

    def _tries(self, within_s: float, complaint: str) -> Iterator[None]:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            ended = self._process.poll() is not None
            yield  # Once more after its end: what it said last may be what is waited for.
            if ended:
                raise LaunchError(f"ended with {self._process.returncode}: {self._end()}")
            time.sleep(0.02)
        raise LaunchError(f"{complaint} within {within_s:g} s: {self._end()}")

    def _end(self) -> str:
        return " / ".join(self.output().strip().splitlines()[-_SHOWN_LINES:])


@contextlib.contextmanager
def server(
    command: Sequence[str], core: int = SERVER_CORE, environment: dict[str, str] | None = None
) -> Iterator[Server]:
    """Run a server, pinned to a core, until the block ends; `python` is this interpreter."""
    words = [sys.executable if word == "python" else word for word in command]
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        log = Path(directory) / "log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=os.environ | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: pin(core),
            )
        try:
            yield Server(process, log)
        finally:
            _end_family(process)


def _end_family(process: "subprocess.Popen[bytes]") -> None:
    """End a server in order, and what it may have left behind without."""
    family = family_of(process.pid)
    try:
        process.terminate()
        process.wait(END_WITHIN_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also after a second Ctrl-C
        if process.poll() is None:
            process.kill()
            process.wait()
        for member in family:
            _kill_if_left(member)


def _kill_if_left(member: _Process) -> None:
    """Kill a process that is still the one it was; the grace is for one that is just ending."""
    deadline = time.monotonic() + 2.0
    while any(found.started == member.started for found in family_of(member.pid)[:1]):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
            return
        time.sleep(0.02)


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses, TCP or UDP, for servers that cannot choose."""
    for port in random.sample(_PORTS, 100):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tcp,
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        ):
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))
            return port
    raise LaunchError(f"no port is free between {_PORTS.start} and {_PORTS.stop}")
