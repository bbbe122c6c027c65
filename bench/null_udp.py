"""The null server of the latencies: `null_udp.c`, compiled when it is needed.

A round trip of datagrams of the sizes that a request and its answer have, with no protocol and no
work: what is above it is the daemon's and its client's.
"""

import contextlib
import functools
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.launch import LaunchError, server
from bench.measure import CLIENT_CORE, pin

SOURCE = Path(__file__).with_suffix(".c")
_WITHIN_S = 60.0


def compile_into(directory: Path) -> Path:
    """Compile it with the system's compiler.

    Raises:
        LaunchError: There is none, or it fails.
    """
    program = directory / "null_udp"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-std=gnu11", "-O2", "-o", str(program), str(SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_WITHIN_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise LaunchError(f"{SOURCE.name} cannot be compiled: {said}") from error
    return program


@contextlib.contextmanager
def serving(program: Path, reply_bytes: int, sleeps: bool) -> Iterator[int]:
    """Serve on the server's core until the block ends; its port."""
    with server([str(program), "serve", str(reply_bytes), *(["sleep"] * sleeps)]) as child:
        yield int(child.wait_output(r"(?m)^(\d+)$")[1])


def ask(
    program: Path, port: int, count: int, request_bytes: int, sleeps: bool
) -> npt.NDArray[np.float64]:
    """Return so many round trips in µs, made on the generator's core."""
    command = [str(program), "ask", str(port), str(count), str(request_bytes)]
    done = subprocess.run(
        command + ["sleep"] * sleeps,
        check=True,
        capture_output=True,
        timeout=_WITHIN_S,
        preexec_fn=functools.partial(pin, CLIENT_CORE),
    )
    return np.array(done.stdout.split(), np.float64) / 1000
