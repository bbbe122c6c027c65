"""Asking a device without waiting (`native/gpu/commands.h`), against the admission kernel as it is.

`tests/native/raw_device.c` has the raw front ask a stand-in; here it is shown that the kernel
answers what that one does.
"""

import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import gpu_programs
import pytest
from host_gpu import HostDevice, Library
from native_region import open_region

from dataplane._native import ffi, lib

FREE, WRITING, READY, RUNNING, CANCELLING = range(5)
OK, ILLEGAL, STALE, FULL, OVERFLOW, UNANSWERED, PENDING = 0, -1, -2, -3, -4, -7, -8
CLAIM, REVOKE, CANCEL = 1, 4, 5
NEVER = 2**63 - 1
SLOTS, ENTRIES = 2, 32
ID_BYTES = b"\5\0\0\0"

pytestmark = pytest.mark.skipif(
    shutil.which(gpu_programs.cxx()) is None, reason="no C++ compiler here"
)


class Answer(NamedTuple):
    asker: int
    kind: int
    status: int
    slot: int
    generation: int


class Asking:
    """A listener that asks, and a device that answers when the test has it `tick`."""

    def __init__(self, region: Any, device: HostDevice) -> None:
        self.native = ffi.gc(lib.dp_commands_new(region.native, 2, 0, 0), lib.dp_commands_free)
        self.region = region
        self.device = device
        self.tick = device.tick

    def claim(self, asker: int, now: int = 0) -> int:
        return int(
            lib.dp_commands_ask_claim(
                self.native, 0, SLOTS, 0, SLOTS, ffi.cast("void *", asker), now
            )
        )

    def ask(self, kind: int, answer: Answer) -> int:
        return int(lib.dp_commands_ask(self.native, kind, answer.slot, answer.generation, 0))

    def answers(self) -> list[Answer]:
        """Take all that are there."""
        found, out = [], ffi.new("struct dp_answer *")
        while lib.dp_commands_answer(self.native, out):
            asker = int(ffi.cast("uintptr_t", out.asker))
            found.append(Answer(asker, out.kind, out.status, out.slot, out.generation))
        return found

    def held(self, asker: int = 1) -> Answer:
        """A slot in WRITING."""
        assert self.claim(asker) >= 0
        self.tick()
        (answer,) = self.answers()
        assert answer.status == OK
        lib.dp_write_begin(self.region.native, answer.slot, 1, 4)
        return answer

    def published(self) -> Answer:
        answer = self.held()
        at_ns = lib.dp_commands_submit(self.native, answer.slot, answer.generation, ID_BYTES, 0, 4)
        assert at_ns > 0
        return answer

    def states(self) -> list[int]:
        """The states of the device's own words."""
        return [self.device.word(slot)[0] for slot in range(SLOTS)]


@pytest.fixture
def asking(library: Library) -> Iterator[Asking]:
    with open_region(listeners=2, slots=SLOTS, table="device") as region:
        yield Asking(region, HostDevice(library, region))


def test_claims_are_answered_in_their_order(asking: Asking) -> None:
    assert [asking.claim(asker) for asker in (11, 12, 13)] == [0, 1, 2]
    assert not lib.dp_commands_is_answered(asking.native)
    assert asking.answers() == []
    asking.tick()
    assert lib.dp_commands_is_answered(asking.native)
    found = asking.answers()
    assert [(one.asker, one.kind, one.status) for one in found] == [
        (11, CLAIM, OK), (12, CLAIM, OK), (13, CLAIM, FULL),
    ]  # fmt: skip
    assert [one.slot for one in found[:2]] == [0, 1]
    assert [asking.device.word(one.slot) for one in found[:2]] == [
        (WRITING, 2, one.generation) for one in found[:2]
    ]
    assert not lib.dp_commands_is_answered(asking.native)


def test_what_is_granted_to_nobody_goes_back(asking: Asking) -> None:
    places = [asking.claim(asker) for asker in (1, 2, 3)]
    lib.dp_commands_disown(asking.native, places[0])
    lib.dp_commands_disown(asking.native, places[2])
    asking.tick()
    assert [(one.asker, one.slot) for one in asking.answers()] == [(2, 1)]
    asking.tick()
    assert asking.states() == [FREE, WRITING]


def test_a_slot_that_was_not_taken_is_revoked(asking: Asking) -> None:
    held = asking.published()
    assert asking.ask(REVOKE, held) == PENDING
    asking.tick()
    assert asking.answers() == [held._replace(asker=0, kind=REVOKE, status=FREE)]
    assert asking.states() == [FREE, FREE]
    assert asking.ask(REVOKE, held) == ILLEGAL  # known without asking


def test_a_slot_that_was_taken_is_cancelled(asking: Asking) -> None:
    held = asking.published()
    asking.tick()
    assert asking.device.take(held.slot)[0] == RUNNING
    assert asking.ask(REVOKE, held) == PENDING
    asking.tick()
    assert [one.status for one in asking.answers()] == [ILLEGAL]
    assert asking.ask(CANCEL, held) == PENDING
    asking.tick()
    assert [one.status for one in asking.answers()] == [CANCELLING]
    assert asking.states()[held.slot] == CANCELLING


def test_a_generation_that_is_over_is_not_asked_for(asking: Asking) -> None:
    held = asking.published()
    assert asking.ask(REVOKE, held._replace(generation=held.generation - 1)) == STALE
    assert asking.ask(REVOKE, held._replace(slot=SLOTS)) == ILLEGAL


def test_answers_wait_however_long_the_ring_went_on(asking: Asking) -> None:
    """No answer that was not taken is written over: there is no room before that."""
    asked = 0
    while (place := asking.claim(asked + 1)) >= 0:
        assert place == asked
        asked += 1
        asking.tick()
    assert place == OVERFLOW
    # Three commands for each slot fit behind them.
    assert asked == ENTRIES - 3 * SLOTS
    found = asking.answers()
    assert [one.asker for one in found] == list(range(1, asked + 1))
    assert [one.status for one in found] == [OK] * SLOTS + [FULL] * (asked - SLOTS)
    assert asking.claim(99) == asked


def test_the_ring_goes_round(asking: Asking) -> None:
    for turn in range(40 * ENTRIES):
        held = asking.published()
        assert lib.dp_commands_let_go(asking.native, held.slot, held.generation) == FREE
        if turn % 7 == 0:
            lib.dp_commands_disown(asking.native, asking.claim(1))
    asking.tick()
    assert asking.answers() == []
    asking.tick()
    assert asking.states() == [FREE, FREE]
    assert not lib.dp_commands_dead(asking.native)


def test_the_longest_waiting_is_known(asking: Asking) -> None:
    assert lib.dp_commands_asked_at(asking.native) == NEVER
    asking.claim(1, now=5)
    asking.claim(2, now=9)
    assert lib.dp_commands_asked_at(asking.native) == 5
    asking.tick()
    assert lib.dp_commands_answer(asking.native, ffi.new("struct dp_answer *"))
    assert lib.dp_commands_asked_at(asking.native) == 9
    asking.answers()
    assert lib.dp_commands_asked_at(asking.native) == NEVER


def test_a_device_that_was_given_up_is_not_asked(asking: Asking) -> None:
    held = asking.published()
    lib.dp_commands_give_up(asking.native)
    assert lib.dp_commands_dead(asking.native)
    assert asking.claim(1) == UNANSWERED
    assert asking.ask(REVOKE, held) == UNANSWERED
    # What is held can be let go of all the same.
    assert lib.dp_commands_let_go(asking.native, held.slot, held.generation) == FREE
    asking.tick()
    assert asking.states() == [FREE, FREE]


def test_letting_go_of_all_takes_back_what_is_on_the_way(asking: Asking) -> None:
    asking.published()
    asking.claim(1)
    assert lib.dp_commands_let_go_all(asking.native) == OK
    asking.tick()
    assert asking.states() == [FREE, FREE]
