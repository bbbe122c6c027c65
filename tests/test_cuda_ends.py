"""How a CUDA runtime ends: one that could not start, and one whose kernel failed.

On host threads."""

import functools
import gc
import os
import shutil
import threading
from typing import Any

import gpu_programs
import pytest
from host_gpu import HostGpu, HostStream, Library

from dataplane.device_table import DeviceTable
from dataplane.errors import AttachError, DetachedError
from dataplane.prompt1 import Request
from dataplane.runtime import cuda
from dataplane.runtime.cuda_alone import alone
from dataplane.runtime.cuda_engine import CudaEngineRuntime

pytestmark = pytest.mark.skipif(
    shutil.which(gpu_programs.cxx()) is None, reason="no C++ compiler here"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(gpu_programs.build_library(tmp_path_factory.mktemp("gpu")))


# One that cannot start.


class Failing(HostGpu):
    """A device of which one call fails, by its number from 0."""

    CALLS = (
        "make_current", "function", "map", "allocate", "upload", "download", "stream", "array",
        "free_memory",
    )  # fmt: skip

    def __init__(self, library: Library, number: int) -> None:
        super().__init__(library)
        self.made: list[str] = []
        self.failed: str | None = None

        def counted(name: str, call: Any, *arguments: Any, **named: Any) -> Any:
            self.made.append(name)
            if len(self.made) == number + 1:
                self.failed = name
                raise cuda.CudaError(f"{name} failed")
            return call(*arguments, **named)

        for name in self.CALLS:
            setattr(self, name, functools.partial(counted, name, getattr(self, name)))


def descriptors() -> int:
    gc.collect()  # the library's own go with their objects
    return len(os.listdir("/proc/self/fd"))


def start(gpu: HostGpu) -> None:
    """Start an engine's runtime, and leave again."""
    with alone(gpu, slots=2, context=16) as on, CudaEngineRuntime(on) as engine:
        engine.ready()


def test_whichever_call_of_the_device_fails_nothing_is_kept(library: Library) -> None:
    whole = Failing(library, -1)
    start(whole)
    assert {"map", "allocate", "upload", "array", "stream", "function"} <= set(whole.made)
    before, threads = descriptors(), threading.active_count()
    for number in range(len(whole.made)):
        gpu = Failing(library, number)
        with pytest.raises(cuda.CudaError, match=f"{whole.made[number]} failed"):
            start(gpu)
        assert (gpu.allocated, gpu.mapped) == ({}, {}), gpu.made
        assert descriptors() == before, gpu.made
        assert threading.active_count() == threads


@pytest.mark.parametrize(
    "call", ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuLaunchKernel", "cuStreamQuery"]
)
def test_whichever_call_of_the_driver_fails_nothing_is_kept(library: Library, call: str) -> None:
    start(HostGpu(library))
    before, threads = descriptors(), threading.active_count()
    gpu = HostGpu(library)
    gpu.fail(call, 719)
    with pytest.raises(cuda.CudaError, match="a kernel failed"):
        start(gpu)
    assert (gpu.allocated, gpu.mapped) == ({}, {})
    assert descriptors() == before
    assert threading.active_count() == threads


def test_an_attachment_that_fails_when_all_else_runs(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = HostGpu(library)
    threads = threading.active_count()
    with alone(gpu, slots=2, context=16) as on:

        def fail() -> None:
            raise AttachError("the heartbeat cannot start")

        monkeypatch.setattr(on.runtime, "ready", fail)
        with pytest.raises(AttachError, match="heartbeat"):
            on.ready()
    assert (gpu.allocated, gpu.mapped) == ({}, {})
    assert threading.active_count() == threads


def test_a_runtime_that_has_left_has_left(library: Library) -> None:
    gpu = HostGpu(library)
    with alone(gpu, slots=2, context=16) as on:
        on.ready()
        on.detach()
        assert (gpu.allocated, gpu.mapped) == ({}, {})
        on.detach()
        with pytest.raises(DetachedError, match="left"):
            on.wait(0)


# One whose kernel failed.


class _NeverDone(HostStream):
    def is_done(self) -> bool:
        return False


class _Waiting(HostGpu):
    """A device whose model's kernels do not end; what is urgent does."""

    def __init__(self, library: Library) -> None:
        super().__init__(library)
        self.urgent: list[bool] = []

    def stream(self, urgent: bool = False) -> HostStream:
        self.urgent.append(urgent)
        return HostStream(self) if urgent else _NeverDone(self)


def test_admission_runs_on_an_urgent_stream(library: Library) -> None:
    gpu = _Waiting(library)
    with alone(gpu, slots=1, context=16) as on:
        on.ready()
    assert gpu.urgent == [True]


def test_what_ends_admission_ends_a_wait_for_the_model(library: Library) -> None:
    """Both use one context; the one of the two that hears of it may be the other."""
    gpu = _Waiting(library)
    with alone(gpu, slots=1, context=16) as on:
        stream = gpu.stream()
        on.ready()
        raised: list[BaseException] = []

        def follow() -> None:
            try:
                on.follow(stream)
            except cuda.CudaError as error:
                raised.append(error)

        waiting = threading.Thread(target=follow, daemon=True)
        waiting.start()
        gpu.fail("cuLaunchKernel", 719)
        DeviceTable(on.runtime.region, answer_ms=50).admit(Request(1), 1, 8)
        waiting.join(10)
        assert not waiting.is_alive()
        assert "a kernel failed" in str(raised[0])
        gpu.fail("cuLaunchKernel", 0)
