"""The two engines against each other: what reaches the slots, and what the wire means.

Every exchange is told to the reference and to the packet pump, pass by pass, under one clock; after
each pass the slots, what the puppet took and whether it is to stop are the same, and at the end the
answers and the counters. A difference is a mistake in one of the two.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from exchange_maker import STOP, Maker, body_of
from hand import Frame
from paired_servers import BODY_TIMEOUT, CONTEXT, VOCAB, Server
from twins import Twins

from dataplane.errors import ResetCode
from dataplane.prompt1 import Request, encode_request

_CASES_A_CONNECTION = 25


def finish_all(server: Server) -> None:
    server.take()
    for job in server.taken:
        if not job.over:
            job.finish(STOP)


def play(twins: Twins, maker: Maker) -> list[int]:
    """One exchange of a few streams; their numbers."""
    streams = [twins.open() for _ in range(maker.random.randint(1, 6))]
    said = [maker.frames(stream) for stream in streams]
    packets = maker.packets(said)
    while packets:
        count = maker.random.choice([1, 1, 2, 5, len(packets)])
        group, packets = packets[:count], packets[count:]
        order = list(range(len(group)))
        if maker.chance(0.3):
            order += [maker.random.randrange(len(group)) for _ in range(2)]  # the same once more
        twins.deliver(group, order, maker.puppet() if maker.chance(0.7) else None)
        if maker.chance(0.15):
            twins.run_for(maker.random.choice([0.021, 0.203, 1.007, BODY_TIMEOUT * 1.1]))
    return [stream for stream in streams if stream in twins.said]


def wait_for_answers(twins: Twins, streams: Sequence[int]) -> None:
    for _ in range(100):
        if all(s.hand.of(stream).over for s in twins.servers for stream in streams):
            return
        twins.run_for(0.1)
    raise AssertionError(f"not all of {streams} are answered")


def settle(twins: Twins, streams: Sequence[int]) -> None:
    """End an exchange, and compare what it came to."""
    for _ in range(3):
        twins.deliver([], puppet=finish_all)
    twins.run_for(BODY_TIMEOUT * 1.2)
    for _ in range(3):
        twins.deliver([], puppet=finish_all)
    wait_for_answers(twins, streams)
    twins.check_answers(streams)
    twins.check_counts()
    for server in twins.servers:
        assert set(server.states()) == {"FREE"}
        assert server.writing() == 0
        assert server.counts().in_flight == 0
    # Whoever was stopped, or late, breaks off: both sides of every stream are over then.
    left = [stream for stream in streams if not twins.is_over(stream)]
    twins.deliver([[Frame("reset", stream, twins.ends.get(stream, 0))] for stream in left])
    twins.forget(streams)


KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "lossy": {"loss": 0.3},
    "later": {"lazy": True},  # Python hears of things at the end of a pass
    "later-lossy": {"lazy": True, "loss": 0.3},
    "capped": {"max_writing": 2},
    "keyed": {"keyed": True},
    "keyed-lossy": {"keyed": True, "loss": 0.3, "lazy": True},
    "keyed-capped": {"keyed": True, "max_writing": 2},
}


def play_cases(state_dir: Path, cases: range, kind: str) -> None:
    """Play the exchanges of these numbers, many on a connection."""
    options = KINDS[kind]
    for first in cases[::_CASES_A_CONNECTION]:
        with contextlib.closing(Twins(state_dir, seed=first, **options)) as twins:
            for case in range(first, min(first + _CASES_A_CONNECTION, cases.stop)):
                try:
                    settle(twins, play(twins, Maker(case, twins, alone="capped" in kind)))
                except AssertionError as error:
                    raise AssertionError(f"{kind}, case {case}: {error}") from error
            check_who_served(twins)


def check_who_served(twins: Twins) -> None:
    """With the pump, requests are admitted in C, to every partition."""
    _, pumped = twins.servers
    assert pumped.stats.claimed == 0
    for ingress in pumped.ingresses:
        assert ingress.raw is not None
        assert ingress.raw().claimed > 0


@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_do_the_same(state_dir: Path, kind: str) -> None:
    first = list(KINDS).index(kind) * 10_000
    play_cases(state_dir, range(first, first + 100), kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_do_the_same_for_long(state_dir: Path, kind: str) -> None:
    first = list(KINDS).index(kind) * 10_000 + 100
    play_cases(state_dir, range(first, first + 1000), kind)


# ---------------------------------------------------------------- every split


@pytest.fixture(scope="module")
def twins(state_dir: Path) -> Iterator[Twins]:
    with contextlib.closing(Twins(state_dir)) as made:
        yield made


def settle_quickly(twins: Twins, stream: int) -> None:
    """Let both answer (aioquic paces what it sends), and compare."""
    wait_for_answers(twins, [stream])
    twins.check_answers([stream])
    twins.check_counts()
    for server in twins.servers:
        assert set(server.states()) == {"FREE"}


def whole_request(twins: Twins, width: int) -> bytes:
    number = len(twins.ids) + 1
    twins.ids.add(number)
    return encode_request(Request(3, width, request_id=number)) + body_of([7, 40_000, 9], width)


def take_and_answer(server: Server) -> None:
    for job in server.take():
        assert job.emit([job.number % VOCAB]) == 0
        job.finish(STOP)


def play_pieces(twins: Twins, *packets: list[Frame]) -> None:
    """Each packet in a pass of its own; the request is published by the last at the latest."""
    for packet in packets:
        twins.deliver([packet])
    twins.deliver([], puppet=take_and_answer)
    twins.deliver([], puppet=finish_all)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("order", ["in order", "overtaken", "one packet"])
def test_a_request_cut_at_every_byte(twins: Twins, width: int, order: str) -> None:
    for at in range(len(whole_request(twins, width)) + 1):
        data, stream = whole_request(twins, width), twins.open()
        pieces = [
            Frame("stream", stream, 0, data[:at]),
            Frame("stream", stream, at, data[at:], True),
        ]
        if order == "overtaken":
            pieces.reverse()
        play_pieces(twins, pieces) if order == "one packet" else play_pieces(
            twins, *([piece] for piece in pieces)
        )
        settle_quickly(twins, stream)
        for server in twins.servers:
            assert server.taken[-1].prompt == body_of([7, 40_000, 9], 4)
            assert server.hand.of(stream).whole


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("declared", [2, 4], ids=["overflow", "short"])
def test_a_body_that_does_not_fit_cut_at_every_byte(
    twins: Twins, width: int, declared: int
) -> None:
    size = len(whole_request(twins, width))
    for at in range(size + 1):
        data, stream = bytearray(whole_request(twins, width)), twins.open()
        data[8] = declared
        for first, last in ((0, at), (at, size)):
            twins.deliver([[Frame("stream", stream, first, bytes(data[first:last]), last == size)]])
        settle_quickly(twins, stream)
        for server in twins.servers:
            assert server.hand.of(stream).data[4:6] == (400).to_bytes(2, "little")


@pytest.mark.parametrize("how", ["reset", "stop", "both"])
def test_a_client_that_leaves_after_every_byte(twins: Twins, how: str) -> None:
    """Before the request, within it, with its end, once it is taken and after its answer."""
    size = len(whole_request(twins, 4))
    for at in range(size + 4):
        data, stream = whole_request(twins, 4), twins.open()
        twins.deliver([[Frame("stream", stream, 0, data[:at], fin=at >= size)]] if at else [])
        if at > size + 1:
            twins.deliver([], puppet=Server.take)
        if at > size + 2:
            twins.deliver([], puppet=finish_all)
            twins.run_for(0.2)
        if how != "stop":
            twins.deliver([[Frame("reset", stream, min(at, size), code=3)]])
        if how != "reset":
            twins.deliver([[Frame("stop", stream, code=9)]])
        twins.deliver([], puppet=finish_all)
        if not twins.is_over(stream):
            twins.deliver([[Frame("stream", stream, at, data[at:], fin=True)]])
            twins.deliver([], puppet=finish_all)
        settle_quickly(twins, stream)


def test_breaking_off_what_came_whole_is_no_news(state_dir: Path) -> None:
    """Python hears of a header cut short by FIN only after the reset that follows it."""
    with contextlib.closing(Twins(state_dir, lazy=True)) as twins:
        stream, data = twins.open(), whole_request(twins, 4)[:16]
        twins.deliver([[Frame("stream", stream, 0, data, True)], [Frame("reset", stream, 16)]])
        settle_quickly(twins, stream)
        for server in twins.servers:
            assert server.hand.of(stream).data[4:6] == (400).to_bytes(2, "little")


def test_streams_come_back_as_they_end(state_dir: Path) -> None:
    """A connection never runs out of streams, however they ended."""
    with contextlib.closing(Twins(state_dir)) as twins:
        for case in range(700):
            stream, data = twins.open(), whole_request(twins, 4)
            assert twins.has_room(1)
            kind = case % 5
            if kind == 0:
                frames = [Frame("stream", stream, 0, data, True)]
            elif kind == 1:
                frames = [Frame("reset", stream)]
            elif kind == 2:
                frames = [Frame("stop", stream, code=1), Frame("stream", stream, 0, data, True)]
            elif kind == 3:
                frames = [Frame("stream", stream, 0, b"nonsense", True)]
            else:
                frames = [Frame("stream", stream, 0, data[:50]), Frame("reset", stream, 50)]
            twins.deliver([frames])
            twins.deliver([], puppet=take_and_answer)
            settle_quickly(twins, stream)


# ---------------------------------------------------------------- whose request it is


def keyed_request(twins: Twins, key: bytes | None, count: int = 3) -> bytes:
    number = len(twins.ids) + 1
    twins.ids.add(number)
    request = Request(count, request_id=number, api_key=key)
    return encode_request(request) + body_of(range(count), 4)


def status_of(server: Server, stream: int) -> int:
    return int.from_bytes(server.hand.of(stream).data[4:6], "little")


def ask_keyed(twins: Twins, key: bytes | None, count: int = 3) -> int:
    """Say a whole request, and let nobody take it; its stream."""
    stream, data = twins.open(), keyed_request(twins, key, count)
    frames = [
        Frame("stream", stream, at, data[at : at + 1000], at + 1000 >= len(data))
        for at in range(0, len(data), 1000)
    ]
    twins.deliver([[frame] for frame in frames])
    return stream


def statuses(twins: Twins, *streams: int) -> list[int]:
    """What both answered, each with a verdict."""
    twins.run_for(0.3)
    twins.check_answers(streams)
    one, other = ([status_of(server, stream) for stream in streams] for server in twins.servers)
    assert one == other
    return one


def test_a_full_or_lost_partition_is_nothing_to_the_other(state_dir: Path) -> None:
    with contextlib.closing(Twins(state_dir, keyed=True)) as twins:
        held = [ask_keyed(twins, b"alpha") for _ in range(4)]
        full, other = ask_keyed(twins, b"alpha"), ask_keyed(twins, b"beta")
        assert statuses(twins, full, other) == [429, 200]
        twins.deliver([], puppet=Server.take)
        writing, data = twins.open(), keyed_request(twins, b"beta")
        twins.deliver([[Frame("stream", writing, 0, data[:-4])]])

        # Alpha's runtime goes: what it was at breaks off, and beta's go on.
        for server in twins.servers:
            server.lose(0)
        assert statuses(twins, ask_keyed(twins, b"alpha")) == [503]
        assert [server.hand.of(stream).reset for server in twins.servers for stream in held] == [
            int(ResetCode.RUNTIME_LOST)
        ] * 8
        twins.deliver([[Frame("stream", writing, len(data) - 4, data[-4:], True)]])
        twins.deliver([], puppet=finish_all)
        assert statuses(twins, other, writing, ask_keyed(twins, b"beta")) == [200, 200, 200]
        assert all(server.hand.of(stream).whole for server in twins.servers
                   for stream in (other, writing))  # fmt: skip

        for server in twins.servers:
            server.regain(0)
        assert statuses(twins, ask_keyed(twins, b"alpha"), ask_keyed(twins, None)) == [200, 401]
        twins.deliver([], puppet=finish_all)
        check_who_served(twins)


def test_bounds_and_vocabulary_are_those_of_the_keys_partition(state_dir: Path) -> None:
    with contextlib.closing(Twins(state_dir, keyed=True)) as twins:
        long = [ask_keyed(twins, key, CONTEXT + 1) for key in (b"alpha", b"beta")]
        assert statuses(twins, *long) == [400, 200]
        outside = []
        for key in (b"alpha", b"beta"):
            outside.append(twins.open())
            data = keyed_request(twins, key)[:-4] + body_of([VOCAB], 4)
            twins.deliver([[Frame("stream", outside[-1], 0, data, True)]])
        assert statuses(twins, *outside) == [400, 200]
