"""Slots on a device without a daemon, for what measures the device: `dataplane profile --gpu` and
`bench/gpu.py`.

All is as in a runtime, its admission thread included, but this process is the listener too.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

from dataplane._native import lib
from dataplane.device_table import DeviceTable
from dataplane.errors import DataplaneError
from dataplane.manifest import Manifest
from dataplane.prompt1 import Request
from dataplane.region import Region, create_region
from dataplane.runtime.api import Runtime
from dataplane.runtime.cuda import CudaRuntime, Gpu, Mode, Stream
from dataplane.runtime.cuda_device import RESIDENT

VOCAB = 50_000
_NAP_NS = 1000


class _NoDaemon:
    """An attachment to nobody: what `CudaRuntime` asks of one."""

    def __init__(self, region: Region, manifest: Manifest) -> None:
        self.region = region
        self.manifest = manifest
        self._never = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        return self._never

    def ready(self) -> None:
        pass

    def step(self) -> None:
        pass

    def detach(self) -> None:
        if self._never >= 0:
            fd, self._never = self._never, -1
            os.close(fd)


@contextlib.contextmanager
def alone(
    gpu: Gpu, mode: Mode = "tick", *, slots: int = 64, context: int = 1024, max_output: int = 16
) -> Iterator[CudaRuntime]:
    """Put the slots of a new region on a device; `ready` is the caller's to call.

    Raises:
        CudaError: The device cannot be used.
        AttachError: There is no room for the region.
    """
    manifest = Manifest(
        model="none", table="device", slots=slots, context=context, max_output=max_output,
        vocab_size=VOCAB,
    )  # fmt: skip
    region = create_region(manifest, attachment=1, listeners=1)
    fds = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)]
    region.native.doorbell, region.native.outputs[0:1] = fds[0], fds[1:]
    nobody = _NoDaemon(region, manifest)
    try:
        with CudaRuntime(cast(Runtime, nobody), gpu, mode) as runtime:
            yield runtime
    finally:
        nobody.detach()
        for fd in fds:
            os.close(fd)
        region.close_fd()


Busy = Callable[[Stream, int], None]
"""Keeps a stream busy for about so many µs."""


@contextlib.contextmanager
def busy_work(gpu: Gpu) -> Iterator[Busy]:
    """Make what precedes a timed launch: a kernel that looks at a ring that nobody writes."""
    with alone(gpu, slots=1, context=16) as idle:
        lib.dp_device_stop(idle.runtime.region.native, 0)
        yield lambda stream, us: stream.launch(RESIDENT, 1, 1, idle.device, us, _NAP_NS)


def claim_all(table: DeviceTable, slots: int, n_tokens: int, max_output: int) -> list[int]:
    """Claim every slot, in the order of their numbers; the generation of each.

    Raises:
        DataplaneError: The device refuses.
    """
    held = {}
    for _ in range(slots):
        slot = table.admit(Request(n_tokens), 1, max_output)
        if slot < 0:
            raise DataplaneError(f"the device answered a claim with {slot}")
        held[slot] = table.generation
    return [held[slot] for slot in range(slots)]


def ticking(step: Callable[[], Any], work: Callable[[], Any]) -> None:
    """Run `work` on a thread of its own, and `step` again and again until it has ended.

    Raises:
        Exception: What `work` raised.
    """
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    while thread.is_alive():
        step()
    thread.join()
    step()
    if failed:
        raise failed[0]
