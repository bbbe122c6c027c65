"""Claims that wait for a device: what comes meanwhile, who leaves meanwhile, and one that never
answers. The admission kernel is as it is, and runs when the test has it tick."""

from collections.abc import Callable

import pytest
from device_pair import (
    HEADER,
    IDS,
    WHOLE,
    DevicePair,
    StartPair,
    asked,
    both,
    close,
    header,
    partial,
    reset,
    stop,
    whole,
)
from host_gpu import HostDevice, Library
from native_region import open_region, rung
from pair import Pair, request_bytes

from dataplane import refusals
from dataplane._native import ffi, lib
from dataplane.device_table import AskingTable
from dataplane.errors import Refusal, ResetCode
from dataplane.exchange import Asked, Exchange
from dataplane.fronts.prompt1 import Prompt1
from dataplane.prompt1 import Request
from dataplane.slots import PENDING, State

ANSWER_S = 0.9

# What comes meanwhile.


@pytest.mark.parametrize("cut", [HEADER, HEADER + 5, len(WHOLE) - 1, len(WHOLE)])
def test_a_body_may_come_before_and_behind_the_answer(device_pair: StartPair, cut: int) -> None:
    one = device_pair(slots=1)
    stream = one.open(WHOLE[:cut], cut == len(WHOLE))
    one.deliver()
    assert asked(one, stream).body == WHOLE[HEADER:cut]
    assert one.held() == []
    one.tick()
    if cut < len(WHOLE):
        assert one.held() == ["WRITING"]
        assert one.server.writing == 1
        one.client.send_stream_data(stream, WHOLE[cut:], True)
        one.deliver()
    one.device.tick()
    assert one.held() == ["READY"]
    assert one.region.prompt(0, 3).tolist() == IDS
    answer = one.answer_one(stream, [7, 8])
    assert (answer.ids, answer.verdict.status, answer.verdict.slot) == ([7, 8], 200, 0)
    assert answer.trailer == (1, 3, 2)
    one.check_at_rest()


def test_a_body_may_come_in_pieces_meanwhile(device_pair: StartPair) -> None:
    one = device_pair(slots=1)
    stream = one.open(WHOLE[:HEADER], False)
    one.deliver()
    for at in range(HEADER, len(WHOLE)):
        one.client.send_stream_data(stream, WHOLE[at : at + 1], at + 1 == len(WHOLE))
        one.deliver()
    assert asked(one, stream).is_whole
    one.tick()
    assert one.answer_one(stream, [9]).ids == [9]
    one.check_at_rest()


def test_no_more_of_a_body_is_kept_than_is_declared(device_pair: StartPair) -> None:
    one = device_pair(slots=1)
    stream = one.open(WHOLE + bytes(500), False)
    one.deliver()
    one.client.send_stream_data(stream, bytes(500))
    one.deliver()
    assert len(asked(one, stream).body) == 4 * len(IDS) + 1
    one.tick()
    answer = one.answer(stream)
    assert (answer.verdict.status, answer.fin) == (400, True)
    assert "longer than the 3 tokens" in answer.reason
    one.run_until(lambda: answer.stopped == 0)
    one.check_at_rest()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (request_bytes([1, 2], declared=3), "the body ended after 2 of 3 tokens"),
        (WHOLE + b"\0", "longer than the 3 tokens"),
        (request_bytes([1, 100_000]), "token 1 is 100000; the vocabulary has 100000"),
    ],
)
def test_a_bad_body_is_refused_when_its_claim_is_answered(
    device_pair: StartPair, data: bytes, words: str
) -> None:
    one = device_pair(slots=1)
    stream = one.open(data, True)
    one.deliver()
    one.tick()
    answer = one.answer(stream)
    assert (answer.verdict.status, answer.fin) == (400, True)
    assert words in answer.reason
    one.check_at_rest()
    assert (one.stats.claimed, one.stats.failed) == (1, 1)


def test_those_that_find_no_slot_are_refused_in_the_order_of_the_asking(
    device_pair: StartPair,
) -> None:
    one = device_pair(slots=2)
    streams = [one.ask([number]) for number in range(5)]
    one.deliver()
    one.tick()
    refused = [one.answer(stream) for stream in streams[2:]]
    assert [answer.verdict.status for answer in refused] == [429] * 3
    assert {answer.reason for answer in refused} == {"every slot is taken"}
    one.device.tick()
    assert one.held() == ["READY"] * 2
    assert [one.answer_one(stream, [5]).ids for stream in streams[:1]] == [[5]]
    assert one.answer_one(streams[1], [6]).ids == [6]
    one.check_at_rest()


def test_more_may_be_asked_for_than_the_ring_has_room(device_pair: StartPair) -> None:
    one = device_pair(slots=2)
    streams = [one.ask([1]) for _ in range(60)]
    one.deliver()
    assert all(isinstance(one.server.streams[stream], Asked) for stream in streams)
    one.engine = one.device.tick
    answers = [one.answer(stream) for stream in streams[2:]]
    assert {answer.verdict.status for answer in answers} == {429}
    assert one.held() == ["READY"] * 2
    for stream in streams[:2]:
        assert one.answer_one(stream, [5]).ids == [5]
    one.check_at_rest()
    assert one.gave_up == []


def test_the_cap_on_slots_in_writing_holds_for_those_that_waited(device_pair: StartPair) -> None:
    one = device_pair(slots=4, max_writing=2)
    streams = [one.open(WHOLE[:-1], False) for _ in range(4)]
    one.deliver()
    one.tick()
    for stream in streams[2:]:
        answer = one.answer(stream)
        assert answer.verdict.status == 429
        assert "already holds 2 slots" in answer.reason
    one.device.tick()
    assert one.held() == ["WRITING"] * 2
    for stream in streams:
        one.client.reset_stream(stream, 1)
    one.deliver()
    one.check_at_rest()


def test_the_queue_time_ends_with_the_answer(device_pair: StartPair) -> None:
    one = device_pair(slots=1)
    ready_ns = one.received_ns() - 30_000_000
    one.received_ns = lambda: ready_ns
    stream = one.ask(IDS)
    one.deliver()
    assert one.stats.latency.total(0).within[-1] == 0
    one.tick()
    answer = one.answer_one(stream, [1])
    assert 30_000 <= answer.verdict.queue_us < 60_000_000
    assert one.stats.latency.total(0).within[-1] == 1


# Whoever leaves meanwhile.


# Behind the request's end a reset changes nothing.
LEAVES = [(leave, state) for leave in (reset, both) for state in (header, partial)]
LEAVES += [(leave, state) for leave in (stop, close) for state in (header, partial, whole)]


@pytest.mark.parametrize("answered", ["before", "behind"])
@pytest.mark.parametrize(("leave", "state"), [*LEAVES, (both, whole)])
def test_what_is_granted_to_one_that_left_goes_back(
    device_pair: StartPair,
    leave: Callable[[Pair, int], None],
    state: Callable[[DevicePair], int],
    answered: str,
) -> None:
    """Whether the device granted it before the client left or behind that."""
    one = device_pair(slots=1)
    stream = state(one)
    one.deliver()
    asked(one, stream)
    if answered == "before":
        one.device.tick()
        assert one.held() == ["WRITING"]
    leave(one, stream)
    one.deliver()
    one.tick()
    one.tick()
    assert one.held() == []
    assert (one.stats.in_flight, one.server.writing) == (0, 0)
    assert one.ingress.next_deadline() is None
    if leave is not close:
        other = one.ask(IDS)
        one.deliver()
        one.tick()
        assert one.answer_one(other, [4]).ids == [4]
        one.check_at_rest()


def test_a_client_that_left_before_its_claim_was_posted_is_not_asked_for(
    device_pair: StartPair,
) -> None:
    one = device_pair(slots=1)
    streams = [one.ask([1]) for _ in range(60)]
    one.deliver()
    for stream in streams:
        stop(one, stream)
    one.deliver()
    one.tick()
    one.tick()
    assert one.held() == []
    one.check_at_rest()
    assert one.stats.claimed == 0


# A device that does not answer.


def test_all_that_wait_are_refused_once_and_then_at_once(device_pair: StartPair) -> None:
    one = device_pair(slots=4)
    streams = [whole(one), partial(one)]
    one.deliver()
    started = one.now
    one.run_for(ANSWER_S / 2)
    streams.append(whole(one))
    one.deliver()
    assert one.gave_up == []
    for stream in streams:
        answer = one.answer(stream)
        assert (answer.verdict.status, answer.fin) == (503, True)
        assert "does not answer" in answer.reason
    assert ANSWER_S <= one.now - started < 1
    assert len(one.gave_up) == 1
    at = one.now
    late = one.answer(one.ask(IDS))
    assert late.verdict.status == 503
    assert one.now - at < 0.1
    assert len(one.gave_up) == 1
    assert one.ingress.next_deadline() is None
    one.ingress.detach("it is gone")
    assert (one.stats.in_flight, one.server.writing, one.server.streams) == (0, 0, {})


def test_another_front_that_gave_the_device_up_says_it_for_all(device_pair: StartPair) -> None:
    one = device_pair(slots=1)
    stream = whole(one)
    one.deliver()
    asks = one.table.asks
    assert asks is not None
    asks.give_up()
    answer = one.answer(stream, within=0.1)
    assert answer.verdict.status == 503
    assert "does not answer" in answer.reason


def test_an_answer_in_the_last_moment_counts(device_pair: StartPair) -> None:
    """It was there before the daemon looked, which may have been held up itself."""
    one = device_pair(slots=1)
    stream = whole(one)
    one.deliver()
    one.device.tick()
    one.now += 5
    one.serve()
    assert one.gave_up == []
    assert one.answer_one(stream, [3]).ids == [3]
    one.check_at_rest()


# The daemon's and the runtime's end.


def test_a_runtime_that_goes_takes_those_with_it_that_wait(device_pair: StartPair) -> None:
    one = device_pair(slots=1)
    streams = [whole(one), whole(one)]
    one.deliver()
    one.ingress.detach("the runtime is gone")
    for stream in streams:
        answer = one.answer(stream)
        assert (answer.verdict.status, answer.reason) == (503, refusals.LOST)
    assert one.ingress.next_deadline() is None
    assert one.server.streams == {}


def test_a_daemon_that_drains_refuses_what_is_granted_then(device_pair: StartPair) -> None:
    one = device_pair(slots=1)
    stream = whole(one)
    one.deliver()
    one.ingress.draining = True
    one.tick()
    assert one.answer(stream).reason == refusals.DRAINING
    one.check_at_rest()


def test_a_daemon_that_ends_refuses_those_that_wait(device_pair: StartPair) -> None:
    one = device_pair(slots=1)
    stream = whole(one)
    one.deliver()
    one.ingress.end_all(refusals.draining(), ResetCode.SHUTTING_DOWN)
    assert one.answer(stream).reason == refusals.DRAINING
    one.check_at_rest()


# A mistake of our own.


@pytest.mark.parametrize("granted", [False, True])
def test_a_front_that_fails_ends_its_connection_alone(
    device_pair: StartPair, granted: bool
) -> None:
    told: list[int] = []

    class Faulty(Prompt1):
        def decided(self, asked: Asked, outcome: Exchange | Refusal) -> None:
            told.append(asked.stream_id)
            if not isinstance(outcome, Refusal):
                super().decided(asked, outcome)
            raise RuntimeError("a mistake in the front")

    one = device_pair(slots=2, front=Faulty)
    streams = [whole(one), whole(one)]
    one.deliver()
    if granted:
        one.tick()
    else:
        one.ingress.end_all(refusals.draining(), ResetCode.SHUTTING_DOWN)
    assert told == streams[:1]
    assert one.server.ended
    one.tick()
    one.device.tick()
    assert one.held() == []
    assert (one.stats.in_flight, one.server.writing) == (0, 0)


# A listener's sleep.


def test_a_listener_does_not_sleep_over_an_answer(library: Library) -> None:
    with open_region(table="device") as region:
        table, device = AskingTable(region), HostDevice(library, region)
        bell = ffi.gc(lib.dp_bell_new(region.native), lib.dp_bell_free)
        assert table.admit(Request(1), 1, 8) == PENDING
        assert table.sleep()
        device.tick()
        lib.dp_bell_ring(bell, -1)
        assert rung(region.native.outputs[0]) == 1  # it slept, so it is woken
        assert not table.sleep()
        assert (answer := table.next_answer()) is not None
        assert table.sleep()
        assert table.let_go(answer.slot, answer.generation) == State.FREE
        table.wake()
