"""Sleep and wake: who rings whom and when, and when the runtime's wait ends (contract 1)."""

import os
import select
import threading
import time
from collections.abc import Iterator

import pytest
from native_region import (
    CANCELLING,
    DONE,
    READY,
    RUNNING,
    VERBS,
    WRITING,
    Slot,
    emit,
    open_region,
    rung,
)

from dataplane._native import ffi, lib
from dataplane.region import Region

OK, STOP = 0, 1


@pytest.fixture
def region() -> Iterator[Region]:
    with open_region(listeners=2) as region:
        yield region


def rings(region: Region) -> tuple[int, ...]:
    """How often (the doorbell, the output of listener 1, of listener 2) were rung since."""
    native = region.native
    return tuple(rung(fd) for fd in (native.doorbell, native.outputs[0], native.outputs[1]))


@pytest.mark.parametrize(
    ("verb", "state", "expected"),
    [
        ("publish", WRITING, (1, 0, 0)),
        ("cancel", RUNNING, (1, 0, 0)),
        ("let_go", RUNNING, (1, 0, 0)),
        ("let_go", WRITING, (0, 0, 0)),
        ("let_go", READY, (0, 0, 0)),
        ("let_go", DONE, (0, 0, 0)),
        ("emit", RUNNING, (0, 0, 1)),
        ("finish", RUNNING, (0, 0, 1)),
        ("finish", CANCELLING, (0, 0, 0)),
        ("publish", DONE, (0, 0, 0)),
        ("finish", DONE, (0, 0, 0)),
        ("emit", READY, (0, 0, 0)),
    ],
)
def test_a_verb_rings_those_who_sleep_and_must_know(
    region: Region, verb: str, state: int, expected: tuple[int, ...]
) -> None:
    header = region.native.header
    awake, asleep = Slot(region, state, owner=2), Slot(region, state, owner=2)
    assert rings(region) == (0, 0, 0)
    VERBS[verb](*awake.handle)
    assert rings(region) == (0, 0, 0)
    header.runtime_sleeping.value = 1
    for owner in (1, 2):
        header.listener_sleeping[owner - 1].value = 1
    VERBS[verb](*asleep.handle)
    assert rings(region) == expected


@pytest.mark.parametrize("owner", [0, 3, 17, 0xFFFF])
def test_an_owner_that_is_no_listener_is_not_rung(region: Region, owner: int) -> None:
    slot = Slot(region, RUNNING)
    state, _, generation = slot.word
    slot.native.states[slot.number] = generation << 24 | owner << 8 | state
    for i in range(2, 16):
        slot.native.outputs[i] = slot.native.doorbell  # so that a ring would be heard
    for flag in slot.native.header.listener_sleeping:
        flag.value = 1
    assert emit(slot, [1]) == OK
    assert lib.dp_finish(*slot.handle, STOP) == DONE
    assert rings(region) == (0, 0, 0)


def test_a_listener_does_not_sleep_over_a_change(region: Region) -> None:
    slot = Slot(region, RUNNING, owner=2)
    watch = ffi.new("struct dp_watch[1]")
    watch[0].slot, watch[0].generation = slot.number, slot.generation
    assert lib.dp_listener_sleep(region.native, 2, watch, 1) == 0
    assert region.native.header.listener_sleeping[1].value == 1
    assert emit(slot, [1]) == OK
    assert select.select([region.native.outputs[1]], [], [], 0)[0]
    lib.dp_listener_wake(region.native, 2)
    lib.dp_listener_drain(region.native, 2)
    assert region.native.header.listener_sleeping[1].value == 0
    assert rings(region) == (0, 0, 0)
    assert lib.dp_listener_sleep(region.native, 2, watch, 1) == 1


@pytest.mark.parametrize("state", [READY, CANCELLING])
def test_the_runtime_does_not_wait_for_what_is_there(region: Region, state: int) -> None:
    Slot(region, state)
    start = time.monotonic()
    assert lib.dp_runtime_wait(region.native, -1, 20_000, 0) == 1
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("spin_us", [0, 100])
def test_the_runtimes_wait_ends_in_time(region: Region, spin_us: int) -> None:
    for state in (WRITING, RUNNING):
        Slot(region, state)
    start = time.monotonic()
    assert lib.dp_runtime_wait(region.native, -1, 20, spin_us) == 0
    assert 0.019 <= time.monotonic() - start < 5
    assert region.native.header.runtime_sleeping.value == 0


def test_the_runtime_is_told_that_the_daemon_is_gone(region: Region) -> None:
    reader, writer = os.pipe()
    try:
        assert lib.dp_runtime_wait(region.native, reader, 0, 0) == 0
        os.close(writer)
        assert lib.dp_runtime_wait(region.native, reader, 20_000, 0) == -1
    finally:
        os.close(reader)


@pytest.mark.parametrize("spin_us", [0, 1_000_000])
def test_the_runtime_is_rung_awake(region: Region, spin_us: int) -> None:
    slot = Slot(region)
    got: list[int] = []
    native = region.native
    waiting = threading.Thread(
        target=lambda: got.append(lib.dp_runtime_wait(native, -1, 30_000, spin_us))
    )
    waiting.start()
    deadline = time.monotonic() + 10
    while not (spin_us or native.header.runtime_sleeping.value) and time.monotonic() < deadline:
        os.sched_yield()
    assert lib.dp_publish(*slot.handle, ffi.NULL) == READY
    waiting.join(20)
    assert got == [1]
    assert rings(region) == (0, 0, 0)
