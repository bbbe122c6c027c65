"""`/metrics`: the daemon's counters in the Prometheus text format, version 0.0.4.

Rendered here from the counters that are there anyway: a custom collector of prometheus-client takes
600 µs for the same page, in the packet loop, and this takes a tenth of it. The rules that hold:

- One family is one HELP line, one TYPE line and its samples, and stands once.
- Counters end in `_total` and only grow; times are in seconds.
- Histograms count since the start, cumulatively, under fixed bounds, and end in `+Inf`. A value is
  a whole number of microseconds, rounded down.
- Names of the daemon's own begin with `dataplane_`. The three of vLLM are there so that dashboards
  and routers that know those read them: nothing ever waits here, so what runs is what holds a slot.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from dataplane.latency import BOUNDS_US, Series
from dataplane.slots import State
from dataplane.stats import Counts, Stats, cpu_s, rss_bytes

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_BOUNDS = (*(repr(bound / 1e6) for bound in BOUNDS_US), "+Inf")


class Partition(NamedTuple):
    """What is measured of one partition.

    Attributes:
        slots: How many are in each state, in the states' order, and behind them in none that there
            is; all 0 without a runtime.
        model: What its runtime serves, a label of vLLM's metrics; None without one.
        ready: Whether a runtime serves it, and its heart beats.
    """

    name: str
    slots: Sequence[int]
    model: str | None
    ready: bool


class _Single(NamedTuple):
    """A family of one sample."""

    name: str
    kind: str
    meaning: str
    read: Callable[[Stats, Counts], float]


_SINGLES = (
    _Single("claimed_total", "counter", "Slots claimed.", lambda stats, counts: counts.claimed),
    _Single(
        "pump_claimed_total", "counter", "Slots claimed by the packet pump, without Python.",
        lambda stats, counts: counts.claimed - stats.claimed,
    ),
    _Single(
        "completed_total", "counter", "Answers that ended whole.",
        lambda stats, counts: counts.completed,
    ),
    _Single(
        "cancelled_total", "counter", "Requests that ended by the client's leaving.",
        lambda stats, counts: counts.cancelled,
    ),
    _Single(
        "failed_total", "counter", "Requests that held a slot and ended by an error.",
        lambda stats, counts: counts.failed,
    ),
    _Single(
        "in_flight", "gauge", "Requests that hold a slot.",
        lambda stats, counts: counts.in_flight,
    ),
    _Single(
        "clock_negative_total", "counter",
        "Latencies that were dropped because the clock went back.",
        lambda stats, counts: counts.negative,
    ),
    _Single(
        "connections", "gauge", "Open QUIC connections.",
        lambda stats, counts: stats.connections,
    ),
    _Single(
        "datagrams_dropped_total", "counter",
        "Datagrams that the kernel did not take when they were sent.",
        lambda stats, counts: counts.datagrams_dropped,
    ),
    _Single(
        "uptime_seconds", "gauge", "Time since the start.",
        lambda stats, counts: stats.uptime_s(),
    ),
    _Single(
        "cpu_seconds_total", "counter", "CPU time of the daemon, without the runtime's.",
        lambda stats, counts: cpu_s(),
    ),
    _Single(
        "resident_memory_bytes", "gauge", "Resident memory of the daemon, the region included.",
        lambda stats, counts: rss_bytes(),
    ),
)  # fmt: skip

_SERIES = {
    Series.QUEUE: "From a request's complete header to the decision about its slot.",
    Series.INGRESS: "From a complete request to its publication to the runtime.",
    Series.PICKUP: "From publication to the runtime's taking it.",
    Series.FIRST_TOKEN: "From a complete request to its first token.",
    Series.TOTAL: "From a complete request to the end of its answer.",
}


def label(name: str, value: str) -> str:
    """Return one label with its value escaped, in braces."""
    return labels({name: value})


def labels(values: Mapping[str, str]) -> str:
    """Return labels with their values escaped, in braces; "" without any."""
    pairs = [f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _head(name: str, kind: str, meaning: str) -> str:
    return f"# HELP {name} {meaning}\n# TYPE {name} {kind}"


def _family(name: str, kind: str, meaning: str, samples: Iterable[tuple[str, float]]) -> str:
    """Return a family; a sample is its labels in braces, or "", and its value."""
    lines = [_head(name, kind, meaning)]
    lines += [f"{name}{labels} {value}" for labels, value in samples]
    return "\n".join(lines)


def _histogram_form(series: Series, meaning: str) -> str:
    """Return a series' family with places for its numbers."""
    name = f"dataplane_{series.name.lower()}_seconds"
    lines = [_head(name, "histogram", meaning)]
    lines += [f'{name}_bucket{{le="{bound}"}} %d' for bound in _BOUNDS]
    return "\n".join((*lines, f"{name}_sum %r", f"{name}_count %d"))


# All that never changes is put together once.
_SINGLE_FORMS = [
    (_head(f"dataplane_{name}", kind, meaning) + f"\ndataplane_{name} ", read)
    for name, kind, meaning, read in _SINGLES
]
_HISTOGRAM_FORMS = [(series, _histogram_form(series, text)) for series, text in _SERIES.items()]
_STATES = [state.name for state in State]


def render(stats: Stats, partitions: Sequence[Partition]) -> bytes:
    """Return the page: the daemon's counters, and what is measured of each partition.

    Only where there are several is a partition a label of what was there before.
    """
    counts = stats.counts()
    parts = [_requests(counts.answers)]
    parts += [f"{form}{read(stats, counts)}" for form, read in _SINGLE_FORMS]
    parts += _slots(counts.in_flight, partitions)
    for series, form in _HISTOGRAM_FORMS:
        within, sum_us = stats.latency.total(series)
        parts.append(form % (*within, sum_us / 1e6, within[-1]))
    return "\n".join((*parts, "")).encode()


def _requests(answers: Mapping[int, int]) -> str:
    samples = [(label("status", str(status)), count) for status, count in sorted(answers.items())]
    return _family("dataplane_requests_total", "counter", "Answers by status.", samples)


def _slots(in_flight: int, partitions: Sequence[Partition]) -> list[str]:
    several = len(partitions) > 1
    states: list[tuple[str, float]] = []
    ready: list[tuple[str, float]] = []
    running: list[tuple[str, float]] = []
    waiting: list[tuple[str, float]] = []
    used: list[tuple[str, float]] = []
    for name, slots, model, is_ready in partitions:
        whose = {"partition": name} if several else {}
        count = sum(slots)
        held = count - slots[State.FREE]
        pairs = zip(_STATES, slots, strict=False)
        states += [(labels({**whose, "state": state}), number) for state, number in pairs]
        ready.append((label("partition", name), int(is_ready)))
        of_model = labels({**whose, **({} if model is None else {"model_name": model})})
        running.append((of_model, held if several else in_flight))
        waiting.append((of_model, 0))
        used.append((of_model, held / count if count else 0.0))
    return [
        _family("dataplane_slots", "gauge", "Slots by state.", states),
        _family(
            "dataplane_runtime_ready", "gauge", "Whether a runtime serves, and its heart beats.",
            ready,
        ),
        _family("vllm:num_requests_running", "gauge", "Requests that hold a slot.", running),
        _family(
            "vllm:num_requests_waiting", "gauge",
            "Always 0: a request gets a slot or is refused at once.", waiting,
        ),
        _family(
            "vllm:kv_cache_usage_perc", "gauge", "Share of the slots that are held, 0 to 1.", used
        ),
    ]  # fmt: skip
