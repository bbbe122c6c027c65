"""Deadlines of requests whose claim, revoke or cancel waits for a device."""

from collections.abc import Callable
from typing import Any

import pytest
from device_pair import IDS, DevicePair, StartPair, asked, close, stop
from pair import Pair, request_bytes

from dataplane.errors import ResetCode


def published(pair: DevicePair, **fields: Any) -> int:
    stream = pair.ask(IDS, **fields)
    pair.deliver()
    pair.tick()
    pair.device.tick()
    assert pair.held() == ["READY"]
    return stream


def test_a_deadline_that_passed_while_the_claim_waited_holds(device_pair: StartPair) -> None:
    one = device_pair(slots=1)
    stream = one.open(request_bytes(IDS, deadline_ms=1)[:-1], False)
    one.deliver()
    arrived = one.received_ns() - 100_000_000
    asked(one, stream).ready_ns = arrived
    one.tick()
    assert one.held() == ["WRITING"]
    assert one.answer(stream, within=0.1).verdict.status == 408
    one.check_at_rest()


def test_a_deadline_takes_back_what_no_engine_took(device_pair: StartPair) -> None:
    one = device_pair(slots=1)
    stream = published(one, deadline_ms=300)
    one.run_for(0.5)
    assert not one.answers[stream].over  # the device has not said which of the two it was
    one.tick()
    answer = one.answer(stream)
    assert (answer.ids, answer.trailer) == ([], (3, 3, 0))
    one.check_at_rest()
    assert one.stats.completed == 1


def test_a_deadline_cancels_what_runs(device_pair: StartPair) -> None:
    one = device_pair(slots=1)
    stream = published(one, deadline_ms=300)
    job = one.take_one()
    job.emit([7])
    one.run_for(0.4)
    job.emit([8])
    one.tick()  # it was taken: the revoke lost, and the cancel is asked for
    assert not job.cancelled
    one.tick()
    answer = one.answer(stream)
    assert (answer.ids, answer.trailer) == ([7, 8], (3, 3, 2))
    assert job.cancelled
    assert job.finish() == 0
    one.check_at_rest()


def test_an_engine_that_is_faster_than_the_cancel_has_its_answer_sent(
    device_pair: StartPair,
) -> None:
    one = device_pair(slots=1)
    stream = published(one, deadline_ms=300)
    job = one.take_one()
    job.emit([7])
    one.run_for(0.4)
    one.tick()
    job.emit([8, 9])
    job.finish()
    one.tick()
    answer = one.answer(stream)
    assert (answer.ids, answer.trailer) == ([7, 8, 9], (1, 3, 3))
    one.check_at_rest()


@pytest.mark.parametrize("runs", [False, True])
@pytest.mark.parametrize("leave", [stop, close])
def test_whoever_leaves_while_a_deadline_waits_gives_its_slot_back(
    device_pair: StartPair, leave: Callable[[Pair, int], None], runs: bool
) -> None:
    one = device_pair(slots=1)
    stream = published(one, deadline_ms=300)
    job = one.take_one() if runs else None
    one.run_for(0.4)
    if runs:
        one.tick()
    leave(one, stream)
    one.deliver()
    one.tick()
    one.tick()
    if job is not None:
        assert job.cancelled
        assert job.finish() == 0
    assert one.held() == []
    assert (one.stats.in_flight, one.stats.cancelled) == (0, 1)
    if leave is stop:
        one.check_at_rest()


def test_a_deadline_that_the_device_does_not_answer_gives_it_up(device_pair: StartPair) -> None:
    one = device_pair(slots=1)
    stream = published(one, deadline_ms=300)
    one.run_until(lambda: one.gave_up)
    one.ingress.detach("the runtime is gone")
    assert one.answer(stream).reset == ResetCode.RUNTIME_LOST
    assert (one.stats.in_flight, one.server.writing) == (0, 0)
