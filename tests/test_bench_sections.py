"""What the benches make of what they measured: rows, targets and the sections' own sums."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import (
    contention,
    goodput,
    latency,
    memory,
    neighbours,
    null_udp,
    readme,
    refusals,
    tables,
    targets,
)
from bench.cases import parse_case
from bench.cells import Measured, row_of
from bench.clients import Outcome
from bench.launch import LaunchError
from bench.systems import SYSTEMS, Files, command_of
from dataplane.load.tally import Outcome as LoadOutcome

FILES = Files(Path("d"), Path("d/cert"), Path("d/key"), Path("d/ca"))


def measured(requests: int, server_cpu_s: float, times_us: list[float]) -> Measured:
    times = np.array(times_us)
    return Measured(Outcome(np.resize(times, requests), 0.5, 0.001, times + 1), server_cpu_s, 0.0)


# ---------------------------------------------------------------- rows


def test_a_row_is_the_median_of_its_rounds() -> None:
    case = parse_case("128-s32")
    assert case is not None
    rounds = [
        measured(1000, 0.002, [10.0, 20.0]),
        measured(1000, 0.009, [90.0, 95.0]),
        measured(1000, 0.004, [30.0, 40.0]),
    ]
    row = row_of(SYSTEMS["dataplane raw"], case, rounds, None)
    assert (row.server_cpu_us, row.rounds_cpu_us) == (4.0, [2.0, 9.0, 4.0])
    assert (row.p50_us, row.p99_us) == (30.0, 40.0)
    assert (row.verdict_p50_us, row.verdict_p99_us) == (31.0, 41.0)
    assert (row.requests, row.seconds, row.rate_per_s) == (3000, 1.5, 2000.0)
    assert row.client_cpu_us == 1.0
    assert row.ceiling_rate == 1e6  # from the generator's own CPU
    assert not row.client_bound
    assert (row.flags, row.gso) == ("", True)


def test_a_peers_row_has_the_ceiling_that_was_measured_and_no_verdicts() -> None:
    case = parse_case("128-c1")
    assert case is not None
    outcome = Outcome(np.array([5.0, 6.0]), 1.0, 0.5)
    row = row_of(SYSTEMS["uvicorn json"], case, [Measured(outcome, 0.1, 0.0)], 77.0)
    assert row.ceiling_rate == 77.0
    assert row.verdict_p50_us is row.verdict_p99_us is None
    assert row.client_bound
    assert not row.gso


@pytest.mark.parametrize(
    ("name", "flag", "gso", "cases"),
    [
        ("dataplane raw", None, True, ("128-c1", "128-s32", "131072-c1")),
        ("dataplane raw no-pump", "--no-pump", True, ("128-s32", "131072-c1")),
        ("dataplane h3 no-pump", "--no-pump", True, ("128-s32", "131072-c1")),
        ("dataplane raw no-gso", None, False, ("131072-c1",)),
    ],
)
def test_the_daemon_is_measured_without_what_makes_it_fast(
    name: str, flag: str | None, gso: bool, cases: tuple[str, ...]
) -> None:
    system = SYSTEMS[name]
    tried = [case for text in ("128-c1", "128-s32", "131072-c1") if (case := parse_case(text))]
    assert tuple(case.name for case in tried if system.takes_part(case)) == cases
    words = command_of(system, tried[0], FILES, 1)
    assert words[-1] == "--runtime=null"
    assert ("--no-pump" in words) == (flag is not None)
    assert system.variant.gso is gso


# ---------------------------------------------------------------- targets


def entry(
    system: str, case: str, cpu: float, *, tls: bool = False, encoding: str = "binary"
) -> Any:
    return {"system": system, "case": case, "server_cpu_us": cpu, "tls": tls, "encoding": encoding}


ROWS = [
    entry("dataplane raw", "128-s32", 4.0, tls=True),
    entry("dataplane raw no-pump", "128-s32", 1.0, tls=True),  # no peer, however cheap
    entry("dataplane h3", "128-s32", 16.0, tls=True),
    entry("fastapi json", "128-s32", 100.0, encoding="json"),
    entry("uvicorn binary", "128-s32", 20.0),
    entry("granian h1 binary", "128-s32", 12.0),
    entry("dataplane raw", "131072-c1", 500.0, tls=True),
    entry("uvicorn binary", "131072-c1", 100.0),
    entry("uvicorn json", "131072-c1", 1.0, encoding="json"),
    entry("uvicorn binary tls", "131072-c1", 510.0, tls=True),
]


def spread(system: str, busy_poll: bool, p50: float, value: float) -> dict[str, Any]:
    return {"system": system, "busy_poll": busy_poll, "p50_us": p50, "spread_us": value}


SECTIONS: dict[str, Any] = {
    "latency": {
        "rows": [
            spread(latency.DAEMON, False, 60.0, 1.0),
            spread(latency.DAEMON, True, 25.0, 8.2),
            spread(latency.NULL, True, 6.0, 4.0),
        ]
    },
    "refusals": {"ratio": 1.0},
    "goodput": {"engines": {"pump": {"last_of_peak": 0.949}}},
    "memory": {"error": "RuntimeError()"},
}


def test_targets_are_met_missed_or_not_measured() -> None:
    found = targets.judged({"rows": ROWS, "sections": SECTIONS})
    values = {one["name"]: (one["value"], one["met"]) for one in found}
    assert values == {
        "raw 128-s32, server CPU a request": (4.0, True),
        "raw 128-c32, server CPU a request": (None, None),
        "128-s32: uvicorn + FastAPI with JSON, over raw": (25.0, True),
        "128-s32: bare uvicorn with a binary body, over raw": (5.0, True),
        "128-s32: the fastest peer, over raw": (3.0, True),
        "h3 128-s32, server CPU a request": (16.0, False),
        "raw 128-c1 busy-polling, verdict p50": (25.0, True),
        "the same, p99 - p50, over the null server's": (2.05, False),
        "raw 131072-c1, GSO sender, server CPU": (0.5, True),
        "the same, over the fastest peer's upload with TLS": (0.98, True),
        "the same, over the fastest binary upload on plain TCP": (5.0, False),
        "raw 131072-c1, sender without GSO, server CPU": (None, None),
        "a refusal's CPU, over an admission's": (1.0, True),
        "goodput at 10x, of its peak": (94.9, False),
        "memory a connection besides aioquic's own": (None, None),
    }


def test_of_an_empty_run_nothing_is_judged() -> None:
    found = targets.judged({"rows": [], "sections": {}})
    assert {one["met"] for one in found} == {None}
    lines = targets.lines(found)
    assert len(lines) == len(targets.TARGETS) + 2
    assert all("not measured" in line for line in lines[2:])


def test_the_readme_has_the_targets_and_the_sections_that_did_not_fail(tmp_path: Path) -> None:
    result: dict[str, Any] = {
        "rows": [], "command": "make bench", "date": "2026-11-29T00:00:00", "commit": "0" * 40,
        "kernel": "6", "machine": {"cpu": "C", "cores": 2, "virtual": True},
        "sections": {"memory": SECTIONS["memory"], "refusals": REFUSALS},
    }  # fmt: skip
    result["targets"] = targets.judged(result)
    lines = readme.section_lines(result, tmp_path)
    text = "\n".join(lines)
    assert "| a refusal's CPU, over an admission's " in text
    assert "A refusal costs 0.50 times an admission." in lines
    assert "KiB a connection" not in text


# ---------------------------------------------------------------- sections


def summary(cpu_us: float) -> dict[str, float]:
    return refusals.summary([refusals.Round(cpu_us, 1000.0, 0.5, 10.0)])


REFUSALS = {
    "streams": 32, "flood": {"connections": 8, "streams": 64}, "ratio": 0.5,
    "admission": summary(4.0), "refusal": summary(2.0), "refusals_at_most": summary(1.6),
}  # fmt: skip


def test_refusals_are_medians_and_what_a_core_could_do() -> None:
    rounds = [refusals.Round(cpu, 100 * cpu, 0.1 * cpu, cpu) for cpu in (9.0, 2.0, 4.0)]
    assert refusals.summary(rounds) == {
        "cpu_us": 4.0,
        "rate_per_s": 400.0,
        "core_share": 0.4,
        "verdict_p50_us": 4.0,
        "per_core_s": 250_000.0,
    }


def test_a_latencys_spread_is_the_rounds_own() -> None:
    """The median of p99 - p50 is not the medians' difference."""
    rounds = [np.array([1.0] * 50 + [1.0 + spread_us] * 50) for spread_us in (5.5, 1.25, 3.0)]
    row = latency.summary("x", True, rounds)
    assert (row["p50_us"], row["p99_us"], row["spread_us"]) == (1.0, 4.0, 3.0)
    assert latency.row_of({"rows": [row]}, "x", True) is row
    with pytest.raises(LookupError):
        latency.row_of({"rows": [row]}, "x", False)


def test_a_connections_bytes_leave_out_what_came_with_the_first() -> None:
    assert memory.per_connection({0: 1_000, 200: 1_000_000, 1000: 1_800_000}) == 1000.0


def outcome(by_status: dict[str, int], seconds: float) -> LoadOutcome:
    count = sum(by_status.values())
    times = np.arange(1.0, count + 1)
    return LoadOutcome(count, by_status, times, times, times, seconds, 0.1)


def test_goodput_is_over_the_whole_time_that_answering_took() -> None:
    """What is answered behind the burst does not make a server look faster."""
    late = outcome({"200": 800, "429": 200}, seconds=4.0)
    row = goodput.row_of(10.0, late, goodput.Spent(0.5, 1.0))
    assert (row["goodput_per_s"], row["refused_per_s"]) == (200.0, 50.0)
    assert row["offered_per_s"] == 10 * goodput.CAPACITY
    assert (row["daemon_cpu_us"], row["runtime_core_share"]) == (500.0, 0.25)
    assert (row["verdict_p50_us"], row["verdict_p99_us"]) == (500, 990)


def test_the_peak_may_be_anywhere_and_the_last_is_held_against_it() -> None:
    rows = [{"goodput_per_s": rate} for rate in (50.0, 100.0, 95.0)]
    assert goodput.peak_of(rows) == {"peak_per_s": 100.0, "last_of_peak": 0.95}
    assert goodput.peak_of([{"goodput_per_s": 0.0}])["last_of_peak"] is None


def test_what_is_kept_beside_the_interpreters_work() -> None:
    alone = contention.summary([contention.Round(1000.0, 100.0, 200.0, 0.9, 0.0)])
    beside = contention.summary(
        [contention.Round(rate, 150.0, 800.0, 0.7, 0.2) for rate in (100.0, 750.0, 800.0)]
    )
    assert contention.kept(alone, beside) == {
        "throughput": 0.75,
        "p50_times": 1.5,
        "p99_times": 4.0,
    }


def test_the_neighbours_bodies_are_as_large_as_they_are_said_to_be() -> None:
    assert 100_000 <= len(neighbours.ids_body()) < 100_100
    assert 2000 <= len(neighbours.text_of(2000)) < 2020
    assert neighbours.text_of(50) == neighbours.text_of(50)
    body = neighbours.text_body(100)
    assert neighbours.request_of(body).endswith(body)


def test_a_table_is_aligned_and_a_missing_figure_is_a_dash() -> None:
    cells = [("a", "n"), ("bb", tables.number(1234.5)), ("c", tables.percent(None))]
    assert tables.aligned(cells) == [
        "| a  |     n |",
        "| -- | ----: |",
        "| bb | 1,234 |",
        "| c  |     - |",
    ]
    assert [tables.number(value) for value in (99.94, None)] == ["99.9", "-"]
    assert tables.percent(0.9494) == "94.9%"


# ---------------------------------------------------------------- the null server


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("sleeps", [False, True])
def test_the_null_server_answers_every_datagram(tmp_path: Path, sleeps: bool) -> None:
    program = null_udp.compile_into(tmp_path)
    with null_udp.serving(program, 80, sleeps) as port:
        times = null_udp.ask(program, port, 50, 589, sleeps)
    assert len(times) == 50
    assert times.min() > 0


def test_a_compiler_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(LaunchError, match=r"null_udp\.c cannot be compiled"):
        null_udp.compile_into(tmp_path)
