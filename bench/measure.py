"""What the benches share: processes pinned to a core, and the CPU time that they took."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SERVER_CORE = 0
CLIENT_CORE = 1


def cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process in ns, as the scheduler accounts it."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total


def rss_bytes(pid: int) -> int:
    """Return a process's resident memory without what it shares (its region, its libraries)."""
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def pin(core: int) -> None:
    """Keep this process on one core, where the machine has it."""
    with contextlib.suppress(OSError, ValueError):
        os.sched_setaffinity(0, {core})


@contextlib.contextmanager
def process(arguments: list[str], core: int = SERVER_CORE) -> Iterator[tuple[int, str]]:
    """Run a Python program pinned to a core until the block ends.

    Yields:
        Its process number and its first line of output.
    """
    child = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: pin(core),
    )
    try:
        assert child.stdout is not None
        line = child.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{' '.join(arguments)} ended with status {child.wait()}")
        yield child.pid, line
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
