"""What the runtime appends is sent once and in order, however the answers beside it end."""

import random
from typing import Any

import pytest

from dataplane._native import ffi, lib
from dataplane.egress import Egress
from dataplane.errors import ResetCode
from dataplane.exchange import Exchange
from dataplane.manifest import Manifest
from dataplane.prompt1 import Request
from dataplane.region import create_region
from dataplane.slots import Finish
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
        return False

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

    def finish(self, exchange: Exchange) -> None:
        native = self.table.region.native
        reason = int(Finish.STOP)
        assert lib.dp_finish(native, exchange.slot, exchange.generation, reason) >= 0


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
