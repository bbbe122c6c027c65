"""The compiled slot machine against contract 1, whose numbers and table stand here as literals."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from native_region import (
    CANCELLING,
    CLAIM,
    DONE,
    EVENTS,
    FREE,
    ID,
    READY,
    RUNNING,
    VERBS,
    WRITING,
    Slot,
    emit,
    open_region,
    snapshot,
)

from dataplane import slots
from dataplane._native import ffi, lib
from dataplane.region import Region

OK, ILLEGAL, STALE, FULL, OVERFLOW, BAD_TOKEN, SHORT = 0, -1, -2, -3, -4, -5, -6
LOST = 6  # a watch whose word is another holder's
STOP, LENGTH, DEADLINE, ERROR = 1, 2, 3, 4

STATES = {"FREE": 0, "WRITING": 1, "READY": 2, "RUNNING": 3, "CANCELLING": 4, "DONE": 5}
TABLE = {
    ("CLAIM", "FREE"): "WRITING",
    ("PUBLISH", "WRITING"): "READY",
    ("ABORT", "WRITING"): "FREE",
    ("TAKE", "READY"): "RUNNING",
    ("REVOKE", "READY"): "FREE",
    ("CANCEL", "RUNNING"): "CANCELLING",
    ("FINISH", "RUNNING"): "DONE",
    ("FINISH", "CANCELLING"): "FREE",
    ("RELEASE", "DONE"): "FREE",
}


@pytest.fixture
def region() -> Iterator[Region]:
    with open_region(listeners=2) as region:
        yield region


# Numbers and table.


def test_numbers_are_the_contracts() -> None:
    assert {state.name: int(state) for state in slots.State} == STATES
    assert {event.name: int(event) for event in slots.Event} == dict(
        zip(EVENTS, range(8), strict=True)
    )
    assert (lib.DP_STATES, lib.DP_EVENTS) == (6, 8)
    assert (lib.DP_STATE_MASK, lib.DP_OWNER_MASK) == (0xFF, 0xFFFF)
    assert (lib.DP_OWNER_SHIFT, lib.DP_GENERATION_SHIFT) == (8, 24)
    assert lib.DP_COUNT_MASK == 0xFFFFFF
    assert {reason.name: int(reason) for reason in slots.Finish} == {
        "STOP": STOP, "LENGTH": LENGTH, "DEADLINE": DEADLINE, "ERROR": ERROR,
    }  # fmt: skip
    assert lib.DP_OK == OK
    assert (slots.ILLEGAL, slots.STALE, slots.FULL) == (ILLEGAL, STALE, FULL)
    assert (slots.OVERFLOW, slots.BAD_TOKEN, slots.SHORT) == (OVERFLOW, BAD_TOKEN, SHORT)


def test_word_is_laid_out_as_the_contract_says() -> None:
    assert slots.unpack_word(0x123456789A_BCDE_05) == (5, 0xBCDE, 0x123456789A)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
def test_every_pair_of_the_table(region: Region, event: str, state: str) -> None:
    expected = TABLE.get((event, state))
    compiled = slots.next_state(slots.Event[event], slots.State[state])
    assert (compiled.name if compiled is not None else None) == expected
    if event == "CLAIM":
        return  # no handle claims: see below
    slot = Slot(region, STATES[state], owner=2)
    before = snapshot(region)
    result = lib.dp_apply(*slot.handle, EVENTS.index(event))
    if expected is None:
        assert result == ILLEGAL
        assert snapshot(region) == before
    else:
        assert result == STATES[expected]
        assert slot.word == (STATES[expected], 2, slot.generation)


@pytest.mark.parametrize(("event", "state"), [(-1, 0), (8, 0), (0, -1), (0, 6), (99, 99)])
def test_a_pair_outside_the_table_is_illegal(event: int, state: int) -> None:
    assert slots.next_state(event, state) is None


def test_no_handle_claims_again(region: Region) -> None:
    slot = Slot(region, FREE)
    before = snapshot(region)
    assert lib.dp_apply(*slot.handle, CLAIM) == ILLEGAL
    assert snapshot(region) == before


# Verbs that must not act.

LEGAL_IN = {
    "publish": {WRITING},
    "cancel": {RUNNING},
    "let_go": {WRITING, READY, RUNNING, DONE},
    "emit": {RUNNING, CANCELLING},
    "finish": {RUNNING, CANCELLING},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("away", [-1, 1, 1 << 39])
def test_a_stale_handle_changes_nothing(region: Region, verb: str, state: int, away: int) -> None:
    slot = Slot(region, state)
    before = snapshot(region)
    stale = (slot.generation + away) % (1 << 40)
    assert VERBS[verb](slot.native, slot.number, stale) == STALE
    assert snapshot(region) == before


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
@pytest.mark.parametrize("verb", LEGAL_IN)
def test_an_illegal_verb_changes_nothing(region: Region, verb: str, state: int) -> None:
    slot = Slot(region, state)
    before = snapshot(region)
    if state in LEGAL_IN[verb]:
        assert VERBS[verb](*slot.handle) >= 0
        assert snapshot(region) != before
    else:
        assert VERBS[verb](*slot.handle) == ILLEGAL
        assert snapshot(region) == before


@pytest.mark.parametrize("state", [s for s in STATES.values() if s != READY])
def test_take_takes_nothing_but_ready(region: Region, state: int) -> None:
    slot = Slot(region, state)
    before = snapshot(region)
    assert lib.dp_take(region.native, slot.number, ffi.new("uint64_t *")) == ILLEGAL
    assert snapshot(region) == before


def test_a_word_that_no_state_has_is_left_alone(region: Region) -> None:
    slot = Slot(region, RUNNING)
    slot.native.states[slot.number] |= 0xC8
    before = snapshot(region)
    for verb in VERBS.values():
        assert verb(*slot.handle) in (ILLEGAL, 0)
    assert snapshot(region) == before
    assert poll(region, slot)[0][0].state == LOST


# Claim.


def claim(
    region: Region, first: int, count: int, start: int, probes: int, owner: int = 1
) -> tuple[int, int]:
    """Claim: (slot, free left), or (status, -1)."""
    claimed = ffi.new("struct dp_claimed *")
    status = lib.dp_claim(region.native, owner, first, count, start, probes, claimed)
    return (claimed.slot, claimed.free_left) if status == OK else (status, -1)


def test_claim_probes_from_its_start_and_wraps() -> None:
    with open_region(slots=4) as region:
        assert [claim(region, 0, 4, 2, 4) for _ in range(5)] == [
            (2, 3), (3, 2), (0, 1), (1, 0), (FULL, -1),
        ]  # fmt: skip


def test_claim_stays_in_its_range() -> None:
    with open_region(slots=6) as region:
        assert [claim(region, 2, 3, 1, 3) for _ in range(4)] == [
            (3, 2), (4, 1), (2, 0), (FULL, -1),
        ]  # fmt: skip
        assert [region.native.states[i] & 0xFF for i in range(6)] == [0, 0, 1, 1, 1, 0]


def test_strict_claim_tries_one_slot() -> None:
    with open_region(slots=3) as region:
        assert claim(region, 0, 3, 1, 1) == (1, 2)
        before = snapshot(region)
        assert claim(region, 0, 3, 1, 1) == (FULL, -1)
        assert snapshot(region) == before


def test_claim_adds_one_to_the_generation_and_writes_the_owner(region: Region) -> None:
    before = region.native.states[0] >> 24
    slot = Slot(region, owner=0xBEEF)
    assert slot.word == (WRITING, 0xBEEF, (before + 1) % (1 << 40))
    assert slot.generation == (before + 1) % (1 << 40)
    assert slot.free_left == 1


def test_the_first_generation_differs_between_regions() -> None:
    seen = set()
    for _ in range(4):
        with open_region() as region:
            seen.add(region.native.states[0] >> 24)
            assert region.native.states[0] & 0xFFFFFF == 0
            assert region.native.states[0] == region.native.states[1]
    assert len(seen) > 1


def test_generations_wrap_after_40_bits(region: Region) -> None:
    for i in range(region.slots):
        region.native.states[i] = ((1 << 40) - 1) << 24
    slot = Slot(region, RUNNING)
    assert slot.word == (RUNNING, 1, 0)
    assert lib.dp_emit(*slot.handle, ID, 1) == OK
    assert slot.progress == (1, 0)
    assert lib.dp_finish(*slot.handle, STOP) == DONE


# What a request carries.


def test_publish_and_take_stamp_the_time(region: Region) -> None:
    slot = Slot(region)
    at_ns, generation = ffi.new("int64_t *"), ffi.new("uint64_t *")
    start = time.time_ns()
    assert lib.dp_publish(*slot.handle, at_ns) == READY
    published = time.time_ns()
    assert start <= at_ns[0] <= published
    assert slot.request.published_ns == at_ns[0]
    assert lib.dp_take(region.native, slot.number, generation) == RUNNING
    assert generation[0] == slot.generation
    assert published <= slot.request.taken_ns <= time.time_ns()


def test_describe_fills_the_listeners_line(region: Region) -> None:
    request = Slot(region).request
    assert (request.request_id, request.n_tokens, request.max_output) == (1, 3, 16)
    assert (request.temperature, request.top_p) == (0.5, pytest.approx(0.9))
    assert (request.top_k, request.seed) == (40, 9)


def test_finish_states_its_reason(region: Region) -> None:
    slot = Slot(region, RUNNING)
    assert lib.dp_finish(*slot.handle, LENGTH) == DONE
    assert slot.request.finish_reason == LENGTH


# Output.


def test_emit_appends_and_counts(region: Region) -> None:
    slot = Slot(region, RUNNING)
    assert emit(slot, [1, 2]) == emit(slot, []) == emit(slot, [3]) == OK
    assert slot.progress == (3, slot.generation)
    assert slot.output(3) == [1, 2, 3]


def test_emit_never_goes_beyond_what_was_asked_for(region: Region) -> None:
    slot = Slot(region, RUNNING)
    slot.request.max_output = 5
    assert emit(slot, [1, 2, 3, 4]) == OK
    before = snapshot(region)
    assert emit(slot, [5, 6]) == OVERFLOW
    assert snapshot(region) == before
    assert emit(slot, [5]) == OK
    assert emit(slot, [6]) == OVERFLOW
    assert slot.progress[0] == 5


@pytest.mark.parametrize(("most", "out"), [(0xFFFFFFFF, 16), (3, 4), (0, 1), (16, 0xFFFFFF)])
def test_emit_stays_in_the_slot_whatever_the_region_says(
    region: Region, most: int, out: int
) -> None:
    slot = Slot(region, RUNNING)
    slot.request.max_output = most
    slot.native.progress[slot.number] = slot.generation << 24 | out
    before = snapshot(region)
    assert emit(slot, [1]) == OVERFLOW
    assert snapshot(region) == before


def test_a_new_holder_starts_from_no_output(region: Region) -> None:
    slot = Slot(region, RUNNING)
    assert emit(slot, [1, 2]) == OK
    assert lib.dp_finish(*slot.handle, STOP) == DONE
    assert lib.dp_let_go(*slot.handle) == FREE
    again = Slot(region, RUNNING)
    assert again.number == slot.number
    watches, changed = poll(region, again)
    assert (watches[0].count, changed) == (0, [])
    assert emit(again, [9]) == OK
    assert again.progress == (1, again.generation)


def test_cancelled_only_while_cancelling(region: Region) -> None:
    slot = Slot(region, RUNNING)
    assert lib.dp_is_cancelled(*slot.handle) == 0
    assert lib.dp_cancel(*slot.handle) == CANCELLING
    assert lib.dp_is_cancelled(*slot.handle) == 1
    assert emit(slot, [1]) == OK  # nobody reads it; the engine need not know yet
    assert lib.dp_finish(*slot.handle, STOP) == FREE
    assert lib.dp_is_cancelled(*slot.handle) == 0


# Poll.


def poll(region: Region, *held: Slot, seen: int = 0) -> tuple[Any, list[int]]:
    """Poll fresh watches over the slots: the watches, and which of them changed."""
    watches = ffi.new("struct dp_watch[]", len(held))
    for watch, slot in zip(watches, held, strict=True):
        watch.slot, watch.generation, watch.seen = slot.number, slot.generation, seen
    changed = ffi.new("uint32_t[]", len(held))
    n = lib.dp_poll(region.native, watches, len(held), changed)
    return watches, list(changed[0:n])


@pytest.mark.parametrize(
    ("state", "reported"),
    [(FREE, True), (READY, False), (RUNNING, False), (CANCELLING, True), (DONE, True)],
)
def test_poll_reports_ends_and_not_waits(region: Region, state: int, reported: bool) -> None:
    slot = Slot(region, state)
    watches, changed = poll(region, slot)
    assert (watches[0].state, changed) == (state, [0] if reported else [])


def test_poll_names_those_with_new_output(region: Region) -> None:
    quiet, busy = Slot(region, RUNNING), Slot(region, RUNNING)
    assert emit(busy, [4, 5]) == OK
    assert poll(region, quiet, busy)[1] == [1]
    assert poll(region, busy)[0][0].count == 2
    assert poll(region, busy, seen=2)[1] == []


def test_poll_reports_a_slot_that_was_lost(region: Region) -> None:
    slot = Slot(region, RUNNING)
    slot.generation -= 1
    watches, changed = poll(region, slot)
    assert (watches[0].state, changed) == (LOST, [0])


# Letting go.


@pytest.mark.parametrize(
    ("state", "to"),
    [(WRITING, FREE), (READY, FREE), (RUNNING, CANCELLING), (DONE, FREE)],
)
def test_let_go_does_what_the_state_asks_for(region: Region, state: int, to: int) -> None:
    slot = Slot(region, state)
    assert lib.dp_let_go(*slot.handle) == to
    assert slot.word == (to, 1, slot.generation)


def test_a_dead_listeners_slots_are_let_go_and_no_others() -> None:
    with open_region(listeners=2, slots=12) as region:
        dead = [Slot(region, state, owner=1) for state in STATES.values() if state != FREE]
        alive = [Slot(region, state, owner=2) for state in STATES.values() if state != FREE]
        assert lib.dp_let_go_all(region.native, 1) == 4  # all but the CANCELLING one
        assert [slot.word[0] for slot in dead] == [FREE, FREE, CANCELLING, CANCELLING, FREE]
        assert [slot.word[0] for slot in alive] == [WRITING, READY, RUNNING, CANCELLING, DONE]
        assert lib.dp_let_go_all(region.native, 1) == 0
