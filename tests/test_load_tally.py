"""The load generator's schedule and its sums."""

import numpy as np
import pytest

from dataplane.load.tally import LOST, RESET, Schedule, Tally, quantiles

SECOND = 1_000_000_000

# ---------------------------------------------------------------- the schedule


def test_a_closed_loop_begins_at_once_and_as_many_as_there_are() -> None:
    schedule = Schedule(2, None, 100)
    assert [schedule.take(now) for now in (100, 250, 300)] == [100, 250, None]
    assert schedule.next_ns() is None


def test_an_open_loop_keeps_its_moments_whatever_the_server_does() -> None:
    rate, start = 300.0, 7 * SECOND
    schedule = Schedule(400, rate, start)
    due = [start + round(i * SECOND / rate) for i in range(400)]
    begun: list[tuple[int, int]] = []

    def advance(now: int) -> None:
        while (began := schedule.take(now)) is not None:
            begun.append((began, now))

    for i in range(100):  # Woken for each, a little late.
        assert schedule.next_ns() == due[i]
        advance(due[i] - 1)
        assert len(begun) == i
        advance(due[i] + 1000)
    advance(start + SECOND)  # Then nothing for two thirds of a second.
    assert [began for began, _ in begun] == due[:301]
    late = [now - began for began, now in begun[100:]]
    assert late == [start + SECOND - moment for moment in due[100:301]]
    advance(start + 2 * SECOND)
    assert [began for began, _ in begun] == due
    assert schedule.next_ns() is None


def test_the_moments_of_an_open_loop_do_not_drift() -> None:
    schedule = Schedule(3_000_001, 3.0, 0)
    schedule.taken = 3_000_000
    assert schedule.next_ns() == 1_000_000 * SECOND


def test_what_is_abandoned_never_begins() -> None:
    schedule = Schedule(5, None, 0)
    schedule.take(0)
    assert schedule.abandon() == 4
    assert (schedule.take(1), schedule.abandon()) == (None, 0)


# ---------------------------------------------------------------- the sums


@pytest.mark.parametrize("count", [1, 2, 9, 10, 99, 100, 999, 1000, 1001, 3000, 12_345])
def test_quantiles_are_those_of_numpy(count: int) -> None:
    times = np.random.default_rng(count).lognormal(5, 2, count)
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    wanted = {
        name: round(float(np.quantile(times, share, method="inverted_cdf")))
        for name, share in shares.items()
    }
    assert quantiles(times) == wanted


def test_quantiles_are_measured_times() -> None:
    assert quantiles(np.arange(1.0, 1001.0)) == {
        "p50": 500,
        "p90": 900,
        "p99": 990,
        "p999": 999,
        "max": 1000,
    }
    assert quantiles(np.empty(0)) == dict.fromkeys(("p50", "p90", "p99", "p999", "max"))


def test_each_request_is_counted_once() -> None:
    tally = Tally(6)
    for took_us, status, ingress in ((30, 429, -1), (10, 200, 0), (20, 200, 4)):
        tally.verdict(took_us * 1000, ingress)
        tally.answered(status, took_us * 2000)
    tally.failed(RESET)
    tally.failed(LOST, 2)
    tally.failed(LOST, 0)
    outcome = tally.outcome(seconds=2.0, cpu_s=1.0)
    assert tally.ended == outcome.requests == 6
    assert outcome.by_status == {"200": 2, "429": 1, "lost": 2, "reset": 1}
    assert list(outcome.verdicts_us) == [30, 10, 20]
    assert list(outcome.totals_us) == [60, 20, 40]
    assert list(outcome.ingress_us) == [0, 4]
    assert (outcome.broken, outcome.rate) == (3, 1.5)
