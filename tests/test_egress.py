"""What the runtime appends is sent once and in order, however the answers beside it end."""

import random
from typing import Any

import pytest

from dataplane._native import ffi, lib
from dataplane.egress import HOLD_S, Egress
from dataplane.errors import Refusal, ResetCode
from dataplane.exchange import Asked, Exchange
from dataplane.latency import Series
from dataplane.manifest import Manifest
from dataplane.prompt1 import Request
from dataplane.region import create_region
from dataplane.slots import STALE, Finish, State
from dataplane.stats import Stats
from dataplane.table import HostTable

SLOTS = 8
MAX_OUTPUT = 16


class Reader:
    """Front and connection in one: keeps what each request was sent."""

    def __init__(self) -> None:
        self.ids: dict[int, bytes] = {}
        self.ends: dict[int, int] = {}
        self.failed: list[Exception] = []
        self.raising = -1
        self.full = False

    def decided(self, asked: Asked, outcome: Exchange | Refusal) -> None:
        raise AssertionError("nothing is asked here")

    def answer(self, exchange: Exchange, ids: bytes, finish: int) -> None:
        exchange.answered = True
        if exchange.request_id == self.raising:
            raise ValueError("a front that fails")
        self.ids[exchange.request_id] = self.ids.get(exchange.request_id, b"") + ids
        if finish:
            self.ends[exchange.request_id] = finish

    def refuse(self, exchange: Exchange, refusal: Any) -> None:
        raise AssertionError("nothing is refused here")

    def fail(self, exchange: Exchange, code: ResetCode) -> None:
        self.ends[exchange.request_id] = -code

    def overfull(self) -> bool:
        return self.full

    def broken(self, error: Exception) -> None:
        self.failed.append(error)


class Bench:
    """A slot table, the egress over it, and a runtime that is played by hand."""

    def __init__(self) -> None:
        manifest = Manifest(
            model="t", slots=SLOTS, context=4, max_output=MAX_OUTPUT, vocab_size=1000
        )
        self.table = HostTable(create_region(manifest, 1, 1))
        self.egress = Egress(Stats())
        self.egress.table = self.table
        self.reader = Reader()
        self.broken: list[str] = []
        self.egress.on_broken = self.broken.append
        self.exchanges = [Exchange(slot) for slot in range(SLOTS)]

    def request(self, request_id: int) -> Exchange:
        """Publish a request and have the runtime take it."""
        slot = self.table.admit(Request(1), request_id, MAX_OUTPUT)
        exchange = self.exchanges[slot]
        exchange.generation = self.table.generation
        exchange.front = exchange.connection = self.reader
        exchange.request_id = request_id
        exchange.max_output = MAX_OUTPUT
        exchange.live, exchange.answered, exchange.sent = True, False, 0
        exchange.started = 0.0
        exchange.pickup_us = exchange.first_us = -1
        exchange.complete_ns = exchange.published_ns = self.table.submit(
            slot, exchange.generation, b"\1\0\0\0", 0, 4
        )
        self.table.watch(exchange)
        self.egress.unanswered.append(exchange)
        taken = ffi.new("uint64_t *")
        assert lib.dp_take(self.table.region.native, slot, taken) >= 0
        return exchange

    def emit(self, exchange: Exchange, *ids: int) -> None:
        array = ffi.new("int32_t[]", ids)
        native = self.table.region.native
        assert lib.dp_emit(native, exchange.slot, exchange.generation, array, len(ids)) == 0

    def finish(self, exchange: Exchange, reason: int = int(Finish.STOP)) -> None:
        native = self.table.region.native
        assert lib.dp_finish(native, exchange.slot, exchange.generation, reason) >= 0

    def state(self, exchange: Exchange) -> State:
        return State(self.table.region.native.states[exchange.slot] & 0xFF)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def words(*ids: int) -> bytes:
    return b"".join(i.to_bytes(4, "little") for i in ids)


def test_an_answer_that_ends_does_not_repeat_the_ids_of_another(bench: Bench) -> None:
    """The watch is kept dense: the last entry moves into the place of one that ended."""
    first, second, third = (bench.request(number) for number in (1, 2, 3))
    for exchange in (first, second, third):
        bench.emit(exchange, exchange.request_id * 10)
    bench.finish(first)
    bench.egress.flush()
    bench.egress.flush()
    bench.emit(third, 31)
    bench.egress.flush()
    assert bench.reader.ids == {1: words(10), 2: words(20), 3: words(30, 31)}


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_output_and_ends_gives_each_its_ids_once(bench: Bench, seed: int) -> None:
    dice = random.Random(seed)
    running: list[tuple[Exchange, list[int]]] = []
    expected: dict[int, list[int]] = {}
    number = 0
    for _ in range(300):
        if len(running) < SLOTS and dice.random() < 0.4:
            number += 1
            running.append((bench.request(number), expected.setdefault(number, [])))
        for exchange, out in running:
            if len(out) < MAX_OUTPUT and dice.random() < 0.5:
                out.append(dice.randrange(1000))
                bench.emit(exchange, out[-1])
        ending = [pair for pair in running if dice.random() < 0.2]
        for pair in ending:
            bench.finish(pair[0])
            running.remove(pair)
        bench.egress.flush()
    assert not bench.broken
    assert number > 30
    live = {exchange.request_id for exchange, _ in running}
    assert set(bench.reader.ends) == set(expected) - live
    assert bench.reader.ids == {name: words(*out) for name, out in expected.items()}


def test_a_front_that_raises_breaks_its_own_connection_only(bench: Bench) -> None:
    exchanges = [bench.request(number) for number in range(3)]
    bench.reader.raising = 1
    for exchange in exchanges:
        bench.emit(exchange, 7)
    bench.egress.flush()
    assert len(bench.reader.failed) == 1
    assert bench.reader.ids == {0: words(7), 2: words(7)}


# ---------------------------------------------------------------- output ids


@pytest.mark.parametrize("bad", [-1, 1000, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("done", [False, True])
def test_an_output_id_outside_the_vocabulary_is_not_sent(
    bench: Bench, bad: int, done: bool
) -> None:
    """-1 is the end mark of the wire."""
    exchange = bench.request(1)
    bench.emit(exchange, 1, 999, bad, 2)
    if done:
        bench.finish(exchange)
    bench.egress.flush()
    slot, shown = exchange.slot, bad % 2**32
    assert bench.broken == [f"slot {slot}: output id {shown} is outside the vocabulary"]
    assert bench.reader.ids.get(1, b"") == b""


def test_of_a_broken_runtime_nothing_more_is_sent_or_said(bench: Bench) -> None:
    bad, good, late = (bench.request(number) for number in (1, 2, 3))
    bench.egress.unanswered.remove(late)
    bench.egress.flush()
    assert bench.reader.ids == {1: b"", 2: b""}
    bench.emit(bad, -1)
    bench.egress.flush()
    bench.egress.unanswered.append(late)
    for exchange in (bad, good):
        bench.emit(exchange, 5)
        bench.egress.flush()
    assert len(bench.broken) == 1
    assert bench.reader.ids == {1: b"", 2: b""}


def test_an_expiring_answer_with_a_bad_id_is_a_broken_rule(bench: Bench) -> None:
    exchange = bench.request(1)
    bench.emit(exchange, -1)
    bench.egress.expire(exchange)
    assert len(bench.broken) == 1
    assert bench.reader.ids == {}


def test_a_release_that_fails_is_a_broken_rule(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = bench.request(1)
    bench.finish(exchange)
    monkeypatch.setattr(bench.table, "release", lambda *handle: STALE)
    bench.egress.flush()
    assert len(bench.broken) == 1
    assert bench.reader.ends == {}


# ---------------------------------------------------------------- a reader that is behind


def test_output_for_a_full_connection_waits_in_its_slot(bench: Bench) -> None:
    first, second = bench.request(1), bench.request(2)
    bench.egress.flush()
    bench.reader.full = True
    for exchange in (first, second):
        bench.emit(exchange, exchange.request_id)
    bench.finish(second)
    bench.egress.flush()
    bench.emit(first, 5)
    bench.egress.flush()
    assert bench.reader.ids == {1: b"", 2: b""}
    assert [bench.state(exchange) for exchange in (first, second)] == [State.RUNNING, State.DONE]
    assert bench.table.sleep(), "what waits for a reader keeps the loop busy"
    bench.table.wake()
    bench.reader.full = False
    bench.egress.flush()
    assert bench.reader.ids == {1: words(1, 5), 2: words(2)}
    assert bench.reader.ends == {2: int(Finish.STOP)}
    assert bench.state(second) == State.FREE
    assert bench.egress.next_due() is None


def test_a_finished_answer_waits_only_so_long(bench: Bench) -> None:
    exchange = bench.request(1)
    bench.egress.flush()
    bench.reader.full = True
    bench.emit(exchange, 1)
    bench.egress.flush()
    bench.egress.stats.now += 10 * HOLD_S
    bench.egress.flush()
    assert bench.reader.ends == {}, "the runtime is not done with it"
    bench.finish(exchange)
    bench.egress.flush()
    assert bench.egress.next_due() == bench.egress.stats.now + HOLD_S
    bench.egress.stats.now += HOLD_S / 2
    bench.egress.flush()
    assert bench.reader.ends == {}
    bench.egress.stats.now += HOLD_S / 2
    bench.egress.flush()
    assert bench.reader.ends == {1: -ResetCode.SLOW_READER}
    assert bench.state(exchange) == State.FREE
    assert bench.egress.next_due() is None


def test_a_broken_rule_is_found_while_the_reader_is_behind(bench: Bench) -> None:
    exchange = bench.request(1)
    bench.egress.flush()
    bench.reader.full = True
    bench.emit(exchange, 1)
    bench.egress.flush()
    bench.table.region.native.states[exchange.slot] = 0
    assert not bench.table.sleep()
    bench.table.wake()
    bench.egress.flush()
    assert len(bench.broken) == 1


def test_a_held_answer_that_ends_is_forgotten(bench: Bench) -> None:
    exchange = bench.request(1)
    bench.egress.flush()
    bench.reader.full = True
    bench.emit(exchange, 1)
    bench.finish(exchange)
    bench.egress.flush()
    bench.table.let_go(exchange.slot, exchange.generation)
    bench.table.unwatch(exchange)
    bench.egress.ended(exchange)
    assert bench.egress.next_due() is None
    bench.reader.full = False
    bench.egress.flush()
    assert bench.reader.ids == {1: b""}


# ---------------------------------------------------------------- times and errors


def counted(bench: Bench, series: Series) -> int:
    return bench.egress.stats.latency.total(series).within[-1]


def test_an_answer_without_a_token_has_no_first_token(bench: Bench) -> None:
    exchange = bench.request(1)
    bench.finish(exchange)
    bench.egress.flush()
    assert exchange.pickup_us >= 0
    assert exchange.first_us < 0
    assert (counted(bench, Series.PICKUP), counted(bench, Series.FIRST_TOKEN)) == (1, 0)


def test_a_clock_that_went_back_is_counted_once_and_told_to_nobody(bench: Bench) -> None:
    exchange = bench.request(1)
    exchange.published_ns = exchange.complete_ns = 2**62
    bench.emit(exchange, 1)
    bench.egress.flush()
    bench.emit(exchange, 2)
    bench.finish(exchange)
    bench.egress.flush()
    assert max(exchange.pickup_us, exchange.first_us, exchange.total_us) < 0
    assert bench.egress.stats.latency.negative == 3
    assert counted(bench, Series.PICKUP) == counted(bench, Series.TOTAL) == 0


def test_a_deadline_that_finds_the_first_output_knows_its_times(bench: Bench) -> None:
    exchange = bench.request(1)
    bench.emit(exchange, 1)
    bench.egress.expire(exchange)
    assert bench.reader.ids == {1: words(1)}
    assert min(exchange.pickup_us, exchange.first_us) >= 0
    assert counted(bench, Series.FIRST_TOKEN) == 1


def test_a_runtime_error_is_a_reset_after_the_200_of_an_earlier_pass(bench: Bench) -> None:
    exchange = bench.request(1)
    bench.finish(exchange, int(Finish.ERROR))
    bench.egress.flush()
    assert exchange.answered
    assert bench.reader.ends == {}
    assert not bench.table.sleep(), "nobody would make the next pass"
    bench.table.wake()
    bench.egress.flush()
    assert bench.reader.ends == {1: -ResetCode.RUNTIME_ERROR}
    assert bench.state(exchange) == State.FREE
    assert counted(bench, Series.PICKUP) == 1
