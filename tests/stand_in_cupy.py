"""A CuPy over the tests' driver: what `CupyGpu` calls of it, on kernels that are host threads.

A test copies this file to a folder of the PYTHONPATH as `cupy.py`, beside `libcuda.so.1`, which is
the library of `gpu_programs.build_library`. Where CUDA would refuse arguments, this does.
"""

import ctypes
import threading
import time
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

__version__ = "stand-in"
_driver = ctypes.CDLL("libcuda.so.1")
_HANDLE, _TEXT = ctypes.c_void_p, ctypes.c_char_p
_driver.host_gpu.restype = _driver.host_stream.restype = _driver.host_function.restype = _HANDLE
_driver.host_function.argtypes = [_TEXT]
_driver.host_stream.argtypes = _driver.host_make_current.argtypes = [_HANDLE]
_driver.host_stream_done.argtypes = _driver.host_stream_wait.argtypes = [_HANDLE]
_driver.host_capture.argtypes = [_HANDLE, ctypes.c_int]
_driver.host_stream_launch.argtypes = [
    _HANDLE, _TEXT, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_uint64),
]  # fmt: skip
_gpu = _driver.host_gpu()
_current = threading.local()
_PAGE, _ALIGNED, _NOT_READY = 4096, 256, 600
_ATTRIBUTES = {
    16: 132, 18: 0, 36: 2_619_000, 37: 5120, 39: 2048, 78: 1, 81: 233_472, 82: 65_536, 86: 0,
    88: 0, 90: 1, 91: 1, 99: 1, 106: 32, 111: 1024,
}  # fmt: skip
_allocated: dict[int, Any] = {}
_pinned: dict[int, int] = {}


def _malloc(size: int) -> int:
    buffer = ctypes.create_string_buffer(size + _ALIGNED)
    address = -(-ctypes.addressof(buffer) // _ALIGNED) * _ALIGNED
    _allocated[address] = buffer
    return address


def _free(address: int) -> None:
    if address:
        del _allocated[address]


def _memcpy(to: int, source: int, size: int, kind: int) -> None:
    assert kind == 4, "cudaMemcpyDefault"
    ctypes.memmove(to, source, size)


def _memcpy_async(to: int, source: int, size: int, kind: int, stream: int) -> None:
    assert kind == 1, "cudaMemcpyHostToDevice"
    assert any(at <= source and source + size <= at + length for at, length in _pinned.items())
    _driver.host_stream_wait(stream)
    ctypes.memmove(to, source, size)


def _register(address: int, size: int, flags: int) -> None:
    assert (address % _PAGE, flags) == (0, 3), "portable and mapped"
    assert address not in _pinned, "cudaErrorHostMemoryAlreadyRegistered"
    _pinned[address] = size


def _attributes(address: int) -> SimpleNamespace:
    assert address in _pinned
    return SimpleNamespace(devicePointer=address)


class Stream:
    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False,
                 priority: int | None = None) -> None:  # fmt: skip
        assert non_blocking
        self.ptr = _driver.host_stream(_gpu)
        self._is_capturing = False

    def synchronize(self) -> None:
        _driver.host_stream_wait(self.ptr)

    def __enter__(self) -> Self:
        _current.streams = [*getattr(_current, "streams", ()), self]
        return self

    def __exit__(self, *error: object) -> None:
        _current.streams.pop()

    def begin_capture(self, mode: int) -> None:
        assert mode == 0, "cudaStreamCaptureModeGlobal"
        self._is_capturing = True
        _driver.host_capture(_gpu, 1)

    def end_capture(self) -> None:
        self._is_capturing = False
        _driver.host_capture(_gpu, 0)

    def run(self, kernel: str, blocks: int, threads: int, arguments: Any) -> None:
        if self._is_capturing:
            return
        if kernel in ("dp_echo", "dp_engine_turn"):  # the threads of a block are real here
            blocks, threads = 1, 2
        elif kernel == "dp_bench_read":
            blocks, threads = 1, 1
        numbers = (ctypes.c_uint64 * 4)(*(int(value) for value in arguments))
        _driver.host_stream_launch(self.ptr, kernel.encode(), blocks, threads, numbers)


class Event:
    def record(self, stream: Stream) -> None:
        stream.synchronize()
        self.s = time.perf_counter()

    def synchronize(self) -> None:
        pass


class _Kernel:
    num_regs, shared_size_bytes, local_size_bytes, max_threads_per_block = 56, 0, 0, 128

    def __init__(self, name: str) -> None:
        assert _driver.host_knows(name.encode()), name
        self._name = name
        self.kernel = SimpleNamespace(ptr=_driver.host_function(name.encode()) or 0)

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        assert isinstance(arguments[0], np.uint64)
        _current.streams[-1].run(self._name, *grid, *block, arguments)


class RawModule:
    def __init__(self, path: str) -> None:
        with open(path, "rb") as image:
            assert image.read(4) == b"\x50\xed\x55\xba", "no fatbin"

    def get_function(self, name: str) -> _Kernel:
        return _Kernel(name)


def _array(shape: tuple[int, ...], kind: str, memptr: tuple[Any, int]) -> Any:
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    buffer = (ctypes.c_uint8 * size).from_address(memptr[0].ptr)
    return np.ctypeslib.as_array(buffer).view(kind).reshape(shape)


ndarray = _array
cuda = SimpleNamespace(
    Stream=Stream,
    Event=Event,
    get_elapsed_time=lambda start, stop: (stop.s - start.s) * 1000,
    UnownedMemory=lambda ptr, size, owner, device: SimpleNamespace(ptr=ptr, owner=owner),
    MemoryPointer=lambda memory, offset: (memory, offset),
    driver=SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=lambda *how: 16),
    runtime=SimpleNamespace(
        getDeviceCount=lambda: 1,
        setDevice=lambda number: _driver.host_make_current(_gpu),
        getDeviceProperties=lambda number: {"name": b"stand-in", "major": 9, "minor": 0},
        deviceGetAttribute=lambda attribute, number: _ATTRIBUTES[attribute],
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
        hostRegister=_register,
        hostUnregister=lambda address: _pinned.pop(address),
        pointerGetAttributes=_attributes,
        malloc=_malloc,
        free=_free,
        memset=lambda address, value, size: ctypes.memset(address, value, size),
        memcpy=_memcpy,
        memcpyAsync=_memcpy_async,
        memGetInfo=lambda: (1 << 36, 1 << 37),
        streamSynchronize=lambda stream: None,
        streamQuery=lambda stream: 0 if _driver.host_stream_done(stream) else _NOT_READY,
    ),
)
