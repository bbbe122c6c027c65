"""What a core did, and the hogs that keep one busy.

A hog is a child of the bench: it ends when told to, when the bench is gone, and by itself after so
many seconds, whichever comes first.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.launch import Server, server
from bench.measure import CLIENT_CORE, SERVER_CORE, pin

CPU = "CPU"
MEMORY = "memory bandwidth"
_BYTES = 256 << 20
_SPARE_CORE = max(SERVER_CORE, CLIENT_CORE) + 1


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Run the block on one core, where the machine has it."""
    before = os.sched_getaffinity(0)
    pin(core)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def core_times(core: int) -> tuple[int, int]:
    """Return a core's idle and whole time since the start, in the kernel's ticks; 0s if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *fields = line.split()
            if name == f"cpu{core}":
                times = list(map(int, fields[:8]))
                return times[3] + times[4], sum(times)
    return 0, 0


def has_spare_core() -> bool:
    """Whether there is one besides the server's and the generator's."""
    return (os.cpu_count() or 1) > _SPARE_CORE


@contextlib.contextmanager
def hog(kind: str, seconds: float) -> Iterator[Server]:
    """Keep a hog for the block: `CPU` on the server's core, or `MEMORY` where it takes no core.

    The one for memory runs on a core of its own; where there is none, on the generator's, with the
    idle scheduling class, so that it has only what the generator leaves.
    """
    spare = has_spare_core()
    core = SERVER_CORE if kind == CPU else _SPARE_CORE if spare else CLIENT_CORE
    command = ["python", "-m", "bench.noqueue.cores", f"--seconds={seconds}"]
    if kind == MEMORY:
        command.append("--memory")
        if not spare:
            command.append("--idle")
    with server(command, core) as child:
        child.wait_output("ready")
        yield child


def _goes_on(until: float, parent: int) -> bool:
    """Whether it is not yet time to end, and the bench is still there."""
    return time.monotonic() < until and os.getppid() == parent


def _spin(until: float, parent: int) -> None:
    while _goes_on(until, parent):
        count = 0
        while count < 20_000:
            count += 1


def _copy(until: float, parent: int) -> None:
    """Copy from one array into another that both are larger than any cache."""
    source = np.ones(_BYTES, dtype=np.uint8)
    target = np.zeros_like(source)
    print("ready", flush=True)
    while _goes_on(until, parent):
        np.copyto(target, source)


def _be_idle() -> None:
    """Take what the others leave: this process, and its session, which is scheduled as a group."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")


def main() -> None:
    """Be a hog."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--idle", action="store_true")
    options = parser.parse_args()
    if options.idle:
        _be_idle()
    until, parent = time.monotonic() + options.seconds, os.getppid()
    if options.memory:
        _copy(until, parent)
    else:
        print("ready", flush=True)
        _spin(until, parent)


if __name__ == "__main__":
    main()
