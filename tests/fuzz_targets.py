"""Build and run the fuzz targets: each `tests/fuzz/NAME.c` with its seeds, `fuzz/corpus/NAME/`.

`make fuzz` runs this file: every target under clang's libFuzzer, AddressSanitizer and UBSan, for so
many seconds each. What it finds lies in `build/fuzz/NAME/`: inputs that reached new code in
`found/`, where the next run goes on from, and an input that failed as `crash-...`. Such a one is
put into the corpus with its fix.

Without clang, a target is linked with `fuzz/replay/main.c` and replays the corpus and seeded
mutations of it, which `test_fuzz_corpus.py` does.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
FUZZ = ROOT / "tests" / "fuzz"

COMMON = ("-std=c11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{NATIVE}")
SANITIZED = ("-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
# An error of a sanitizer ends in abort(), so that the input that met it is told.
OPTIONS = {"ASAN_OPTIONS": "abort_on_error=1", "UBSAN_OPTIONS": "abort_on_error=1:halt_on_error=1"}

# Inputs are packets, and few of those that a network carries are longer.
PACKET_MAX = 1500


class Target(NamedTuple):
    """What a target is linked with: sources below `native/`, and libraries."""

    sources: tuple[str, ...]
    libraries: tuple[str, ...] = ()


_CONNECTION = tuple(sorted(f"quic/{path.name}" for path in (NATIVE / "quic").glob("*.c")))
TARGETS = {
    "frames": Target(("quic/frames.c",)),
    "packets": Target(_CONNECTION, ("crypto",)),
}


def seeds(name: str) -> list[Path]:
    """The committed corpus of a target."""
    return sorted((FUZZ / "corpus" / name).iterdir())


def build(name: str, binary: Path, compiler: str, flags: Sequence[str], *more: Path) -> Path:
    """Compile a target."""
    target = TARGETS[name]
    sources = [FUZZ / f"{name}.c", *more, *(NATIVE / source for source in target.sources)]
    libraries = [f"-l{library}" for library in target.libraries]
    command = [compiler, *COMMON, *flags, *SANITIZED, "-o", str(binary)]
    command += [*map(str, sources), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} does not compile:\n{done.stderr}")
    return binary


def build_replay(name: str, to: Path, compiler: str) -> Path:
    """Compile a target as a program of its own, with the compiler that is there."""
    flags = ("-fsanitize=address,undefined",)
    return build(name, to / f"replay-{name}", compiler, flags, FUZZ / "replay" / "main.c")


def replay(
    binary: Path, files: Sequence[Path], mutations: int, seed: int
) -> subprocess.CompletedProcess[str]:
    """Run the corpus, each cut of it, and mutations of it; the exit code is 0 when all held."""
    command = [str(binary), str(mutations), str(seed), *map(str, files)]
    environment = {**os.environ, **OPTIONS}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def fuzz(name: str, seconds: int, clang: str) -> bool:
    """Run a target under libFuzzer; whether nothing failed."""
    folder = ROOT / "build" / "fuzz" / name
    found = folder / "found"
    found.mkdir(parents=True, exist_ok=True)
    binary = build(name, folder / name, clang, ("-fsanitize=fuzzer,address,undefined",))
    print(f"{name}: {seconds} s, {len(seeds(name))} seeds ...", flush=True)
    options = (f"-max_total_time={seconds}", f"-max_len={PACKET_MAX}", "-print_final_stats=1")
    command = [str(binary), *options, f"-artifact_prefix={folder}/"]
    command += [str(found), str(FUZZ / "corpus" / name)]
    environment = {**os.environ, **OPTIONS}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    (folder / "log").write_text(done.stderr, encoding="utf-8")
    if done.returncode:
        print(f"{name} FAILED, {folder / 'log'}:\n{done.stderr[-4000:]}")
        return False
    for line in done.stderr.splitlines():
        if "DONE" in line or "number_of_executed_units" in line:
            print(f"  {line.strip()}")
    return True


def main() -> int:
    clang = os.environ.get("CLANG", "clang")
    if shutil.which(clang) is None:
        print(f"make fuzz needs clang with libFuzzer, and there is no {clang} here.")
        print("    Debian, Ubuntu: sudo apt-get install clang")
        print("    Fedora:         sudo dnf install clang compiler-rt")
        return 1
    seconds, names = int(sys.argv[1]), sys.argv[2:] or list(TARGETS)
    held = [fuzz(name, seconds, clang) for name in names]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
