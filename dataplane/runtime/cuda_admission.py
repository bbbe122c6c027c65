"""The thread that runs the admission kernel for what listeners post.

All that it does is C (`native/gpu/admission_loop.c`), called once: the interpreter's lock is not
held and not waited for, whatever the engine's thread does, which may also be to capture graphs:
this one has no part in a capture. What ends it early is put into words here. CUDA's driver is
called through the library that `Gpu.driver` names.
"""

import os
import sys
import threading
from typing import Any

from dataplane._native import ffi, lib
from dataplane.region import Region
from dataplane.runtime.cuda_device import RESIDENT, TICK, CudaError, Gpu, Stream, in_words

END_WITHIN_S = 2.0
_TEXT_BYTES = 512
_DOING = {
    lib.DP_ADMISSION_CONTEXT: "using the device's context on the admission thread",
    lib.DP_ADMISSION_TICK: f"launching {TICK}",
    lib.DP_ADMISSION_RESIDENT: f"launching {RESIDENT}",
    lib.DP_ADMISSION_KERNEL: "the admission kernel on the device",
}


class Admission(threading.Thread):
    """Runs the admission kernel; no other thread of this process does, and none uses its stream.

    A thread of its own: a step of the model may take longer than a claim may wait. When it is made
    both kernels have run once.

    Args:
        gpu, stream: The device, and a stream of it.
        region: Whose rings are served.
        device: Where `struct dp_device` lies.
        stays: Whether a kernel stays on the device; else there is a launch for each batch.
        daemon: A descriptor that is readable once nobody is served any more; -1: none.
        work: An eventfd to write when the model has something to do; -1: none.

    Attributes:
        error: What ended the thread before it was told to end, or None.

    Raises:
        CudaError: The driver's library or the device cannot be used.
    """

    def __init__(
        self,
        gpu: Gpu,
        stream: Stream,
        region: Region,
        device: int,
        stays: bool,
        daemon: int = -1,
        work: int = -1,
    ) -> None:
        super().__init__(name="admission", daemon=True)
        self.error: CudaError | None = None
        self._work = work
        self._driver = _open(gpu.driver)
        gpu.make_current()
        plan = {
            "region": region.native,
            "driver": self._driver,
            "context": self._context(),
            "stream": ffi.cast("CUstream", stream.handle),
            "tick": ffi.cast("CUfunction", gpu.function(TICK)),
            "resident": ffi.cast("CUfunction", gpu.function(RESIDENT)),
            "device": device,
            "daemon": daemon,
            "work": work,
            "stays": stays,
        }
        loop = lib.dp_admission_new(ffi.new("struct dp_admission_plan *", plan))
        if loop == ffi.NULL:
            raise OSError(ffi.errno, f"admission cannot start: {os.strerror(ffi.errno)}")
        self._loop = ffi.gc(loop, lib.dp_admission_free)
        self._used = (gpu, region, stream)  # the loop points into what is theirs
        result = lib.dp_admission_try(self._loop)
        if result:
            raise self._failure(result)

    def run(self) -> None:
        result = lib.dp_admission_run(self._loop)
        if not result:
            return
        self.error = self._failure(result)
        print(f"dataplane: admission on the device failed: {self.error}", file=sys.stderr)
        if self._work >= 0:
            os.eventfd_write(self._work, 1)  # the engine's thread raises it

    def end(self) -> bool:
        """Have it end; False when a kernel hangs."""
        lib.dp_admission_end(self._loop)
        self.join(END_WITHIN_S)
        return not self.is_alive()

    def _context(self) -> Any:
        """Return the context that is current on this thread."""
        context = ffi.new("CUcontext *")
        result = lib.dp_driver_context(self._driver, context)
        if result:
            raise CudaError(in_words("asking for the device's context", result, self._said(result)))
        if context[0] == ffi.NULL:
            raise CudaError("no context of the device is current: open it on this thread")
        return context[0]

    def _failure(self, result: int) -> CudaError:
        doing = _DOING[lib.dp_admission_failed(self._loop)]
        return CudaError(in_words(doing, result, self._said(result)))

    def _said(self, result: int) -> str:
        text = ffi.new("char[]", _TEXT_BYTES)
        lib.dp_driver_explain(self._driver, result, text, _TEXT_BYTES)
        return str(ffi.string(text).decode(errors="replace"))


def _open(library: str) -> Any:
    error = ffi.new("char[]", _TEXT_BYTES)
    driver = lib.dp_driver_open(os.fsencode(library), error, _TEXT_BYTES)
    if driver == ffi.NULL:
        said = ffi.string(error).decode(errors="replace")
        raise CudaError(
            f"the CUDA driver's library {library} cannot be used: install the NVIDIA driver"
            f" (`nvidia-smi` must work), and give a container its libraries ({said})"
        )
    return ffi.gc(driver, lib.dp_driver_close)
