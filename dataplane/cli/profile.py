"""`dataplane profile`: where a request's time goes, stage by stage.

A daemon of its own runs under the sampler (`dataplane.cli.sampler`) while the load of `dataplane
bench` is on it. Two views come out: the share of the CPU time that each stage takes, from the
samples, and the latencies that the daemon itself publishes.
"""

import http.client
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dataplane.cli import bench as cli_bench
from dataplane.cli.bench import Plan, Target
from dataplane.cli.demo import ChildDaemon
from dataplane.cli.sampler import STAGES
from dataplane.client import read_ca
from dataplane.errors import UnavailableError
from dataplane.kinds import Address, parse_address
from dataplane.load import Server

_MEANING = {
    "pump": "the packet pump's thread: packets, prompt/1",
    "kernel": "system calls: receive, send, wait",
    "crypto": "packet protection",
    "transport": "QUIC in aioquic, less its crypto",
    "parse": "headers, frames, field sections, JSON",
    "claim": "admission, the compare-and-swap",
    "write": "ids checked and stored, publish, doorbell",
    "egress": "output collected, verdict and answer built and queued",
    "interpreter": "the event loop and what is left",
}


_ENOUGH = 200
"""Samples from which a stage of a tenth is told within a fifth of itself."""


def run(plan: Plan) -> int:
    """Load a daemon under the sampler and print its stages; 0, or 1 when a request broke off."""
    with tempfile.TemporaryDirectory(prefix="dataplane-") as directory:
        out = Path(directory) / "samples.json"
        slots = min(cli_bench.SLOTS_MOST, plan.in_flight)
        command = cli_bench.serve_command(plan, slots, directory)
        at = command.index("dataplane")
        command[at : at + 1] = ["dataplane.cli.sampler", str(out)]
        with ChildDaemon(command) as daemon:
            ready = daemon.wait_ready()
            server = Server(parse_address(ready.quic), read_ca(ready.ca))
            os.kill(daemon.pid, signal.SIGUSR1)  # what start-up cost is not asked for
            outcome, cpu_us = cli_bench.measure(plan, Target(server, ready.admin, ready.context))
            os.kill(daemon.pid, signal.SIGUSR2)
            latencies = _latencies(ready.admin)
        if not out.exists():
            raise UnavailableError("the daemon ended without its samples")
        found = json.loads(out.read_text(encoding="utf-8"))
    document = summary(found, cpu_us or 0.0, latencies)
    if plan.json:
        print(json.dumps(document))
    else:
        _show(document)
    return 1 if outcome.broken else 0


def summary(found: dict[str, Any], cpu_us: float, latencies: dict[str, Any]) -> dict[str, Any]:
    """Return the object of `--json`: each stage's share and µs a request, and the latencies."""
    samples = {stage: found["samples"].get(stage, 0) for stage in STAGES}
    total = sum(samples.values()) or 1
    used = (found["user_s"] + found["system_s"]) or 1.0
    return {
        "samples": round(sum(samples.values())),
        "server_cpu_us_per_request": round(cpu_us, 2),
        "system_share": round(found["system_s"] / used, 4),
        "stages": {
            stage: {
                "share": round(count / total, 4),
                "us_per_request": round(cpu_us * count / total, 2),
            }
            for stage, count in samples.items()
        },
        "latency_us": latencies,
    }


def _latencies(admin: Address) -> dict[str, Any]:
    """Return the daemon's own figures for the last minute."""
    connection = http.client.HTTPConnection(*admin, timeout=5)
    try:
        connection.request("GET", "/health?latency99&window=60")
        page = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UnavailableError(f"the daemon's latencies cannot be had: {error}") from error
    finally:
        connection.close()
    return {name: page[name] for name in ("queue", "ingress", "pickup")}


def _show(document: dict[str, Any]) -> None:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", no_wrap=True, min_width=11)
    table.add_column("share", justify="right", no_wrap=True, min_width=5)
    table.add_column("µs", justify="right", no_wrap=True, min_width=5)
    table.add_column("", min_width=14, no_wrap=True)
    table.add_column("what it is", style="dim", no_wrap=True)
    for stage, row in document["stages"].items():
        bar = "█" * round(row["share"] * 14)
        table.add_row(
            stage, f"{row['share']:.1%}", f"{row['us_per_request']:.1f}", bar, _MEANING[stage]
        )
    console.print(table)
    print(
        f"{document['server_cpu_us_per_request']} µs of CPU a request, {document['samples']:,}"
        f" samples; {document['system_share']:.0%} of the time was the kernel's"
    )
    if document["samples"] < _ENOUGH:
        print("so few samples say little: give --requests more")
    for name, times in document["latency_us"].items():
        if not times["max"]:
            continue  # The null runtime picks nothing up.
        shown = ", ".join(f"{quantile} {time}" for quantile, time in times.items())
        print(f"{name:8} {shown} µs")
