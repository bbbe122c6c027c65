"""Prompts over a bad link, and everything that hangs on time, with a clock of our own."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pair import Job, Link, Pair, echo, request_bytes

StartPair = Callable[..., Pair]
STOP, LENGTH, DEADLINE = 1, 2, 3
BODY_TIMEOUT = 5.0
LATE = BODY_TIMEOUT / 20 + 0.1  # how much later than it may a late one is found


@pytest.fixture
def pair(state_dir: Path) -> StartPair:
    """Make a pair whose handshake is complete."""

    def start(link: Link | None = None, **options: Any) -> Pair:
        made = Pair(state_dir, link, **{"body_timeout": BODY_TIMEOUT, **options})
        made.connect()
        return made

    return start


def hold_one(pair: Pair, **fields: Any) -> tuple[int, Job]:
    """Bring a request to RUNNING."""
    stream = pair.ask([1, 2, 3], **fields)
    pair.run_until(lambda: pair.held() == ["READY"])
    (job,) = pair.take()
    return stream, job


# ---------------------------------------------------------------- a bad link

LINKS = {
    "good": Link(),
    "10% lost": Link(loss=0.1),
    "30% lost": Link(loss=0.3),
    "doubled": Link(duplication=0.5),
    "reordered": Link(reordering=0.5),
    "everything": Link(loss=0.1, duplication=0.1, reordering=0.3),
}


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS.keys())
def test_what_arrives_in_the_slots_is_what_was_sent(pair: StartPair, link: Link, seed: int) -> None:
    requests = 24
    # At 30% loss a body may well take longer than the time-out that is usual.
    one = pair(link, seed=seed, max_writing=4, max_output=4096, body_timeout=3600.0)
    choose = random.Random(seed)
    prompts = {
        number: [choose.randrange(100_000) for _ in range(choose.randint(1, 3000))]
        for number in range(1, requests + 1)
    }
    arrived: dict[int, list[int]] = {}

    def engine() -> None:
        for job in one.take():
            arrived[job.request_id] = job.prompt
            job.emit(job.prompt)
            job.finish()

    one.engine = engine
    streams: dict[int, int] = {}
    waiting = list(prompts)

    def finished() -> bool:
        in_flight = sum(not one.answers[stream].over for stream in streams.values())
        while waiting and in_flight < 4:
            number = waiting.pop()
            streams[number] = one.ask(prompts[number], request_id=number)
            in_flight += 1
        one.transmit()
        return in_flight == 0

    one.run_until(finished, within=36_000.0)
    assert arrived == prompts
    for number, stream in streams.items():
        answer = one.answers[stream]
        assert (answer.verdict.status, answer.verdict.request_id) == (200, number)
        assert answer.ids == prompts[number]
        assert answer.trailer == (STOP, len(prompts[number]), len(prompts[number]))
    assert one.stats.completed == requests
    one.check_at_rest()


@pytest.mark.parametrize("width", [2, 4])
def test_a_request_may_be_split_anywhere(pair: StartPair, width: int) -> None:
    one = pair(max_output=4096)
    one.engine = echo(one)
    choose = random.Random(width)
    for _ in range(20):
        ids = [choose.randrange(256**2) for _ in range(choose.randint(1, 60))]
        data = request_bytes([], declared=len(ids), width=width)
        data += b"".join(number.to_bytes(width, "little") for number in ids)
        stream = one.open(data[:1], False)
        at = 1
        while at < len(data):
            one.deliver()
            size = choose.randint(1, 80)
            one.client.send_stream_data(stream, data[at : at + size], at + size >= len(data))
            at += size
        assert one.answer(stream).ids == ids
    one.check_at_rest()


def test_two_runs_of_one_seed_are_alike(pair: StartPair) -> None:
    def times() -> list[float]:
        one = pair(LINKS["everything"], seed=7)
        one.engine = echo(one)
        start = one.now
        ends = []
        for _ in range(5):
            one.answer(one.ask([1, 2, 3]))
            ends.append(round(one.now - start, 6))
        return ends

    assert times() == times()


# ---------------------------------------------------------------- one write


def writes(pair: Pair, stream: int) -> list[bytes]:
    """What the daemon wrote on a stream, write by write."""
    return [data for number, data, _ in pair.sends if number == stream]


def test_output_that_is_there_goes_out_with_the_verdict(pair: StartPair) -> None:
    one = pair()
    one.engine = echo(one)
    stream = one.ask([7, 8, 9])
    assert one.answer(stream).ids == [7, 8, 9]
    assert len(writes(one, stream)) == 1
    one.check_at_rest()


def test_output_that_comes_later_has_writes_of_its_own(pair: StartPair) -> None:
    one = pair()
    stream, job = hold_one(one)
    assert [len(data) for data in writes(one, stream)] == [32]
    one.serve()
    job.emit([4, 5])
    one.serve()
    one.serve()
    job.emit([6])
    job.finish(LENGTH)
    one.serve()
    assert [len(data) for data in writes(one, stream)] == [32, 8, 4 + 20]
    answer = one.answer(stream)
    assert (answer.ids, answer.trailer) == ([4, 5, 6], (LENGTH, 3, 3))
    one.check_at_rest()


# ---------------------------------------------------------------- deadlines


def test_a_deadline_in_ready_takes_the_request_back(pair: StartPair) -> None:
    one = pair()
    stream = one.ask([1, 2, 3], deadline_ms=200)
    one.run_until(lambda: one.held() == ["READY"])
    start = one.now
    answer = one.answer(stream)
    assert 0.1 < one.now - start < 0.3
    assert (answer.verdict.status, answer.ids) == (200, [])
    assert answer.trailer == (DEADLINE, 3, 0)
    assert one.take() == []
    one.check_at_rest()


@pytest.mark.parametrize("ids", [[], [4, 5]])
def test_a_deadline_in_running_sends_what_is_out(pair: StartPair, ids: list[int]) -> None:
    one = pair()
    stream, job = hold_one(one, deadline_ms=200)
    if ids:
        job.emit(ids[:1])
        one.serve()
        job.emit(ids[1:])
    one.now += 0.3  # Nobody rang for the last one: the deadline finds it.
    answer = one.answer(stream)
    assert answer.ids == ids
    assert answer.trailer == (DEADLINE, 3, len(ids))
    assert one.held() == ["CANCELLING"]
    assert job.cancelled
    assert one.stats.in_flight == 0
    job.finish()
    one.check_at_rest()


def test_a_deadline_that_comes_after_the_end_changes_nothing(pair: StartPair) -> None:
    one = pair()
    stream, job = hold_one(one, deadline_ms=200)
    job.emit([4])
    job.finish(LENGTH)
    one.now += 0.3  # In this pass both are found: the end, and that the time is over.
    answer = one.answer(stream)
    assert (answer.ids, answer.trailer) == ([4], (LENGTH, 3, 1))
    one.check_at_rest()


def test_a_deadline_is_not_the_next_holders(pair: StartPair) -> None:
    one = pair(slots=1)
    stream, job = hold_one(one, deadline_ms=500)
    job.finish()
    one.answer(stream)
    stream, job = hold_one(one)
    one.run_for(1.0)
    assert one.held() == ["RUNNING"]
    job.finish()
    assert one.answer(stream).trailer == (STOP, 3, 0)
    one.check_at_rest()


def test_a_deadline_while_the_body_comes_is_a_time_out(pair: StartPair) -> None:
    one = pair()
    stream = one.open(request_bytes([1, 2, 3], declared=10, deadline_ms=200), False)
    one.run_until(lambda: one.held() == ["WRITING"])
    start = one.now
    answer = one.answer(stream)
    assert 0.1 < one.now - start < 0.3
    assert answer.verdict.status == 408
    assert answer.reason == "only 3 of 10 tokens came in time"
    one.check_at_rest()


# ---------------------------------------------------------------- time-outs


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (request_bytes([1, 2, 3], declared=10), "only 3 of 10 tokens came in time"),
        (request_bytes([], declared=10), "only 0 of 10 tokens came in time"),
        (request_bytes([])[:47], "only 47 bytes of the header came in time"),
        (b"D", "only 1 bytes of the header came in time"),
    ],
)
def test_what_does_not_come_is_a_time_out(pair: StartPair, data: bytes, words: str) -> None:
    one = pair()
    stream = one.open(data, False)
    one.deliver()
    start = one.now
    answer = one.answer(stream)
    assert BODY_TIMEOUT <= one.now - start <= BODY_TIMEOUT + LATE
    assert (answer.verdict.status, answer.reason, answer.fin) == (408, words, True)
    assert one.held() == []
    one.run_until(lambda: answer.stopped == 0)
    one.check_at_rest()


def test_a_drip_does_not_put_a_time_out_off(pair: StartPair) -> None:
    one = pair()
    data = request_bytes(list(range(100)))
    stream = one.open(data[:50], False)
    start = one.now
    for at in range(50, 300):
        if one.answers[stream].over:
            break
        one.client.send_stream_data(stream, data[at : at + 1])
        one.deliver()
        one.run_for(0.1)
    assert one.answers[stream].verdict.status == 408
    assert BODY_TIMEOUT <= one.now - start <= BODY_TIMEOUT + LATE + 0.2
    one.check_at_rest()


def test_one_late_body_harms_no_other(pair: StartPair) -> None:
    one = pair(slots=4, max_writing=2)
    one.engine = echo(one)
    late = one.open(request_bytes([1], declared=2), False)
    one.deliver()
    for number in range(20):
        assert one.answer(one.ask([number])).ids == [number]
        one.run_for(0.1)
    assert not one.answers[late].over
    one.client.send_stream_data(late, b"\2\0\0\0", True)
    assert one.answer(late).ids == [1, 2]
    one.check_at_rest()


# ---------------------------------------------------------------- no room


def test_a_connection_may_not_hold_all_slots_in_writing(pair: StartPair) -> None:
    one = pair(slots=4)
    one.engine = echo(one)
    held = [one.open(request_bytes([1], declared=2), False) for _ in range(2)]
    one.deliver()
    assert one.held() == ["WRITING", "WRITING"]
    refused = one.answer(one.open(request_bytes([1], declared=2), False))
    assert refused.verdict.status == 429
    assert "already holds 2 slots" in refused.reason
    assert "its cap" in refused.reason
    assert refused.verdict.retry_after_ms > 0
    one.client.send_stream_data(held[0], b"\2\0\0\0", True)
    assert one.answer(held[0]).ids == [1, 2]
    # Now there is room for one more.
    assert one.answer(one.ask([5])).ids == [5]
    one.client.send_stream_data(held[1], b"\2\0\0\0", True)
    assert one.answer(held[1]).ids == [1, 2]
    one.check_at_rest()


def test_no_slot_is_told_as_that(pair: StartPair) -> None:
    one = pair(slots=4)
    streams = [one.ask([number]) for number in range(4)]
    one.run_until(lambda: one.held() == ["READY"] * 4)
    for refused in (one.answer(one.ask([9])), one.answer(one.open(request_bytes([9]), False))):
        assert (refused.verdict.status, refused.reason) == (429, "every slot is taken")
        assert (refused.verdict.slot, refused.verdict.free_left) == (None, 0)
        assert refused.verdict.retry_after_ms > 0
    for job in one.take():
        job.finish()
    for stream in streams:
        assert one.answer(stream).trailer == (STOP, 1, 0)
    one.check_at_rest()
