"""A runtime for an engine whose loop runs in Python, with its slots on a CUDA device.

The engine uses it as it uses `dataplane.runtime.Runtime`: take, read, emit, finish. Only kernels
may swap the slots' words (`dataplane.runtime.cuda`), so what the engine asks is gathered, and one
launch of a small kernel (`native/gpu/engine.cu`) carries out all of it. The rules that hold here:

- A verb takes effect at the next `take`, before that waits, or at `flush` or `detach`; those of one
  request in their order. Until then no client sees of it. An engine that computes for long between
  two takes flushes what its clients should see meanwhile. The one verb that flushes by itself is an
  `emit` for which there is no more room (`IDS_A_TURN` ids a slot between two launches).
- `take` launches only when there is a reason: verbs, a READY slot, a held request that was
  cancelled. It takes every READY slot. `cancelled` is as of the last launch.
- What a verb answers is known before the launch: only this engine can end a request, and its count
  is kept here. If the device finds a request over nevertheless, the next `emit` says so.
- The launch is on a stream of its own and is waited for: ids are numbers of the host by then, so
  there is nothing in the model's stream to wait for.
- Its memory is made before `ready` and has fixed addresses, so every launch has the same arguments.
- One thread uses a runtime and what was taken through it.
"""

import contextlib
import mmap
import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane._native import ffi, lib
from dataplane.errors import DataplaneError
from dataplane.manifest import Manifest
from dataplane.runtime import cuda
from dataplane.runtime.api import Detaches, Taken
from dataplane.runtime.cuda import CudaError, CudaRuntime, Gpu, Mode, Stream
from dataplane.slots import Finish

TURN = "dp_engine_turn"
IDS_A_TURN = 256
"""Ids that a slot can emit between two launches without one of its own."""
_MOST_THREADS = 128
_ID_BYTES = 4
# A failed admission kernel rings nobody, so an endless wait looks up now and then.
_LOOK_S = 1.0


class GatheredTaken(Taken):
    """A request that this engine holds; its verbs wait for the runtime's next launch."""

    __slots__ = ("_emitted", "_engine", "_part", "_room")

    def __init__(self, engine: "CudaEngineRuntime", native: Any, part: Any) -> None:
        super().__init__(engine, native)
        self._engine = engine
        self._part = part
        self._room = min(self.max_output, engine.region.max_output)
        self._emitted = 0

    def _is_mine(self) -> bool:
        """Whether the slot's part of the turn is still this request's."""
        part = self._part
        return not self.finished and bool(part.held) and part.generation == self.generation

    @property
    def cancelled(self) -> bool:
        """Whether nobody waited for more at the last launch: finish soon, with any reason."""
        return self._is_mine() and bool(self._part.cancelled)

    def emit(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bool:
        """Append output ids, with the next launch.

        Returns:
            True, or False when the request is over.

        Raises:
            DataplaneError: More ids than the request allows; nothing was emitted.
            CudaError: There were more than `IDS_A_TURN`, and the launch that made room failed.
        """
        array = np.ascontiguousarray(ids, dtype=np.int32)
        if not self._is_mine() or self._part.lost or self._engine.is_over:
            return False
        if array.size > self._room - self._emitted:
            raise DataplaneError(
                f"slot {self.slot}: {array.size} more ids would exceed max_output {self._room}"
            )
        self._engine.gather_ids(self.slot, array)
        self._emitted += array.size
        return True

    def finish(self, reason: Finish) -> bool:
        """End the request, with the next launch; False when it was over already."""
        mine = self._is_mine() and not self._engine.is_over
        self.finished = True
        if self._engine.held.get(self.slot) is self:
            del self._engine.held[self.slot]
        if mine:
            self._engine.gather_finish(self.slot, reason)
        return mine and not self._part.lost


class CudaEngineRuntime(Detaches):
    """`dataplane.runtime.Runtime` on the `device` table; a context manager that detaches.

    Attributes:
        cuda: The attachment and its device.
        manifest: What was agreed.
        region: The mapped region.
        held: The requests taken and not finished, by slot.
        is_over: Whether it detached; then verbs do nothing.
    """

    def __init__(self, on: CudaRuntime) -> None:
        self.cuda = on
        self.manifest: Manifest = on.runtime.manifest
        self.region = on.runtime.region
        self.held: dict[int, Taken] = {}
        self.is_over = False
        native = self.region.native
        self._room = min(IDS_A_TURN, self.region.max_output)
        size = lib.dp_turn_bytes(native, self._room)
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._memory = ffi.from_buffer(mmap.mmap(-1, size, flags))
        self._turn = ffi.cast("struct dp_turn *", self._memory)
        self._turn.room = self._room
        self._parts = [lib.dp_turn_at(self._turn, slot) for slot in range(self.region.slots)]
        self._batch = ffi.new("struct dp_taken[]", self.region.slots)
        self._threads = min(self.region.slots, _MOST_THREADS)
        self._asked = False  # verbs wait for the launch
        self._stream: Stream = on.gpu.stream()
        host = int(ffi.cast("uintptr_t", self._turn))
        self._address = on.map(host, size, "the memory of the engine's turns", self._memory)

    @property
    def mapped(self) -> int:
        """Where the device sees the region's first byte."""
        return self.cuda.mapped

    def ready(self) -> None:
        """Run the kernels once, and say that everything is allocated and warm."""
        self._launch(take=False)
        self.cuda.ready()

    def take(self, timeout: float | None = None, spin_us: int = 0) -> list[Taken]:
        """Carry out what was asked, and take every request that is ready.

        Args:
            timeout: Seconds to wait for one; None waits without end, 0 only looks.
            spin_us: Look so long without sleeping before blocking; costs a core, saves a wake-up.

        Returns:
            The requests; empty after the time-out, or when a held request is cancelled.

        Raises:
            DetachedError: The daemon is gone, or dropped this runtime.
            CudaError: The device failed.
        """
        start = time.monotonic()
        self.cuda.wait_for_news(0)
        while True:
            due = bool(lib.dp_turn_is_due(self.region.native, self._turn))
            if due or self._asked:
                taken = self._launch(take=True)
                if taken or any(request.cancelled for request in self.held.values()):
                    return taken
            passed = time.monotonic() - start
            left = _LOOK_S if timeout is None else timeout - passed
            if left <= 0:
                return []
            # Mirrors run ahead of the words by a moment: what is due comes without a ring.
            awake = due or passed * 1e6 < spin_us
            self.cuda.wait_for_news(0 if awake else min(left, _LOOK_S))

    def flush(self) -> None:
        """Carry out what was asked now; nothing is taken.

        Raises:
            CudaError: The device failed.
        """
        if self._asked and not self.is_over:
            self._launch(take=False)

    def gather_ids(self, slot: int, ids: npt.NDArray[np.int32]) -> None:
        """Write down ids of a held request that are within its room."""
        part = self._parts[slot]
        to = lib.dp_turn_ids(self.region.native, self._turn, slot)
        done = 0
        while done < ids.size:
            if part.count == self._room:
                self.flush()
            count = min(self._room - part.count, ids.size - done)
            ffi.memmove(to + part.count, ids[done : done + count], count * _ID_BYTES)
            part.count += count
            done += count
            self._asked = True

    def gather_finish(self, slot: int, reason: Finish) -> None:
        """Write down the end of a held request."""
        self._parts[slot].reason = int(Finish(reason))
        self._asked = True

    def _launch(self, take: bool) -> list[Taken]:
        """One turn; the requests that it took."""
        self._turn.take = take
        self._stream.launch(TURN, 1, self._threads, self.cuda.device, self._address)
        self.cuda.wait_for(self._stream)
        self._asked = False
        count = lib.dp_turn_end(self.region.native, self._turn, self._batch)
        self.cuda.ring()
        taken: list[Taken] = []
        for i in range(count):
            request = GatheredTaken(self, self._batch[i], self._parts[self._batch[i].slot])
            self.held[request.slot] = request
            taken.append(request)
        return taken

    def fileno(self) -> int:
        """Return the connection to the daemon: readable once that is gone; -1 after `detach`."""
        return self.cuda.runtime.fileno()

    def step(self) -> None:
        """Say that the engine made a step: a prefill chunk, a decode step, an idle pass."""
        self.cuda.step()

    def detach(self) -> None:
        """Carry out what was asked and leave: the daemon ends what is in flight then."""
        if self.is_over:
            return
        with contextlib.suppress(CudaError):
            self.flush()
        self.is_over = True
        self.cuda.detach()


def attach(
    socket_path: str | os.PathLike[str],
    manifest: Manifest,
    tokenizer: str | os.PathLike[str] | None = None,
    gpu: Gpu | None = None,
    mode: Mode = "tick",
) -> CudaEngineRuntime:
    """Attach to the daemon with the slots on a device; arguments and errors as `cuda.attach`."""
    on = cuda.attach(socket_path, manifest, tokenizer, gpu, mode)
    try:
        return CudaEngineRuntime(on)
    except BaseException:
        on.detach()
        raise
