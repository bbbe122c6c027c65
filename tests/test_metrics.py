"""`/metrics`, as a scraper reads it: with prometheus-client's parser, and against known numbers."""

import math
import os
import re
import resource
from types import SimpleNamespace

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from dataplane import metrics
from dataplane.latency import Series
from dataplane.slots import State
from dataplane.stats import Stats

NO_SLOTS = [0] * (len(State) + 1)
STATES = ["FREE", "WRITING", "READY", "RUNNING", "CANCELLING", "DONE"]
SERIES = ["queue", "ingress", "pickup", "first_token", "total"]
COUNTERS = {
    "dataplane_requests", "dataplane_claimed", "dataplane_pump_claimed", "dataplane_completed",
    "dataplane_cancelled", "dataplane_failed", "dataplane_clock_negative",
    "dataplane_datagrams_dropped", "dataplane_cpu_seconds",
}  # fmt: skip
GAUGES = {
    "dataplane_in_flight", "dataplane_slots", "dataplane_runtime_ready", "dataplane_connections",
    "dataplane_uptime_seconds", "dataplane_resident_memory_bytes", "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
}  # fmt: skip
HISTOGRAMS = {f"dataplane_{series}_seconds" for series in SERIES}

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LINE = re.compile(
    rf"# HELP {_NAME} [^\n]+"
    rf"|# TYPE {_NAME} (counter|gauge|histogram)"
    rf'|{_NAME}(\{{{_NAME}="([^"\\\n]|\\["\\n])*"\}})? (\d+(\.\d+)?(e[+-]?\d+)?)'
)


@pytest.fixture
def stats() -> Stats:
    return Stats()


def one(slots: list[int], model: str | None) -> metrics.Partition:
    return metrics.Partition("default", slots, model, True)


def page(
    stats: Stats, slots: list[int] | None = None, model: str | None = "some-model"
) -> dict[str, Metric]:
    """Render and parse; each family by its name."""
    text = metrics.render(stats, [one(NO_SLOTS if slots is None else slots, model)]).decode()
    families = list(text_string_to_metric_families(text))
    found = {family.name: family for family in families}
    assert len(found) == len(families), "a family stands twice"
    return found


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    """Return the one sample of this name and these labels."""
    (found,) = [
        each.value
        for family in families.values()
        for each in family.samples
        if each.name == sample and each.labels == labels
    ]
    return float(found)


def test_every_family_is_there_typed_and_described(stats: Stats) -> None:
    families = page(stats)
    kinds = {name: family.type for name, family in families.items()}
    assert kinds == {
        **dict.fromkeys(COUNTERS, "counter"),
        **dict.fromkeys(GAUGES, "gauge"),
        **dict.fromkeys(HISTOGRAMS, "histogram"),
    }
    assert all(family.documentation for family in families.values())


def test_the_text_is_version_0_0_4(stats: Stats) -> None:
    assert metrics.CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"
    stats.answers[200] = 3
    stats.latency.record_ns(Series.INGRESS, 7_000)
    text = metrics.render(stats, [one([5, 1, 0, 0, 0, 0, 0], 'a "b"\\\n')]).decode()
    assert text.endswith("\n")
    for line in text.splitlines():
        assert _LINE.fullmatch(line), line
    for kind in ("HELP", "TYPE"):
        names = re.findall(rf"^# {kind} (\S+)", text, re.MULTILINE)
        assert len(names) == len(set(names)) == len(COUNTERS | GAUGES | HISTOGRAMS)


def test_requests_are_counted_by_status(stats: Stats) -> None:
    stats.answers.update({200: 12, 429: 3})
    families = page(stats)
    samples = {
        sample.labels["status"]: sample.value for sample in families["dataplane_requests"].samples
    }
    assert samples == {"200": 12, "429": 3}


def test_counters_are_the_stats(stats: Stats) -> None:
    stats.claimed, stats.completed, stats.cancelled, stats.failed = 1000, 200, 30, 4
    stats.latency.record_ns(Series.QUEUE, -5)
    stats.connections, stats.datagrams_dropped = 17, 9
    families = page(stats)
    found = {
        name: value(families, name)
        for name in (
            "dataplane_claimed_total", "dataplane_completed_total", "dataplane_cancelled_total",
            "dataplane_failed_total", "dataplane_in_flight", "dataplane_clock_negative_total",
            "dataplane_connections", "dataplane_datagrams_dropped_total",
        )
    }  # fmt: skip
    assert list(found.values()) == [1000, 200, 30, 4, 766, 1, 17, 9]


def test_claims_of_the_pump_are_counted_apart(stats: Stats) -> None:
    stats.claimed = 5
    assert value(page(stats), "dataplane_pump_claimed_total") == 0
    raw = SimpleNamespace(claimed=7, completed=0, cancelled=0, failed=0, negative=0, ok=0, busy=0)
    stats.raw = lambda: raw
    families = page(stats)
    assert value(families, "dataplane_claimed_total") == 12
    assert value(families, "dataplane_pump_claimed_total") == 7


def test_slots_are_counted_in_every_state(stats: Stats) -> None:
    families = page(stats, [5, 1, 0, 7, 2, 3, 0])
    samples = {
        sample.labels["state"]: sample.value for sample in families["dataplane_slots"].samples
    }
    assert samples == dict(zip(STATES, [5, 1, 0, 7, 2, 3], strict=True))


def test_what_routers_know_from_vllm_is_there(stats: Stats) -> None:
    stats.claimed, stats.completed = 9, 3
    families = page(stats, [2, 1, 1, 3, 0, 0, 1], "SmolLM2")
    labels = {"model_name": "SmolLM2"}
    assert value(families, "vllm:num_requests_running", **labels) == 6
    assert value(families, "vllm:num_requests_waiting", **labels) == 0
    assert value(families, "vllm:kv_cache_usage_perc", **labels) == 0.75


def test_without_a_runtime_no_slot_is_held(stats: Stats) -> None:
    families = page(stats, NO_SLOTS, None)
    assert value(families, "vllm:kv_cache_usage_perc") == 0
    assert value(families, "dataplane_slots", state="FREE") == 0


@pytest.mark.parametrize("model", ['say "hi"', "a\\b", "two\nlines", "\\n", "größe", ""])
def test_a_models_name_is_escaped(stats: Stats, model: str) -> None:
    samples = page(stats, model=model)["vllm:num_requests_running"].samples
    assert [sample.labels for sample in samples] == [{"model_name": model}]


@pytest.mark.parametrize("series", Series)
def test_a_series_is_a_cumulative_histogram_in_seconds(stats: Stats, series: Series) -> None:
    for microseconds in (10, 11, 26, 99_999, 60_000_000, 60_000_001):
        stats.latency.record_ns(series, microseconds * 1000)
    name = f"dataplane_{series.name.lower()}_seconds"
    families = page(stats)
    buckets = {
        float(sample.labels["le"]): sample.value
        for sample in families[name].samples
        if sample.name == f"{name}_bucket"
    }
    assert list(buckets) == [
        1e-05, 2.5e-05, 5e-05, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05,
        0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, math.inf,
    ]  # fmt: skip
    counted = [buckets[le] for le in (1e-05, 2.5e-05, 5e-05, 0.05, 0.1, 30, 60, math.inf)]
    assert counted == [1, 2, 3, 3, 4, 4, 5, 6]
    assert list(buckets.values()) == sorted(buckets.values())
    assert value(families, f"{name}_count") == 6
    assert value(families, f"{name}_sum") == pytest.approx(120.100047, abs=1e-9)
    others = HISTOGRAMS - {name}
    assert [value(families, f"{other}_count") for other in others] == [0, 0, 0, 0]


def test_the_process_is_measured(stats: Stats) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    families = page(stats)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = value(families, "dataplane_cpu_seconds_total")
    assert before.ru_utime + before.ru_stime <= cpu + 0.01
    assert cpu <= after.ru_utime + after.ru_stime + 0.01
    with open("/proc/self/statm", encoding="ascii") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert value(families, "dataplane_resident_memory_bytes") == pytest.approx(resident, rel=0.1)
    first = value(families, "dataplane_uptime_seconds")
    assert 0 <= first < value(page(stats), "dataplane_uptime_seconds")
