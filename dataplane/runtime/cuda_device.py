"""A device as a CUDA runtime needs it, and the real one, through CuPy.

Every error of CUDA is turned into one that names the remedy. CuPy is imported when a device is
opened, not before: nothing else of this package needs it.
"""

import contextlib
import ctypes
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dataplane._native import ffi
from dataplane.errors import DataplaneError
from dataplane.installing import pip_install

KERNELS = Path(__file__).resolve().parent.parent / "kernels.fatbin"
"""Built ahead by `make kernels`."""

DRIVER = "libcuda.so.1"
"""CUDA's driver, which CuPy has loaded by then."""

TICK, RESIDENT = "dp_admission_tick", "dp_admission_resident"


class CudaError(DataplaneError):
    """CUDA cannot do what was asked; the text says what to change."""


class Stream(Protocol):
    """Kernels in order, beside those of other streams."""

    @property
    def handle(self) -> int:
        """The driver's `CUstream`."""

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: int) -> None:
        """Launch; the first argument (and a second one over 32 bits) is an address."""

    def is_done(self) -> bool: ...
    def wait(self) -> None: ...


class Gpu(Protocol):
    """What a runtime needs of a device. Addresses are the device's unless said otherwise."""

    @property
    def driver(self) -> str:
        """The library of CUDA's driver, for what is launched from C (`native/gpu/driver.h`)."""

    def make_current(self) -> None:
        """Have what this thread calls of the driver go to this device."""

    def function(self, kernel: str) -> int:
        """Return the driver's `CUfunction` of a kernel."""

    def map(self, host_address: int, size: int, what: str = "the region") -> int:
        """Pin host memory and return where the device sees it.

        `what` it is, errors say. When this raises, nothing is pinned.
        """

    def unmap(self, host_address: int) -> None: ...
    def allocate(self, size: int) -> int:
        """Return device memory that is zeroed, for every stream, when this returns."""

    def free(self, address: int) -> None: ...
    def upload(self, address: int, data: bytes) -> None:
        """Copy to the device; every stream finds it there when this returns."""

    def download(self, address: int, size: int) -> bytes: ...
    def stream(self, urgent: bool = False) -> Stream:
        """Make a stream; what waits in an urgent one goes before what waits in the others."""

    def array(self, address: int, shape: tuple[int, ...], kind: str, owner: object) -> Any:
        """Return an array over memory of the device, which keeps `owner`."""

    def free_memory(self) -> int: ...


class Resources(NamedTuple):
    """What a kernel takes on this device, as its machine code says."""

    registers: int
    shared_bytes: int
    local_bytes: int
    """Stack and spills, a thread."""
    most_threads: int


class MeasuredGpu(Gpu, Protocol):
    """A device that times what runs on it, for `dataplane profile --gpu` and the benches."""

    name: str
    capability: tuple[int, int]

    def attribute(self, number: int) -> int:
        """Return a `cudaDeviceAttr` of the device."""

    def resources(self, kernel: str) -> Resources: ...
    def resident_blocks(self, kernel: str, threads: int) -> int | None:
        """How many blocks of it a multiprocessor holds at once; None where the driver cannot say"""

    def elapsed_us(
        self, stream: Stream, work: Callable[[], None], before: Callable[[], None]
    ) -> float:
        """Wait for `work`, which launches on the stream; how long it took, by the device.

        `before` keeps the stream busy meanwhile: else the host's launches would be in the time.
        """

    def copy(self, stream: Stream, to: int, source: int, size: int) -> None:
        """Have the stream copy from pinned memory of the host to the device's."""

    def more_kernels(self, image: Path, names: tuple[str, ...]) -> None:
        """Load kernels of another image, to be launched by name as the others are."""


# CUDA, through CuPy.

_OF_A_KERNEL = "a kernel on the device"
_NOT_READY = 600
# The lower the number, the sooner; CUDA puts the device's least in its place. Streams are made with
# 0, its greatest.
_MOST_URGENT = -100
_NULL_STREAM = 0
# By where both addresses lie: one of the region is the host's memory as well as the device's.
_EITHER_WAY = 4

_ADVICE = {
    2: "the device has too little free memory: end what else runs on it (`nvidia-smi`), or ask for"
    " fewer slots or a smaller context",
    35: "the NVIDIA driver is missing, or older than this CuPy needs: install one (`nvidia-smi`"
    " must work), or the CuPy of an older CUDA (the extra cuda12)",
    3: "CUDA does not start: see what `nvidia-smi` says; in a container, start that with the NVIDIA"
    " container toolkit (--gpus all)",
    36: "the driver is older than this CUDA needs: update it, or take an older CUDA's CuPy (the"
    " extra cuda12)",
    46: "the device is another process's, or is set to serve one alone: end that one, or"
    " `nvidia-smi -c 0`",
    4: "CUDA has shut down in this process, which is ending: start the runtime again",
    100: "there is no CUDA device: `nvidia-smi -L` must list one, and CUDA_VISIBLE_DEVICES name it",
    101: "there is no such device: see `nvidia-smi -L` and CUDA_VISIBLE_DEVICES",
    200: "the driver cannot read the kernels, which a newer CUDA made, or the file is damaged:"
    " update it, or rebuild with `make kernels` by the nvcc of this machine's CUDA",
    218: "the driver cannot use the kernels' PTX: update it, or rebuild with `make kernels`",
    222: "the driver is older than the kernels' PTX, and no machine code for this device is with"
    " them: update it, or rebuild with `make kernels` on this machine's CUDA",
    201: "the device's context is not there any more: start the runtime again",
    209: "the kernels were not built for this device: rebuild with `make kernels`",
    300: "the kernels cannot be read: build them with `make kernels`",
    301: "the kernels are not there: build them with `make kernels`",
    304: "the system refused: see `ulimit -l` (locked memory) and the container's limits",
    700: "a kernel touched memory that is not its own; this process cannot use the device any more",
    701: "the device has too few registers or threads for the kernel: rebuild it with"
    " `make kernels` for this device",
    702: "a kernel took too long and was ended; this process cannot use the device any more",
    709: "the device's context is not there any more: start the runtime again",
    719: "a kernel failed; this process cannot use the device any more",
    712: "that memory is pinned already: start the runtime again",
    801: "the device or driver does not support it",
    802: "the system is not ready: on a machine with NVSwitch nvidia-fabricmanager must run",
    803: "the driver's library and its kernel module are of two versions: restart the machine",
    804: "the driver's compatibility library does not fit this device: use the driver's own",
    900: "a thread captures a graph meanwhile: capture before `ready`, or in the mode"
    " `thread_local`",
    901: "a graph's capture was spoilt: by what this thread or another asked of CUDA meanwhile",
    999: "the driver failed for a reason of its own: see `dmesg` and `nvidia-smi`",
}
_ADVICE.update(
    # A failed assertion; the stack, an instruction, an address, its space or the counter was wrong.
    dict.fromkeys((710, 714, 715, 716, 717, 718), _ADVICE[719])
)
_REGISTER_ADVICE = (
    "{what} of {mib} MiB cannot be pinned: raise the limit of locked memory (`ulimit -l`, in a"
    " container --ulimit memlock=-1), or ask for fewer slots or a smaller context"
)


def in_words(doing: str, status: int, said: object, advice: str | None = None) -> str:
    """Return what an error of CUDA (runtime or driver, which share the numbers) is told as.

    Args:
        doing: What failed.
        status: The number.
        said: CUDA's own words.
        advice: Better than the general one where memory cannot be had.
    """
    told = advice if advice and status in (1, 2, 304, 801) else _ADVICE.get(status)
    return f"{doing}: {told or 'see what CUDA says'} ({said})"


@contextlib.contextmanager
def _explained(doing: str, advice: str | None = None) -> Iterator[None]:
    """Turn what CuPy raises (it has a `status`) into words."""
    try:
        yield
    except Exception as error:
        status = getattr(error, "status", None)
        if isinstance(error, MemoryError):  # cupy.cuda.memory.OutOfMemoryError is one
            status = 2
        if status is None:
            raise
        raise CudaError(in_words(doing, status, error, advice)) from error


def _without_cupy(error: ImportError) -> str:
    """Say what is missing, the driver first: without it a CuPy is of no use."""
    install = f"{pip_install('cuda13')}, or [cuda12] for a driver that knows no CUDA 13"
    if importlib.util.find_spec("cupy") is not None:
        return f"CuPy is installed but does not import ({error}): {install}"
    lack = f"CuPy is not installed: {install}"
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return f"there is no NVIDIA driver on this machine ({DRIVER}): install one; then, {lack}"
    return lack


class CupyGpu:
    """A CUDA device, of those that CUDA_VISIBLE_DEVICES leaves.

    Raises:
        CudaError: There is no CuPy, driver, device or kernel image that fits; the text says which.
    """

    def __init__(self, number: int = 0, kernels: Path = KERNELS) -> None:
        # Kernels that load lazily would have a resident one wait for itself.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        try:
            import cupy
        except ImportError as error:
            raise CudaError(_without_cupy(error)) from error
        self.driver = DRIVER
        self._cupy = cupy
        self._cuda = cupy.cuda.runtime
        with _explained("the CUDA device cannot be used"):
            count = self._cuda.getDeviceCount()
            if number >= count:
                raise CudaError(
                    f"there is no CUDA device {number}, CUDA sees {count}: {_ADVICE[101]}"
                )
            self.number = number
            self.make_current()
            properties = self._cuda.getDeviceProperties(number)
        self.name: str = properties["name"].decode()
        self.capability = (int(properties["major"]), int(properties["minor"]))
        if not kernels.exists():
            raise CudaError(f"the kernels are not at {kernels}: build them with `make kernels`")
        architecture = "sm_{}{}".format(*self.capability)
        with _explained(f"the kernels do not load on {self.name} ({architecture})"):
            self._module = cupy.RawModule(path=str(kernels))
            self._kernels = {name: self._module.get_function(name) for name in (TICK, RESIDENT)}

    def make_current(self) -> None:
        with _explained(f"using CUDA device {self.number}"):
            self._cuda.setDevice(self.number)
            # Makes the context, so that later errors are about what was asked.
            self._cuda.free(0)

    def attribute(self, number: int) -> int:
        """Return a `cudaDeviceAttr` of the device."""
        with _explained(f"asking for attribute {number}"):
            return int(self._cuda.deviceGetAttribute(number, self.number))

    def kernel(self, name: str) -> Any:
        """Return a kernel of the image."""
        kernel = self._kernels.get(name)
        if kernel is None:
            with _explained(f"the kernel {name} does not load"):
                kernel = self._kernels[name] = self._module.get_function(name)
        return kernel

    def function(self, kernel: str) -> int:
        with _explained(f"the kernel {kernel} does not load"):
            return int(self.kernel(kernel).kernel.ptr)

    def map(self, host_address: int, size: int, what: str = "the region") -> int:
        mib = -(-size >> 20)
        with _explained(f"registering {what}", _REGISTER_ADVICE.format(what=what, mib=mib)):
            # Portable and mapped.
            self._cuda.hostRegister(host_address, size, 3)
        try:
            with _explained(f"asking where the device sees {what}"):
                return int(self._cuda.pointerGetAttributes(host_address).devicePointer)
        except BaseException:
            self.unmap(host_address)
            raise

    def unmap(self, host_address: int) -> None:
        with contextlib.suppress(Exception):
            self._cuda.hostUnregister(host_address)

    def allocate(self, size: int) -> int:
        doing = f"allocating {size} bytes on {self.name}, {self.free_memory() >> 20} MiB free"
        with _explained(doing):
            address = int(self._cuda.malloc(size))
        try:
            with _explained(doing):
                self._cuda.memset(address, 0, size)
                self._order()
        except BaseException:
            self.free(address)
            raise
        return address

    def _order(self) -> None:
        """Wait for the null stream: the streams that are made here do not."""
        self._cuda.streamSynchronize(_NULL_STREAM)

    def free(self, address: int) -> None:
        with contextlib.suppress(Exception):
            self._cuda.free(address)

    def upload(self, address: int, data: bytes) -> None:
        source = ffi.from_buffer(data)
        with _explained("copying to the device"):
            host = int(ffi.cast("uintptr_t", source))
            self._cuda.memcpy(address, host, len(data), _EITHER_WAY)
            # Of pageable memory: the call may return before the device has it.
            self._order()

    def download(self, address: int, size: int) -> bytes:
        target = ffi.new("char[]", size)
        with _explained("copying from the device"):
            host = int(ffi.cast("uintptr_t", target))
            self._cuda.memcpy(host, address, size, _EITHER_WAY)
        return bytes(ffi.buffer(target))

    def stream(self, urgent: bool = False) -> Stream:
        make = self._cupy.cuda.Stream
        # CuPy 13 makes streams of one priority only, and says more than that when it is asked.
        is_able = "priority" in inspect.signature(make).parameters
        how = {"priority": _MOST_URGENT} if urgent and is_able else {}
        with _explained("making a stream"):
            return _CupyStream(self, make(non_blocking=True, **how))

    def query(self, stream: int) -> int:
        """Return the status of a stream: 0, done; 600, not yet; else what went wrong."""
        return int(self._cuda.streamQuery(stream))

    def array(self, address: int, shape: tuple[int, ...], kind: str, owner: object) -> Any:
        cupy = self._cupy
        size = 4
        for extent in shape:
            size *= extent
        memory = cupy.cuda.UnownedMemory(address, size, owner, self.number)
        return cupy.ndarray(shape, kind, memptr=cupy.cuda.MemoryPointer(memory, 0))

    def free_memory(self) -> int:
        with _explained("asking for the free memory"):
            return int(self._cuda.memGetInfo()[0])

    # What is only measured with (MeasuredGpu).

    def resources(self, kernel: str) -> Resources:
        found = self.kernel(kernel)
        with _explained(f"asking what {kernel} takes"):
            return Resources(
                int(found.num_regs),
                int(found.shared_size_bytes),
                int(found.local_size_bytes),
                int(found.max_threads_per_block),
            )

    def resident_blocks(self, kernel: str, threads: int) -> int | None:
        driver = getattr(self._cupy.cuda, "driver", None)
        ask = getattr(driver, "occupancyMaxActiveBlocksPerMultiprocessor", None)
        if ask is None:
            return None
        with _explained(f"asking for the occupancy of {kernel}"):
            return int(ask(self.function(kernel), threads, 0))

    def elapsed_us(
        self, stream: Stream, work: Callable[[], None], before: Callable[[], None]
    ) -> float:
        assert isinstance(stream, _CupyStream)
        cuda = self._cupy.cuda
        before()
        with _explained("timing a kernel"):
            start, stop = cuda.Event(), cuda.Event()
            start.record(stream.native)
        work()
        with _explained(_OF_A_KERNEL):
            stop.record(stream.native)
            stop.synchronize()
            return float(cuda.get_elapsed_time(start, stop)) * 1000

    def copy(self, stream: Stream, to: int, source: int, size: int) -> None:
        assert isinstance(stream, _CupyStream)
        with _explained("copying to the device"):
            self._cuda.memcpyAsync(to, source, size, 1, stream.handle)

    def more_kernels(self, image: Path, names: tuple[str, ...]) -> None:
        with _explained(f"the kernels of {image} do not load on {self.name}"):
            module = self._cupy.RawModule(path=str(image))
            self._kernels.update({name: module.get_function(name) for name in names})


class _CupyStream:
    def __init__(self, gpu: CupyGpu, stream: Any) -> None:
        import numpy as np

        self._gpu = gpu
        self.native = stream
        self._address, self._number = np.uint64, np.uint32
        self._bound: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    @property
    def handle(self) -> int:
        return int(self.native.ptr)

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: int) -> None:
        # The same few launches again and again: what CuPy wants is made once.
        bound = self._bound.get((kernel, arguments))
        if bound is None:
            values = tuple(
                self._address(value) if position == 0 or value >= 2**32 else self._number(value)
                for position, value in enumerate(arguments)
            )
            bound = self._bound[kernel, arguments] = (self._gpu.kernel(kernel), values)
        with _explained(f"launching {kernel}"), self.native:
            bound[0]((blocks,), (threads,), bound[1])

    def is_done(self) -> bool:
        # CuPy's `done` is False for an error as well, and so for ever.
        status = self._gpu.query(self.handle)
        if status in (0, _NOT_READY):
            return status == 0
        self.wait()  # raises it, in CUDA's words
        raise CudaError(in_words(_OF_A_KERNEL, status, f"cudaError {status}"))

    def wait(self) -> None:
        with _explained(_OF_A_KERNEL):
            self.native.synchronize()
