"""Build the kernels for host threads: the traffic program, its mutants, and the library of tests.

`make tsan` runs this file: `gpu_traffic` under ThreadSanitizer and under AddressSanitizer with
UBSan, then with each mistake that `gpu_mutants.h` sows, which has to be noticed.
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from native_programs import ASAN, ATTEMPTS, CAUGHT, NATIVE, PLAIN, PROGRAMS, TSAN, Kind, Run, run

GPU = NATIVE / "gpu"
TRAFFIC = "gpu_traffic"
_C_SOURCES = (
    "slots", "region", "tokens", "attach", "gpu/commands", "gpu/device", "gpu/turn", "gpu/driver",
    "gpu/admission_loop",
)  # fmt: skip
_WARNINGS = ("-g", "-Wall", "-Wextra", "-Werror", "-pthread")
# `#pragma unroll` is the device's compiler's; not every program calls every verb.
_CUDA = (
    "-std=c++20", "-Wno-unknown-pragmas", "-Wno-unused-function", f"-I{GPU}", f"-I{NATIVE}",
    "-x", "c++",
)  # fmt: skip


class Mutant(NamedTuple):
    """A mistake and the build that notices it."""

    name: str
    kind: Kind
    amount: int = 500


MUTANTS = (
    Mutant("RELAXED_COMMAND", TSAN),
    Mutant("RELAXED_VERDICT", TSAN),
    Mutant("RELAXED_CLAIM", TSAN),
    Mutant("RELAXED_PUBLISH", TSAN),
    Mutant("RELAXED_TAKE", TSAN),
    Mutant("RELAXED_SHOW", TSAN),
    Mutant("RELAXED_MIRROR", TSAN),
    Mutant("RELAXED_GIVE_BACK", TSAN),
    Mutant("TORN_CLAIM", TSAN),
    Mutant("TORN_CANCEL", PLAIN, 900),
    Mutant("TORN_REVOKE", PLAIN, 900),
    Mutant("LATE_MIRROR", PLAIN, 900),
    Mutant("FORGOTTEN_CLAIM", PLAIN, 10),
)


def cxx() -> str:
    return os.environ.get("CXX", "c++")


def _compile(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"this does not compile: {' '.join(command)}\n{done.stderr}")


def _objects(kind: Kind, to: Path) -> list[str]:
    """Compile the C sources, once a kind."""
    made = []
    for name in _C_SOURCES:
        target = to / f"{kind.name.split()[0]}-{Path(name).name}.o"
        if not target.exists():
            part = target.with_suffix(f".{os.getpid()}")
            _compile(
                [os.environ.get("CC", "cc"), "-std=c11", *_WARNINGS, *kind.flags, f"-I{NATIVE}",
                 "-c", str(NATIVE / f"{name}.c"), "-o", str(part)]
            )  # fmt: skip
            part.rename(target)
        made.append(str(target))
    return made


def build_traffic(kind: Kind, to: Path, mutant: str | None = None) -> Path:
    """Compile the program with the kernels as they are, or with a mistake in them."""
    binary = to / f"{TRAFFIC}-{kind.name.split()[0]}-{mutant or 'original'}"
    # What a mutant loses, it loses at once.
    flags = ["-DMUTANT", f"-DMUTANT_{mutant}", "-DLIMIT_MS=1500"] if mutant else []
    _compile(
        [cxx(), *_WARNINGS, *kind.flags, *_CUDA, *flags, str(PROGRAMS / f"{TRAFFIC}.cpp"),
         "-x", "none", *_objects(kind, to), "-rdynamic", "-o", str(binary)]
    )  # fmt: skip
    return binary


def build_library(to: Path) -> Path:
    """Compile the kernels, and CUDA's driver for them, into the library of `host_gpu.py`.

    Once a process; what each has is a copy, and so has globals of its own.
    """
    library = to / "libhostgpu.so"
    library.write_bytes(_library())
    return library


@functools.cache
def _library() -> bytes:
    with tempfile.TemporaryDirectory(prefix="dataplane-gpu-") as folder:
        made = Path(folder) / "libhostgpu.so"
        _compile(
            [cxx(), *_WARNINGS, "-O1", "-fPIC", "-shared", *_CUDA, "-include",
             str(GPU / "host_cuda.h"), str(PROGRAMS / "gpu_host.cpp"),
             str(PROGRAMS / "gpu_driver.cpp"), "-o", str(made)]
        )  # fmt: skip
        return made.read_bytes()


def hunt(mutant: Mutant, binary: Path) -> str | None:
    """Run a mutant until its mistake is noticed; how it was, or None."""
    for seed in range(1, ATTEMPTS + 1):
        done = run(binary, Run(TRAFFIC, mutant.amount), seed)
        if done.returncode in CAUGHT:
            return f"{CAUGHT[done.returncode]}, run {seed}"
        if done.returncode:
            raise RuntimeError(f"{mutant.name} ended with {done.returncode}:\n{done.stderr}")
    return None


def check_sanitized(to: Path) -> bool:
    """Run the program under every sanitizer; whether all were silent."""
    sound = True
    for kind in (TSAN, ASAN):
        start = time.monotonic()
        done = run(build_traffic(kind, to), Run(TRAFFIC, 1000))
        if done.returncode:
            sound = False
            print(f"{TRAFFIC} under {kind.name} FAILED:\n{done.stdout}{done.stderr}")
        print(f"{done.stdout}{TRAFFIC}, {kind.name}: {time.monotonic() - start:.1f} s", flush=True)
    return sound


def check_mutants(to: Path) -> bool:
    """Hunt every mutant; whether all were noticed."""
    sound = True
    for kind in {mutant.kind for mutant in MUTANTS}:
        _objects(kind, to)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        binaries = list(pool.map(lambda one: build_traffic(one.kind, to, one.name), MUTANTS))
    for mutant, binary in zip(MUTANTS, binaries, strict=True):
        how = hunt(mutant, binary)
        sound = sound and how is not None
        print(
            f"kernel mutant {mutant.name}: {'caught ' + how if how else 'NOT CAUGHT'}", flush=True
        )
    return sound


def main() -> int:
    if shutil.which(cxx()) is None:
        print(f"the kernels on host threads: waived, there is no {cxx()} here")
        return 0
    with tempfile.TemporaryDirectory(prefix="dataplane-gpu-") as folder:
        sound = check_sanitized(Path(folder))
        return 0 if check_mutants(Path(folder)) and sound else 1


if __name__ == "__main__":
    sys.exit(main())
