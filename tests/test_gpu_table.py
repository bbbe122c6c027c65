"""One suite over both slot tables: what `SlotTable` promises, whoever swaps the words.

`host` does it in C in the region. `device` has the admission kernel do it, here on host threads,
and the runtime's side is the device's own (`slots_device.cuh`). `asking` is the device's table of a
listener, whose answers are waited for here. The numbers and the table are contract 1's, as
literals.
"""

import os
import select
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import gpu_programs
import native_programs
import pytest
from host_gpu import HostDevice, Library
from native_region import open_region, rung

from dataplane._native import ffi, lib
from dataplane.device_table import AskingTable, DeviceTable, table_of
from dataplane.pages import copy_words
from dataplane.prompt1 import Request
from dataplane.region import Region
from dataplane.table import Answer, HostTable

FREE, WRITING, READY, RUNNING, CANCELLING, DONE = range(6)
OK, ILLEGAL, STALE, FULL, OVERFLOW, BAD_TOKEN, SHORT, UNANSWERED = 0, -1, -2, -3, -4, -5, -6, -7
PENDING = -8
STOP, LENGTH = 1, 2
STATES = ("FREE", "WRITING", "READY", "RUNNING", "CANCELLING", "DONE")
ID_BYTES = b"\5\0\0\0"

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


class Side(Protocol):
    """The runtime's side of a slot."""

    def take(self, slot: int) -> tuple[int, int]: ...
    def emit(self, slot: int, generation: int, ids: list[int]) -> int: ...
    def is_cancelled(self, slot: int, generation: int) -> bool: ...
    def finish(self, slot: int, generation: int, reason: int) -> int: ...


class HostSide:
    """The verbs of an engine on the CPU."""

    def __init__(self, region: Region) -> None:
        self._native = region.native

    def take(self, slot: int) -> tuple[int, int]:
        generation = ffi.new("uint64_t *")
        return lib.dp_take(self._native, slot, generation), generation[0]

    def emit(self, slot: int, generation: int, ids: list[int]) -> int:
        array = ffi.new("int32_t[]", ids)
        return int(lib.dp_emit(self._native, slot, generation, array, len(ids)))

    def is_cancelled(self, slot: int, generation: int) -> bool:
        return bool(lib.dp_is_cancelled(self._native, slot, generation) == 1)

    def finish(self, slot: int, generation: int, reason: int) -> int:
        return int(lib.dp_finish(self._native, slot, generation, reason))


class Ticker:
    """Runs the admission kernel when it is asked to, as the runtime's thread does."""

    def __init__(self, device: HostDevice) -> None:
        self.device = device
        self._native = device.region.native
        self._bell = ffi.gc(lib.dp_bell_new(self._native), lib.dp_bell_free)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            if lib.dp_device_wait(self._native, -1, 10, 0) > 0:
                self.device.tick()
            self.ring()

    def ring(self) -> None:
        lib.dp_bell_ring(self._bell, -1)

    def end(self) -> None:
        self._ending.set()
        self._thread.join()


class WaitingTable(AskingTable):
    """An asking table whose caller has nothing else to do until the device answers."""

    def _wait(self) -> Answer:
        until = time.monotonic() + 5
        while (answer := self.next_answer()) is None:
            assert time.monotonic() < until
            time.sleep(0.0005)
        assert self.next_answer() is None
        assert not self.pending
        return answer

    def admit(self, request: Request, request_id: int, max_output: int) -> int:
        assert super().admit(request, request_id, max_output) == PENDING
        assert self.pending
        answer = self._wait()
        assert answer.ticket == self.ticket
        if answer.status < 0:
            return answer.status
        self.begin(answer.slot, request, request_id, max_output)
        return answer.slot

    def revoke(self, slot: int, generation: int) -> int:
        return self._result(super().revoke(slot, generation), True)

    def cancel(self, slot: int, generation: int) -> int:
        return self._result(super().cancel(slot, generation), False)

    def _result(self, status: int, is_revoke: bool) -> int:
        if status != PENDING:
            return status
        answer = self._wait()
        assert (answer.ticket, answer.is_revoke) == (0, is_revoke)
        return answer.status


class Rig:
    """A table over a region of a few slots, and the runtime's side of it."""

    def __init__(self, region: Region, side: Side, ticker: Ticker | None, table: HostTable) -> None:
        self.region = region
        self.table = table
        self.side = side
        self.ticker = ticker

    def settle(self) -> None:
        """Wait until what was told to a device has happened."""
        until = time.monotonic() + 5
        while self.ticker and lib.dp_device_pending(self.region.native):
            assert time.monotonic() < until
            time.sleep(0.0005)

    def words(self) -> list[tuple[int, int, int]]:
        """Return every slot's word as (state, owner, generation), alike wherever it is kept."""
        self.settle()
        words = [(w & 0xFF, w >> 8 & 0xFFFF, w >> 24) for w in map(int, copy_words(self.region))]
        if self.ticker:
            device = self.ticker.device
            assert words == [device.word(slot) for slot in range(self.region.slots)]
        return words

    def state(self, slot: int) -> int:
        return self.words()[slot][0]

    def claim(self, n_tokens: int = 1, max_output: int = 8, **fields: Any) -> "Slot":
        number = self.table.admit(Request(n_tokens, **fields), 77, max_output)
        assert number >= 0, number
        return Slot(self, number, self.table.generation)

    def slot_in(self, state: int) -> "Slot":
        """Claim a slot and lead it to a state."""
        slot = self.claim()
        for step in _WAYS[state]:
            assert slot.do(step) >= 0, step
            self.settle()
        assert self.state(slot.number) == state
        return slot


_WAYS: dict[int, tuple[str, ...]] = {
    FREE: ("let_go",),
    WRITING: (),
    READY: ("submit",),
    RUNNING: ("submit", "take"),
    CANCELLING: ("submit", "take", "cancel"),
    DONE: ("submit", "take", "finish"),
}


class Slot:
    """A claimed slot; also what a table watches."""

    def __init__(self, rig: Rig, number: int, generation: int) -> None:
        self.rig = rig
        self.slot = self.number = number
        self.generation = generation
        self.watch = -1

    def do(self, verb: str, away: int = 0) -> int:
        """Apply a verb, under a generation that is `away` from its own."""
        generation = (self.generation + away) % (1 << 40)
        table, side = self.rig.table, self.rig.side
        if verb == "submit":
            return table.submit(self.number, generation, ID_BYTES, 0, 4)
        if verb == "take":
            self.rig.settle()
            return side.take(self.number)[0]
        if verb == "finish":
            return side.finish(self.number, generation, STOP)
        verb_of_table = getattr(table, verb)
        return int(verb_of_table(self.number, generation))


@pytest.fixture(params=["host", "device", "asking"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def open_rig(kind: str, library: Library, region: Region) -> Rig:
    if kind == "host":
        return Rig(region, HostSide(region), None, HostTable(region))
    device = HostDevice(library, region)
    table = WaitingTable(region) if kind == "asking" else DeviceTable(region)
    return Rig(region, device, Ticker(device), table)


def table_named(kind: str) -> str:
    """What a manifest calls it."""
    return "host" if kind == "host" else "device"


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


# The device alone.


@pytest.fixture
def silent(library: Library) -> Iterator[tuple[DeviceTable, HostDevice, list[str]]]:
    """A device table whose device answers only when the test has it tick."""
    with open_region(slots=2, table="device") as region:
        table, said = DeviceTable(region, answer_ms=100), list[str]()
        table.on_dead = said.append
        yield table, HostDevice(library, region), said


Silent = tuple[DeviceTable, HostDevice, list[str]]


def test_a_device_that_does_not_answer_is_given_up(silent: Silent) -> None:
    table, device, said = silent
    start = time.monotonic()
    assert table.admit(Request(1), 1, 8) == UNANSWERED
    assert time.monotonic() - start < 1
    start = time.monotonic()
    assert [table.admit(Request(1), 1, 8) for _ in range(100)] == [UNANSWERED] * 100
    assert time.monotonic() - start < 0.1
    assert len(said) == 1
    assert "100 ms" in said[0]
    # It wakes up: the claim is granted and taken back, and stays refused.
    device.tick()
    assert [device.word(slot)[0] for slot in range(2)] == [FREE, FREE]
    assert device.word(0)[1] == 1
    assert table.admit(Request(1), 1, 8) == UNANSWERED


def test_by_default_a_claim_waits_less_than_a_second(library: Library) -> None:
    with open_region(slots=1, table="device") as region:
        table = DeviceTable(region)
        start = time.monotonic()
        assert table.admit(Request(1), 1, 8) == UNANSWERED
        assert 0.8 < time.monotonic() - start < 1.0


def test_what_is_not_waited_for_does_not_block(silent: Silent) -> None:
    table, device, _ = silent
    threading.Timer(0.02, device.tick).start()
    slot = table.admit(Request(1), 1, 8)
    assert slot == 0
    start = time.monotonic()
    assert table.submit(slot, table.generation, ID_BYTES, 0, 4) > 0
    assert table.let_go(slot, table.generation) == FREE
    assert time.monotonic() - start < 0.05
    assert device.word(0)[0] == WRITING
    device.tick()
    assert device.word(0)[0] == FREE


def test_letting_go_goes_on_when_the_device_was_given_up(silent: Silent) -> None:
    table, device, _ = silent
    threading.Timer(0.02, device.tick).start()
    slot = table.admit(Request(1), 1, 8)
    generation = table.generation
    assert table.submit(slot, generation, ID_BYTES, 0, 4) > 0
    assert table.cancel(slot, generation) == UNANSWERED
    assert table.revoke(slot, generation) == UNANSWERED
    assert table.let_go(slot, generation) == FREE
    device.tick()
    assert device.word(0)[0] == FREE


@pytest.mark.parametrize("held", [FREE, WRITING, READY, RUNNING, DONE])
def test_another_process_lets_go_for_a_listener_that_died(silent: Silent, held: int) -> None:
    dead, device, _ = silent
    threading.Timer(0.02, device.tick).start()
    slot = dead.admit(Request(1), 1, 8)
    generation = dead.generation
    if held >= READY:
        dead.submit(slot, generation, ID_BYTES, 0, 4)
        device.tick()
    if held >= RUNNING:
        assert device.take(slot)[0] == RUNNING
    if held == DONE:
        assert device.finish(slot, generation, STOP) == DONE
    if held == FREE:
        dead.let_go(slot, generation)
    del dead
    DeviceTable(device.region).let_go_all()
    device.tick()
    assert device.word(slot)[0] == (CANCELLING if held == RUNNING else FREE)
    if held == RUNNING:
        assert device.is_cancelled(slot, generation)
        assert device.finish(slot, generation, STOP) == FREE


def test_a_listener_cannot_touch_anothers_slot(library: Library) -> None:
    with open_region(listeners=2, slots=2, table="device") as region:
        device = HostDevice(library, region)
        mine, other = DeviceTable(region, 1), DeviceTable(region, 2)
        threading.Timer(0.02, device.tick).start()
        assert mine.admit(Request(1), 1, 8) == 0
        other.let_go_all()
        device.tick()
        assert device.word(0)[:2] == (WRITING, 1)


def test_rubbish_in_a_ring_changes_nothing(silent: Silent) -> None:
    _, device, _ = silent
    native = device.region.native
    before = [device.word(slot) for slot in range(2)]
    address = int(ffi.cast("uintptr_t", native.base)) + native.layout.rings
    entries = ffi.cast("struct dp_command *", address + ffi.sizeof("struct dp_ring"))
    count = lib.dp_ring_entries(2)
    seed = 1
    for i in range(count):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        kind = seed >> 60  # a claim of slots that there are would be none
        kind = 10 if kind == lib.DP_COMMAND_CLAIM else kind
        entries[i].command = (seed & (2**54 - 1)) & ~0xF | kind | 1 << 54
    device.tick()
    assert [device.word(slot) for slot in range(2)] == before
    assert [entries[i].verdict >> 54 for i in range(count)] == [1] * count


def test_the_ring_keeps_room(silent: Silent) -> None:
    for slots, entries in ((1, 16), (2, 32), (8, 64), (1024, 8192)):
        assert lib.dp_ring_entries(slots) == entries
        assert entries >= 6 * slots + 2


def test_an_echo_job_has_the_size_that_python_allocates(library: Library) -> None:
    from dataplane.runtime.cuda_echo import JOB_BYTES

    assert library.native.host_echo_job_bytes() == JOB_BYTES


def test_a_device_region_says_so_and_a_host_region_has_no_rings() -> None:
    with open_region(table="host") as host, open_region(table="device") as device:
        assert host.native.mirrors == ffi.NULL
        assert host.native.layout.ring_bytes == 0
        assert device.native.layout.ring_bytes > 0
        assert device.bytes > host.bytes


def test_the_program_of_threads_sees_only_what_is_allowed(tmp_path: Path) -> None:
    if shutil.which(gpu_programs.cxx()) is None:
        pytest.skip("no C++ compiler here")
    binary = gpu_programs.build_traffic(native_programs.PLAIN, tmp_path)
    done = native_programs.run(binary, native_programs.Run(gpu_programs.TRAFFIC, 300), seed=11)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "taken back" in done.stdout


def test_every_mutant_of_the_kernels_is_hunted() -> None:
    source = (native_programs.PROGRAMS / "gpu_mutants.h").read_text(encoding="utf-8")
    sown = [word.removeprefix("MUTANT_") for word in source.split() if word.startswith("MUTANT_")]
    assert sorted(sown) == sorted(mutant.name for mutant in gpu_programs.MUTANTS)
    assert os.path.exists(gpu_programs.GPU / "admission.cu")
