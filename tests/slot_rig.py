"""A slot table over a region of a few slots, and the runtime's side of it, for several test files.

`host` does it in C in the region. `device` has the admission kernel do it, here on host threads,
and the runtime's side is the device's own (`slots_device.cuh`). `asking` is the device's table of a
listener, whose answers are waited for here. The numbers are contract 1's, as literals.
"""

import threading
import time
from typing import Any, Protocol

from host_gpu import HostDevice, Library

from dataplane._native import ffi, lib
from dataplane.device_table import AskingTable, DeviceTable
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


def open_rig(kind: str, library: Library, region: Region) -> Rig:
    if kind == "host":
        return Rig(region, HostSide(region), None, HostTable(region))
    device = HostDevice(library, region)
    table = WaitingTable(region) if kind == "asking" else DeviceTable(region)
    return Rig(region, device, Ticker(device), table)


def table_named(kind: str) -> str:
    """What a manifest calls it."""
    return "host" if kind == "host" else "device"
