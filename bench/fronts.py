"""HTTP/3, JSON and long prompts against the raw protocol: `python -m bench.fronts`.

One daemon (`null` runtime), one run, a round of each case in turn, medians. What is compared is the
server's CPU a request; over HTTP/3 the generator costs more than the server, so no latency is taken
from it, except for the last two cases, which compare latencies of the same generator:

- `first`: the verdict of the first request after `ready` against the median of later ones, over
fresh daemons;
- `scraped`: ingress' p99 under load while `/metrics` and `/health` are fetched ten times a
second, against without.
"""

import argparse
import array
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.measure import CLIENT_CORE, cpu_ns, pin, process
from dataplane.http3 import Http3, data_frame_header
from dataplane.load import Load, Server
from dataplane.load.wire import H3Dialogue, dialogues

CONTEXT = 131_072
SLOTS = 64
VOCAB = 50_000
AUTHORITY = "localhost"
SCRAPES_PER_S = 10
PAUSE_S = 0.1
LATER = 15
TARGETS = {
    "h3 / raw, 128 ids": 3.0,
    "json / binary, 1000 ids": 2.5,
    "upload of 131072 ids, ms": 0.55,
    "first / later request": 1.5,
}


class Case(NamedTuple):
    """A kind of request, and how many are in flight and in a round."""

    name: str
    protocol: str
    tokens: int
    streams: int
    requests: int


CASES = (
    Case("raw 128", "raw", 128, 32, 30_000),
    Case("h3 128", "h3", 128, 32, 3000),
    Case("h3 1000", "h3", 1000, 8, 600),
    Case("json 1000", "json", 1000, 8, 600),
    Case("raw 131072", "raw", 131_072, 1, 200),
)


def token_ids(count: int) -> "array.array[int]":
    return array.array("I", (i % VOCAB for i in range(count)))


def json_request(ids: "array.array[int]") -> bytes:
    """Return a whole HTTP/3 request with a JSON body and a binary answer."""
    body = json.dumps({"token_ids": ids.tolist()}, separators=(",", ":")).encode()
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":authority", AUTHORITY.encode()),
        (b":path", b"/v1/generate"),
        (b"content-type", b"application/json"),
        (b"accept", b"application/octet-stream"),
        (b"content-length", b"%d" % len(body)),
    ]
    head = Http3(is_client=True).encode_headers(0, fields)
    return head + data_frame_header(len(body)) + body


class Daemon(NamedTuple):
    """A daemon under test."""

    pid: int
    server: Server
    admin: int


@contextlib.contextmanager
def daemon(directory: str) -> Iterator[Daemon]:
    """Serve with the `null` runtime on the server's core."""
    arguments = ["-m", "dataplane", "serve", "--runtime=null", "--listen=localhost:0"]
    arguments += ["--admin=localhost:0", f"--state-dir={directory}", f"--slots={SLOTS}"]
    arguments += [f"--max-writing={SLOTS}", f"--context={CONTEXT}", f"--vocab-size={VOCAB}"]
    with process(arguments) as (pid, ready):
        found = re.search(r"quic=127\.0\.0\.1:(\d+) admin=127\.0\.0\.1:(\d+) .*ca=(.+)", ready)
        assert found, ready
        server = Server((AUTHORITY, int(found[1])), Path(found[3]).read_bytes())
        yield Daemon(pid, server, int(found[2]))


def load_of(case: Case, server: Server) -> Load:
    """Return a connected generator for a case."""
    ids = token_ids(case.tokens)
    if case.protocol == "json":
        request = json_request(ids)
        load = Load(server, "h3", lambda: H3Dialogue(request), 1)
    else:
        alpn, make = dialogues(case.protocol, AUTHORITY, ids.tobytes(), 1)
        load = Load(server, alpn, make, 1)
    load.connect()
    return load


def round_us(load: Load, case: Case, pid: int, part: int = 1) -> float:
    """Return the server's CPU a request in µs over one round."""
    requests = max(1, case.requests // part)
    before = cpu_ns(pid)
    outcome = load.run(requests, case.streams)
    if outcome.by_status != {"200": requests}:
        raise RuntimeError(f"{case.name}: not every request was answered with 200: {outcome}")
    return (cpu_ns(pid) - before) / requests / 1000


def costs(target: Daemon, rounds: int, progress: Progress) -> dict[str, float]:
    """Return each case's median CPU a request in µs."""
    task = progress.add_task("cost a request", total=len(CASES) * (rounds + 1))
    found: dict[str, list[float]] = {case.name: [] for case in CASES}
    with contextlib.ExitStack() as stack:
        loads = [(case, stack.enter_context(load_of(case, target.server))) for case in CASES]
        for case, load in loads:
            round_us(load, case, target.pid, part=3)
            progress.advance(task)
        for _ in range(rounds):
            for case, load in loads:
                found[case.name].append(round_us(load, case, target.pid))
                progress.advance(task)
    return {name: statistics.median(values) for name, values in found.items()}


def first_against_later(directory: str, daemons: int, progress: Progress) -> float:
    """Return the median ratio of the first verdict's time to the median of the next ones.

    All come after the same pause: a request that follows one at once finds warm caches and a core
    that is awake, whatever the daemon did before.
    """
    task = progress.add_task("first request", total=daemons + 1)
    case = Case("raw 128", "raw", 128, 1, 1)
    ratios = []
    for number in range(daemons + 1):
        with daemon(directory) as target, load_of(case, target.server) as load:
            times = []
            for _ in range(1 + LATER):
                time.sleep(PAUSE_S)
                times.append(float(load.run(1, 1).verdicts_us[0]))
        if number:  # In the first daemon the generator itself was cold.
            ratios.append(times[0] / statistics.median(times[1:]))
        progress.advance(task)
    return statistics.median(ratios)


_SCRAPER = """
import http.client, sys, time
port, every = int(sys.argv[1]), float(sys.argv[2])
connection = http.client.HTTPConnection("127.0.0.1", port)
while True:
    for path in ("/metrics", "/health"):
        connection.request("GET", path)
        connection.getresponse().read()
    time.sleep(every)
"""


@contextlib.contextmanager
def scraper(port: int) -> Iterator[None]:
    """Fetch the pages from a process of their own, on the generator's core."""
    child = subprocess.Popen([sys.executable, "-c", _SCRAPER, str(port), str(1 / SCRAPES_PER_S)])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def scraped_against_not(target: Daemon, rounds: int, progress: Progress) -> dict[str, float]:
    """Return ingress' p99 in µs, with and without the pages being fetched.

    As the daemon states it, from the kernel's receive time on: whoever fetches the pages shares
    the generator's core, so what the generator sees is slowed by that too.
    """
    task = progress.add_task("pages under load", total=2 * rounds)
    case = CASES[0]
    p99: dict[str, list[float]] = {"plain": [], "scraped": []}
    with load_of(case, target.server) as load:
        for _ in range(rounds):
            for name in p99:
                with scraper(target.admin) if name == "scraped" else contextlib.nullcontext():
                    times = load.run(case.requests, 8).ingress_us
                p99[name].append(sorted(times)[len(times) * 99 // 100])
                progress.advance(task)
    return {name: statistics.median(values) for name, values in p99.items()}


def measure(rounds: int, progress: Progress) -> dict[str, Any]:
    """Run every case."""
    with tempfile.TemporaryDirectory() as directory:
        with daemon(directory) as target:
            cpu = costs(target, rounds, progress)
            pages = scraped_against_not(target, rounds, progress)
        first = first_against_later(directory, rounds, progress)
    found = {
        "h3 / raw, 128 ids": cpu["h3 128"] / cpu["raw 128"],
        "json / binary, 1000 ids": cpu["json 1000"] / cpu["h3 1000"],
        "upload of 131072 ids, ms": cpu["raw 131072"] / 1000,
        "first / later request": first,
        "ingress p99 scraped / not": pages["scraped"] / pages["plain"],
    }
    return {
        "server_cpu_us": {name: round(value, 2) for name, value in cpu.items()},
        "found": {name: round(value, 3) for name, value in found.items()},
        "targets": TARGETS,
    }


def main() -> int:
    """Measure and print; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pin(CLIENT_CORE)
    with Progress(console=Console(stderr=True)) as progress:
        result = measure(options.rounds, progress)
    if options.json:
        print(json.dumps(result))
    else:
        table = Table("measured", "found", "at most")
        for name, value in result["found"].items():
            table.add_row(name, f"{value:g}", f"{TARGETS[name]:g}" if name in TARGETS else "")
        Console().print(table)
        print("server CPU a request, µs:", result["server_cpu_us"])
    return int(any(result["found"][name] > most for name, most in TARGETS.items()))


if __name__ == "__main__":
    sys.exit(main())
