"""What admission costs on top of the transport: `python -m bench.admission`.

Server CPU a request of the daemon (`null` runtime: parse, claim, id check, write, publish, verdict)
against a bare aioquic echo with the same requests and an answer of the same size, all under the
same load, turn about, in one run. On aioquic alone (`--no-pump`) the target is a ratio of at most
1.3; with the packet pump, what is left of the same cost. Also the daemon's memory between its
10,000th and its last request, with the pump.
"""

import argparse
import array
import contextlib
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from bench import bare_echo
from bench.measure import CLIENT_CORE, cpu_ns, pin, process, rss_bytes
from dataplane import prompt1
from dataplane.identity import load_identity
from dataplane.load import Load, Server
from dataplane.load.wire import RawDialogue, raw_request

ANSWER = prompt1.encode_verdict(200, 0, 1, 0, 0, 0, 0) + prompt1.encode_end(1, 0, 0)
SLOTS = 64
VOCABULARY = 50_000
DAEMONS: dict[str, list[str]] = {"aioquic": ["--no-pump"], "pump": []}
WARM_UP = 2000
TARGET = 1.3


def measure(load: Load, pid: int, requests: int, streams: int) -> float:
    """Return the server's CPU a request in µs over one round."""
    before = cpu_ns(pid)
    outcome = load.run(requests, streams)
    spent = cpu_ns(pid) - before
    if outcome.by_status != {"200": requests}:
        raise RuntimeError(f"not every request was answered with 200: {outcome.by_status}")
    return spent / requests / 1000


def daemon_command(options: argparse.Namespace, state: Path, *flags: str) -> list[str]:
    command = ["-m", "dataplane", "serve", "--runtime=null", "--listen=localhost:0"]
    command += ["--admin=localhost:0", f"--state-dir={state}", f"--vocab-size={VOCABULARY}"]
    command += [f"--slots={SLOTS}", f"--max-writing={SLOTS}", f"--socket={state / flags[0]}"]
    return [*command, f"--context={max(1024, options.tokens)}", *flags[1:]]


def start_servers(
    options: argparse.Namespace, state: Path, stack: contextlib.ExitStack
) -> dict[str, tuple[Load, int]]:
    """Start every server; a load on each, and its process."""
    ids = array.array("I", (i % VOCABULARY for i in range(options.tokens)))
    request = raw_request(ids.tobytes(), 0)
    identity = load_identity(state, "localhost")
    assert identity.ca is not None
    ca_pem = identity.ca.read_bytes()

    def load_of(port: str, alpn: str) -> Load:
        server = Server(("127.0.0.1", int(port)), ca_pem)
        return stack.enter_context(Load(server, alpn, lambda: RawDialogue(request), 1))

    bare = ["-m", "bench.bare_echo", f"--cert={identity.cert}", f"--key={identity.key}"]
    pid, port = stack.enter_context(process([*bare, f"--answer={ANSWER.hex()}"]))
    loads = {"bare": (load_of(port, bare_echo.ALPN), pid)}
    for name, flags in DAEMONS.items():
        pid, ready = stack.enter_context(process(daemon_command(options, state, name, *flags)))
        found = re.search(r"quic=127\.0\.0\.1:(\d+)", ready)
        assert found, ready
        loads[name] = (load_of(found[1], prompt1.ALPN), pid)
    return loads


def compare(options: argparse.Namespace, directory: str, progress: Progress) -> dict[str, object]:
    """Run the servers side by side, a round each in turn."""
    servers = 1 + len(DAEMONS)
    rounds = progress.add_task("rounds", total=options.rounds * servers + 1)
    with contextlib.ExitStack() as stack:
        loads = start_servers(options, Path(directory), stack)
        costs: dict[str, list[float]] = {name: [] for name in loads}
        for load, server in loads.values():
            load.connect()
            measure(load, server, min(WARM_UP, options.requests), options.streams)
        progress.advance(rounds)
        pid = loads["pump"][1]
        rss_first = rss_last = 0
        done = min(WARM_UP, options.requests)
        for _ in range(options.rounds):
            for name, (load, server) in loads.items():
                costs[name].append(measure(load, server, options.requests, options.streams))
                progress.advance(rounds)
            done += options.requests
            rss_last = rss_bytes(pid)
            if done >= 10_000 and not rss_first:
                rss_first = rss_last
    medians = {name: statistics.median(values) for name, values in costs.items()}
    return {
        "tokens": options.tokens,
        "streams": options.streams,
        "requests": done,
        "server_cpu_us": {name: round(value, 2) for name, value in medians.items()},
        "ratio": round(medians["aioquic"] / medians["bare"], 3),
        "target": TARGET,
        "pump_ratio": round(medians["pump"] / medians["bare"], 3),
        "rss_bytes": rss_last,
        "rss_growth_bytes": rss_last - rss_first,
    }


def main() -> int:
    """Measure, print; 1 when the ratio is above the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--requests", type=int, default=5000, help="a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object and no more")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON object there too")
    options = parser.parse_args()
    pin(CLIENT_CORE)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as directory, Progress(console=console) as progress:
        result = compare(options, directory, progress)
    if options.out is not None:
        options.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result))
    else:
        cpu = result["server_cpu_us"]
        assert isinstance(cpu, dict)
        shown = ", ".join(f"{name} {value} µs" for name, value in cpu.items())
        print(f"server CPU a request: {shown}")
        print(f"ratio {result['ratio']} (target: at most {TARGET}), pump {result['pump_ratio']}")
        growth = result["rss_growth_bytes"]
        print(f"memory grew by {growth} bytes by request {result['requests']}")
    ratio = result["ratio"]
    assert isinstance(ratio, float)
    return 0 if ratio <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
