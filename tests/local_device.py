"""A region whose listener and whose runtime are both this process, on a device of host threads.

What a daemon would do, the test does with `table`: claim, publish, cancel, read, release.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from daemon_process import wait_until
from host_gpu import HostGpu, Library

from dataplane._native import ffi, lib
from dataplane.device_table import DeviceTable
from dataplane.prompt1 import Request
from dataplane.runtime.cuda import CudaRuntime, Mode
from dataplane.runtime.cuda_alone import alone
from dataplane.runtime.cuda_engine import TURN, CudaEngineRuntime


class Asked:
    """A published request, as its listener sees it."""

    def __init__(self, on: "LocalDevice", slot: int, generation: int) -> None:
        self.slot, self.generation = slot, generation
        self._native = on.region.native
        self._table = on.table

    @property
    def state(self) -> int:
        """Its state as the listener may know it; -1 once the slot is another's."""
        word: int = lib.dp_word_now(self._native, self.slot)
        return word & 0xFF if word >> 24 == self.generation else -1

    @property
    def out(self) -> list[int]:
        """The ids that are out."""
        progress: int = self._native.progress[self.slot]
        count = progress & 0xFFFFFF if progress >> 24 == self.generation else 0
        return list(lib.dp_output(self._native, self.slot)[0:count])

    @property
    def stated(self) -> Any:
        return self._native.requests[self.slot]

    def cancel(self) -> int:
        return self._table.cancel(self.slot, self.generation)

    def release(self) -> int:
        return self._table.release(self.slot, self.generation)


class LocalDevice:
    """The listener's side, the runtime's, and the device between them."""

    def __init__(self, on: CudaRuntime, gpu: HostGpu) -> None:
        self.region = on.runtime.region
        self.gpu = gpu
        self.runtime = CudaEngineRuntime(on)
        self.launches: list[tuple[Any, ...]] = []
        self._note_launches()
        self.runtime.ready()
        self.table = DeviceTable(self.region, spin_us=2000, answer_ms=20_000)

    def _note_launches(self) -> None:
        stream: Any = self.runtime._stream
        launch = stream.launch

        def note(*how: Any) -> None:
            self.launches.append(how)
            launch(*how)

        stream.launch = note

    def turns(self) -> int:
        """How often the engine's kernel was launched."""
        return [kernel for kernel, *_ in self.launches].count(TURN)

    def ask(self, prompt: list[int], max_output: int = 8, **fields: Any) -> Asked:
        """Publish a request, and wait until the device has it."""
        slot = self.table.admit(Request(len(prompt), **fields), 77, max_output)
        assert slot >= 0, slot
        asked = Asked(self, slot, self.table.generation)
        body = ffi.buffer(ffi.new("int32_t[]", prompt))[:]
        assert self.table.submit(slot, asked.generation, body, 0, len(body)) > 0
        wait_until("it was carried out", lambda: not lib.dp_device_pending(self.region.native))
        return asked

    def leave(self) -> None:
        """End the attachment as a daemon does."""
        os.eventfd_write(self.runtime.fileno(), 1)


@contextlib.contextmanager
def local_device(library: Library, mode: Mode = "tick", **geometry: int) -> Iterator[LocalDevice]:
    """Open all of it; nothing may be left on the device in the end."""
    gpu = HostGpu(library)
    with alone(gpu, mode, **geometry) as runtime:
        on = LocalDevice(runtime, gpu)
        try:
            yield on
        finally:
            on.runtime.detach()
    assert gpu.allocated == {}
    assert gpu.mapped == {}
