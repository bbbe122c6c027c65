"""A region whose listener and whose runtime are both this process, on a device of host threads.

What a daemon would do, the test does with `table`: claim, publish, cancel, read, release.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from daemon_process import wait_until
from host_gpu import HostGpu, Library
from native_region import manifest, open_region

from dataplane._native import ffi, lib
from dataplane.device_table import DeviceTable
from dataplane.manifest import Manifest
from dataplane.prompt1 import Request
from dataplane.region import Region
from dataplane.runtime.cuda import CudaRuntime, Mode
from dataplane.runtime.cuda_engine import CudaEngineRuntime


class LocalRuntime:
    """What `CudaRuntime` needs of an attachment; `leave` is the daemon's end of it."""

    def __init__(self, region: Region, stated: Manifest) -> None:
        self.region = region
        self.manifest = stated
        self.steps = 0
        self._gone = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def leave(self) -> None:
        os.eventfd_write(self._gone, 1)

    def fileno(self) -> int:
        return self._gone

    def ready(self) -> None: ...

    def step(self) -> None:
        self.steps += 1

    def detach(self) -> None:
        if self._gone >= 0:
            os.close(self._gone)
            self._gone = -1


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

    def __init__(self, region: Region, stated: Manifest, library: Library, mode: Mode) -> None:
        self.region = region
        self.gpu = HostGpu(library)
        self.attachment = LocalRuntime(region, stated)
        on = CudaRuntime(self.attachment, self.gpu, mode)  # type: ignore[arg-type]
        self.runtime = CudaEngineRuntime(on)
        self.runtime.ready()
        self.table = DeviceTable(region, spin_us=2000, answer_ms=20_000)

    def ask(self, prompt: list[int], max_output: int = 8, **fields: Any) -> Asked:
        """Publish a request, and wait until the device has it."""
        slot = self.table.admit(Request(len(prompt), **fields), 77, max_output)
        assert slot >= 0, slot
        asked = Asked(self, slot, self.table.generation)
        body = ffi.buffer(ffi.new("int32_t[]", prompt))[:]
        assert self.table.submit(slot, asked.generation, body, 0, len(body)) > 0
        wait_until("it was carried out", lambda: not lib.dp_device_pending(self.region.native))
        return asked

    def turns(self) -> int:
        """How often the engine's kernel was launched."""
        return self.gpu.launches.count("dp_engine_turn")


@contextlib.contextmanager
def local_device(library: Library, mode: Mode = "tick", **geometry: Any) -> Iterator[LocalDevice]:
    """Open all of it; nothing may be left on the device in the end."""
    stated = manifest(table="device", **geometry)
    with open_region(table="device", **geometry) as region:
        on = LocalDevice(region, stated, library, mode)
        try:
            yield on
        finally:
            on.runtime.detach()
    assert on.gpu.allocated == {}
    assert on.gpu.mapped == {}
