"""What the machine code of the kernels takes, for every target: registers, shared memory, spills.

That needs no GPU. Where there are the sources and nvcc, ptxas says it as it compiles them
(`-Xptxas -v`), spills included; where there is only the fatbin, cuobjdump reads it from there.
"""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from dataplane.kernels import SOURCES, KernelsError, compile_kernels


class Usage(NamedTuple):
    """One kernel on one target; `spill_bytes` is None where nobody says."""

    kernel: str
    target: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int | None


class Found(NamedTuple):
    """The usages and who said so, or no usages and why."""

    usages: tuple[Usage, ...] = ()
    by: str | None = None
    waived: str | None = None


def look(fatbin: Path, sources: Path = SOURCES) -> Found:
    """Ask the compiler, or read the fatbin."""
    nvcc, cuobjdump = shutil.which("nvcc"), shutil.which("cuobjdump")
    if nvcc is not None and (sources / "gpu/kernels.cu").is_file():
        try:
            return Found(of_ptxas(_compiled(nvcc, sources)), "ptxas -v, as nvcc compiled them")
        except KernelsError as error:
            return Found(waived=str(error))
    if cuobjdump is None:
        return Found(waived="there is no nvcc with the sources here, and no cuobjdump")
    if not fatbin.is_file():
        return Found(waived=f"{fatbin} is not there: `make kernels` builds it where nvcc is")
    command = [cuobjdump, "--dump-resource-usage", str(fatbin)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return Found(waived=f"cuobjdump fails: {' '.join(done.stderr.split())}")
    return Found(of_cuobjdump(done.stdout), f"cuobjdump, from {fatbin.name}")


def _compiled(nvcc: str, sources: Path) -> str:
    with tempfile.TemporaryDirectory(prefix="dataplane-kernels-") as folder:
        target = Path(folder) / "kernels.fatbin"
        return compile_kernels(nvcc, target, sources, flags=("-Xptxas", "-v"))


def _in_order(found: list[Usage]) -> tuple[Usage, ...]:
    return tuple(sorted(found, key=lambda one: (one.kernel, int(one.target.removeprefix("sm_")))))


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(sm_\d+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


def of_ptxas(said: str) -> tuple[Usage, ...]:
    """Return what `ptxas -v` said of each kernel."""
    found = []
    parts = _ENTRY.split(said)
    for kernel, target, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        frame, used = _FRAME.search(text), _USED.search(text)
        if frame is None or used is None:
            continue
        shared = _SHARED.search(used[2])
        found.append(
            Usage(
                kernel,
                target,
                int(used[1]),
                int(shared[1]) if shared else 0,
                int(frame[1]),
                int(frame[2]) + int(frame[3]),
            )
        )
    return _in_order(found)


def of_cuobjdump(said: str) -> tuple[Usage, ...]:
    """Return what `cuobjdump --dump-resource-usage` said of each kernel."""
    found = []
    target = ""
    kernel = ""
    for line in said.splitlines():
        if named := re.search(r"arch = (sm_\d+)", line):
            target = named[1]
        elif named := re.search(r"Function (\w+):", line):
            kernel = named[1]
        elif kernel and (used := dict(re.findall(r"\b(REG|STACK|SHARED):(\d+)", line))):
            registers, shared, stack = (int(used.get(n, 0)) for n in ("REG", "SHARED", "STACK"))
            found.append(Usage(kernel, target, registers, shared, stack, None))
            kernel = ""
    return _in_order(found)
