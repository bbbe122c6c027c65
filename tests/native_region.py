"""A region with its eventfds and a slot of it in any state, as the tests of the verbs need them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from dataplane._native import ffi, lib
from dataplane.manifest import Manifest
from dataplane.region import Region, create_region

# Contract 1's states, and the events that lead to each of them from a claim.
FREE, WRITING, READY, RUNNING, CANCELLING, DONE = range(6)
EVENTS = ("CLAIM", "PUBLISH", "ABORT", "TAKE", "REVOKE", "CANCEL", "FINISH", "RELEASE")
CLAIM, PUBLISH, ABORT, TAKE, REVOKE, CANCEL, FINISH, RELEASE = range(8)
WAY_TO: dict[int, tuple[int, ...]] = {
    FREE: (ABORT,),
    WRITING: (),
    READY: (PUBLISH,),
    RUNNING: (PUBLISH, TAKE),
    CANCELLING: (PUBLISH, TAKE, CANCEL),
    DONE: (PUBLISH, TAKE, FINISH),
}


def manifest(**changes: Any) -> Manifest:
    """Return a small manifest, changed as told."""
    fields: dict[str, Any] = {
        "model": "test", "slots": 2, "context": 64, "max_output": 16, "vocab_size": 50_000,
    }  # fmt: skip
    return Manifest(**{**fields, **changes})


@contextlib.contextmanager
def open_region(listeners: int = 1, **changes: Any) -> Iterator[Region]:
    """Make a region with a doorbell and an output eventfd for each listener."""
    region = create_region(manifest(**changes), attachment=7, listeners=listeners)
    fds = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(1 + listeners)]
    region.native.doorbell, region.native.outputs[0:listeners] = fds[0], fds[1:]
    try:
        yield region
    finally:
        for fd in fds:
            os.close(fd)
        region.close_fd()


class Slot:
    """A slot that was just claimed and brought to a state, and its words."""

    def __init__(self, region: Region, state: int = WRITING, owner: int = 1) -> None:
        claimed = ffi.new("struct dp_claimed *")
        status = lib.dp_claim(region.native, owner, 0, region.slots, 0, region.slots, claimed)
        assert status == 0, "no slot is free"
        self.region = region
        self.native = region.native
        self.number: int = claimed.slot
        self.generation: int = claimed.generation
        self.free_left: int = claimed.free_left
        self.handle = (self.native, self.number, self.generation)
        lib.dp_describe(self.native, self.number, 1, 3, region.max_output, 0.5, 0.9, 40, 9)
        for event in WAY_TO[state]:
            assert lib.dp_apply(*self.handle, event) >= 0
        assert self.word[0] == state

    @property
    def word(self) -> tuple[int, int, int]:
        """The state word as (state, owner, generation)."""
        word: int = self.native.states[self.number]
        return word & 0xFF, word >> 8 & 0xFFFF, word >> 24

    @property
    def progress(self) -> tuple[int, int]:
        """The progress word as (count, generation)."""
        word: int = self.native.progress[self.number]
        return word & 0xFFFFFF, word >> 24

    @property
    def request(self) -> Any:
        return self.native.requests[self.number]

    def output(self, count: int) -> list[int]:
        return list(lib.dp_output(self.native, self.number)[0:count])


def snapshot(region: Region) -> bytes:
    """Return every byte of a region."""
    return bytes(ffi.buffer(region.native.base, region.bytes))


def rung(fd: int) -> int:
    """Return how often an eventfd was rung since the last look."""
    try:
        return os.eventfd_read(fd)
    except BlockingIOError:
        return 0


ERROR = 4  # a finish reason
ID = ffi.new("int32_t[]", [5])
VERBS: dict[str, Callable[..., int]] = {
    **{f"apply {name}": lambda *h, e=i: lib.dp_apply(*h, e) for i, name in enumerate(EVENTS) if i},
    "publish": lambda *handle: lib.dp_publish(*handle, ffi.NULL),
    "cancel": lib.dp_cancel,
    "let_go": lib.dp_let_go,
    "emit": lambda *handle: lib.dp_emit(*handle, ID, 1),
    "finish": lambda *handle: lib.dp_finish(*handle, ERROR),
    "is_cancelled": lib.dp_is_cancelled,
}


def emit(slot: Slot, ids: list[int]) -> int:
    status: int = lib.dp_emit(*slot.handle, ffi.new("int32_t[]", ids), len(ids))
    return status
