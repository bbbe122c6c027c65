"""A listener's hold on the slots of one attachment: the verbs, and the watch over what was
published.

`SlotTable` is the interface; `HostTable` is the table whose words lie in the region, on which the
listener does the compare-and-swap itself (`dataplane.device_table` has the other one). Its methods
are one C call each, since they are on the way of every request.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from dataplane._native import ffi, lib
from dataplane.latency import Latency, Series
from dataplane.prompt1 import Request
from dataplane.region import Region

# Bound once: looking a name up in `lib` costs as much as some of these calls.
_admit, _write, _submit, _apply, _poll, _copy_output = (
    lib.dp_admit, lib.dp_write, lib.dp_submit, lib.dp_apply, lib.dp_poll, lib.dp_copy_output,
)  # fmt: skip
_serve_whole = lib.dp_serve_whole
UNREAD: Any = ffi.NULL
"""Of a request that C is to read."""
_REVOKE: int = lib.DP_REVOKE
_RELEASE: int = lib.DP_RELEASE


_unpack_served = struct.Struct("=qQqqIIIIIII").unpack_from
Served = tuple[int, int, int, int, int, int, int, int, int, int, int]
"""What became of a request (`struct dp_served`): its status, generation, ns to the claim, when it
was published (CLOCK_REALTIME ns), slot, slots left free, µs to the claim and to the publish, its
tokens, the most of its answer, and the bytes of its identifier."""


class Watched(Protocol):
    """What is watched from publish to the end of its answer."""

    slot: int
    generation: int
    watch: int


class Answer(NamedTuple):
    """What a device says to a verb that was PENDING.

    Attributes:
        ticket: Of a claim; 0: it answers a revoke or a cancel.
        status: Of a claim 0 or a negative status, of another verb what the verb answers.
        is_revoke: Whether it answers a revoke.
    """

    ticket: int
    status: int
    slot: int
    generation: int
    is_revoke: bool


class Asks(Protocol):
    """What a table answers later: its `admit`, `revoke` and `cancel` may say PENDING.

    Attributes:
        ticket: Names the last claim that is PENDING.
        pending: Whether the device owes an answer.
        dead: Whether the device was given up; no answer comes any more.
    """

    ticket: int
    pending: bool
    dead: bool

    def next_answer(self) -> Answer | None: ...
    def disown(self, ticket: int) -> None: ...
    def answer_due(self) -> float | None: ...
    def give_up(self) -> None: ...


class SlotTable(Protocol):
    """What listener, ingress and egress ask of a slot table; `HostTable` says how each is meant.

    A slot is named by its number and the generation that `admit` left in `generation`. Verbs answer
    the new state, or a negative status (`dataplane.slots`) and change nothing. One whose words lie
    in a device may answer `admit`, `revoke` and `cancel` with PENDING, and through `asks` later.
    """

    region: Region
    count: int
    generation: int
    free_left: int
    serve_whole: Callable[[int, Any, int, int, int, Any], Served] | None

    @property
    def asks(self) -> Asks | None: ...
    def count_in(self, latency: Latency, null: bool) -> None: ...
    def given_id(self, size: int) -> bytes: ...
    def admit(self, request: Request, request_id: int, max_output: int) -> int: ...
    def free(self) -> int: ...
    def begin(self, slot: int, request: Request, request_id: int, max_output: int) -> None: ...
    def write(self, slot: int, body: bytes, offset: int, length: int) -> int: ...
    def submit(self, slot: int, generation: int, body: bytes, offset: int, length: int) -> int: ...
    def written(self, slot: int) -> tuple[int, int]: ...
    def bad_token(self, slot: int) -> tuple[int, int]: ...
    def revoke(self, slot: int, generation: int) -> int: ...
    def cancel(self, slot: int, generation: int) -> int: ...
    def release(self, slot: int, generation: int) -> int: ...
    def let_go(self, slot: int, generation: int) -> int: ...
    def watch(self, watched: Watched) -> None: ...
    def unwatch(self, watched: Watched) -> None: ...
    def poll(self) -> list[Any]: ...
    def entry(self, watched: Watched) -> Any: ...
    def output(self, slot: int, start: int, stop: int) -> bytes | None: ...
    def request(self, slot: int) -> Any: ...
    def sleep(self) -> bool: ...
    def wake(self) -> None: ...
    def drain(self) -> None: ...


class HostTable:
    """The slots of one region, as listener `owner` (from 1) holds them.

    Attributes:
        generation: Of the last claim.
        free_left: Slots seen free right after it.
        serve_whole: Claims, writes and publishes a plain HTTP/3 request that came whole at a time
            (CLOCK_REALTIME ns): called with the id to give it, bytes or a buffer of C's whose
            [at, at + size) it is, and what was read of it (`struct dp_h3_plain`) or `UNREAD`. None
            where there is no such thing.
    """

    def __init__(self, region: Region, owner: int = 1) -> None:
        self.region = region
        self.owner = owner
        self.first = 0
        self.count = region.slots
        self.generation = 0
        self.free_left = 0
        self._native = region.native
        self._next_probe = 0
        self._claimed = ffi.new("struct dp_claimed *")
        self._watches = ffi.new("struct dp_watch[]", region.slots)
        self._changed = ffi.new("uint32_t[]", region.slots)
        self._ids = ffi.new("uint8_t[]", region.max_output * 4)
        self._ids_view = ffi.buffer(self._ids)
        self._watched: list[Any] = []
        self._served = ffi.new("struct dp_served *")
        self.serve_whole: Callable[[int, Any, int, int, int, Any], Served] | None = None

    @property
    def asks(self) -> Asks | None:
        """None: each verb answers at once."""
        return None

    # Claim to publish.

    def admit(self, request: Request, request_id: int, max_output: int) -> int:
        """Claim a slot and write into it what the request states: its number, or FULL.

        Affinity 0 starts anywhere; a strict one tries its own slot alone.
        """
        start, probes = self._probe(request)
        claimed = self._claimed
        status: int = _admit(
            self._native, self.owner, self.first, self.count, start, probes, request_id,
            request.n_tokens, request.width, max_output, request.temperature, request.top_p,
            request.top_k, request.seed, claimed,
        )  # fmt: skip
        if status < 0:
            return status
        self.generation = claimed.generation
        self.free_left = claimed.free_left
        return claimed.slot  # type: ignore[no-any-return]

    def _probe(self, request: Request) -> tuple[int, int]:
        """Return where in the range a request's probe starts, and how many slots it tries."""
        count = self.count
        if request.affinity:
            return request.affinity % count, 1 if request.strict else count
        start = self._next_probe
        self._next_probe = start + 1 if start + 1 < count else 0
        return start, count

    def count_in(self, latency: Latency, null: bool) -> None:
        """Provide `serve_whole`: count its times here; with `null`, revoke at publish."""
        native = self._native
        if native.geometry.table != lib.DP_TABLE_HOST:
            return
        whole = ffi.new("struct dp_whole *")
        whole.region, whole.latency = native, latency.native
        whole.owner, whole.first, whole.count = self.owner, self.first, self.count
        whole.series, whole.null = Series.QUEUE, null
        served, view = self._served, ffi.buffer(self._served)

        def serve(
            request_id: int, data: Any, at: int, size: int, complete_ns: int, plain: Any
        ) -> Served:
            now_s = latency.now_s
            _serve_whole(whole, now_s, request_id, data, at, size, plain, complete_ns, served)
            return _unpack_served(view)

        self.serve_whole = serve

    def given_id(self, size: int) -> bytes:
        """Return the client's own identifier of the last request served whole."""
        return ffi.buffer(self._served.id, size)[:]  # type: ignore[no-any-return]

    def free(self) -> int:
        """Count the slots that are FREE now."""
        return int(lib.dp_count_free(self._native, self.first, self.count))

    def begin(self, slot: int, request: Request, request_id: int, max_output: int) -> None:
        """State anew what the request of a slot in WRITING asks for, and begin its body."""
        lib.dp_describe(
            self._native, slot, request_id, request.n_tokens, max_output, request.temperature,
            request.top_p, request.top_k, request.seed,
        )  # fmt: skip
        lib.dp_write_begin(self._native, slot, request.n_tokens, request.width)

    def write(self, slot: int, body: bytes, offset: int, length: int) -> int:
        """Append `length` bytes of the body from `offset` of `body`: 0, OVERFLOW or BAD_TOKEN."""
        return _write(self._native, slot, body, offset, length)  # type: ignore[no-any-return]

    def submit(self, slot: int, generation: int, body: bytes, offset: int, length: int) -> int:
        """Append the last part and publish: when (CLOCK_REALTIME ns), or a negative status."""
        return _submit(  # type: ignore[no-any-return]
            self._native, slot, generation, body, offset, length
        )

    def written(self, slot: int) -> tuple[int, int]:
        """Return the whole ids written so far and the bytes of the next one."""
        writer = self._native.writers[slot]
        return writer.written, writer.partial_bytes

    def bad_token(self, slot: int) -> tuple[int, int]:
        """Return (index, id) of the first id outside the vocabulary, in the body or the output."""
        writer = self._native.writers[slot]
        return writer.bad_index, writer.bad_id

    # Ends.

    def revoke(self, slot: int, generation: int) -> int:
        """Take a READY slot back."""
        return _apply(self._native, slot, generation, _REVOKE)  # type: ignore[no-any-return]

    def cancel(self, slot: int, generation: int) -> int:
        """Ask the runtime to finish a RUNNING slot, and ring it."""
        return int(lib.dp_cancel(self._native, slot, generation))

    def release(self, slot: int, generation: int) -> int:
        """Free a DONE slot."""
        return _apply(self._native, slot, generation, _RELEASE)  # type: ignore[no-any-return]

    def let_go(self, slot: int, generation: int) -> int:
        """End the hold whatever the state: abort, revoke, cancel or release."""
        return int(lib.dp_let_go(self._native, slot, generation))

    # The watch over published slots.

    def watch(self, watched: Watched) -> None:
        """Follow a published slot from now on."""
        index = len(self._watched)
        entry = self._watches[index]
        entry.generation = watched.generation
        entry.slot = watched.slot
        entry.seen = entry.count = entry.paused = 0
        entry.state = lib.DP_READY
        watched.watch = index
        self._watched.append(watched)

    def unwatch(self, watched: Watched) -> None:
        """Stop following; the last entry takes the place, so the watch stays dense."""
        index, watched.watch = watched.watch, -1
        last = self._watched.pop()
        if last is not watched:
            self._watched[index] = last
            self._watches[index] = self._watches[len(self._watched)]
            last.watch = index

    def poll(self) -> list[Any]:
        """Return what is watched that has new output, an end, or a broken rule.

        Their entries are looked up with `entry` when each is dealt with: `unwatch` moves them.
        """
        count = len(self._watched)
        if not count:
            return []
        changed: int = _poll(self._native, self._watches, count, self._changed)
        if not changed:
            return []
        return [self._watched[self._changed[i]] for i in range(changed)]

    def entry(self, watched: Watched) -> Any:
        """Return the watch entry of a followed slot, refreshed by the last poll."""
        return self._watches[watched.watch]

    def output(self, slot: int, start: int, stop: int) -> bytes | None:
        """Copy output ids [start, stop) out of the slot, as they go on the wire (u32 LE).

        None when one is outside the vocabulary; `bad_token` says which.
        """
        if _copy_output(self._native, slot, start, stop, self._ids):
            return None
        return self._ids_view[: (stop - start) * 4]  # type: ignore[no-any-return]

    def request(self, slot: int) -> Any:
        """Return the slot's request record; load each field once."""
        return self._native.requests[slot]

    # Sleep and wake.

    def sleep(self) -> bool:
        """Say that this listener is about to block; False when something changed meanwhile."""
        return not lib.dp_listener_sleep(
            self._native, self.owner, self._watches, len(self._watched)
        )

    def wake(self) -> None:
        lib.dp_listener_wake(self._native, self.owner)

    def drain(self) -> None:
        """Read the eventfd that the runtime rang."""
        lib.dp_listener_drain(self._native, self.owner)
