"""A `Gpu` of host threads: `dataplane.runtime.cuda`, the C loop of its admission thread and the
kernels run as they are, without CUDA; CUDA's driver is `gpu_driver.cpp`.

Run as a program it is a `cuda-echo` runtime: `host_gpu.py LIBRARY SOCKET SLOTS CONTEXT MAX_OUTPUT
MODE [stuck | hung | slow [PARTITION]]`. Once SIGUSR1 comes, with `stuck` no kernel ends any more,
with `hung` none of the model's, while admission goes on, and with `slow` none does until it comes
again.
"""

import ctypes
import functools
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

from dataplane._native import ffi, lib
from dataplane.manifest import DEFAULT_PARTITION
from dataplane.region import Region
from dataplane.runtime.cuda import Stream

BUILD_NEEDS = "c++"
_NUMBERS = ctypes.c_uint64 * 4


class Library:
    """`gpu_host.cpp` and `gpu_driver.cpp`, built by `gpu_programs.build_library`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.native = native = ctypes.CDLL(str(path))
        handle, name = ctypes.c_void_p, ctypes.c_char_p
        native.host_gpu.restype = native.host_stream.restype = handle
        native.host_function.restype = handle
        native.host_function.argtypes = [name]
        native.host_stream.argtypes = native.host_make_current.argtypes = [handle]
        native.host_stream_launch.argtypes = [
            handle, name, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_uint64),
        ]  # fmt: skip
        native.host_stream_done.argtypes = native.host_stream_wait.argtypes = [handle]
        native.host_stuck.argtypes = native.host_capture.argtypes = [handle, ctypes.c_int]
        native.host_fail.argtypes = [handle, name, ctypes.c_int]
        native.host_calls.argtypes = native.host_launched.argtypes = [handle, name]
        native.host_echo_job_bytes.restype = ctypes.c_size_t
        slot = [ctypes.c_uint64, ctypes.c_uint32]
        native.host_take.argtypes = [*slot, ctypes.POINTER(ctypes.c_uint64)]
        native.host_emit.argtypes = [
            *slot, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int32), ctypes.c_uint32,
        ]  # fmt: skip
        native.host_is_cancelled.argtypes = [*slot, ctypes.c_uint64]
        native.host_set_timer.argtypes = [ctypes.c_int64, ctypes.c_int64]
        native.host_finish.argtypes = [*slot, ctypes.c_uint64, ctypes.c_uint32]


class HostStream:
    """Launches that run one after the other, beside their caller."""

    def __init__(self, gpu: "HostGpu") -> None:
        self._native = gpu.library.native
        self.handle: int = self._native.host_stream(gpu.handle)

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: int) -> None:
        assert self._native.host_knows(kernel.encode()), kernel
        # The threads of a block are real here.
        if kernel in ("dp_echo", "dp_engine_turn"):
            blocks, threads = 1, 2
        numbers = _NUMBERS(*arguments)
        self._native.host_stream_launch(self.handle, kernel.encode(), blocks, threads, numbers)

    def is_done(self) -> bool:
        return bool(self._native.host_stream_done(self.handle))

    def wait(self) -> None:
        self._native.host_stream_wait(self.handle)


class _HangingStream(HostStream):
    """A stream whose kernels of the model hang from a moment on; those of admission do not."""

    def __init__(self, gpu: "HostGpu", hung: threading.Event) -> None:
        super().__init__(gpu)
        self._hung = hung
        self._hangs = False

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: int) -> None:
        self._hangs = kernel == "dp_echo" and self._hung.is_set()
        if not self._hangs:
            super().launch(kernel, blocks, threads, *arguments)

    def is_done(self) -> bool:
        return not self._hangs and super().is_done()


class HostGpu:
    """Host memory is the device's.

    Attributes:
        allocated: Bytes by address.
        hung: Once it is set, the model's kernels do not end; None: they always do.
    """

    def __init__(self, library: Library, hung: threading.Event | None = None) -> None:
        self.library = library
        self.hung = hung
        self.mapped: dict[int, int] = {}
        self.allocated: dict[int, Any] = {}

    @property
    def driver(self) -> str:
        """The library that stands in for CUDA's driver."""
        return str(self.library.path)

    @functools.cached_property
    def handle(self) -> int:
        """The device's context."""
        return int(self.library.native.host_gpu())

    def make_current(self) -> None:
        self.library.native.host_make_current(self.handle)

    def function(self, kernel: str) -> int:
        return int(self.library.native.host_function(kernel.encode()))

    def get_stuck(self, stuck: bool = True) -> None:
        """Have no kernel end from now on."""
        self.library.native.host_stuck(self.handle, stuck)

    def capture(self, capturing: bool = True) -> None:
        """Have some thread capture a graph, in CUDA's default mode, until it is told otherwise."""
        self.library.native.host_capture(self.handle, capturing)

    def fail(self, call: str, result: int) -> None:
        """Have a call of the driver answer with this `CUresult` from now on."""
        self.library.native.host_fail(self.handle, call.encode(), result)

    def calls(self, call: str) -> int:
        """Return how often a call of the driver was made."""
        return int(self.library.native.host_calls(self.handle, call.encode()))

    def launched(self, kernel: str) -> int:
        """Return how often a kernel was launched."""
        return int(self.library.native.host_launched(self.handle, kernel.encode()))

    def map(self, host_address: int, size: int, what: str = "the region") -> int:
        self.mapped[host_address] = size
        return host_address

    def unmap(self, host_address: int) -> None:
        del self.mapped[host_address]

    def allocate(self, size: int) -> int:
        buffer = ctypes.create_string_buffer(size + 64)
        address = (ctypes.addressof(buffer) + 63) & ~63
        self.allocated[address] = buffer
        return address

    def free(self, address: int) -> None:
        del self.allocated[address]

    def upload(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def download(self, address: int, size: int) -> bytes:
        return ctypes.string_at(address, size)

    def stream(self, urgent: bool = False) -> Stream:
        return HostStream(self) if self.hung is None else _HangingStream(self, self.hung)

    def array(self, address: int, shape: tuple[int, ...], kind: str, owner: object) -> Any:
        count = int(np.prod(shape))
        buffer = (ctypes.c_uint8 * (count * np.dtype(kind).itemsize)).from_address(address)
        self._owner = owner
        return np.ctypeslib.as_array(buffer).view(kind).reshape(shape)

    def free_memory(self) -> int:
        return 1 << 30


class HostDevice:
    """The device's side of a region, verb by verb: for tests that play the runtime themselves."""

    def __init__(self, library: Library, region: Region) -> None:
        self.native = library.native
        self.region = region
        self.gpu = HostGpu(library)
        native = region.native
        size = lib.dp_device_bytes(native)
        self.address = self.gpu.allocate(size)
        image = ffi.new("char[]", size)
        base = int(ffi.cast("uintptr_t", native.base))
        lib.dp_device_image(native, base, self.address, image)
        self.gpu.upload(self.address, bytes(ffi.buffer(image)))
        self._stream = self.gpu.stream()

    def tick(self) -> None:
        """Carry out what is posted."""
        listeners = self.region.native.geometry.listeners
        self._stream.launch("dp_admission_tick", 1, listeners, self.address, 4096)
        self._stream.wait()

    def word(self, slot: int) -> tuple[int, int, int]:
        """Return the device's own word as (state, owner, generation)."""
        words = self.address + lib.dp_device_bytes(self.region.native) - self.region.slots * 8
        word = ctypes.c_uint64.from_address(words + slot * 8).value
        return word & 0xFF, word >> 8 & 0xFFFF, word >> 24

    def take(self, slot: int) -> tuple[int, int]:
        """Take: the new state or a status, and the generation."""
        generation = ctypes.c_uint64()
        status = self.native.host_take(self.address, slot, ctypes.byref(generation))
        return status, generation.value

    def emit(self, slot: int, generation: int, ids: list[int]) -> int:
        array = (ctypes.c_int32 * len(ids))(*ids)
        return int(self.native.host_emit(self.address, slot, generation, array, len(ids)))

    def is_cancelled(self, slot: int, generation: int) -> bool:
        return bool(self.native.host_is_cancelled(self.address, slot, generation))

    def finish(self, slot: int, generation: int, reason: int) -> int:
        return int(self.native.host_finish(self.address, slot, generation, reason))


def main(arguments: list[str]) -> int:
    from dataplane.errors import DataplaneError
    from dataplane.runtime.cuda_echo import main as cuda_echo

    library, socket, slots, context, max_output, mode, *rest = arguments
    how = rest.pop(0) if rest else ""
    partition = rest.pop(0) if rest else DEFAULT_PARTITION
    hangs = False
    hung = threading.Event() if how == "hung" else None
    gpu = HostGpu(Library(Path(library)), hung)

    def hang(number: int, frame: object) -> None:
        nonlocal hangs
        hangs = not hangs if how == "slow" else True
        if hung:
            hung.set()
        else:
            gpu.get_stuck(hangs)
        print("it hangs" if hangs else "it goes on", flush=True)

    signal.signal(signal.SIGUSR1, hang)
    try:
        return cuda_echo(
            socket, int(slots), int(context), int(max_output), 50_000,
            lambda text: print(text, flush=True), gpu=gpu, mode=mode,  # type: ignore[arg-type]
            partition=partition,
        )  # fmt: skip
    except DataplaneError as error:
        print(f"host_gpu: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
