"""Build and run the C test programs of `tests/native`: plain, sanitized, and with seeded mistakes.

`make tsan` runs this file: every program under ThreadSanitizer and under AddressSanitizer with
UBSan, then each mutant of `native/slots.c`, which the program that is there for it must notice.
`test_native_programs.py` runs the programs quickly and plain.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
PROGRAMS = ROOT / "tests" / "native"

# What a program is linked with besides itself, under `native/`; the others are about slots.
_SLOTS = ("slots", "region", "tokens", "attach")
_CONNECTION = tuple(sorted(f"quic/{path.stem}" for path in (NATIVE / "quic").glob("*.c")))
_PUMP = (
    *_CONNECTION,
    "pump/calls",
    "pump/events",
    "pump/loop",
    "pump/loop_in",
    "pump/loop_out",
    "pump/pump",
    "pump/routes",
    "pump/socket",
    "pump/timers",
)
_RAW = (
    "slots",
    "region",
    "tokens",
    "latency",
    "keys",
    "pump/raw",
    "pump/raw_in",
    "pump/raw_out",
    "pump/raw_serve",
    "pump/raw_table",
    "gpu/commands",
    "pump/prompt1",
    "quic/streams",
    "quic/ranges",
    "quic/pool",
)
_RECOVERY = ("quic/recovery", "quic/ranges", "quic/pool", "quic/frames")
SOURCES = {
    "clock": (),
    "conn": ("slots", "region", *_CONNECTION),
    "probes": ("slots", "region", *_CONNECTION),
    "frames": ("quic/frames",),
    "http3": ("http3_request",),
    # These include protect.c, to reach its limits.
    "protect": ("quic/aead", "quic/aead_wide"),
    "key_updates": ("quic/aead", "quic/aead_wide"),
    "load": ("pump/load", "pump/load_h3", "quic/pool"),
    "load_h3": ("pump/load", "pump/load_h3", "quic/pool"),
    "pump": ("slots", "region", *_PUMP),
    "pump_loop": ("slots", "region", *_PUMP),
    "routes": ("pump/routes",),
    "raw_in": _RAW,
    "raw_refused": _RAW,
    "raw_ends": _RAW,
    "raw_out": _RAW,
    "raw_device": _RAW,
    "raw_keys": _RAW,
    "ranges": ("quic/ranges", "quic/pool"),
    "sending": ("quic/streams", "quic/ranges", "quic/pool"),
    "recovery": _RECOVERY,
    "congestion": _RECOVERY,
    "recovery_link": _RECOVERY,
}

COMMON = ("-std=c11", "-g", "-Wall", "-Wextra", "-Werror", "-pthread")

CAUGHT = {1: "by its outcomes", 66: "by ThreadSanitizer"}
ATTEMPTS = 10
TIME_LIMIT_S = 120


class Kind(NamedTuple):
    """A way to compile."""

    name: str
    flags: tuple[str, ...]


PLAIN = Kind("plain", ("-O2",))
# For the default suite, where compiling takes longer than what is run.
QUICK = Kind("quick", ("-O1", "-g0"))
# The compiler warns that ThreadSanitizer does not model fences; no data here hangs on one.
TSAN = Kind("ThreadSanitizer", ("-O2", "-fsanitize=thread", "-Wno-tsan"))
ASAN = Kind(
    "AddressSanitizer and UBSan",
    ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
)


class Run(NamedTuple):
    """A program and how much it does: its arguments, of which the second is the seed."""

    program: str
    amount: int
    race: str | None = None

    def arguments(self, seed: int) -> list[str]:
        return [str(self.amount), str(seed), *([self.race] if self.race else [])]


class Mutant(NamedTuple):
    """A mistake that `mutants.c` sows, and the build and the run that notice it."""

    name: str
    kind: Kind
    run: Run
    processors: int = 1


_RACES = Run("races", 20_000)
_TRAFFIC = Run("traffic", 5_000)

# A fence that is missing shows only where two processors really run at once.
MUTANTS = (
    Mutant("TORN_CLAIM", PLAIN, _RACES),
    Mutant("TORN_VERB", PLAIN, _RACES),
    Mutant("BLIND_VERB", PLAIN, _RACES),
    Mutant("RELAXED_CLAIM", TSAN, _TRAFFIC),
    Mutant("RELAXED_PUBLISH", TSAN, _TRAFFIC),
    Mutant("RELAXED_TAKE", TSAN, _TRAFFIC),
    Mutant("RELAXED_FINISH", TSAN, _TRAFFIC),
    Mutant("RELAXED_RELEASE", TSAN, _TRAFFIC),
    Mutant("RELAXED_EMIT", TSAN, _TRAFFIC),
    Mutant("RELAXED_POLL_STATE", TSAN, _TRAFFIC),
    Mutant("RELAXED_POLL_COUNT", TSAN, _TRAFFIC),
    Mutant("NO_FENCE_IN_WAIT", PLAIN, Run("wakes", 200_000, "publish/wait"), processors=2),
    Mutant("NO_FENCE_IN_SLEEP", PLAIN, Run("wakes", 200_000, "emit/sleep"), processors=2),
    Mutant("NO_FENCE_BEFORE_RING", PLAIN, Run("wakes", 200_000, "emit/sleep"), processors=2),
    Mutant("SLEEPS_UNSAID", PLAIN, Run("wakes", 1_000, "publish/wait")),
)

SANITIZED = {
    TSAN: (
        Run("races", 20_000),
        Run("wakes", 20_000),
        Run("traffic", 50_000),
        Run("writers", 300),
        Run("handshake", 20),
        Run("pump", 100),
        Run("pump_loop", 100),
    ),
    ASAN: (
        Run("races", 10_000),
        Run("wakes", 5_000),
        Run("traffic", 20_000),
        Run("writers", 1_000),
        Run("handshake", 20),
        Run("frames", 10_000),
        Run("http3", 200_000),
        Run("protect", 300),
        Run("key_updates", 300),
        Run("ranges", 20_000),
        Run("recovery", 1),
        Run("congestion", 1),
        Run("recovery_link", 100_000),
        Run("clock", 500_000),
        Run("conn", 100),
        Run("probes", 300),
        Run("sending", 30),
        Run("load", 500),
        Run("load_h3", 20_000),
        Run("pump", 200),
        Run("pump_loop", 200),
        Run("routes", 10_000),
        Run("raw_in", 20),
        Run("raw_refused", 1),
        Run("raw_ends", 1),
        Run("raw_out", 3),
        Run("raw_device", 1),
        Run("raw_keys", 1),
    ),
}


def compiler() -> str:
    return os.environ.get("CC", "cc")


def build(program: str, kind: Kind, to: Path, mutant: str | None = None) -> Path:
    """Compile a program with the sources under test, or with a mutant in place of `slots.c`."""
    (binary,) = build_all([(program, kind, mutant)], to)
    return binary


def build_all(wanted: Iterable[tuple[str, Kind, str | None]], to: Path) -> list[Path]:
    """Compile several programs, on every processor: a source that some share but once a kind.

    What lies in `to` already is taken as it is: use a folder that is new.
    """
    every = list(wanted)
    # The programs' own are the longest, so they go first.
    units = sorted(
        {unit for one in every for unit in _units(*one)}, key=lambda unit: unit.source, reverse=True
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = dict(zip(units, pool.map(lambda unit: _object(unit, to), units), strict=True))
        links = [
            pool.submit(_link, *one, [objects[unit] for unit in _units(*one)], to) for one in every
        ]
        return [link.result() for link in links]


class _Unit(NamedTuple):
    """A source, and the flags that it is compiled with."""

    source: Path
    kind: Kind
    mutant: str | None

    @property
    def flags(self) -> tuple[str, ...]:
        if not self.mutant:
            return (*COMMON, *self.kind.flags)
        # Not every mutant uses every way to be wrong; and a wake-up that is lost is lost at once.
        mutant = ("-DMUTANT", f"-DMUTANT_{self.mutant}", "-Wno-unused-function", "-DLOST_MS=1000")
        return (*COMMON, *self.kind.flags, *mutant)


def _units(program: str, kind: Kind, mutant: str | None) -> list[_Unit]:
    """What a program is linked from. Only itself and the mutant know of mutants."""
    names = SOURCES.get(program, _SLOTS)
    shared = [NATIVE / f"{name}.c" for name in names if not (mutant and name == "slots")]
    own = [PROGRAMS / f"{program}.c", *([PROGRAMS / "mutants.c"] if mutant else [])]
    return [
        *(_Unit(source, kind, mutant) for source in own),
        *(_Unit(source, kind, None) for source in shared),
    ]


def _object(unit: _Unit, to: Path) -> Path:
    """Compile a source, unless that was done."""
    path = "-".join(unit.source.relative_to(ROOT).with_suffix("").parts)
    made = to / f"{path}-{unit.kind.name.split()[0]}-{unit.mutant or 'original'}.o"
    if not made.exists():
        part = made.with_suffix(".part")
        command = [compiler(), *unit.flags, f"-I{NATIVE}", "-c", str(unit.source), "-o", str(part)]
        _compile(unit.source.name, command)
        part.rename(made)
    return made


def _link(program: str, kind: Kind, mutant: str | None, objects: Sequence[Path], to: Path) -> Path:
    binary = to / f"{program}-{kind.name.split()[0]}-{mutant or 'original'}"
    command = [compiler(), *COMMON, *kind.flags, "-o", str(binary), *map(str, objects), "-lcrypto"]
    _compile(program, command)
    return binary


def _compile(what: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{what} does not compile:\n{done.stderr}")


def run(binary: Path, run_of: Run, seed: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a program; its exit code is 0 when all it saw was allowed."""
    command = [str(binary), *run_of.arguments(seed)]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66"}
    done = _finish(command, environment)
    if "unexpected memory mapping" in done.stderr:
        # An old ThreadSanitizer on a kernel that scatters mappings more widely than it knows.
        done = _finish(["setarch", "--addr-no-randomize", *command], environment)
    return done


def _finish(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )


def check_sanitized(to: Path) -> bool:
    """Run every program under every sanitizer; whether all were silent."""
    sound = True
    for kind, runs in SANITIZED.items():
        start = time.monotonic()
        binaries = build_all(((one.program, kind, None) for one in runs), to)
        for one, binary in zip(runs, binaries, strict=True):
            done = run(binary, one)
            if done.returncode:
                sound = False
                print(f"{one.program} under {kind.name} FAILED:\n{done.stdout}{done.stderr}")
            elif one.program in ("races", "traffic"):
                print(done.stdout, end="")
        print(f"{kind.name}: {len(runs)} programs, {time.monotonic() - start:.1f} s\n", flush=True)
    return sound


def hunt(mutant: Mutant, binary: Path) -> str | None:
    """Run a mutant until its mistake is noticed; how it was, or None."""
    for seed in range(1, ATTEMPTS + 1):
        done = run(binary, mutant.run, seed)
        if done.returncode in CAUGHT:
            return f"{CAUGHT[done.returncode]}, run {seed}"
        if done.returncode:
            raise RuntimeError(f"{mutant.name} ended with {done.returncode}:\n{done.stderr}")
    return None


def check_mutants(to: Path) -> bool:
    """Hunt every mutant; whether all were noticed."""
    sound = True
    start = time.monotonic()
    binaries = build_all(((one.run.program, one.kind, one.name) for one in MUTANTS), to)
    processors = len(os.sched_getaffinity(0))
    for mutant, binary in zip(MUTANTS, binaries, strict=True):
        if mutant.processors > processors:
            print(f"mutant {mutant.name}: waived, it takes {mutant.processors} processors")
            continue
        how = hunt(mutant, binary)
        sound = sound and how is not None
        print(f"mutant {mutant.name}: {'caught ' + how if how else 'NOT CAUGHT'}", flush=True)
    print(f"{len(MUTANTS)} mutants, {time.monotonic() - start:.1f} s")
    return sound


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="dataplane-native-") as folder:
        sound = check_sanitized(Path(folder))
        return 0 if check_mutants(Path(folder)) and sound else 1


if __name__ == "__main__":
    sys.exit(main())
