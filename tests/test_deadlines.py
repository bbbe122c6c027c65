"""Deadlines: counted from arrival, and kept no longer than their request needs them."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pair import Pair, echo, request_bytes

StartPair = Callable[..., Pair]
DEADLINE = 3
MONTH_MS = 30 * 24 * 3600 * 1000


@pytest.fixture
def pair(tmp_path: Path) -> StartPair:
    def start(**options: Any) -> Pair:
        made = Pair(tmp_path, **options)
        made.connect()
        return made

    return start


def test_a_deadline_counts_from_the_arrival_of_the_header(pair: StartPair) -> None:
    """The datagram lay in the socket for 0.4 s of its 0.5."""
    one = pair()
    one.received_ns = lambda: time.time_ns() - 400_000_000
    stream = one.ask([1, 2, 3], deadline_ms=500)
    one.deliver()
    due = one.ingress.next_deadline()
    assert due is not None
    assert 0.0 < due - one.now < 0.15
    assert one.answer(stream).trailer == (DEADLINE, 3, 0)


def test_a_header_from_the_future_has_its_whole_deadline(pair: StartPair) -> None:
    one = pair()
    one.received_ns = lambda: time.time_ns() + 10_000_000_000
    one.ask([1, 2, 3], deadline_ms=500)
    one.deliver()
    assert one.ingress.next_deadline() == pytest.approx(one.now + 0.5, abs=0.05)


def test_deadlines_of_ended_requests_are_not_kept(pair: StartPair) -> None:
    """Each had two entries in a queue for a month: after its header, and after its body."""
    one = pair(slots=2)
    one.engine = echo(one)
    body = request_bytes([1, 2, 3], deadline_ms=MONTH_MS)
    for _ in range(20):
        stream = one.open(body[:-1], False)
        one.deliver()
        one.client.send_stream_data(stream, body[-1:], True)
        assert one.answer(stream).ids == [1, 2, 3]
    wakes = 0
    while (due := one.ingress.next_deadline()) is not None:
        one.ingress.on_deadline(due)
        wakes += due > one.now + MONTH_MS / 2000
    assert wakes <= 1


def test_each_of_many_deadlines_is_met(pair: StartPair) -> None:
    """Also those that are set before one that is due earlier."""
    one = pair(slots=4)
    streams = {one.ask([1], deadline_ms=ms): ms for ms in (900, 300, 600)}
    began = one.now
    for stream, ms in sorted(streams.items(), key=lambda item: item[1]):
        assert one.answer(stream).trailer == (DEADLINE, 1, 0)
        assert one.now - began == pytest.approx(ms / 1000, abs=0.1)
    one.check_at_rest()


def test_a_front_that_raises_in_a_time_out_costs_its_connection_only(pair: StartPair) -> None:
    one = pair()

    def raising(*arguments: Any) -> None:
        raise ValueError("a front that fails")

    one.open(request_bytes([1], declared=9, deadline_ms=100), False)
    one.deliver()
    (held,) = [exchange for exchange in one.ingress._exchanges if exchange.live]
    held.front.refuse = raising  # type: ignore[assignment, method-assign]
    one.ingress.on_deadline(one.now + 1.0)
    assert one.server.gone
    assert one.held() == []
    assert one.ingress.next_deadline() is None
    assert one.stats.in_flight == 0


def test_a_front_that_raises_does_not_keep_the_others_from_ending(pair: StartPair) -> None:
    one = pair()

    def raising(*arguments: Any) -> None:
        raise ValueError("a front that fails")

    for _ in range(3):
        one.ask([1])
    one.deliver()
    held = [exchange for exchange in one.ingress._exchanges if exchange.live]
    held[0].front.fail = raising  # type: ignore[assignment, method-assign]
    one.ingress.detach("the runtime is gone")
    assert one.ingress.table is None
    assert one.held() == []
    assert one.stats.in_flight == 0
