"""A runtime whose slots live on a CUDA device: attach, register the region, admit on the device.

This process owns the CUDA context; the daemon has none. The region that the daemon made is pinned
and mapped into the device, so kernels read prompts where the daemon wrote them and write output
where it reads it. The slots' words lie in device memory and only kernels swap them: the model's
(`native/gpu/slots_device.cuh`) and the admission kernel (`native/gpu/admission.cu`), which a thread
in C (`dataplane.runtime.cuda_admission`) runs in one of two ways:

- *tick*: the doorbell rings, one small launch carries out what was posted, the thread sleeps again.
- *persistent*: the kernel stays and looks at the rings itself, for a bounded number of looks; then
  it is launched again, until nothing was posted for a while. It holds an SM and needs every other
  kernel to have been loaded and every allocation made before.

Everything is allocated and every kernel has run before `ready`. `Gpu` is what is needed of a
device (`dataplane.runtime.cuda_device`); the tests run the same kernels on host threads behind it.

An engine does, in its loop: `wait`, launch its own kernels with `device` as argument, `follow` or
`wait_for` them, `step`.
"""

import contextlib
import os
import select
from typing import Any, Literal

import msgspec

from dataplane._native import ffi, lib
from dataplane.errors import DetachedError
from dataplane.manifest import Manifest
from dataplane.runtime.api import Detaches, Runtime
from dataplane.runtime.api import attach as _attach
from dataplane.runtime.cuda_admission import Admission
from dataplane.runtime.cuda_device import KERNELS, CudaError, CupyGpu, Gpu, Stream
from dataplane.runtime.cuda_watchdog import Progress, Watchdog, end_process

__all__ = [
    "KERNELS", "MODES", "CudaError", "CudaRuntime", "CupyGpu", "Gpu", "Mode", "Stream", "attach",
]  # fmt: skip

Mode = Literal["tick", "persistent"]
MODES: tuple[Mode, ...] = ("tick", "persistent")

_ATTEND_US = 200


class CudaRuntime(Detaches):
    """An attachment whose slots live on a device; a context manager that detaches.

    Attributes:
        runtime: The attachment itself.
        device: Where `struct dp_device` lies: the argument of every kernel that serves slots.
        prompts, outputs: (slots, context) and (slots, max_output) int32 arrays of the device, over
        the region itself.
    """

    def __init__(self, runtime: Runtime, gpu: Gpu, mode: Mode = "tick") -> None:
        self.runtime = runtime
        self.gpu = gpu
        self.mode = mode
        self._region = runtime.region
        self._bell = _bell(runtime.region.native)
        self._admission: Admission | None = None
        self._watchdog: Watchdog | None = None
        self._progress = Progress()
        self._owned = contextlib.ExitStack()
        try:
            self._make()
        except BaseException:
            self._owned.close()
            raise

    def _make(self) -> None:
        region, gpu = self._region, self.gpu
        self._work = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._owned.callback(os.close, self._work)
        native, layout = region.native, region.native.layout
        host = int(ffi.cast("uintptr_t", native.base))
        self._mapped = self.map(host, region.bytes, "the region", region)
        size = lib.dp_device_bytes(native)
        self.device = self.allocate(size)
        image = ffi.new("char[]", size)
        lib.dp_device_image(native, self._mapped, self.device, image)
        gpu.upload(self.device, bytes(ffi.buffer(image)))
        self.prompts = self._array(layout.prompts, layout.prompt_stride, region.context)
        self.outputs = self._array(layout.outputs, layout.output_stride, region.max_output)

    def _array(self, offset: int, stride: int, columns: int) -> Any:
        shape = (self._region.slots, stride // 4)
        return self.gpu.array(self._mapped + offset, shape, "int32", self._region)[:, :columns]

    @property
    def mapped(self) -> int:
        """Where the device sees the region's first byte."""
        return self._mapped

    def allocate(self, size: int) -> int:
        """Return zeroed device memory that goes with this runtime; before `ready` only."""
        address = self.gpu.allocate(size)
        self._owned.callback(self.gpu.free, address)
        return address

    def map(self, host_address: int, size: int, what: str, owner: object) -> int:
        """Pin memory of the host until this runtime detaches; before `ready` only.

        Args:
            host_address, size: The memory, in bytes.
            what: What it is, for the text of an error.
            owner: What keeps the memory; it is kept as long.

        Returns:
            Where the device sees it.
        """
        address = self.gpu.map(host_address, size, what)

        def unmap(owner: object) -> None:
            self.gpu.unmap(host_address)

        self._owned.callback(unmap, owner)
        return address

    # From warm to ready to the end.

    def ready(self) -> None:
        """Run every kernel of admission once, start it, and tell the daemon.

        Raises:
            CudaError: A kernel does not run, or the driver cannot be called from C.
        """
        # A claim goes before the blocks that the model has queued, and waits only for running ones.
        stream = self.gpu.stream(urgent=True)
        admission = Admission(
            self.gpu, stream, self._region, self.device, self.mode == "persistent",
            self.runtime.fileno(), self._work,
        )  # fmt: skip
        admission.start()
        self._admission = admission
        max_step_s = self.runtime.manifest.max_step_ms / 1000
        watchdog = Watchdog(self.runtime, self._progress, self.is_working, max_step_s)
        watchdog.start()
        self._watchdog = watchdog
        self.runtime.ready()

    def detach(self) -> None:
        """Leave, stop admission and give back what was allocated.

        With a kernel that hangs, the process ends here: what the kernel uses cannot be given back.
        """
        try:
            with self._progress:
                self.runtime.detach()
                if self._admission is not None and not self._admission.end():
                    end_process("a kernel hangs on the device")
                self._admission = None
                self._owned.close()
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()
                self._watchdog = None

    # The engine's loop.

    def is_working(self) -> bool:
        """Whether a slot waits on the model: READY, RUNNING or CANCELLING."""
        return bool(lib.dp_is_working(self._region.native))

    def wait(self, timeout: float) -> bool:
        """Wait until there is work for the model's kernels.

        Returns:
            Whether there is.

        Raises:
            DetachedError: The daemon is gone, or dropped this runtime.
            CudaError: The admission kernel failed.
        """
        self.wait_for_news(0 if self.is_working() else timeout)
        return self.is_working()

    def wait_for_news(self, timeout: float) -> None:
        """Wait until a slot became READY or CANCELLING since the last wait; 0 s: only look.

        Raises:
            DetachedError, CudaError: As `wait`.
        """
        self._raise_failure()
        daemon = self.runtime.fileno()
        if daemon < 0:
            raise DetachedError("this runtime left the daemon")
        found = select.poll()
        found.register(self._work, select.POLLIN)
        found.register(daemon, select.POLLIN)
        ready = dict(found.poll(timeout * 1000))
        self._progress.move()
        if daemon in ready:
            raise DetachedError("the daemon ended the attachment")
        if self._work in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._work)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._admission is not None and self._admission.error is not None:
            raise self._admission.error

    def follow(self, stream: Stream) -> None:
        """Wait for a stream's kernels, and ring listeners meanwhile for what they emit.

        Raises:
            CudaError: A kernel failed, one of this stream or the admission kernel.
        """
        with self._progress:
            while not stream.is_done():
                # What ended admission may be why nothing comes here.
                self._raise_failure()
                lib.dp_bell_attend(self._bell, -1, _ATTEND_US)
        self.ring()

    def wait_for(self, stream: Stream) -> None:
        """Wait for a stream's kernels.

        Raises:
            CudaError: One of them failed.
        """
        with self._progress:
            stream.wait()

    def ring(self) -> None:
        """Wake the listeners that sleep and have something new to read."""
        lib.dp_bell_ring(self._bell, -1)

    def step(self) -> None:
        """Say that the engine made a step."""
        self._progress.move()
        self.runtime.step()


def _bell(native: Any) -> Any:
    bell = lib.dp_bell_new(native)
    if bell == ffi.NULL:
        raise MemoryError("no memory for the bell of a device")
    return ffi.gc(bell, lib.dp_bell_free)


def attach(
    socket_path: str | os.PathLike[str],
    manifest: Manifest,
    tokenizer: str | os.PathLike[str] | None = None,
    gpu: Gpu | None = None,
    mode: Mode = "tick",
) -> CudaRuntime:
    """Attach to the daemon and put the slots on a device.

    Args:
        socket_path: The daemon's `--socket`.
        manifest: Whatever its `table` says, it is `device` here.
        tokenizer: A tokenizer.json to hand over, or None.
        gpu: The device; the first one that CUDA sees by default.
        mode: How the admission kernel runs.

    Raises:
        CudaError: The device cannot be used.
        AttachError: The daemon and this runtime did not come together.
    """
    gpu = gpu or CupyGpu()
    manifest = msgspec.structs.replace(manifest, table="device")
    runtime = _attach(socket_path, manifest, tokenizer, table="device")
    try:
        return CudaRuntime(runtime, gpu, mode)
    except BaseException:
        runtime.detach()
        raise
