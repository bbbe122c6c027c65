"""`dataplane.runtime.cuda` on a CuPy that is none: what it asks of CUDA, and what it says when CUDA
refuses. Each error has to name the remedy."""

import contextlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import StartDaemon
from daemon_process import wait_until
from host_gpu import HostGpu

from dataplane.errors import AttachError
from dataplane.manifest import Manifest
from dataplane.runtime import attach, cuda

DEVICE = Manifest(
    model="test", table="device", slots=2, context=64, max_output=16, vocab_size=50_000
)


class CudaFailureError(Exception):
    """As CuPy's: with a status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class Fake:
    """A CuPy that keeps what it was asked, and fails where a test says so.

    Attributes:
        calls: What was asked, in its order.
        failures: A status by the call that fails with it.
        at: The number of the one call that fails besides, from 0; -1: none.
        query: What `streamQuery` answers, which raises nothing.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failures: dict[str, int] = {}
        self.at = -1
        self.query = 0
        self.devices = 1
        self.launched: list[tuple[str, Any, Any, tuple[Any, ...]]] = []

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]

    def answer(self, name: str, value: Any) -> Any:
        def call(*arguments: Any) -> Any:
            number = len(self.calls)
            self.calls.append((name, arguments))
            if name in self.failures or number == self.at:
                raise CudaFailureError(self.failures.get(name, 999))
            return value() if callable(value) else value

        return call

    def runtime(self) -> types.SimpleNamespace:
        answers = {
            "getDeviceCount": self.devices,
            "setDevice": None,
            "free": None,
            "getDeviceProperties": {"name": b"Fake H100", "major": 9, "minor": 0},
            "hostRegister": None,
            "hostUnregister": None,
            "pointerGetAttributes": types.SimpleNamespace(devicePointer=0x7000_0000_0000),
            "malloc": 0x5000_0000_0000,
            "memset": None,
            "memcpy": None,
            "memcpyAsync": None,
            "streamSynchronize": None,
            "streamQuery": lambda: self.query,
            "memGetInfo": (3 << 20, 80 << 30),
            "deviceGetAttribute": 1,
        }
        return types.SimpleNamespace(
            **{name: self.answer(name, value) for name, value in answers.items()}
        )

    def kernel(self, name: str) -> Any:
        def launch(grid: Any, block: Any, arguments: tuple[Any, ...]) -> None:
            if "launch" in self.failures:
                raise CudaFailureError(self.failures["launch"])
            self.launched.append((name, grid, block, arguments))

        # As a RawKernel's.
        launch.num_regs, launch.shared_size_bytes = 56, 1024  # type: ignore[attr-defined]
        launch.local_size_bytes, launch.max_threads_per_block = 8, 128  # type: ignore[attr-defined]
        launch.kernel = types.SimpleNamespace(ptr=0xF00)  # type: ignore[attr-defined]
        return launch

    def module(self, path: str) -> Any:
        self.calls.append(("RawModule", (path,)))
        if "RawModule" in self.failures:
            raise CudaFailureError(self.failures["RawModule"])
        return types.SimpleNamespace(get_function=self.kernel)

    def event(self) -> Any:
        """An event that notes how many kernels were launched before it: a "millisecond" each."""
        event = types.SimpleNamespace(at=0, synchronize=self.answer("event", None))
        event.record = lambda stream: setattr(event, "at", len(self.launched))
        return event

    def stream(self, non_blocking: bool = False, priority: int | None = None) -> Any:
        assert non_blocking
        self.answer("Stream", None)(priority or 0)
        stream = contextlib.nullcontext()
        stream.ptr = 0xABC  # type: ignore[attr-defined]
        stream.synchronize = self.answer("synchronize", None)  # type: ignore[attr-defined]
        return stream


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = Fake()
    cupy: Any = types.ModuleType("cupy")
    cupy.RawModule = fake.module
    cupy.cuda = types.SimpleNamespace(
        runtime=fake.runtime(),
        Stream=fake.stream,
        Event=fake.event,
        get_elapsed_time=lambda start, stop: stop.at - start.at,
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")  # so that it is put back afterwards
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    return fake


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.fatbin"
    path.write_bytes(b"")
    return path


def refused(make: Any) -> str:
    with pytest.raises(cuda.CudaError) as caught:
        make()
    return str(caught.value)


# No device.


def test_without_cupy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "pip install -e '.[cuda13]'" in refused(cuda.CupyGpu)


@pytest.mark.parametrize(
    ("status", "remedy"), [(35, "driver"), (100, "nvidia-smi -L"), (101, "CUDA_VISIBLE_DEVICES")]
)
def test_no_driver_and_no_device(fake: Fake, image: Path, status: int, remedy: str) -> None:
    fake.failures["getDeviceCount"] = status
    said = refused(lambda: cuda.CupyGpu(kernels=image))
    assert remedy in said
    assert f"cudaError {status}" in said


def test_a_device_that_is_not_there(fake: Fake, image: Path) -> None:
    assert "CUDA sees 1" in refused(lambda: cuda.CupyGpu(3, image))


# Kernels.


def test_kernels_that_were_not_built(fake: Fake, tmp_path: Path) -> None:
    said = refused(lambda: cuda.CupyGpu(kernels=tmp_path / "none.fatbin"))
    assert "make kernels" in said
    assert "none.fatbin" in said


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (200, "a newer CUDA made"),
        (209, "not built for this device"),
        (218, "update it"),
        (222, "older"),
    ],
)
def test_kernels_that_do_not_load(fake: Fake, image: Path, status: int, remedy: str) -> None:
    fake.failures["RawModule"] = status
    said = refused(lambda: cuda.CupyGpu(kernels=image))
    assert "Fake H100 (sm_90)" in said
    assert remedy in said
    assert "make kernels" in said


def test_every_kernel_is_loaded_at_once(fake: Fake, image: Path) -> None:
    cuda.CupyGpu(kernels=image)
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"
    assert fake.named("RawModule") == [(str(image),)]


# Memory.


def test_the_region_is_pinned_portable_and_mapped(fake: Fake, image: Path) -> None:
    gpu = cuda.CupyGpu(kernels=image)
    assert gpu.map(0x1000, 8192) == 0x7000_0000_0000
    assert fake.named("hostRegister") == [(0x1000, 8192, 3)]
    assert fake.named("pointerGetAttributes") == [(0x1000,)]


def test_memory_that_the_device_does_not_see_is_not_left_pinned(fake: Fake, image: Path) -> None:
    fake.failures["pointerGetAttributes"] = 1
    said = refused(lambda: cuda.CupyGpu(kernels=image).map(0x1000, 8192, "the memory of turns"))
    assert "where the device sees the memory of turns" in said
    assert fake.named("hostUnregister") == [(0x1000,)]


@pytest.mark.parametrize("status", [1, 2, 304, 801])
def test_a_registration_that_is_refused(fake: Fake, image: Path, status: int) -> None:
    fake.failures["hostRegister"] = status
    said = refused(lambda: cuda.CupyGpu(kernels=image).map(0x1000, 300 << 20))
    assert "300 MiB" in said
    assert "ulimit -l" in said
    assert "memlock" in said


def test_what_cannot_be_pinned_is_named(fake: Fake, image: Path) -> None:
    fake.failures["hostRegister"] = 2
    said = refused(lambda: cuda.CupyGpu(kernels=image).map(0x1000, 8192, "the memory of turns"))
    assert "registering the memory of turns: the memory of turns of 1 MiB cannot be pinned" in said


def test_no_free_device_memory(fake: Fake, image: Path) -> None:
    fake.failures["malloc"] = 2
    said = refused(lambda: cuda.CupyGpu(kernels=image).allocate(1 << 30))
    assert "3 MiB free" in said
    assert "fewer slots" in said


def test_allocated_memory_is_zeroed(fake: Fake, image: Path) -> None:
    address = cuda.CupyGpu(kernels=image).allocate(640)
    # Waited for: streams that block nobody do not wait for the null stream.
    assert fake.calls[-2:] == [("memset", (address, 0, 640)), ("streamSynchronize", (0,))]


def test_what_is_copied_is_there_for_every_stream(fake: Fake, image: Path) -> None:
    cuda.CupyGpu(kernels=image).upload(0x5000, b"12345678")
    copy, order = fake.calls[-2:]
    # cudaMemcpyDefault: the address may be one of the region, which is the host's memory too.
    assert (copy[0], copy[1][0], *copy[1][2:]) == ("memcpy", 0x5000, 8, 4)
    assert order == ("streamSynchronize", (0,))


@pytest.mark.parametrize("call", ["memset", "streamSynchronize"])
def test_memory_that_cannot_be_zeroed_is_given_back(fake: Fake, image: Path, call: str) -> None:
    gpu = cuda.CupyGpu(kernels=image)
    fake.failures[call] = 719
    assert "allocating 640 bytes" in refused(lambda: gpu.allocate(640))
    assert fake.named("free")[-1] == (0x5000_0000_0000,)


def test_whichever_call_fails_nothing_is_kept(fake: Fake, image: Path) -> None:
    gpu = cuda.CupyGpu(kernels=image)

    def take(call: int) -> bool:
        """Pin and allocate, with a call that fails; whether one did."""
        fake.calls.clear()
        fake.at = call
        with contextlib.ExitStack() as stack:
            try:
                gpu.map(0x1000, 8192)
                stack.callback(gpu.unmap, 0x1000)
                stack.callback(gpu.free, gpu.allocate(640))
                return False
            except cuda.CudaError:
                return True

    for call in range(6):
        assert take(call), call
        refused_one = fake.calls[call][0]
        for keep, give_back in (("hostRegister", "hostUnregister"), ("malloc", "free")):
            kept = len(fake.named(keep)) - (refused_one == keep)
            assert len(fake.named(give_back)) == kept, refused_one
    assert not take(99)


# Launches.


def test_arguments_have_the_kernels_types(fake: Fake, image: Path) -> None:
    stream = cuda.CupyGpu(kernels=image).stream()
    stream.launch("dp_echo", 2, 128, 0x1000, 0x5000_0000_0000, 4096, 64)
    ((name, grid, block, arguments),) = fake.launched
    assert (name, grid, block) == ("dp_echo", (2,), (128,))
    assert [type(value) for value in arguments] == [np.uint64, np.uint64, np.uint32, np.uint32]
    assert [int(value) for value in arguments] == [0x1000, 0x5000_0000_0000, 4096, 64]


@pytest.mark.parametrize(
    ("status", "told"), [(700, "touched memory"), (716, "a kernel failed"), (719, "failed")]
)
def test_a_kernel_that_fails(fake: Fake, image: Path, status: int, told: str) -> None:
    stream = cuda.CupyGpu(kernels=image).stream()
    fake.failures["synchronize"] = status
    said = refused(stream.wait)
    assert told in said
    assert "cannot use the device any more" in said


def test_whether_a_stream_is_done(fake: Fake, image: Path) -> None:
    stream = cuda.CupyGpu(kernels=image).stream()
    assert stream.is_done()
    fake.query = 600
    assert not stream.is_done()
    assert fake.named("streamQuery") == [(0xABC,), (0xABC,)]
    assert fake.named("synchronize") == []


def test_asking_for_the_end_of_a_kernel_that_failed_raises(fake: Fake, image: Path) -> None:
    stream = cuda.CupyGpu(kernels=image).stream()
    fake.query = fake.failures["synchronize"] = 719
    assert "a kernel failed" in refused(stream.is_done)
    del fake.failures["synchronize"]  # of an error that is told of once
    assert "a kernel failed" in refused(stream.is_done)


@pytest.mark.parametrize("one_priority", [False, True])
def test_an_urgent_stream_goes_before_the_others(
    fake: Fake, image: Path, one_priority: bool
) -> None:
    """Where CuPy can make one; what it is asked for is below what any device has."""
    if one_priority:  # as CuPy 13
        sys.modules["cupy"].cuda.Stream = lambda non_blocking=False: fake.stream(non_blocking)
    gpu = cuda.CupyGpu(kernels=image)
    assert gpu.stream(urgent=True).handle == 0xABC
    gpu.stream()
    assert fake.named("Stream") == [(0 if one_priority else -100,), (0,)]


def test_a_stream_that_cannot_be_made(fake: Fake, image: Path) -> None:
    fake.failures["Stream"] = 2
    gpu = cuda.CupyGpu(kernels=image)
    for urgent in (False, True):
        assert "making a stream" in refused(lambda urgent=urgent: gpu.stream(urgent))


def test_an_error_that_nobody_knows_keeps_its_own_words(fake: Fake, image: Path) -> None:
    stream = cuda.CupyGpu(kernels=image).stream()
    fake.failures["launch"] = 999
    assert "cudaError 999" in refused(lambda: stream.launch("dp_echo", 1, 1, 0x1000))


def test_a_mistake_of_our_own_is_not_explained_away(fake: Fake, image: Path) -> None:
    gpu = cuda.CupyGpu(kernels=image)
    with pytest.raises(TypeError):
        gpu.upload(0x1000, None)  # type: ignore[arg-type]


def test_the_driver_is_handed_what_cupy_has(fake: Fake, image: Path) -> None:
    fake.devices = 3
    sys.modules["cupy"].cuda.runtime = fake.runtime()
    gpu = cuda.CupyGpu(2, image)
    assert gpu.driver == "libcuda.so.1"
    assert gpu.stream().handle == 0xABC
    assert gpu.function("dp_admission_tick") == 0xF00
    before = len(fake.named("setDevice"))
    gpu.make_current()
    assert fake.named("setDevice")[before:] == [(2,)]


def test_a_device_that_cannot_be_made_current(fake: Fake, image: Path) -> None:
    gpu = cuda.CupyGpu(kernels=image)
    fake.failures["setDevice"] = 201
    assert "start the runtime again" in refused(gpu.make_current)


# Measuring.


def test_what_a_kernel_takes_is_its_machine_codes(fake: Fake, image: Path) -> None:
    assert cuda.CupyGpu(kernels=image).resources("dp_echo") == (56, 1024, 8, 128)


def test_the_driver_says_the_occupancy_where_cupy_can_ask(fake: Fake, image: Path) -> None:
    gpu = cuda.CupyGpu(kernels=image)
    assert gpu.resident_blocks("dp_echo", 128) is None
    ask = fake.answer("occupancy", 16)
    driver = types.SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=ask)
    sys.modules["cupy"].cuda.driver = driver
    assert gpu.resident_blocks("dp_echo", 128) == 16
    assert fake.named("occupancy") == [(0xF00, 128, 0)]


def test_a_time_is_of_the_work_and_not_of_what_came_before(fake: Fake, image: Path) -> None:
    gpu = cuda.CupyGpu(kernels=image)
    stream = gpu.stream()

    def launch(times: int) -> None:
        for _ in range(times):
            stream.launch("dp_echo", 1, 1, 0x1000)

    assert gpu.elapsed_us(stream, lambda: launch(3), lambda: launch(5)) == 3000
    assert len(fake.launched) == 8


def test_a_copy_goes_to_the_device_in_the_streams_order(fake: Fake, image: Path) -> None:
    gpu = cuda.CupyGpu(kernels=image)
    gpu.copy(gpu.stream(), 0x5000, 0x1000, 640)
    assert fake.named("memcpyAsync") == [(0x5000, 0x1000, 640, 1, 0xABC)]


def test_more_kernels_are_launched_by_name(fake: Fake, image: Path, tmp_path: Path) -> None:
    gpu = cuda.CupyGpu(kernels=image)
    gpu.more_kernels(tmp_path / "more.fatbin", ("dp_bench_read",))
    assert fake.named("RawModule")[-1] == (str(tmp_path / "more.fatbin"),)
    gpu.stream().launch("dp_bench_read", 1, 1, 0x1000)
    assert fake.launched[-1][0] == "dp_bench_read"
    fake.failures["RawModule"] = 209
    assert "not built for this device" in refused(lambda: gpu.more_kernels(image, ("x",)))


# Attaching.


def test_a_manifest_that_asks_for_a_device_needs_who_has_one(tmp_path: Path) -> None:
    """Else nobody would carry out the daemon's commands, and it would blame the device."""
    manifest = Manifest(model="m", table="device", slots=1, context=8, max_output=8, vocab_size=9)
    with pytest.raises(AttachError, match=r"attach with dataplane\.runtime\.cuda_engine"):
        attach(tmp_path / "none.sock", manifest)


class NoRoom(HostGpu):
    """A device that cannot pin the region."""

    def map(self, host_address: int, size: int, what: str = "the region") -> int:
        raise cuda.CudaError("the region cannot be pinned")


def test_a_runtime_that_cannot_start_leaves_the_daemon_as_it_was(daemon: StartDaemon) -> None:
    serving = daemon("--runtime=none")
    for _ in range(2):
        with pytest.raises(cuda.CudaError, match="cannot be pinned"):
            cuda.attach(serving.socket, DEVICE, gpu=NoRoom(None))  # type: ignore[arg-type]
        wait_until("it left", lambda: serving.stderr.count("closed the attachment") > 0)
    assert serving.health()["status"] == "no runtime"
