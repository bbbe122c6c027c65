"""`cuda-echo` on a device of host threads, in a process of its own, for several test files."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from daemon_process import DaemonProcess, first_line
from host_gpu import Library

SLOTS, CONTEXT, MAX_OUTPUT = 3, 64, 16


@contextlib.contextmanager
def echo_on_device(
    daemon: DaemonProcess,
    library: Library,
    *rest: str,
    mode: str = "tick",
    program: str = "host_gpu.py",
    context: int = CONTEXT,
    max_output: int = MAX_OUTPUT,
) -> Iterator["subprocess.Popen[str]"]:
    """Attach `cuda-echo` until the end of the block; the daemon serves meanwhile."""
    path = Path(__file__).with_name(program)
    numbers = [str(number) for number in (SLOTS, context, max_output)]
    command = [sys.executable, str(path), str(library.path), str(daemon.socket), *numbers, mode]
    process = subprocess.Popen(
        [*command, *rest], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        try:
            assert first_line(process.stdout, 20) == "cuda-echo is ready\n", process.stderr.read()
            daemon.wait_for_status("ok")
            yield process
        finally:
            process.kill()
            process.wait(20)


def hang(runtime: "subprocess.Popen[str]", says: str = "it hangs") -> None:
    """Have it do what it was told to do at SIGUSR1 (`host_gpu.py`)."""
    os.kill(runtime.pid, signal.SIGUSR1)
    assert runtime.stdout is not None
    assert first_line(runtime.stdout, 10) == f"{says}\n"
