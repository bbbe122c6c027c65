"""More than the slots can serve: `python -m bench.overload`.

From half of what the scripted engine's slots can serve to ten times that, offered to this daemon
and to queueing front ends with the same engine. The rules that hold here:

- What the slots can serve follows from the engine's costs; it is not measured.
- A client that has no first token within its patience leaves, as clients do. It does not come back:
  the load is what is offered. In a long queue whoever is at its head is about to leave, so under
  a lasting overload slots go to clients that leave before their first token.
- Goodput counts whole answers whose first token came within `TARGET_MS`. What it is under other
  targets, and whole answers at whatever delay, stand beside it: a queue looks as good or as bad as
  the target allows. One of as many as there are slots makes wait as long as a slot is held, so a
  target near that decides all.
- Answers a second are those that were whole before the burst was over. Its first ones cannot be
  whole before a slot was held once, so each figure is low by that, the same for every system.
- Right behind a burst comes half the load again. The system has recovered when a row of first
  tokens has a median within 10% of the one that it had at half the load; the time runs from the
  burst's end to the first of that row.
- The queueing front end is measured with a queue without bound, as asyncio's is, and with one that
  holds as many as there are slots and answers 503 beyond.
"""

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import CLIENT_CORE, SERVER_CORE
from bench.noqueue import figures
from bench.noqueue.alone import main
from bench.noqueue.cores import core_times, on_core
from bench.noqueue.engine import Costs
from bench.noqueue.exchange import End, Exchange
from bench.noqueue.generator import Client, Generator
from bench.noqueue.groups import Ticker, warm_up
from bench.noqueue.report import number, table
from bench.noqueue.shape import Shape, moments, shape_of
from bench.noqueue.systems import Cpu, Starter, System, dataplane, queue_front, spent
from bench.results import Form, Progress

LOADS = (0.5, 1.0, 2.0, 5.0, 10.0)
TARGET_MS = 200.0
"""A first token within it counts: a usual objective for chat."""
TARGETS_MS = (50.0, 100.0, TARGET_MS, 500.0, 1000.0, 2000.0)
WITHIN = 1.1
_ROW = 20
"""First tokens whose median tells whether the system has recovered."""
_NS = 1_000_000_000


class Length(NamedTuple):
    """How long things are, in seconds."""

    burst: float
    recovery: float
    """At most."""
    patience: float


LENGTHS = {Form.QUICK: Length(2.5, 3.0, 1.0), Form.FULL: Length(60.0, 90.0, 10.0)}


class Mark(NamedTuple):
    """What was used so far: by the system, and of the server's core."""

    cpu: Cpu
    idle: int
    ticks: int


class Recovery:
    """Watches the first tokens behind a burst; true once they are as before it."""

    def __init__(self, burst_requests: int, base_ms: float | None) -> None:
        self._from = burst_requests
        self._limit_ms = base_ms * WITHIN if base_ms is not None else None
        self._first_ms: dict[int, float] = {}
        self._row_from = burst_requests
        self.since: int | None = None
        """The number of the request from which on it was as before."""

    def __call__(self, exchange: Exchange) -> bool:
        if exchange.number < self._from or self.since is not None or self._limit_ms is None:
            return self.since is not None
        if exchange.first_ns:
            late_ms = (exchange.first_ns - exchange.due_ns) / 1e6
        else:
            late_ms = float("inf")
        self._first_ms[exchange.number] = late_ms
        while all(self._row_from + i in self._first_ms for i in range(_ROW)):
            row = [self._first_ms[self._row_from + i] for i in range(_ROW)]
            if statistics.median(row) <= self._limit_ms:
                self.since = self._row_from
                return True
            self._row_from += 1
        return False


def offsets(
    shape: Shape, burst_rate: float, rest_rate: float, burst_s: float, rest_s: float
) -> tuple[list[int], int]:
    """Return when each request of a burst and of what follows it is due, and how many are burst."""
    burst = _until(moments(burst_rate, shape.gaps_ms), burst_s)
    rest = _until(moments(rest_rate, shape.gaps_ms, seed=1), rest_s)
    return burst + [round(burst_s * _NS) + at for at in rest], len(burst)


def _until(due: Iterator[int], seconds: float) -> list[int]:
    return list(itertools.takewhile(lambda at: at < seconds * _NS, due))


class Bench:
    """One system under every load, in turn."""

    def __init__(
        self, system: System, generator: Generator, shape: Shape, capacity: float, length: Length
    ) -> None:
        self._system = system
        self._generator = generator
        self._shape = shape
        self._capacity = capacity
        self._length = length
        self._base_ms: float | None = None

    def at(self, load: float, progress: Progress) -> dict[str, Any]:
        """Offer so much, and half the load behind it until the system has recovered."""
        length, shape = self._length, self._shape
        rest_s = length.recovery if self._base_ms is not None else 0.0
        due, burst = offsets(
            shape, load * self._capacity, LOADS[0] * self._capacity, length.burst, rest_s
        )
        client = Client(self._system.payload, shape.max_output, length.patience)
        recovery = Recovery(burst, self._base_ms)
        ticker = Ticker(progress, f"{self._system.name} at {load:g}x")
        marks: list[Mark] = []

        def mark() -> None:
            marks.append(Mark(self._system.cpu(), *core_times(SERVER_CORE)))

        def stop(exchange: Exchange) -> bool:
            ticker(exchange)
            return recovery(exchange)

        end_ns = round(length.burst * _NS)
        run = self._generator.run(due, client, [(0, mark), (end_ns, mark)], stop)
        if len(marks) < 2:
            mark()  # Nothing was in flight any more when the burst's time was over.
        row = describe(run.exchanges[:burst], load, run.start_ns, length.burst)
        row |= _cpu(marks[0], marks[1], length.burst, burst)
        row["generator_late_p99_ms"] = figures.spread(ns / 1e6 for ns in run.late_ns)["p99"]
        if self._base_ms is None:
            self._base_ms = row["first_token_ms"]["p50"]
        else:
            row["recovery_s"] = None
            if recovery.since is not None:
                row["recovery_s"] = round(due[recovery.since] / _NS - length.burst, 3)
        return row


def describe(burst: list[Exchange], load: float, start_ns: int, seconds: float) -> dict[str, Any]:
    """Return what a burst came to."""
    ended = figures.ends(burst)
    answered = [one for one in burst if one.end is End.ANSWERED]
    in_time = [one for one in answered if one.end_ns <= start_ns + seconds * _NS]
    return {
        "load": load,
        **ended,
        "offered_per_s": round(len(burst) / seconds, 2),
        "answers_per_s": round(len(in_time) / seconds, 2),
        "goodput_per_s": round(figures.goodput(in_time, TARGET_MS) / seconds, 2),
        "goodput_by_target_ms": {
            f"{target:g}": round(figures.goodput(in_time, target) / seconds, 2)
            for target in TARGETS_MS
        },
        "refusals_per_s": round(ended["refused"] / seconds, 2),
        "first_token_ms": figures.spread(figures.first_tokens_ms(burst)),
        "admitted_verdict_ms": figures.spread(figures.verdicts_ms(burst, End.ANSWERED)),
        "admitted_total_ms": figures.spread((one.end_ns - one.due_ns) / 1e6 for one in answered),
        "refusal_ms": figures.spread(figures.verdicts_ms(burst, End.REFUSED)),
        "gave_up_share": round(ended["gave_up"] / max(1, len(burst)), 4),
    }


def _cpu(before: Mark, after: Mark, seconds: float, requests: int) -> dict[str, Any]:
    """Return what the burst left of the server's core, as processes and core account for it."""
    taken_s = sum(spent(before.cpu, after.cpu).values())
    ticks = max(1, after.ticks - before.ticks)
    return {
        "cpu_us_per_request": round(taken_s * 1e6 / max(1, requests), 1),
        "cpu_left_share": round(1.0 - taken_s / seconds, 4),
        "core_idle_share": round((after.idle - before.idle) / ticks, 4),
    }


def _measure(
    starter: Starter, shape: Shape, costs: Costs, length: Length, progress: Progress
) -> dict[str, Any]:
    with starter(shape, costs) as system, on_core(CLIENT_CORE):
        with Generator(system.wire()) as generator:
            warm_up(generator, system, shape)
            bench = Bench(system, generator, shape, shape.capacity(costs), length)
            rows = [bench.at(load, progress) for load in LOADS]
        peak = max(row["goodput_per_s"] for row in rows)
        return {
            "system": system.name,
            "rows": rows,
            "goodput_peak_per_s": peak,
            "goodput_last_of_peak": round(rows[-1]["goodput_per_s"] / peak, 4) if peak else None,
            "commands": system.commands,
        }


def measure_systems(
    shape: Shape, costs: Costs, length: Length, progress: Progress
) -> list[dict[str, Any]]:
    """Measure this daemon and both queueing front ends, one after the other."""
    starters = (dataplane, queue_front(), queue_front(costs.slots))
    return [_measure(starter, shape, costs, length, progress) for starter in starters]


def run(form: Form, progress: Progress) -> dict[str, Any]:
    """Measure each system under each load."""
    shape, costs, length = shape_of(form), Costs(), LENGTHS[form]
    return {
        "form": str(form),
        "command": "python -m bench.overload" + " --full" * (form is Form.FULL),
        "shape": shape.described(),
        "capacity_per_s": round(shape.capacity(costs), 3),
        "burst_s": length.burst,
        "recovery_at_most_s": length.recovery,
        "patience_s": length.patience,
        "target_ms": TARGET_MS,
        "queue_limit": costs.slots,
        "systems": measure_systems(shape, costs, length, progress),
    }


# ---------------------------------------------------------------- shown


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the result as text."""
    head = (
        "system", "load", "goodput/s", "answers/s", "refused/s", "gave up", "first token p50, ms",
        "p99", "refusal p99, ms", "CPU left", "recovered after, s",
    )  # fmt: skip
    rows = [
        (
            system["system"],
            f"{row['load']:g}x",
            number(row["goodput_per_s"]),
            number(row["answers_per_s"]),
            number(row["refusals_per_s"]),
            f"{row['gave_up_share']:.0%}",
            number(row["first_token_ms"]["p50"]),
            number(row["first_token_ms"]["p99"]),
            number(row["refusal_ms"]["p99"]),
            f"{row['cpu_left_share']:.0%}",
            _recovered(row),
        )
        for system in result["systems"]
        for row in system["rows"]
    ]
    text = [
        f"the slots can serve {result['capacity_per_s']:.1f} requests a second; goodput: first "
        f"token within {result['target_ms']:g} ms; clients leave after {result['patience_s']:g} s",
        "",
        *table(head, rows),
        "",
    ]
    for system in result["systems"]:
        share = system["goodput_last_of_peak"]
        kept = "-" if share is None else f"{share:.0%}"
        text.append(f"{system['system']}: goodput at {LOADS[-1]:g}x is {kept} of its peak")
    return text


def _recovered(row: Mapping[str, Any]) -> str:
    if "recovery_s" not in row:
        return "-"
    return "not within the run" if row["recovery_s"] is None else number(row["recovery_s"], 2)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw goodput and times against the load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11.0, 5.0), layout="constrained")
    can_serve = result["capacity_per_s"]
    left.axhline(can_serve, color="grey", linestyle=":", label="what the slots can serve")
    for system, colour in zip(result["systems"], ("C0", "C1", "C2"), strict=True):
        rows, name = system["rows"], system["system"]
        _draw(left, rows, lambda row: row["goodput_per_s"], "-o", colour, name)
        _draw(left, rows, lambda row: row["answers_per_s"], ":", colour, f"{name}, at any delay")
        _draw(right, rows, lambda row: row["first_token_ms"]["p99"], "-o", colour, name)
        _draw(right, rows, lambda row: row["refusal_ms"]["p99"], "--x", colour, f"{name}, refusals")
    left.set_title(f"answers a second, first token within {result['target_ms']:g} ms", fontsize=10)
    right.set_title("p99 of the first token, ms after the request was due", fontsize=10)
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("offered load, of what the slots can serve")
        axes.set_xscale("log")
        axes.set_xticks(list(LOADS), [f"{load:g}x" for load in LOADS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    left.set_ylim(bottom=0)
    figure.suptitle(f"Overload, {result['form']} form")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw(
    axes: Any,
    rows: list[dict[str, Any]],
    value: Callable[[dict[str, Any]], float | None],
    style: str,
    colour: str,
    label: str,
) -> None:
    """Draw one line, of the loads that have a value."""
    points = [(row["load"], y) for row in rows if (y := value(row)) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), style, color=colour, label=label)


if __name__ == "__main__":
    sys.exit(main(run, lines, plot))
