"""What a refusal costs: `python -m bench.refusals`.

Two daemons on one core, loaded in turn with the same requests: one admits them (`null` runtime),
the other has a runtime that ends nothing and holds every slot, so each request is refused with 429.
The rules that hold here: every answer has to be the one that is expected; a figure is the median of
the rounds; the ratio is of figures from the same rounds. The flood then has more in flight, on more
connections, and shows how many refusals a second the one core sustains.
"""

import statistics
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.daemons import Daemon, answered, attached, daemon, holding, load, requests_for
from bench.measure import CLIENT_CORE
from bench.noqueue.alone import main
from bench.noqueue.cores import on_core
from bench.results import Form, Progress
from bench.tables import aligned, number, percent
from dataplane.load import Load

SLOTS, STREAMS = 64, 32
FLOOD_CONNECTIONS, FLOOD_STREAMS = 8, 64
_HELD_FLAGS = ("--idle-timeout=600",)
_ROUNDS = {Form.QUICK: 5, Form.FULL: 15}
_SECONDS = {Form.QUICK: 0.3, Form.FULL: 2.0}
_WARM = 2000
_BUSY, _OK = 429, 200


class Round(NamedTuple):
    """What a round came to."""

    cpu_us: float
    """Of the daemon, a request."""
    rate_per_s: float
    share: float
    """Of its core."""
    p50_us: float


def _round(load_on: Load, served: Daemon, requests: int, streams: int, status: int) -> Round:
    before = served.cpu_s()
    outcome = answered(load_on.run(requests, streams), status)
    spent = served.cpu_s() - before
    return Round(
        spent / requests * 1e6,
        outcome.rate,
        spent / outcome.seconds,
        float(statistics.median(outcome.verdicts_us)),
    )


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the medians of the rounds, and what a core could do that did nothing else."""
    cpu_us = statistics.median(one.cpu_us for one in rounds)
    return {
        "cpu_us": round(cpu_us, 2),
        "rate_per_s": round(statistics.median(one.rate_per_s for one in rounds), 1),
        "core_share": round(statistics.median(one.share for one in rounds), 4),
        "verdict_p50_us": round(statistics.median(one.p50_us for one in rounds), 1),
        "per_core_s": round(1e6 / cpu_us, 1),
    }


def _compare(admitting: Daemon, refusing: Daemon, form: Form) -> tuple[list[Round], list[Round]]:
    """Load both in turn."""
    admissions, refusals = [], []
    with load(admitting) as admitted, load(refusing) as refused:
        speed = answered(admitted.run(_WARM, STREAMS), _OK)
        answered(refused.run(_WARM, STREAMS), _BUSY)
        requests = requests_for(_SECONDS[form], speed, _WARM)
        for _ in range(_ROUNDS[form]):
            admissions.append(_round(admitted, admitting, requests, STREAMS, _OK))
            refusals.append(_round(refused, refusing, requests, STREAMS, _BUSY))
    return admissions, refusals


def _flood(refusing: Daemon, form: Form) -> list[Round]:
    with load(refusing, connections=FLOOD_CONNECTIONS) as made:
        speed = answered(made.run(_WARM, FLOOD_STREAMS), _BUSY)
        requests = requests_for(_SECONDS[form], speed, _WARM)
        return [
            _round(made, refusing, requests, FLOOD_STREAMS, _BUSY) for _ in range(_ROUNDS[form])
        ]


def run(form: Form, progress: Progress) -> dict[str, Any]:
    """Measure refusals against admissions, and then refusals alone."""
    with (
        daemon(slots=SLOTS) as admitting,
        daemon(*_HELD_FLAGS, runtime="none", slots=SLOTS) as refusing,
        attached(refusing, SLOTS, hold=True),
        holding(refusing, SLOTS, whole=True),
        on_core(CLIENT_CORE),
    ):
        progress("in turn with admissions")
        admissions, refusals = _compare(admitting, refusing, form)
        progress("as many as the core takes")
        flood = _flood(refusing, form)
    ratios = [one.cpu_us / other.cpu_us for one, other in zip(refusals, admissions, strict=True)]
    return {
        "command": "python -m bench.refusals" + " --full" * (form is Form.FULL),
        "slots": SLOTS,
        "streams": STREAMS,
        "flood": {"connections": FLOOD_CONNECTIONS, "streams": FLOOD_STREAMS},
        "admission": summary(admissions),
        "refusal": summary(refusals),
        "refusals_at_most": summary(flood),
        "ratio": round(statistics.median(ratios), 3),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """Return the result as a table."""
    flood = result["flood"]
    names = {
        "admission": f"admitted, {result['streams']} in flight",
        "refusal": f"refused with 429, {result['streams']} in flight",
        "refusals_at_most": f"refused, {flood['connections']} x {flood['streams']} in flight",
    }
    head = ("", "server CPU, µs", "answers a second", "of its core", "verdict p50, µs")
    rows = [
        (
            name,
            number(result[key]["cpu_us"], 2),
            number(result[key]["rate_per_s"], 0),
            percent(result[key]["core_share"]),
            number(result[key]["verdict_p50_us"]),
        )
        for key, name in names.items()
    ]
    ratio = f"A refusal costs {result['ratio']:.2f} times an admission."
    return [*aligned([head, *rows]), "", ratio]


if __name__ == "__main__":
    sys.exit(main(run, lines))
