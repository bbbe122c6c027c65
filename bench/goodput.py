"""Goodput beyond what the slots can serve: `python -m bench.goodput`.

The `echo` runtime at a model's pace, so what the slots can serve follows from its settings; the
native generator offers from half of that to ten times, in an open loop, at even moments and
whatever becomes of the requests before. The rules that hold here:

- Goodput is whole answers with 200 over the time from the first request to the last answer: a
  server that falls behind what is offered does not look better for answering it later.
- The daemon does not queue, so there is no patience to model: a request is admitted or refused at
  once, and both are answers. `bench.overload` has clients with patience and queues to compare with.
- Daemon and runtime share the server's core: what refusals cost, the runtime does not have.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.daemons import ENGINES, Daemon, daemon, load
from bench.launch import spent_s
from bench.measure import CLIENT_CORE
from bench.noqueue.alone import main
from bench.noqueue.cores import on_core
from bench.results import Form, Progress
from bench.tables import aligned, number, percent
from dataplane.load import Load
from dataplane.load.tally import Outcome, quantiles

LOADS = (0.5, 1.0, 2.0, 5.0, 10.0)
SLOTS, OUTPUT, TOKEN_MS = 32, 8, 5.0
CONNECTIONS, STREAMS = 4, 100
CAPACITY = SLOTS / (OUTPUT * TOKEN_MS / 1000)
"""Requests a second."""
_SECONDS = {Form.QUICK: 1.5, Form.FULL: 20.0}
_WARM = 200


class Spent(NamedTuple):
    """CPU seconds over a load."""

    daemon: float
    runtime: float


def row_of(load_factor: float, outcome: Outcome, spent: Spent) -> dict[str, Any]:
    """Return what one load came to."""
    times = quantiles(outcome.verdicts_us)
    answered = outcome.by_status.get("200", 0)
    return {
        "load": load_factor,
        "offered_per_s": round(load_factor * CAPACITY, 1),
        "goodput_per_s": round(answered / outcome.seconds, 1),
        "refused_per_s": round(outcome.by_status.get("429", 0) / outcome.seconds, 1),
        "by_status": outcome.by_status,
        "seconds": round(outcome.seconds, 3),
        "verdict_p50_us": times["p50"],
        "verdict_p99_us": times["p99"],
        "daemon_cpu_us": round(spent.daemon / outcome.requests * 1e6, 2),
        "runtime_core_share": round(spent.runtime / outcome.seconds, 4),
    }


def peak_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the most goodput, and what of it is left at the highest load."""
    peak = max(row["goodput_per_s"] for row in rows)
    last = rows[-1]["goodput_per_s"]
    return {"peak_per_s": peak, "last_of_peak": round(last / peak, 4) if peak else None}


def _offer(made: Load, served: Daemon, load_factor: float, seconds: float) -> dict[str, Any]:
    rate = load_factor * CAPACITY
    requests = round(rate * seconds)
    before = served.child.cpu()
    outcome = made.run(requests, STREAMS, rate)
    after = served.child.cpu()
    if outcome.broken:
        raise RuntimeError(f"not every request was answered: {outcome.by_status}")
    runtime_s = spent_s(before.runtimes, after.runtimes)
    spent = Spent(spent_s(before.all, after.all) - runtime_s, runtime_s)
    return row_of(load_factor, outcome, spent)


def _measure(flags: Sequence[str], form: Form, progress: Progress) -> dict[str, Any]:
    options = [f"--max-output={OUTPUT}", f"--token-delay-ms={TOKEN_MS:g}", *flags]
    with (
        daemon(*options, runtime="echo", slots=SLOTS) as served,
        on_core(CLIENT_CORE),
        load(served, connections=CONNECTIONS, output=OUTPUT) as made,
    ):
        made.run(_WARM, SLOTS // CONNECTIONS)
        rows = []
        for load_factor in LOADS:
            progress(f"{' '.join(flags) or 'pump'}: {load_factor:g}x")
            rows.append(_offer(made, served, load_factor, _SECONDS[form]))
    return {"rows": rows, **peak_of(rows)}


def run(form: Form, progress: Progress) -> dict[str, Any]:
    """Offer every load to the daemon with the pump and without."""
    return {
        "command": "python -m bench.goodput" + " --full" * (form is Form.FULL),
        "capacity_per_s": CAPACITY,
        "slots": SLOTS,
        "output": OUTPUT,
        "token_ms": TOKEN_MS,
        "seconds": _SECONDS[form],
        "engines": {name: _measure(flags, form, progress) for name, flags in ENGINES.items()},
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the result as a table."""
    head = (
        "engine, load", "offered/s", "goodput/s", "refused/s", "verdict p50, µs", "p99, µs",
        "daemon's CPU, µs a request", "runtime, of the core",
    )  # fmt: skip
    rows = [
        (
            f"{name}, {row['load']:g}x",
            number(row["offered_per_s"], 0),
            number(row["goodput_per_s"], 0),
            number(row["refused_per_s"], 0),
            number(row["verdict_p50_us"], 0),
            number(row["verdict_p99_us"], 0),
            number(row["daemon_cpu_us"]),
            percent(row["runtime_core_share"]),
        )
        for name, engine in result["engines"].items()
        for row in engine["rows"]
    ]
    kept = [
        f"{name}: {percent(engine['last_of_peak'])}" for name, engine in result["engines"].items()
    ]
    return [
        *aligned([head, *rows]),
        "",
        f"The slots can serve {result['capacity_per_s']:,.0f} requests a second. Goodput at"
        f" {LOADS[-1]:g}x, of its peak: {', '.join(kept)}.",
    ]


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw goodput and the time of a verdict against the load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.0, 3.8), layout="constrained")
    left.axhline(
        result["capacity_per_s"], color="grey", linestyle=":", label="what the slots can serve"
    )
    for colour, (name, engine) in zip(("C0", "C1"), result["engines"].items(), strict=True):
        loads = [row["load"] for row in engine["rows"]]
        for axes, key in ((left, "goodput_per_s"), (right, "verdict_p99_us")):
            axes.plot(loads, [row[key] for row in engine["rows"]], "-o", color=colour, label=name)
    left.set_title("answers a second", fontsize=10)
    right.set_title("p99 of the verdict, refusals too, µs", fontsize=10)
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("offered load, of what the slots can serve")
        axes.set_xscale("log")
        axes.set_xticks(list(LOADS), [f"{load_factor:g}x" for load_factor in LOADS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    left.set_ylim(bottom=0)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main(run, lines, plot))
