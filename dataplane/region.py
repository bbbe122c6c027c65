"""A mapped region, and how long it lives.

A region is unmapped only when no handle or view of it is left and no C call is inside it (contract
1). Python's reference
counts do that: the mapping belongs to one `Region`, every array made from it keeps that `Region`
alive, and so does every call, through its own `self`. `Region` never unmaps on request; it is
dropped.
"""

import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane._native import ffi, lib
from dataplane.errors import AttachError
from dataplane.manifest import Manifest

GENERATION_BITS = 64 - lib.DP_GENERATION_SHIFT


class _View:
    """Memory of a region, as NumPy wants it described; an array keeps it, and it the region."""

    def __init__(
        self, region: "Region", address: int, count: int, kind: str, readonly: bool
    ) -> None:
        self.region = region
        self.__array_interface__ = {
            "data": (address, readonly),
            "shape": (count,),
            "typestr": kind,
            "version": 3,
        }


class Region:
    """One mapping of a region's memfd in this process.

    Attributes:
        native: The C handle (`struct dp_region *`).
        fd: The memfd, on the daemon's side while it still has to be passed; else -1.
    """

    def __init__(self, native: Any, fd: int = -1) -> None:
        self.native = native
        self.fd = fd
        self.slots: int = native.geometry.slots
        self.context: int = native.geometry.context
        self.max_output: int = native.geometry.max_output
        self.vocab_size: int = native.geometry.vocab_size
        self.bytes: int = native.layout.bytes
        self.attachment: int = native.attachment

    def close_fd(self) -> None:
        """Close the memfd; the mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close_fd()

    def prompt(self, slot: int, count: int) -> npt.NDArray[np.int32]:
        """Return the first `count` ids of a slot's prompt: int32, read-only, no copy."""
        if not (0 <= slot < self.slots and 0 <= count <= self.context):
            raise IndexError(f"no {count} prompt ids in slot {slot}")
        return np.asarray(_View(self, self.prompt_address(slot), count, "<i4", True))

    def prompt_address(self, slot: int) -> int:
        """Return where a slot's prompt begins in this process."""
        return int(ffi.cast("uintptr_t", lib.dp_prompt(self.native, slot)))


def create_region(manifest: Manifest, attachment: int, listeners: int) -> Region:
    """Make and map the memfd that a manifest asks for; daemon's side.

    Raises:
        AttachError: There is not enough memory, or the system allows no such file.
    """
    size = region_bytes(manifest)
    free = available_memory()
    if free is not None and size > free:
        raise AttachError(
            f"the region takes {size >> 20} MiB and {free >> 20} MiB of memory are free: "
            "ask for fewer slots or a smaller context"
        )
    fd = ffi.new("int *")
    generation = secrets.randbits(GENERATION_BITS)
    native = lib.dp_region_create(manifest.geometry(listeners), attachment, generation, fd)
    if native == ffi.NULL:
        reason = os.strerror(ffi.errno)
        raise AttachError(f"a region of {size >> 20} MiB cannot be made: {reason}")
    return Region(ffi.gc(native, lib.dp_region_close), fd[0])


def region_bytes(manifest: Manifest) -> int:
    """Return the size of the region that a manifest asks for."""
    layout = ffi.new("struct dp_layout *")
    lib.dp_layout_of(manifest.geometry(1), layout)
    return int(layout.bytes)


def available_memory() -> int | None:
    """Return the bytes that can be had without swapping, in this control group; None: not known."""
    found = [free for free in (_memory_of_machine(), _memory_of_group()) if free is not None]
    return min(found, default=None)


def _memory_of_group() -> int | None:
    """Return what a control group's limit leaves (cgroup v2), as in a container."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as lines:
            group = next(line[3:].strip() for line in lines if line.startswith("0::"))
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        return None if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError, StopIteration):
        return None


def _memory_of_machine() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return None
