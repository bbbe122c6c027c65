"""What Python's work beside it costs the packet loop: `python -m bench.contention`.

The load `128-s32` of `prompt/1`, alone, and beside a client over HTTP/3 that gives the daemon's
interpreter work, with `/metrics` and `/health` fetched ten times a second (`bench/neighbours.py`);
with the packet pump, whose loop is a C thread that needs no interpreter, and without. Two kinds of
work:

- *JSON*: 100 KB of ids a request, parsed on the daemon's event loop; the `null` runtime, so nothing
  but the daemon is on its core.
- *text*: prompts that the daemon tokenises, with a runtime that has the small model's tokeniser
  and ends each request at once (`bench/plain_runtime.py`). It is a process in Python on the same
  core, and every request of the load goes there and back. Left out without `dataplane model
  install`.

The rules that hold here: everything of the daemon's shares one core, as in the rest of the benches.
What the interpreter's work takes of that core is measured and stands beside the figures: so much
throughput has to go, however the threads are arranged. A figure is the median of rounds; the client
of the load is native in every row.
"""

import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.daemons import (
    ENGINES,
    Daemon,
    answered,
    attached,
    daemon,
    load,
    requests_for,
    threads_named,
)
from bench.launch import Server, Threads, server, spent_s
from bench.measure import CLIENT_CORE
from bench.noqueue.alone import main
from bench.noqueue.cores import on_core
from bench.results import Form, Progress
from bench.tables import aligned, number, percent
from dataplane.load import Load
from dataplane.load.tally import quantiles
from dataplane.model import ModelError, locate_weights, tokenizer_json

ALONE, BESIDE = "alone", "beside"
JSON, TEXT = "JSON", "text"
SLOTS, STREAMS = 64, 32
TEXT_CHARACTERS = 2000
NEIGHBOURS_PER_S, SCRAPES_PER_S = 40.0, 10.0
RUNTIMES = {JSON: "alone", TEXT: "alone, with a runtime"}
CONTEXT = 32_768
"""The JSON's ids have to fit."""
_PUMP_THREAD = "dataplane-pump"
_ROUNDS = {Form.QUICK: 3, Form.FULL: 9}
_SECONDS = {Form.QUICK: 0.7, Form.FULL: 5.0}
_SLACK_S = 1.0
_LONGER = 1.3
"""The neighbours go on so much longer than the rounds should take."""
_WARM = 5000


class Round(NamedTuple):
    """What a round of the load came to."""

    rate_per_s: float
    p50_us: float
    p99_us: float
    loop_share: float
    """Of the server's core: the packet loop's thread, or without the pump the daemon's main one."""
    others_share: float
    """Of the server's core: the daemon's other threads."""


def summary(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the medians."""
    return {
        name: round(statistics.median(getattr(one, name) for one in rounds), 4)
        for name in Round._fields
    }


def kept(alone: Mapping[str, float], beside: Mapping[str, float]) -> dict[str, float]:
    """Return the shares that are kept of throughput, and how many times as long verdicts take."""
    return {
        "throughput": round(beside["rate_per_s"] / alone["rate_per_s"], 4),
        "p50_times": round(beside["p50_us"] / alone["p50_us"], 3),
        "p99_times": round(beside["p99_us"] / alone["p99_us"], 3),
    }


def _loop_threads(cpu: Threads) -> set[tuple[int, int]]:
    """Return the thread that does the packets."""
    return threads_named(cpu, _PUMP_THREAD) or {
        (process, thread) for process, thread in cpu if process == thread
    }


def _round(made: Load, served: Daemon, requests: int) -> Round:
    before = served.child.cpu().all
    outcome = answered(made.run(requests, STREAMS))
    after = served.child.cpu().all
    loop = _loop_threads(after)
    spent = {name: spent_s(before, {name: ns}) for name, ns in after.items()}
    times = quantiles(outcome.verdicts_us)
    return Round(
        outcome.rate,
        float(times["p50"] or 0),
        float(times["p99"] or 0),
        sum(used for name, used in spent.items() if name in loop) / outcome.seconds,
        sum(used for name, used in spent.items() if name not in loop) / outcome.seconds,
    )


@contextlib.contextmanager
def _neighbours(served: Daemon, text: bool, seconds: float) -> Iterator[Server]:
    command = ["python", "-m", "bench.neighbours", f"--quic={served.quic[0]}:{served.quic[1]}"]
    command += [f"--admin={served.admin[0]}:{served.admin[1]}", f"--ca={served.ca}"]
    command += [f"--per-second={NEIGHBOURS_PER_S}", f"--scrapes={SCRAPES_PER_S}"]
    command += [f"--seconds={seconds}", f"--text={TEXT_CHARACTERS * text}"]
    with server(command, CLIENT_CORE) as child:
        child.wait_output("ready")
        yield child


@contextlib.contextmanager
def _served(flags: Sequence[str], tokenizer: Path | None) -> Iterator[Daemon]:
    """Serve with the `null` runtime, or with one that has a tokeniser."""
    if tokenizer is None:
        with daemon(*flags, slots=SLOTS, context=CONTEXT) as served:
            yield served
        return
    with (
        daemon(*flags, runtime="none", slots=SLOTS) as served,
        attached(served, SLOTS, tokenizer=tokenizer),
    ):
        yield served


def _measure(
    flags: Sequence[str], tokenizer: Path | None, form: Form, say: Progress
) -> dict[str, Any]:
    count, seconds = _ROUNDS[form], _SECONDS[form]
    with _served(flags, tokenizer) as served, on_core(CLIENT_CORE), load(served) as made:
        made.run(_WARM, STREAMS)
        requests = requests_for(seconds, answered(made.run(_WARM, STREAMS)))
        say(ALONE)
        alone = [_round(made, served, requests) for _ in range(count)]
        say(BESIDE)
        lasting_s = count * seconds * _LONGER + _SLACK_S
        with _neighbours(served, tokenizer is not None, lasting_s) as child:
            slower = requests_for(seconds, made.run(max(100, requests // 10), STREAMS))
            beside = [_round(made, served, slower) for _ in range(count)]
            said = json.loads(child.wait_output(r"(?m)^\{.*\}$")[0])
    if list(said["by_status"]) != ["200"]:
        raise RuntimeError(f"not every neighbour's request was answered: {said['by_status']}")
    rows = {ALONE: summary(alone), BESIDE: summary(beside)}
    return {"rows": rows, "kept": kept(rows[ALONE], rows[BESIDE]), "neighbours": said}


def _tokenizer(directory: Path) -> Path | None:
    """Return the small model's tokeniser, if the model is installed."""
    try:
        return tokenizer_json(locate_weights(), directory)
    except ModelError:
        return None


def _saying(progress: Progress, what: str) -> Progress:
    return lambda text: progress(f"{what}: {text}")


def run(form: Form, progress: Progress) -> dict[str, Any]:
    """Measure with the pump and without, beside each kind of work."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        tokenizer = _tokenizer(Path(directory))
        kinds = {JSON: None, TEXT: tokenizer} if tokenizer else {JSON: None}
        return {
            "command": "python -m bench.contention" + " --full" * (form is Form.FULL),
            "neighbours_per_s": NEIGHBOURS_PER_S,
            "scrapes_per_s": SCRAPES_PER_S,
            "streams": STREAMS,
            "beside": {
                kind: {
                    name: _measure(flags, file, form, _saying(progress, f"{name}, {kind}"))
                    for name, flags in ENGINES.items()
                }
                for kind, file in kinds.items()
            },
        }


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the result as a table."""
    head = (
        "128 tokens, 32 in flight", "requests a second", "verdict p50, µs", "p99, µs",
        "packet loop, of the core", "the daemon's other threads", "throughput kept",
    )  # fmt: skip
    rows = [
        (
            f"{name}, {condition} {kind}" if condition == BESIDE else f"{name}, {RUNTIMES[kind]}",
            number(row["rate_per_s"], 0),
            number(row["p50_us"], 0),
            number(row["p99_us"], 0),
            percent(row["loop_share"]),
            percent(row["others_share"]),
            percent(engine["kept"]["throughput"] if condition == BESIDE else None),
        )
        for kind, engines in result["beside"].items()
        for name, engine in engines.items()
        for condition, row in engine["rows"].items()
    ]
    return [
        *aligned([head, *rows]),
        "",
        f"Beside it {result['neighbours_per_s']:g} requests a second over HTTP/3 (100 KB of JSON,"
        f" or {TEXT_CHARACTERS:,} characters to tokenise) and two pages of the admin port"
        f" {result['scrapes_per_s']:g} times a second.",
    ]


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw throughput and p99, alone and beside."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.0, 3.4), layout="constrained")
    names, values, colours = [], [], []
    for kind, engines in result["beside"].items():
        for colour, (name, engine) in zip(("C0", "C1"), engines.items(), strict=True):
            for condition, row in engine["rows"].items():
                names.append(f"{name}, {condition} {kind}" if condition == BESIDE else name)
                values.append((row["rate_per_s"], row["p99_us"]))
                colours.append(colour)
    for axes, column, title in (
        (left, 0, "requests a second (log)"),
        (right, 1, "p99 of the verdict, µs (log)"),
    ):
        for place, (value, colour) in enumerate(zip(values, colours, strict=True)):
            axes.plot(value[column], place, "o", color=colour)
            words, beside = f"{value[column]:,.0f}", (7, -3)
            axes.annotate(words, (value[column], place), beside, textcoords="offset points")
        axes.margins(x=0.2)
        axes.set_yticks(range(len(names)), names if axes is left else [""] * len(names))
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_title(title, fontsize=10)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main(run, lines, plot))
