"""One suite over both slot tables: what `SlotTable` promises, whoever swaps the words.

The table of states is contract 1's, as literals.
"""

import select
import time
from collections.abc import Iterator

import pytest
from host_gpu import Library
from native_region import open_region, rung
from slot_rig import (
    BAD_TOKEN,
    CANCELLING,
    DONE,
    FREE,
    FULL,
    ILLEGAL,
    LENGTH,
    OK,
    OVERFLOW,
    READY,
    RUNNING,
    SHORT,
    STALE,
    STATES,
    STOP,
    WRITING,
    HostSide,
    Rig,
    open_rig,
    table_named,
)

from dataplane.device_table import AskingTable, table_of
from dataplane.prompt1 import Request
from dataplane.table import HostTable

LEGAL = {
    ("submit", WRITING): READY,
    ("revoke", READY): FREE,
    ("cancel", RUNNING): CANCELLING,
    ("release", DONE): FREE,
    ("let_go", WRITING): FREE,
    ("let_go", READY): FREE,
    ("let_go", RUNNING): CANCELLING,
    ("let_go", DONE): FREE,
    ("take", READY): RUNNING,
    ("finish", RUNNING): DONE,
    ("finish", CANCELLING): FREE,
}
LISTENER_VERBS = ("submit", "revoke", "cancel", "release", "let_go")
RUNTIME_VERBS = ("take", "finish")


@pytest.fixture(params=["host", "device", "asking"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def rig(kind: str, library: Library) -> Iterator[Rig]:
    with open_region(slots=4, table=table_named(kind)) as region:
        rig = open_rig(kind, library, region)
        try:
            yield rig
        finally:
            if rig.ticker:
                rig.ticker.end()


@pytest.mark.parametrize(("name", "table"), [("host", HostTable), ("device", AskingTable)])
def test_the_region_says_which_table_it_is(name: str, table: type[HostTable]) -> None:
    with open_region(table=name) as region:
        assert type(table_of(region)) is table


# Claim.


def test_claims_go_round_and_then_all_is_taken(rig: Rig) -> None:
    slots = [rig.claim() for _ in range(4)]
    assert [slot.number for slot in slots] == [0, 1, 2, 3]
    assert rig.table.admit(Request(1), 1, 8) == FULL
    assert rig.table.free() == 0
    assert slots[2].do("let_go") == FREE
    rig.settle()
    assert rig.claim().number == 2


def test_a_claim_says_how_many_are_left(rig: Rig) -> None:
    left = []
    for _ in range(4):
        rig.claim()
        left.append(rig.table.free_left)
    assert left == [3, 2, 1, 0]


def test_affinity_starts_there_and_a_strict_one_stays(rig: Rig) -> None:
    assert rig.claim(affinity=6).number == 2
    assert rig.claim(affinity=6).number == 3
    assert rig.claim(affinity=6).number == 0
    assert rig.table.admit(Request(1, affinity=6, strict=True), 1, 8) == FULL
    assert rig.claim(affinity=1, strict=True).number == 1


def test_a_claim_adds_one_to_the_generation(rig: Rig) -> None:
    before = rig.words()[0]
    slot = rig.claim()
    assert slot.generation == (before[2] + 1) % (1 << 40)
    assert rig.words()[0] == (WRITING, 1, slot.generation)


def test_generations_wrap(kind: str, library: Library) -> None:
    with open_region(slots=1, table=table_named(kind)) as region:
        last = ((1 << 40) - 1) << 24
        region.native.states[0] = last
        if kind != "host":
            region.native.mirrors[0] = last
        rig = open_rig(kind, library, region)
        try:
            slot = rig.slot_in(DONE)
            assert slot.generation == 0
            rig.table.watch(slot)
            assert rig.table.poll() == [slot]
            assert rig.words() == [(DONE, 1, 0)]
            assert slot.do("release") == FREE
            assert rig.words() == [(FREE, 1, 0)]
        finally:
            if rig.ticker:
                rig.ticker.end()


# Verbs and states.


@pytest.mark.parametrize("state", range(6), ids=STATES)
@pytest.mark.parametrize("verb", LISTENER_VERBS + RUNTIME_VERBS)
def test_every_verb_in_every_state(rig: Rig, verb: str, state: int) -> None:
    slot = rig.slot_in(state)
    before = rig.words()
    status = slot.do(verb)
    to = LEGAL.get((verb, state))
    if to is None:
        assert status == ILLEGAL
        assert rig.words() == before
        return
    assert status == to or (verb == "submit" and status > 0)
    assert rig.words()[slot.number] == (to, 1, slot.generation)
    assert rig.words()[1:] == before[1:]


@pytest.mark.parametrize("away", [-1, 1, 1 << 39])
@pytest.mark.parametrize("verb", [*LISTENER_VERBS, "finish"])
def test_a_stale_handle_changes_nothing(rig: Rig, verb: str, away: int) -> None:
    for state in range(6):
        slot = rig.slot_in(state)
        before = rig.words()
        assert slot.do(verb, away) == STALE
        assert rig.words() == before
        if state:
            slot.do("let_go")
        if rig.state(slot.number) == CANCELLING:
            assert slot.do("finish") == FREE


def test_a_slot_serves_one_after_the_other(rig: Rig) -> None:
    for _ in range(30):
        slot = rig.slot_in(DONE)
        assert slot.do("release") == FREE
    assert [word[0] for word in rig.words()] == [FREE] * 4


# The body.


def test_a_prompt_arrives_where_the_runtime_reads_it(rig: Rig) -> None:
    slot = rig.claim(3, max_output=5, temperature=0.5, top_k=7, seed=9)
    body = b"".join(i.to_bytes(4, "little") for i in (40_000, 2, 3))
    assert rig.table.write(slot.number, body, 0, 5) == OK
    start = time.time_ns()
    published = rig.table.submit(slot.number, slot.generation, body, 5, 7)
    assert start <= published <= time.time_ns()
    rig.settle()
    assert rig.side.take(slot.number) == (RUNNING, slot.generation)
    assert rig.region.prompt(slot.number, 3).tolist() == [40_000, 2, 3]
    request = rig.table.request(slot.number)
    assert (request.request_id, request.n_tokens, request.max_output) == (77, 3, 5)
    assert (request.temperature, request.top_k, request.seed) == (0.5, 7, 9)
    assert request.published_ns == published
    assert abs(request.taken_ns - (time.time_ns() if isinstance(rig.side, HostSide) else 0)) < (
        10**9 if isinstance(rig.side, HostSide) else 2**63
    )


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"\1\0\0\0", SHORT), (b"\1\0\0\0\2\0\0\0\3", OVERFLOW), (b"\1\0\0\0\xff\xff\0\0", BAD_TOKEN)],
)
def test_a_bad_body_is_told_and_the_slot_stays(rig: Rig, body: bytes, status: int) -> None:
    slot = rig.claim(2)
    assert rig.table.submit(slot.number, slot.generation, body, 0, len(body)) == status
    assert rig.state(slot.number) == WRITING
    assert slot.do("let_go") == FREE
    assert rig.state(slot.number) == FREE


# Output.


def test_output_is_polled_and_copied(rig: Rig) -> None:
    slot = rig.slot_in(RUNNING)
    table = rig.table
    table.watch(slot)
    assert table.poll() == []
    assert rig.side.emit(slot.number, slot.generation, [7, 8]) == OK
    assert table.poll() == [slot]
    entry = table.entry(slot)
    assert (entry.state, entry.count) == (RUNNING, 2)
    assert table.output(slot.number, 0, 2) == b"\7\0\0\0\x08\0\0\0"
    entry.seen = 2
    assert table.poll() == []
    assert rig.side.finish(slot.number, slot.generation, LENGTH) == DONE
    assert table.poll() == [slot]
    assert table.entry(slot).state == DONE
    assert table.request(slot.number).finish_reason == LENGTH
    assert table.release(slot.number, slot.generation) == FREE


def test_what_was_just_published_is_watched_as_ready(rig: Rig) -> None:
    slot = rig.claim()
    assert slot.do("submit") > 0
    rig.table.watch(slot)
    assert rig.table.poll() == []
    assert rig.table.entry(slot).state == READY


def test_emit_stays_within_what_was_asked_for(rig: Rig) -> None:
    slot = rig.claim(max_output=3)
    assert slot.do("submit") > 0
    assert slot.do("take") == RUNNING
    assert rig.side.emit(slot.number, slot.generation, [1, 2]) == OK
    assert rig.side.emit(slot.number, slot.generation, [3, 4]) == OVERFLOW
    assert rig.side.emit(slot.number, slot.generation, [3]) == OK
    assert rig.side.emit(slot.number, slot.generation, [4]) == OVERFLOW
    assert rig.side.emit(slot.number, slot.generation + 1, [4]) == STALE
    assert rig.side.finish(slot.number, slot.generation, LENGTH) == DONE
    assert rig.side.emit(slot.number, slot.generation, [4]) == ILLEGAL


def test_the_runtime_sees_a_cancellation(rig: Rig) -> None:
    slot = rig.slot_in(RUNNING)
    assert not rig.side.is_cancelled(slot.number, slot.generation)
    assert slot.do("cancel") == CANCELLING
    assert rig.side.is_cancelled(slot.number, slot.generation)
    assert rig.side.emit(slot.number, slot.generation, [1]) == OK
    assert rig.side.finish(slot.number, slot.generation, STOP) == FREE
    assert rig.state(slot.number) == FREE


def test_a_new_holder_starts_from_no_output(rig: Rig) -> None:
    slot = rig.slot_in(RUNNING)
    assert rig.side.emit(slot.number, slot.generation, [1, 2]) == OK
    assert rig.side.finish(slot.number, slot.generation, STOP) == DONE
    assert slot.do("release") == FREE
    rig.settle()
    again = rig.claim(affinity=4, strict=True)
    assert again.number == slot.number
    assert again.do("submit") > 0
    assert again.do("take") == RUNNING
    rig.table.watch(again)
    assert rig.table.poll() == []
    assert rig.table.entry(again).count == 0


# Sleep and wake.


def test_a_sleeping_listener_is_rung_for_output(rig: Rig) -> None:
    slot = rig.slot_in(RUNNING)
    rig.table.watch(slot)
    output = rig.region.native.outputs[0]
    rung(output)
    assert rig.table.sleep()
    rig.side.emit(slot.number, slot.generation, [1])
    assert select.select([output], [], [], 2)[0], "nobody rang"
    rig.table.wake()
    rig.table.drain()
    assert rung(output) == 0
    assert not rig.table.sleep()  # there is output already
    rig.table.wake()


def test_a_sleeping_runtime_is_rung_for_a_prompt(rig: Rig) -> None:
    slot = rig.claim()
    if rig.ticker:
        rig.settle()
        rig.ticker.end()
    header, doorbell = rig.region.native.header, rig.region.native.doorbell
    rung(doorbell)
    header.runtime_sleeping.value = 1
    assert slot.do("submit") > 0
    assert rung(doorbell) == 1
    header.runtime_sleeping.value = 0
