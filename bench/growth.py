"""How the cost of a request grows: `python -m bench.growth`.

Server CPU a request (`null` runtime) against the prompt's length, the connections, the open streams
of one connection, and the number of slots with all of them free and all of them taken. For each
series a power is fitted to the part of the cost that
grows: cost = base + factor * x ** exponent, where the base is the cost at the smallest x. A plain
exponent of the whole cost stands beside it, which is what a user feels.

What counts as a fault: an exponent above 1.1 of the growing part anywhere it matters (worse than in
proportion), or a plain exponent above 0.1 in slots and connections between 8 and 128 (the number of
either should not be felt).
"""

import argparse
import contextlib
import json
import math
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.measure import CLIENT_CORE, cpu_ns, pin, process
from bench.results import Form, Progress
from dataplane.load import Load, Server
from dataplane.load.wire import dialogues

AUTHORITY = "localhost"
VOCAB = 1000
LINEAR_MOST = 1.1
FLAT_MOST = 0.1
FLAT_FROM, FLAT_TO = 8, 128
NEGLIGIBLE = 0.15
"""A growing part below this share of the base is noise: no exponent is fitted to it."""


class Point(NamedTuple):
    """One measurement: the daemon's slots, and the load on it."""

    x: int
    tokens: int = 128
    connections: int = 1
    streams: int = 1
    slots: int = 64
    refused: bool = False


class Series(NamedTuple):
    """What is varied."""

    name: str
    points: tuple[Point, ...]
    is_flat: bool  # whether between FLAT_FROM and FLAT_TO nothing should be felt


LENGTHS = (1, 16, 128, 1024, 8192, 32_768, 131_072)
MANY = (1, 8, 32, 128, 512, 1000)
STREAMS = (1, 4, 16, 32, 64, 128)
SLOTS = (1, 8, 32, 128, 512, 1024)

SERIES = (
    Series("prompt tokens", tuple(Point(n, tokens=n, slots=4) for n in LENGTHS), False),
    Series("connections", tuple(Point(n, connections=n, slots=1024) for n in MANY), True),
    Series("open streams", tuple(Point(n, streams=n, slots=256) for n in STREAMS), False),
    Series("slots, all free", tuple(Point(n, slots=n) for n in SLOTS), True),
    Series("slots, all taken", tuple(Point(n, slots=n, refused=True) for n in SLOTS), True),
)


def requests_of(point: Point, form: Form) -> int:
    """Return how many requests make a figure: fewer where each costs more."""
    wanted = 40_000 if form is Form.FULL else 3_000
    by_size = max(3, wanted * 128 // max(128, point.tokens))
    return max(by_size, 2 * point.connections)


@contextlib.contextmanager
def daemon(point: Point, directory: str) -> Iterator[tuple[int, Server]]:
    """Serve so that a point's requests are admitted, or all refused."""
    arguments = ["-m", "dataplane", "serve", "--runtime=null", "--listen=localhost:0"]
    arguments += ["--admin=localhost:0", f"--state-dir={directory}", f"--slots={point.slots}"]
    arguments += [f"--max-writing={point.slots}", f"--context={max(128, point.tokens)}"]
    arguments += [f"--vocab-size={VOCAB}", "--max-connections=2048"]
    arguments += ["--body-timeout=600", "--drain-timeout=0.1"]
    with process(arguments) as (pid, ready):
        found = re.search(r"quic=127\.0\.0\.1:(\d+) .*ca=(.+)", ready)
        assert found, ready
        yield pid, Server((AUTHORITY, int(found[1])), Path(found[2]).read_bytes())


def load_of(server: Server, tokens: int, connections: int) -> Load:
    ids = b"".join((i % VOCAB).to_bytes(4, "little") for i in range(tokens))
    alpn, make = dialogues("raw", AUTHORITY, ids, 1)
    load = Load(server, alpn, make, connections)
    load.connect()
    return load


def measure(point: Point, form: Form) -> float:
    """Return the server's CPU a request in µs."""
    with (
        tempfile.TemporaryDirectory() as directory,
        daemon(point, directory) as (pid, server),
        contextlib.ExitStack() as stack,
    ):
        if point.refused:
            ca = f"{directory}/ca.pem"
            stack.enter_context(held(server.address[1], ca, point.slots))
        load = stack.enter_context(load_of(server, point.tokens, point.connections))
        requests = requests_of(point, form)
        load.run(max(point.connections, requests // 4), point.streams)
        status = "429" if point.refused else "200"
        rounds = []
        for _ in range(3):
            before = cpu_ns(pid)
            outcome = load.run(requests, point.streams)
            if outcome.by_status != {status: requests}:
                raise RuntimeError(f"{point}: not every answer was {status}: {outcome.by_status}")
            rounds.append((cpu_ns(pid) - before) / requests / 1000)
    return statistics.median(rounds)


@contextlib.contextmanager
def held(port: int, ca: str, slots: int) -> Iterator[None]:
    """Take every slot and keep it: a process sends headers without bodies while the block runs."""
    command = ["-m", "bench.holder", f"--port={port}", f"--ca={ca}", f"--slots={slots}"]
    with process(command, CLIENT_CORE):
        yield


def exponent(xs: list[int], ys: list[float]) -> float:
    """Return the slope of log y over log x by least squares."""
    logs = [(math.log(x), math.log(y)) for x, y in zip(xs, ys, strict=True)]
    mean_x = statistics.fmean(x for x, _ in logs)
    mean_y = statistics.fmean(y for _, y in logs)
    spread = sum((x - mean_x) ** 2 for x, _ in logs)
    return sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread


def growing_exponent(xs: list[int], ys: list[float]) -> float | None:
    """Return the exponent of what the cost has above its base; None where that is noise."""
    base = ys[0]
    grown = [
        (x, y - base) for x, y in zip(xs[1:], ys[1:], strict=True) if y - base > NEGLIGIBLE * base
    ]
    if len(grown) < 2:
        return None
    return exponent([x for x, _ in grown], [y for _, y in grown])


def judge(series: Series, costs: list[float]) -> dict[str, Any]:
    """Return a series' figures and what is at fault in it."""
    xs = [point.x for point in series.points]
    growing = growing_exponent(xs, costs)
    middle = [(x, y) for x, y in zip(xs, costs, strict=True) if FLAT_FROM <= x <= FLAT_TO]
    flat = exponent([x for x, _ in middle], [y for _, y in middle]) if len(middle) > 1 else None
    faults = []
    if growing is not None and growing > LINEAR_MOST:
        faults.append(f"grows with the power {growing:.2f}, above {LINEAR_MOST}")
    if series.is_flat and flat is not None and flat > FLAT_MOST:
        faults.append(f"felt between {FLAT_FROM} and {FLAT_TO}: power {flat:.2f}")
    return {
        "x": xs,
        "server_cpu_us": [round(cost, 2) for cost in costs],
        "exponent": round(exponent(xs, costs), 3),
        "exponent_of_growth": None if growing is None else round(growing, 3),
        "exponent_8_to_128": None if flat is None else round(flat, 3),
        "faults": faults,
    }


def run(form: Form, progress: Progress) -> dict[str, Any]:
    """Measure every series."""
    found = {}
    for series in SERIES:
        costs = []
        for point in series.points:
            progress(f"growth: {series.name} {point.x}")
            costs.append(measure(point, form))
        found[series.name] = judge(series, costs)
    return found


def main() -> int:
    """Measure and print; 1 when something grows faster than it may."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pin(CLIENT_CORE)
    form = Form.FULL if options.full else Form.QUICK
    found = run(form, lambda text: print(text, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps(found))
    else:
        table = Table("series", "µs a request, by x", "power", "of growth", "8 to 128", "faults")
        for name, row in found.items():
            costs = zip(row["x"], row["server_cpu_us"], strict=True)
            table.add_row(
                name,
                ", ".join(f"{x}: {cost:g}" for x, cost in costs),
                str(row["exponent"]),
                str(row["exponent_of_growth"]),
                str(row["exponent_8_to_128"]),
                "; ".join(row["faults"]) or "none",
            )
        Console().print(table)
    return int(any(row["faults"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
