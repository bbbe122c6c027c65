"""What a neighbour on the same machine costs: `python -m bench.interference`.

This daemon and the queueing front end at about two thirds of what the slots can serve: alone, with
a hog that spins on the server's core, and with one that keeps the memory busy. The rules that hold
here:

- The same requests at the same moments in each run; a system's runs follow each other, without a
  restart between them.
- Kept means: of that system's own figure when alone. For times it is the other way round, so that 1
  is "as before" and 0.5 is "twice as long".
- Where the machine has no third core, the memory hog runs on the generator's with the idle
  scheduling class: it has what the generator leaves, and the generator's own lateness is reported.
- The scripted engine sleeps instead of computing, so it takes no harm from the memory hog; a real
  one would. What is measured is the front end.
"""

import contextlib
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from bench.launch import Server, spent_s
from bench.measure import CLIENT_CORE
from bench.noqueue import figures
from bench.noqueue.alone import main
from bench.noqueue.cores import CPU, MEMORY, has_spare_core, hog, on_core
from bench.noqueue.engine import Costs
from bench.noqueue.exchange import End
from bench.noqueue.generator import Client, Generator
from bench.noqueue.groups import Ticker, cpu, generator_share, warm_up
from bench.noqueue.report import number, table
from bench.noqueue.shape import Shape, moments, shape_of
from bench.noqueue.systems import Starter, System, dataplane, queue_front, spent
from bench.results import Form, Progress

ALONE = "alone"
LOAD = 0.65
_SECONDS = {Form.QUICK: 5.0, Form.FULL: 120.0}
_PATIENCE_S = {Form.QUICK: 1.0, Form.FULL: 10.0}
_SLACK_S = 30.0
_OWN_CORE = "on a core of its own"
_SHARED_CORE = "on the generator's core, idle class"


def _load(
    system: System, generator: Generator, shape: Shape, rate: float, form: Form, ticker: Ticker
) -> dict[str, Any]:
    """Offer the load once."""
    count = round(_SECONDS[form] * rate)
    client = Client(system.payload, shape.max_output, _PATIENCE_S[form])
    before = system.cpu()
    due = itertools.islice(moments(rate, shape.gaps_ms), count)
    run = generator.run(due, client, stop=ticker)
    taken_s = spent(before, system.cpu())
    exchanges = run.exchanges
    answered = sum(one.end is End.ANSWERED for one in exchanges)
    return {
        **figures.ends(exchanges),
        "answers_per_s": round(answered / run.seconds, 3),
        "verdict_ms": figures.spread(figures.verdicts_ms(exchanges)),
        "first_token_ms": figures.spread(figures.first_tokens_ms(exchanges)),
        "cpu": cpu(taken_s, run),
        "generator": generator_share(run),
    }


def kept(alone: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float | None]:
    """Return how much of throughput and times is kept; 1 is all of it."""

    def share(part: float | None, whole: float | None) -> float | None:
        return round(part / whole, 3) if part and whole else None

    return {
        "throughput": share(other["answers_per_s"], alone["answers_per_s"]),
        "verdict_p99": share(alone["verdict_ms"]["p99"], other["verdict_ms"]["p99"]),
        "first_token_p99": share(alone["first_token_ms"]["p99"], other["first_token_ms"]["p99"]),
        "first_token_p50": share(alone["first_token_ms"]["p50"], other["first_token_ms"]["p50"]),
    }


def _measure(
    starter: Starter, shape: Shape, costs: Costs, form: Form, progress: Progress
) -> dict[str, Any]:
    """Run a system alone, and beside each hog."""
    rate = LOAD * shape.capacity(costs)
    rows: dict[str, dict[str, Any]] = {}
    with starter(shape, costs) as system, on_core(CLIENT_CORE):
        with Generator(system.wire()) as generator:
            warm_up(generator, system, shape)
            for condition in (ALONE, CPU, MEMORY):
                with _beside(condition, form) as child:
                    before = child.cpu().all if child else {}
                    ticker = Ticker(progress, f"{condition}: {system.name}")
                    row = _load(system, generator, shape, rate, form, ticker)
                    if child:
                        row["hog_cpu_s"] = round(spent_s(before, child.cpu().all), 3)
                rows[condition] = row
        for condition in (CPU, MEMORY):
            rows[condition]["kept"] = kept(rows[ALONE], rows[condition])
        return {"system": system.name, "rows": rows, "commands": system.commands}


@contextlib.contextmanager
def _beside(condition: str, form: Form) -> Iterator[Server | None]:
    if condition == ALONE:
        yield None
        return
    with hog(condition, _SECONDS[form] + _PATIENCE_S[form] + _SLACK_S) as child:
        yield child


def run(form: Form, progress: Progress) -> dict[str, Any]:
    """Measure both systems."""
    shape, costs = shape_of(form), Costs()
    return {
        "form": str(form),
        "command": "python -m bench.interference" + " --full" * (form is Form.FULL),
        "shape": shape.described(),
        "load": LOAD,
        "seconds": _SECONDS[form],
        "memory_hog": _OWN_CORE if has_spare_core() else _SHARED_CORE,
        "systems": [
            _measure(starter, shape, costs, form, progress)
            for starter in (dataplane, queue_front())
        ],
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the result as text."""
    head = (
        "system", "beside it", "answers/s", "verdict p99, ms", "first token p50, ms", "p99",
        "kept: answers", "verdict p99", "first token p99", "generator late p99, ms",
    )  # fmt: skip
    rows = []
    for system in result["systems"]:
        for condition, row in system["rows"].items():
            share = row.get("kept", {})
            rows.append(
                (
                    system["system"],
                    condition,
                    number(row["answers_per_s"]),
                    number(row["verdict_ms"]["p99"]),
                    number(row["first_token_ms"]["p50"]),
                    number(row["first_token_ms"]["p99"]),
                    _percent(share.get("throughput")),
                    _percent(share.get("verdict_p99")),
                    _percent(share.get("first_token_p99")),
                    number(row["generator"]["late_ms"]["p99"]),
                )
            )
    return [
        f"load {result['load']:.2f} of what the slots can serve, {result['seconds']:g} s a row; "
        f"memory hog: {result['memory_hog']}",
        "",
        *table(head, rows),
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


if __name__ == "__main__":
    sys.exit(main(run, lines))
