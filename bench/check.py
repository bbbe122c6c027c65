"""Three ratios that must not get worse: `python -m bench.check`, which is what `make bench-check`
calls.

Each is measured in this run and held against the one that is committed in
`bench/results/ratios.json`; more than a quarter worse fails. Ratios of one run carry from machine
to machine, times do not. `--write` commits what was found.

- `raw / uvicorn binary`: server CPU a request of 128 tokens, 32 in flight;
- `h3 / raw`: the same, over HTTP/3;
- `upload / memcpy`: server CPU of 131,072 tokens over raw, against copying as many bytes once.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.cases import Case, Limits, parse_case
from bench.cells import measure_row
from bench.measure import CLIENT_CORE, pin
from bench.progress import Line
from bench.results import RESULTS
from bench.systems import SYSTEMS, Files, running
from dataplane.identity import load_identity

WORSE = 1.25
ROUNDS = 5
LIMITS = Limits(0.6, 100_000)
COMMITTED = RESULTS / "ratios.json"
_SMALL, _LARGE = "128-s32", "131072-c1"
_LARGE_BYTES = 131_072 * 4
_CELLS = (
    ("dataplane raw", _SMALL),
    ("dataplane h3", _SMALL),
    ("uvicorn binary", _SMALL),
    ("dataplane raw", _LARGE),
)


def memcpy_us() -> float:
    """Return the time that copying the large prompt's bytes once takes, in µs."""
    source = np.ones(_LARGE_BYTES, np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(200):
        start = time.perf_counter_ns()
        np.copyto(target, source)
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1000


def _case(name: str) -> Case:
    case = parse_case(name)
    assert case is not None
    return case


def one_round(files: Files, progress: Line) -> dict[str, float]:
    """Return the three ratios of one round, in which what is compared follows each other."""
    cost: dict[tuple[str, str], float] = {}
    copies = []
    for system, case in _CELLS:
        progress(f"{system} {case}")
        copies.append(memcpy_us())
        with running(SYSTEMS[system], _case(case), files) as run:
            cost[system, case] = measure_row(run, _case(case), LIMITS, None).server_cpu_us
    copies.append(memcpy_us())
    raw = cost["dataplane raw", _SMALL]
    return {
        "raw / uvicorn binary": raw / cost["uvicorn binary", _SMALL],
        "h3 / raw": cost["dataplane h3", _SMALL] / raw,
        "upload / memcpy": cost["dataplane raw", _LARGE] / statistics.median(copies[-2:]),
    }


def measure(files: Files, progress: Line) -> dict[str, float]:
    """Return the three ratios: the median of several rounds' own."""
    rounds = [one_round(files, progress) for _ in range(ROUNDS)]
    return {
        name: round(statistics.median(found[name] for found in rounds), 3) for name in rounds[0]
    }


def judge(found: dict[str, float], committed: dict[str, float]) -> list[str]:
    """Return what got worse by more than a quarter, in words."""
    return [
        f"{name}: {value:g}, committed is {committed[name]:g}: {value / committed[name]:.2f} times"
        for name, value in found.items()
        if value > WORSE * committed[name]
    ]


def main() -> int:
    """Measure and compare; 1 when a ratio got worse."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="make these the committed ones")
    options = parser.parse_args()
    pin(CLIENT_CORE)
    progress = Line()
    with tempfile.TemporaryDirectory() as directory:
        identity = load_identity(Path(directory), "localhost")
        assert identity.ca is not None
        files = Files(Path(directory), identity.cert, identity.key, identity.ca)
        found = measure(files, progress)
    progress("")
    if options.write:
        COMMITTED.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    for name, value in found.items():
        print(f"{name:24} {value:g} (committed: {committed[name]:g})")
    worse = judge(found, committed)
    for line in worse:
        print(f"worse: {line}", file=sys.stderr)
    return int(bool(worse))


if __name__ == "__main__":
    sys.exit(main())
