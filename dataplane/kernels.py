"""The kernels of `native/gpu`, compiled by nvcc into one fatbin for every target.

Where an image lies ready that is no older than its sources, it is taken; otherwise nvcc makes one,
in a source tree that has the kernels. nvcc gives the same bytes for the same sources.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from dataplane.errors import DataplaneError

SOURCES = Path(__file__).resolve().parent.parent / "native"
MACHINES = (80, 90, 100)
"""A100, H100 and H200, B200; those that the compiler has."""
PTX = 80
"""For every later device, which compiles it when it is loaded."""


class KernelsError(DataplaneError):
    """There are no kernels and no way to make them, or they do not compile."""


def image(ready: Path, say: Callable[[str], None], sources: Path = SOURCES) -> bytes:
    """Return the fatbin, from the file `ready` or from nvcc.

    Raises:
        KernelsError: Neither is possible.
    """
    if ready.is_file() and not _is_stale(ready, sources):
        say(f"the kernels are those of {ready}")
        return ready.read_bytes()
    nvcc = shutil.which("nvcc")
    if nvcc is None or not (sources / "gpu/kernels.cu").is_file():
        state = f"{ready} is older than its sources" if ready.is_file() else f"{ready} is not there"
        raise KernelsError(
            f"there are no kernels: {state}, and {_lack(nvcc, sources)}; `make kernels` in a source"
            " tree builds them where nvcc is, and --kernels FILE takes a fatbin from there"
        )
    say(f"compiling the kernels with {nvcc} ...")
    with tempfile.TemporaryDirectory(prefix="dataplane-kernels-") as folder:
        target = Path(folder) / "kernels.fatbin"
        compile_kernels(nvcc, target, sources)
        return target.read_bytes()


def _is_stale(ready: Path, sources: Path) -> bool:
    made = ready.stat().st_mtime
    files = [*sources.glob("*.h"), *sources.glob("gpu/*")]
    return any(path.stat().st_mtime > made for path in files if path.is_file())


def _lack(nvcc: str | None, sources: Path) -> str:
    if nvcc is None:
        return "there is no nvcc on the PATH"
    return f"{sources} holds no source of them"


def compile_kernels(
    nvcc: str,
    target: Path,
    sources: Path = SOURCES,
    source: Path | None = None,
    flags: Sequence[str] = (),
) -> str:
    """Compile for every target that this nvcc has.

    Args:
        nvcc: The compiler.
        target: The fatbin.
        sources: Where headers are looked for.
        source: Another file than `gpu/kernels.cu` of the sources.
        flags: More of them.

    Returns:
        What the compilers said.

    Raises:
        KernelsError: nvcc refuses; the text holds its last words.
    """
    known = _run([nvcc, "--list-gpu-code"]).split()
    machines = [number for number in MACHINES if f"sm_{number}" in known]
    codes = [f"arch=compute_{number},code=sm_{number}" for number in machines]
    codes.append(f"arch=compute_{PTX},code=compute_{PTX}")
    return _run(
        # Not compressed: drivers before 550 cannot unpack what CUDA 13 packs by default.
        [nvcc, "-std=c++20", "-O3", "-fatbin", "--no-compress", f"-I{sources}", *flags,
         *(f"-gencode={code}" for code in codes),
         str(source or sources / "gpu/kernels.cu"), "-o", str(target)]
    )  # fmt: skip


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise KernelsError(f"the kernels do not compile: {told} ({' '.join(command)})")
    return done.stdout + done.stderr


def main() -> int:
    """Build the image that this installation's runtimes load: `make kernels`."""
    from dataplane.runtime.cuda import KERNELS

    try:
        made = image(KERNELS, print)
    except KernelsError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return error.exit_code
    part = KERNELS.with_suffix(".part")
    part.write_bytes(made)
    part.replace(KERNELS)
    print(f"{KERNELS}: {len(made) >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
