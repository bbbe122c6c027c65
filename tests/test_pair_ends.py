"""A client that leaves: whatever it does, in whatever state its request is, the slot goes back in
the pass that hears of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pair import Answer, Job, Pair, echo, request_bytes

from dataplane.errors import ResetCode
from dataplane.fronts.prompt1 import Prompt1

StartPair = Callable[..., Pair]
WHOLE = request_bytes([1, 2, 3])


@pytest.fixture
def pair(state_dir: Path) -> StartPair:
    def start(**options: Any) -> Pair:
        made = Pair(state_dir, **options)
        made.connect()
        return made

    return start


# Each brings a request to a state; what they return are its stream and what the engine holds of it.


def header(pair: Pair) -> tuple[int, Job | None]:
    stream = pair.open(WHOLE[:20], False)
    pair.deliver()
    assert pair.held() == []
    return stream, None


def writing(pair: Pair) -> tuple[int, Job | None]:
    stream = pair.open(WHOLE[:-2], False)
    pair.deliver()
    assert pair.held() == ["WRITING"]
    return stream, None


def ready(pair: Pair) -> tuple[int, Job | None]:
    stream = pair.open(WHOLE, True)
    pair.deliver()
    assert pair.held() == ["READY"]
    return stream, None


def running(pair: Pair) -> tuple[int, Job | None]:
    stream, _ = ready(pair)
    (job,) = pair.take()
    return stream, job


def emitting(pair: Pair) -> tuple[int, Job | None]:
    stream, job = running(pair)
    assert job is not None
    job.emit([4])
    pair.serve()
    job.emit([5])
    return stream, job


def done(pair: Pair) -> tuple[int, Job | None]:
    stream, job = emitting(pair)
    assert job is not None
    job.finish()
    assert pair.held() == ["DONE"]
    return stream, None


STATES = [header, writing, ready, running, emitting, done]


def reset(pair: Pair, stream: int) -> None:
    pair.client.reset_stream(stream, 9)


def stop(pair: Pair, stream: int) -> None:
    pair.client.stop_stream(stream, 9)


def reset_and_stop(pair: Pair, stream: int) -> None:
    reset(pair, stream)
    stop(pair, stream)


def close(pair: Pair, stream: int) -> None:
    pair.client.close()


def check_freed(pair: Pair, job: Job | None) -> None:
    """The slot is free, or the engine is told and frees it; nothing else is held."""
    assert pair.held() == (["CANCELLING"] if job else [])
    assert pair.stats.in_flight == 0
    assert pair.server.writing == 0
    if job:
        assert job.cancelled
        assert job.finish() == 0
    assert pair.held() == []


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("leave", [stop, reset_and_stop, close])
def test_leaving_frees_the_slot_at_once(
    pair: StartPair,
    leave: Callable[[Pair, int], None],
    state: Callable[[Pair], tuple[int, Job | None]],
) -> None:
    one = pair(slots=1)
    stream, job = state(one)
    leave(one, stream)
    one.deliver()
    check_freed(one, job)
    assert one.stats.cancelled == (0 if state is header else 1)
    assert one.stats.completed == one.stats.failed == 0
    if leave is close:
        assert one.server.gone
        assert one.server.streams == {}
    else:
        one.engine = echo(one)
        assert one.answer(one.ask([6, 7])).ids == [6, 7]
        one.check_at_rest()


@pytest.mark.parametrize("state", [header, writing])
def test_a_reset_ends_what_is_not_complete(
    pair: StartPair, state: Callable[[Pair], tuple[int, Job | None]]
) -> None:
    one = pair(slots=1)
    stream, _ = state(one)
    reset(one, stream)
    one.deliver()
    check_freed(one, None)
    assert one.answer(stream).reset == 0
    one.engine = echo(one)
    assert one.answer(one.ask([6, 7])).ids == [6, 7]
    one.check_at_rest()


@pytest.mark.parametrize("state", [ready, running, emitting])
def test_a_reset_behind_the_fin_changes_nothing(
    pair: StartPair, state: Callable[[Pair], tuple[int, Job | None]]
) -> None:
    """All was received (RFC 9000 section 3.2), so the request goes on."""
    one = pair(slots=1)
    stream, job = state(one)
    reset(one, stream)
    one.deliver()
    (job,) = [job] if job else one.take()
    job.emit([8])
    job.finish()
    answer = one.answer(stream)
    assert answer.ids[-1] == 8
    assert answer.trailer.finish_reason == 1
    one.check_at_rest()


def test_a_slot_is_freed_while_the_handshakes_neighbours_go_on(pair: StartPair) -> None:
    """Eight requests at once, of which every other one is stopped."""
    one = pair(slots=8)
    streams = [one.ask([number]) for number in range(8)]
    one.deliver()
    for stream in streams[::2]:
        stop(one, stream)
    one.deliver()
    assert one.held() == ["READY"] * 4
    one.engine = echo(one)
    assert [one.answer(stream).ids for stream in streams[1::2]] == [[1], [3], [5], [7]]
    one.check_at_rest()


def test_a_stop_that_overtakes_its_request_takes_no_slot(pair: StartPair) -> None:
    """The network may bring STOP_SENDING before the stream's first byte: nobody will read."""
    one = pair(slots=1)
    late: list[bytes] = []
    stream = one.ask([1, 2, 3])
    late += [data for data, _ in one.client.datagrams_to_send(one.now)]
    stop(one, stream)
    one.deliver()
    one.serve(late)
    assert one.held() == []
    one.check_at_rest()


def test_what_comes_behind_a_refusal_is_dropped(pair: StartPair) -> None:
    one = pair(slots=1)
    stream = one.open(request_bytes([], declared=5000), False)
    one.client.send_stream_data(stream, b"\0" * 400)
    answer = one.answer(stream)
    assert answer.verdict.status == 400
    assert "the context is 4096" in answer.reason
    assert answer.fin
    one.run_until(lambda: answer.stopped == 0)
    assert one.held() == []
    one.check_at_rest()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (request_bytes([1, 2], declared=3), "the body ended after 2 of 3 tokens"),
        (WHOLE[:-1], "the body ended after 2 of 3 tokens and 3 bytes of the next"),
        (WHOLE + b"\0", "longer than the 3 tokens"),
        (request_bytes([1, 100_000]), "token 1 is 100000; the vocabulary has 100000"),
        (WHOLE[:30], "the stream ended inside the header, after 30 bytes"),
        (b"", "the stream ended inside the header, after 0 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "not with the magic DPQ1"),
        (request_bytes([1], max_output=65), "max_output is 65; a slot has room for 64"),
    ],
)
def test_a_bad_request_holds_nothing(pair: StartPair, data: bytes, words: str) -> None:
    one = pair(slots=1)
    one.engine = echo(one)
    answer = one.answer(one.open(data, True))
    assert (answer.verdict.status, answer.fin) == (400, True)
    assert words in answer.reason
    assert one.held() == []
    assert one.answer(one.ask([6])).ids == [6]
    one.check_at_rest()


def test_a_one_way_stream_is_stopped(pair: StartPair) -> None:
    one = pair(slots=1)
    stream = one.client.get_next_available_stream_id(is_unidirectional=True)
    one.client.send_stream_data(stream, WHOLE)
    one.run_until(lambda: one.answers.get(stream, Answer()).stopped == 0)
    assert one.held() == []
    one.check_at_rest()


# ---------------------------------------------------------------- mistakes of our own


class _Faulty(Prompt1):
    """Fails at the first request with a certain affinity, after its claim."""

    def stream_data(
        self, connection: Any, stream_id: int, data: bytes, fin: bool, at_ns: int
    ) -> None:
        super().stream_data(connection, stream_id, data, fin, at_ns)
        if stream_id == 4:
            raise RuntimeError("a mistake in the front")


@pytest.mark.parametrize("fin", [False, True])
def test_an_exception_ends_its_connection_and_frees_its_slots(pair: StartPair, fin: bool) -> None:
    one = pair(slots=4, front=_Faulty)
    one.open(WHOLE if fin else WHOLE[:-1], fin)
    one.deliver()
    assert len(one.held()) == 1
    one.open(WHOLE if fin else WHOLE[:-1], fin)
    one.deliver()
    assert one.held() == []
    assert one.stats.in_flight == 0
    assert one.server.ended
    one.run_until(lambda: one.lost is not None)
    assert one.lost == "internal error"


@pytest.mark.parametrize("at_ns", [0, 1, 2**62])
def test_a_strange_receive_time_harms_nobody(pair: StartPair, at_ns: int) -> None:
    """The kernel gave none, or the clock was set meanwhile."""
    one = pair(slots=1)
    one.engine = echo(one)
    one.received_ns = lambda: at_ns
    answer = one.answer(one.ask([6, 7]))
    assert answer.verdict.status == 200
    assert answer.ids == [6, 7]
    assert one.answer(one.open(b"x", True)).verdict.status == 400
    one.check_at_rest()


# ---------------------------------------------------------------- the runtime's end


def test_what_the_runtime_finished_before_its_end_goes_out_whole(pair: StartPair) -> None:
    one = pair()
    done, running = one.ask([1, 2], affinity=4), one.ask([3], affinity=5)
    one.deliver()
    first, second = one.take()
    first.emit([7, 8])
    first.finish()
    second.emit([9])
    one.ingress.detach("the runtime is gone")
    answer = one.answer(done)
    assert (answer.ids, answer.trailer) == ([7, 8], (1, 2, 2))
    assert one.answer(running).reset == ResetCode.RUNTIME_LOST
