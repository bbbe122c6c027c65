"""What the read-only paths answer, whoever asks."""

import gc
import json
import logging
import timeit
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hdrh.histogram import HdrHistogram

from dataplane._native import lib
from dataplane.latency import Series
from dataplane.manifest import Manifest
from dataplane.pages import Page, Pages, Resident
from dataplane.region import Region, create_region
from dataplane.stats import Stats

SHARED = ["/health", "/slots", "/props", "/tokenizer.json"]
ADMIN_ONLY = ["/livez", "/readyz", "/metrics"]
SERIES = ["queue", "ingress", "pickup", "first_token", "total"]


def manifest(slots: int = 4, **other: Any) -> Manifest:
    return Manifest(
        model="m", slots=slots, context=16, max_output=8, vocab_size=100, stop_ids=(2,), **other
    )


class Attached(NamedTuple):
    """What an attachment shows of itself."""

    manifest: Manifest
    region: Region
    tokenizer: bytes | None


class Runtime(Resident):
    """A runtime that can fall silent."""

    silent = False

    def is_responsive(self) -> bool:
        return super().is_responsive() and not self.silent


class Asked:
    """Pages of a daemon whose runtime, status and time a test sets."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.runtime = Runtime()
        self.status = "ok"
        self.now = 1000.0
        runtimes = {"default": self.runtime}
        self.pages = Pages(self.stats, runtimes, lambda: self.status, lambda: self.now)

    def attach(self, slots: int = 4, attachment: int = 1, **other: Any) -> Any:
        """Put a runtime there; its state words."""
        stated = manifest(slots, **other)
        region = create_region(stated, attachment, listeners=1)
        region.close_fd()
        self.runtime.serve(stated, region)
        return region.native.states

    def get(self, target: str, probes: bool = True) -> Page:
        return self.pages.get(target, probes)

    def json(self, target: str) -> Any:
        page = self.get(target)
        assert (page.status, page.content_type) == (200, "application/json")
        return json.loads(page.body)

    def problem(self, target: str, probes: bool = True) -> tuple[int, str]:
        """Status and detail of a problem document."""
        page = self.get(target, probes)
        assert page.content_type == "application/problem+json"
        document = json.loads(page.body)
        assert set(document) == {"type", "title", "status", "detail"}
        assert (document["type"], document["status"]) == ("about:blank", page.status)
        return page.status, document["detail"]


@pytest.fixture
def asked() -> Asked:
    return Asked()


def word(state: int, generation: int, owner: int = 1) -> int:
    return generation << 24 | owner << 8 | state


# Paths.


def test_paths_of_the_admin_port_are_not_shared(asked: Asked) -> None:
    asked.attach()
    for path in SHARED:
        assert asked.pages.has(path, probes=False)
        assert asked.pages.has(path, probes=True)
    for path in ADMIN_ONLY:
        assert asked.get(path, probes=True).status == 200
        assert asked.get(path, probes=False).status == 404
        assert not asked.pages.has(path, probes=False)


@pytest.mark.parametrize(
    "target", ["/", "/healthz", "/Health", "/health/", "//health", "*", "", "health", "/[", "x://"]
)
def test_an_unknown_path_is_404_and_names_those_there_are(asked: Asked, target: str) -> None:
    status, detail = asked.problem(target)
    assert status == 404
    assert all(path in detail for path in SHARED + ADMIN_ONLY)
    assert not asked.pages.has(target, probes=True)


def test_the_absolute_form_of_a_target_is_understood(asked: Asked) -> None:
    assert asked.get("http://localhost:9433/livez?x=1").status == 200
    assert asked.problem("http://localhost:9433")[0] == 404


def test_a_problem_names_the_request_when_asked_to(asked: Asked) -> None:
    page = asked.pages.get("/nothing", True, "my-id")
    assert json.loads(page.body)["request_id"] == "my-id"
    assert json.loads(page.body)["title"] == "Not Found"


def test_a_page_that_fails_is_500_and_logged(
    asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    def status() -> str:
        raise RuntimeError("broken")

    pages = Pages(asked.stats, {"default": asked.runtime}, status)
    with caplog.at_level(logging.ERROR):
        page = pages.get("/health", probes=False)
    assert page.status == 500
    assert "log" in json.loads(page.body)["detail"]
    assert "RuntimeError: broken" in caplog.text


# Probes.


def test_alive_whatever_the_status(asked: Asked) -> None:
    asked.status = "no runtime"
    assert asked.get("/livez") == (200, "text/plain; charset=utf-8", b"ok\n")


def test_ready_while_the_runtime_answers(asked: Asked) -> None:
    words = asked.attach()
    for slot in range(4):
        words[slot] = word(3, 1)  # Full is an answer of its own, not a failure.
    assert asked.get("/readyz") == (200, "text/plain; charset=utf-8", b"ok\n")


@pytest.mark.parametrize("status", ["draining", "no runtime"])
def test_not_ready_in_another_status(asked: Asked, status: str) -> None:
    asked.attach()
    asked.status = status
    code, detail = asked.problem("/readyz")
    assert code == 503
    assert {"draining": "shutting down", "no runtime": "no runtime"}[status] in detail


def test_not_ready_while_the_runtime_is_silent(asked: Asked) -> None:
    asked.attach()
    asked.runtime.silent = True
    assert asked.problem("/readyz") == (503, "the runtime's heartbeat is late: it may be stuck")


# Health.


def test_health_is_literally_the_contract(asked: Asked) -> None:
    stats = asked.stats
    stats.answers.update({429: 3, 200: 12})
    stats.claimed, stats.completed, stats.cancelled, stats.failed = 20, 12, 1, 2
    health = asked.json("/health")
    assert health == {
        "status": "ok",
        "uptime_s": health["uptime_s"],
        "cpu_s": health["cpu_s"],
        "rss_bytes": health["rss_bytes"],
        "requests": {"200": 12, "429": 3},
        "in_flight": 5,
        "claimed": 20,
        "completed": 12,
        "cancelled": 1,
        "failed": 2,
    }
    assert health["uptime_s"] >= 0
    assert health["cpu_s"] > 0
    assert health["rss_bytes"] > 1 << 20


@pytest.mark.parametrize("status", ["ok", "draining", "no runtime"])
def test_health_says_the_status(asked: Asked, status: str) -> None:
    asked.status = status
    assert asked.json("/health")["status"] == status


def test_health_is_not_the_latency_unless_asked_for(asked: Asked) -> None:
    assert asked.json("/health?window=10")["status"] == "ok"


@pytest.mark.parametrize(
    ("query", "window_s"),
    [
        ("", 60),
        ("&window=10", 10),
        ("&window=60", 60),
        ("&window=300", 300),
        ("=1&format=json", 60),
    ],
)
def test_latency_by_window(asked: Asked, query: str, window_s: int) -> None:
    asked.stats.latency.record_pair_ns(Series.QUEUE, 41_000, 63_000)
    asked.stats.latency.record_ns(Series.PICKUP, 90_000)
    names = ("p50", "p90", "p99", "p999", "max")
    assert asked.json(f"/health?latency99{query}") == {
        "unit": "us",
        "window_s": window_s,
        "count": 1,
        "queue": dict.fromkeys(names, 41),
        "ingress": dict.fromkeys(names, 63),
        "pickup": dict.fromkeys(names, 90),
    }


@pytest.mark.parametrize(
    "window",
    ["", "0", "1", "59", "61", "060", "60s", "+60", "-60", "6e1", "3600", "٦٠", "60&window=60"],
)
def test_any_other_window_is_refused_in_words(asked: Asked, window: str) -> None:
    status, detail = asked.problem(f"/health?latency99&window={window}")
    assert status == 400
    assert "window" in detail


@pytest.mark.parametrize("name", SERIES)
def test_a_series_comes_as_a_histogram(asked: Asked, name: str) -> None:
    for number in range(1, 1001):
        asked.stats.latency.record_ns(Series[name.upper()], number * 1000)
    page = asked.get(f"/health?latency99&format=hdr&series={name}&window=300")
    assert page[:2] == (200, "text/plain; charset=utf-8")
    decoded = HdrHistogram.decode(page.body)
    assert decoded.get_total_count() == 1000
    assert [decoded.get_value_at_percentile(p) for p in (50, 90, 99, 99.9, 100)] == [
        500, 900, 990, 999, 1000,
    ]  # fmt: skip


def test_a_histogram_is_that_of_ingress_unless_another_is_named(asked: Asked) -> None:
    asked.stats.latency.record_ns(Series.INGRESS, 7_000)
    page = asked.get("/health?latency99&format=hdr")
    assert HdrHistogram.decode(page.body).get_max_value() == 7


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("format=xml", "format"),
        ("format=hdr&format=hdr", "format"),
        ("format=hdr&series=verdict", "series"),
        ("format=hdr&series=INGRESS", "series"),
        ("format=hdr&series=", "series"),
        ("format=hdr&series=queue&series=queue", "series"),
        ("format=hdr&window=61", "window"),
    ],
)
def test_a_bad_query_is_refused_in_words(asked: Asked, query: str, named: str) -> None:
    status, detail = asked.problem(f"/health?latency99&{query}")
    assert status == 400
    assert named in detail


# Slots.


def test_slots_are_literally_the_contract(asked: Asked) -> None:
    words = asked.attach(slots=6)
    for slot in range(6):
        words[slot] = word(slot, 12 + slot)
    names = ["FREE", "WRITING", "READY", "RUNNING", "CANCELLING", "DONE"]
    assert asked.json("/slots") == {
        "slots": [
            {
                "slot": slot,
                "partition": "default",
                "state": name,
                "generation": 12 + slot,
                "age_ms": 0,
            }
            for slot, name in enumerate(names)
        ]
    }


def test_without_a_runtime_there_are_no_slots(asked: Asked) -> None:
    assert asked.json("/slots") == {"slots": []}
    assert asked.get("/metrics").status == 200


def test_a_word_that_cannot_be_is_shown_not_believed(asked: Asked) -> None:
    words = asked.attach()
    words[0], words[1] = 2**64 - 1, word(6, 5)
    rows = asked.json("/slots")["slots"]
    assert [row["state"] for row in rows] == ["UNKNOWN", "UNKNOWN", "FREE", "FREE"]
    assert rows[0]["generation"] == 2**40 - 1
    assert b'vllm:kv_cache_usage_perc{model_name="m"} 0.5\n' in asked.get("/metrics").body


def ages(asked: Asked) -> list[int]:
    return [row["age_ms"] for row in asked.json("/slots")["slots"]]


def test_an_age_is_that_of_the_state(asked: Asked) -> None:
    words = asked.attach()
    asked.pages.look()
    asked.now += 2
    words[1] = word(1, 1)
    asked.pages.look()
    asked.now += 0.25
    assert ages(asked) == [2250, 250, 2250, 2250]
    words[1] = word(2, 1)
    assert ages(asked) == [2250, 0, 2250, 2250]
    asked.now += 1
    words[1] = word(2, 2)  # The same state, but another request.
    assert ages(asked) == [3250, 0, 3250, 3250]


def test_another_attachments_slots_are_young(asked: Asked) -> None:
    for attachment in (1, 2):
        words = asked.attach(attachment=attachment)
        for slot in range(4):
            words[slot] = word(0, 7)
        assert ages(asked) == [0] * 4
        asked.now += 60
        assert ages(asked) == [60_000] * 4


def test_a_region_is_not_kept_by_having_been_looked_at(asked: Asked) -> None:
    asked.attach()
    assert asked.runtime.current is not None
    region = weakref.ref(asked.runtime.current.region)
    for path in ("/slots", "/metrics"):
        asked.get(path)
    asked.pages.look()
    asked.runtime.current = None
    gc.collect()
    assert region() is None


# The runtime's own.


def test_props_are_the_manifest(asked: Asked) -> None:
    asked.attach(chat_template="{{ messages }}", max_step_ms=700)
    assert asked.json("/props") == {
        "abi": 1,
        "model": "m",
        "partition": "default",
        "table": "host",
        "slots": 4,
        "context": 16,
        "max_output": 8,
        "vocab_size": 100,
        "stop_ids": [2],
        "chat_template": "{{ messages }}",
        "tokenizer_sha256": None,
        "max_step_ms": 700,
    }


def test_props_without_a_runtime_are_503(asked: Asked) -> None:
    status, detail = asked.problem("/props")
    assert status == 503
    assert "no runtime" in detail


def test_a_tokeniser_is_given_as_it_came(asked: Asked) -> None:
    asked.attach()
    assert asked.problem("/tokenizer.json")[0] == 404
    current = asked.runtime.current
    assert current is not None
    tokenizer = b'{"version": "1.0"}\n'
    asked.runtime.current = Attached(current.manifest, current.region, tokenizer)
    assert asked.get("/tokenizer.json") == (200, "application/json", tokenizer)


def test_without_a_runtime_there_is_no_tokeniser(asked: Asked) -> None:
    status, detail = asked.problem("/tokenizer.json")
    assert status == 404
    assert "no runtime" in detail


# Cost.


def fastest(call: Callable[[], object], times: int = 40) -> float:
    """Return the shortest of several runs in seconds, the one least disturbed."""
    return min(timeit.repeat(call, number=1, repeat=times))


@pytest.mark.parametrize(
    ("target", "at_most_us"),
    [("/health", 50), ("/slots", 300), ("/metrics", 300), ("/health?latency99&window=300", 1000)],
)
def test_a_page_costs_the_packet_loop_little(asked: Asked, target: str, at_most_us: int) -> None:
    """Four times the target: enough to be sure on any machine that no Python loop crept in."""
    words = asked.attach(slots=lib.DP_MAX_SLOTS)
    for slot in range(lib.DP_MAX_SLOTS):
        words[slot] = word(slot % 6, 2**39 + slot)
    for number in range(2000):
        for series in Series:
            asked.stats.latency.record_ns(series, number * 500_000)
    assert asked.get(target).status == 200
    assert fastest(lambda: asked.get(target)) * 1e6 < 4 * at_most_us
