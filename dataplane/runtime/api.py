"""Attach, take, read, emit, finish: an engine's side of the slots.

Rules that hold here (contracts 1 and 2): a taken request's prompt is read where it lies; ids are
emitted in order and never beyond the request's `max_output`; the engine applies stop ids itself and
does not emit them; after `finish` the request is over and its array must not be read. Every call is
safe at any time: one on a request that ended answers that it did. The pulse that says "ready" and
"alive" is a C thread, so a busy interpreter does not miss it.
"""

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec.structs
import numpy as np
import numpy.typing as npt

from dataplane._native import ffi, lib
from dataplane.errors import AttachError, DataplaneError, DetachedError
from dataplane.manifest import Manifest
from dataplane.region import Region
from dataplane.slots import ILLEGAL, OVERFLOW, STALE, Finish

_ERROR_BYTES = 1024


class Holder(Protocol):
    """What a taken request needs of the attachment that it came through."""

    held: "dict[int, Taken]"

    @property
    def region(self) -> Region: ...


class Taken:
    """One request that this engine holds, from take to finish.

    Attributes:
        slot: Its slot, from 0.
        tokens: The prompt, int32 of shape (n_tokens,), read-only, lying in the region.
        address: Where the prompt begins in this process, for engines that take a pointer.
        max_output: At most so many ids may be emitted.
        temperature: 0 is greedy.
        top_p, top_k: 0 is off (so is a top_p of 1).
        seed: 0 asks for a random one.
    """

    __slots__ = (
        "_native", "_runtime", "address", "finished", "generation", "max_output", "request_id",
        "seed", "slot", "temperature", "tokens", "top_k", "top_p",
    )  # fmt: skip

    def __init__(self, runtime: Holder, native: Any) -> None:
        region = runtime.region
        self._runtime = runtime
        self._native = region.native
        self.slot: int = native.slot
        self.generation: int = native.generation
        self.request_id: int = native.request_id
        self.max_output: int = native.max_output
        self.temperature: float = native.temperature
        self.top_p: float = native.top_p
        self.top_k: int = native.top_k
        self.seed: int = native.seed
        self.address = region.prompt_address(self.slot)
        self.tokens: npt.NDArray[np.int32] = region.prompt(self.slot, native.n_tokens)
        self.finished = False

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for more: finish soon, with any reason."""
        return bool(lib.dp_is_cancelled(self._native, self.slot, self.generation))

    def emit(self, ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bool:
        """Append output ids.

        Returns:
            True, or False when the request is over (its slot went back without this engine).

        Raises:
            DataplaneError: More ids than the request allows; nothing was emitted.
        """
        array = np.ascontiguousarray(ids, dtype=np.int32)
        status: int = lib.dp_emit(
            self._native,
            self.slot,
            self.generation,
            ffi.from_buffer("int32_t[]", array),
            array.size,
        )
        if status == OVERFLOW:
            raise DataplaneError(
                f"slot {self.slot}: {array.size} more ids would exceed max_output {self.max_output}"
            )
        return status not in (ILLEGAL, STALE)

    def finish(self, reason: Finish) -> bool:
        """End the request and give the slot back; False when it was over already."""
        self.finished = True
        self._runtime.held.pop(self.slot, None)
        state: int = lib.dp_finish(self._native, self.slot, self.generation, int(reason))
        return state >= 0


class Detaches(ABC):
    """What is attached until the end of its block."""

    @abstractmethod
    def detach(self) -> None:
        """Leave: the daemon ends what is in flight."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()


class Runtime(Detaches):
    """An attachment, from the engine's side; a context manager that detaches.

    Attributes:
        manifest: What was agreed.
        region: The mapped region.
        held: The requests taken and not finished, by slot.
    """

    def __init__(self, native: Any, manifest: Manifest) -> None:
        self._native = native
        self.manifest = manifest
        # The mapping goes with the attachment (dp_detach), and every array keeps both alive.
        self.region = _AttachedRegion(native)
        self.held: dict[int, Taken] = {}
        self._batch = ffi.new("struct dp_taken[]", manifest.slots)

    def ready(self) -> None:
        """Say that everything is allocated and warm: the first heartbeat opens the daemon."""
        failed: int = lib.dp_ready(self._native)
        if failed:
            raise AttachError(f"the heartbeat cannot start: {os.strerror(failed)}")

    def take(self, timeout: float | None = None, spin_us: int = 0) -> list[Taken]:
        """Take every request that is ready.

        Args:
            timeout: Seconds to wait for one; None waits without end, 0 only looks.
            spin_us: Look so long without sleeping before blocking; costs a core, saves a wake-up.

        Returns:
            The requests; empty after the time-out, or when a held request was cancelled meanwhile.

        Raises:
            DetachedError: The daemon is gone, or dropped this runtime.
        """
        milliseconds = -1 if timeout is None else round(timeout * 1000)
        count: int = lib.dp_take_ready(
            self._native, self._batch, self.manifest.slots, milliseconds, spin_us
        )
        if count < 0:
            raise DetachedError("the daemon ended the attachment")
        taken = [Taken(self, self._batch[i]) for i in range(count)]
        for request in taken:
            self.held[request.slot] = request
        return taken

    def fileno(self) -> int:
        """Return the connection to the daemon: readable once that is gone; -1 after `detach`."""
        return int(lib.dp_attached_socket(self._native))

    def step(self) -> None:
        """Say that the engine made a step: a prefill chunk, a decode step, an idle pass."""
        lib.dp_step(self._native)

    def detach(self) -> None:
        """Leave: the daemon ends what is in flight. The mapping stays until the last array goes."""
        lib.dp_leave(self._native)


class _AttachedRegion(Region):
    """A region whose mapping belongs to an attachment."""

    def __init__(self, attachment: Any) -> None:
        super().__init__(lib.dp_attached_region(attachment))
        self._attachment = attachment


def attach(
    socket_path: str | os.PathLike[str],
    manifest: Manifest,
    tokenizer: str | os.PathLike[str] | None = None,
    *,
    table: str = "host",
) -> Runtime:
    """Attach to the daemon that listens on a Unix socket.

    Args:
        socket_path: The daemon's `--socket`.
        manifest: The engine's geometry and model; its tokenizer hash is filled in here.
        tokenizer: A tokenizer.json to hand over, or None.
        table: Where the caller swaps the slots' words; what the manifest must say.

    Raises:
        AttachError: The manifest asks for another table, nobody listens, the daemon refused (the
        text says why), or the region is not as agreed.
    """
    if manifest.table != table:
        raise AttachError(
            f"the manifest says table {manifest.table!r}, and these verbs are for {table!r}: for a"
            " device's slots attach with dataplane.runtime.cuda_engine, or dataplane.runtime.cuda"
        )
    fd = -1
    with contextlib.ExitStack() as stack:
        if tokenizer is not None:
            try:
                fd = stack.enter_context(Path(tokenizer).open("rb")).fileno()
                digest = sha256(Path(tokenizer).read_bytes()).hexdigest()
            except OSError as error:
                raise AttachError(f"the tokeniser cannot be read: {error}") from error
            manifest = msgspec.structs.replace(manifest, tokenizer_sha256=digest)
        line = manifest.encode()
        error_text = ffi.new("char[]", _ERROR_BYTES)
        native = lib.dp_attach(os.fsencode(socket_path), line, fd, error_text, _ERROR_BYTES)
    if native == ffi.NULL:
        raise AttachError(ffi.string(error_text).decode(errors="replace"))
    return Runtime(ffi.gc(native, lib.dp_detach), manifest)
