"""What only a GPU can show, check by check; `gpu_runs.py` (`make test-gpu`) runs them.

The same checks run on host threads in `test_gpu_checks.py`, so that they are known to work before
there is a GPU.
"""

import contextlib
import importlib.util
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from daemon_process import daemon_process, run
from host_gpu import HostGpu
from native_region import open_region

from dataplane._native import ffi, lib
from dataplane.apart import run_apart
from dataplane.client import connect
from dataplane.device_table import DeviceTable
from dataplane.manifest import Manifest
from dataplane.prompt1 import Request
from dataplane.region import Region
from dataplane.runtime import DetachedError, Finish, cuda, cuda_engine
from dataplane.runtime.cuda_alone import alone
from dataplane.runtime.cuda_echo import main as cuda_echo

CLAIMS = 200
REQUESTS = 50
FREE = 0
UNANSWERED = -7
_SANITIZED = "abandoned claim"
_SANITIZER_WITHIN_S = 120

Check = Callable[[cuda.Gpu], str]


class WaivedError(Exception):
    """This cannot be checked here; the text says why."""


class Mapped:
    """A region and its words on a device, without a daemon."""

    def __init__(self, gpu: cuda.Gpu, region: Region) -> None:
        self.gpu = gpu
        self.region = region
        self.host = int(ffi.cast("uintptr_t", region.native.base))
        self.mapped = gpu.map(self.host, region.bytes)
        size = lib.dp_device_bytes(region.native)
        self.device = gpu.allocate(size)
        image = ffi.new("char[]", size)
        lib.dp_device_image(region.native, self.mapped, self.device, image)
        gpu.upload(self.device, bytes(ffi.buffer(image)))
        self.stream = gpu.stream()

    def words(self) -> list[int]:
        """Return the states of the slots, as they are in device memory."""
        size = self.region.slots * 8
        at = self.device + lib.dp_device_bytes(self.region.native) - size
        data = self.gpu.download(at, size)
        return [data[i] for i in range(0, size, 8)]

    def tick(self) -> None:
        self.stream.launch("dp_admission_tick", 1, 1, self.device, 4096)
        self.stream.wait()

    def close(self) -> None:
        self.gpu.free(self.device)
        self.gpu.unmap(self.host)


@contextlib.contextmanager
def mapped(gpu: cuda.Gpu, slots: int = 4) -> Iterator[Mapped]:
    with open_region(slots=slots, table="device") as region:
        found = Mapped(gpu, region)
        try:
            yield found
        finally:
            found.close()


# The checks.


def check_region(gpu: cuda.Gpu) -> str:
    """A sealed memfd is pinned and mapped, and both sides see the same bytes."""
    with mapped(gpu) as on:
        prompt = lib.dp_prompt(on.region.native, 1)
        prompt[0] = 12345
        at = on.mapped + on.region.prompt_address(1) - on.host
        assert int.from_bytes(gpu.download(at, 4), "little") == 12345
        gpu.upload(at, (54321).to_bytes(4, "little"))
        assert prompt[0] == 54321
        same = "the host's" if on.mapped == on.host else "another than the host's"
        return f"the device's address is {same}"


def _claims(gpu: cuda.Gpu, mode: cuda.Mode) -> str:
    """Claim by the runtime's own admission thread."""
    took = []
    with alone(gpu, mode, slots=4) as runtime:
        runtime.ready()
        table = DeviceTable(runtime.runtime.region, spin_us=2000)
        for _ in range(CLAIMS):
            start = time.perf_counter_ns()
            slot = table.admit(Request(1), 1, 8)
            took.append((time.perf_counter_ns() - start) / 1000)
            assert slot >= 0, slot
            assert table.let_go(slot, table.generation) == FREE
    took.sort()
    return f"claim p50 {statistics.median(took):.1f} us, p99 {took[int(len(took) * 0.99)]:.1f} us"


def check_tick(gpu: cuda.Gpu) -> str:
    """Claims by a launch for each."""
    return _claims(gpu, "tick")


def check_persistent(gpu: cuda.Gpu) -> str:
    """Claims by a kernel that stays."""
    return _claims(gpu, "persistent")


def check_stop(gpu: cuda.Gpu) -> str:
    """A resident kernel moves its heartbeat, ends when it is told to, and goes on where it was."""
    with mapped(gpu) as on:
        native = on.region.native
        step_ns = 1 << 63
        for _ in range(3):
            lib.dp_device_stop(native, 0)
            before = lib.dp_device_beat(native)
            on.stream.launch("dp_admission_resident", 1, 1, on.device, 2**31, 200)
            until = time.monotonic() + 5
            while lib.dp_device_beat(native) == before:
                assert time.monotonic() < until, "the heartbeat stands still"
            assert not on.stream.is_done()
            step_ns = min(step_ns, _least_step(native))
            lib.dp_device_stop(native, 1)
            start = time.monotonic()
            on.stream.wait()
            assert time.monotonic() - start < 1
        return f"started and stopped 3 times; the device's timer moves by {step_ns} ns or more"


def _least_step(native: Any) -> int:
    """The least by which two stamps of a resident kernel differ, over 20 ms."""
    stamps, until = set(), time.monotonic() + 0.02
    while time.monotonic() < until:
        stamps.add(int(lib.dp_device_beat(native)))
    ordered = sorted(stamps)
    return min((late - soon for soon, late in pairwise(ordered)), default=1 << 63)


def check_abandoned(gpu: cuda.Gpu) -> str:
    """A claim that is answered too late is refused within 1 s, and its slot comes back."""
    with mapped(gpu) as on:
        table = DeviceTable(on.region)
        start = time.monotonic()
        assert table.admit(Request(1), 1, 8) == UNANSWERED
        took = time.monotonic() - start
        assert took < 1
        on.tick()
        assert on.words() == [FREE] * on.region.slots
        return f"refused after {took * 1000:.0f} ms"


Runtime = Callable[[Path, int, int, int, int, Callable[[str], None], cuda.Gpu], object]
"""Serves on a socket, with slots, context, max_output and vocabulary as told; says when it is
ready; ends with its daemon."""


def _through_a_daemon(gpu: cuda.Gpu, runtime: Runtime) -> str:
    """Have an echo runtime answer, the first request as the later ones; the device's free memory
    has to stay what it was when it was ready."""
    free: list[int] = []
    took: list[float] = []

    async def ask(address: str, ca: Path) -> None:
        async with connect(address, ca) as client:
            for i in range(REQUESTS):
                start = time.monotonic()
                result = await (await client.submit([i, 5, 6])).result()
                took.append(time.monotonic() - start)
                assert (result.status, result.token_ids) == (200, [i, 5, 6])

    failed: list[BaseException] = []
    ready = threading.Event()

    def say(text: str) -> None:
        free.append(gpu.free_memory())
        ready.set()

    def serve(socket: Path) -> None:
        try:
            runtime(socket, 4, 64, 16, 50_000, say, gpu)
        except BaseException as error:
            failed.append(error)
            ready.set()

    with (
        tempfile.TemporaryDirectory(prefix="dataplane-gpu-") as folder,
        daemon_process(Path(folder), "--runtime=none") as daemon,
    ):
        thread = threading.Thread(target=serve, args=(daemon.socket,), daemon=True)
        thread.start()
        assert ready.wait(30), "the runtime was not ready within 30 s"
        _raise(failed)
        daemon.wait_for_status("ok")
        try:
            run(ask(daemon.address, daemon.ca))
        except BaseException:
            _raise(failed)  # which is why
            raise
        free.append(gpu.free_memory())
        daemon.finish()
        thread.join(20)
        assert not thread.is_alive(), "the runtime does not end with its daemon"
        _raise(failed)
    rest = statistics.median(took[1:])
    times = f"first {took[0] * 1e6:.0f} us, later {rest * 1e6:.0f} us"
    assert free[0] == free[1], f"{times}; free memory went from {free[0]} to {free[1]} bytes"
    return f"{times}, memory constant"


def _raise(failed: list[BaseException]) -> None:
    if failed:
        raise failed[0]


def check_echo(gpu: cuda.Gpu) -> str:
    """`cuda-echo` answers through a daemon."""
    return _through_a_daemon(gpu, cuda_echo)


def check_echo_beside(gpu: cuda.Gpu) -> str:
    """The same while the admission kernel stays: two kernels of one process at once."""
    return _through_a_daemon(gpu, partial(cuda_echo, mode="persistent"))


def _engine(
    socket: Path,
    slots: int,
    context: int,
    max_output: int,
    vocab_size: int,
    say: Callable[[str], None],
    gpu: cuda.Gpu,
) -> None:
    """Echo from Python, a launch a turn."""
    manifest = Manifest(
        model="engine", table="device", slots=slots, context=context, max_output=max_output,
        vocab_size=vocab_size,
    )  # fmt: skip
    with (
        contextlib.suppress(DetachedError),
        cuda_engine.attach(socket, manifest, gpu=gpu) as runtime,
    ):
        runtime.ready()
        say("ready")
        while True:
            for request in runtime.take(0.1):
                request.emit(request.tokens)
                request.finish(Finish.STOP)
            runtime.step()


def check_engine(gpu: cuda.Gpu) -> str:
    """An engine of the host's answers through a daemon."""
    return _through_a_daemon(gpu, _engine)


@contextlib.contextmanager
def _capturing(gpu: cuda.Gpu, stream: cuda.Stream) -> Iterator[None]:
    """Capture what this thread launches on a stream, in CUDA's default mode, PyTorch's too."""
    if isinstance(gpu, HostGpu):
        gpu.capture()
        try:
            yield
        finally:
            gpu.capture(False)
        return
    native: Any = getattr(stream, "native", None)
    if native is None:
        raise WaivedError(f"{type(gpu).__name__} captures nothing")
    native.begin_capture(0)  # cudaStreamCaptureModeGlobal
    try:
        yield
    finally:
        native.end_capture()  # raises where the capture was spoilt


def check_capture(gpu: cuda.Gpu) -> str:
    """The engine captures a graph while the admission thread answers claims."""
    claims = 20
    with alone(gpu, slots=4) as runtime:
        runtime.ready()
        table = DeviceTable(runtime.runtime.region, spin_us=2000)
        stream = gpu.stream()
        with _capturing(gpu, stream):
            if not isinstance(gpu, HostGpu):
                stream.launch("dp_admission_tick", 1, 1, runtime.device, 0)
            for _ in range(claims):
                slot = table.admit(Request(1), 1, 8)
                assert slot >= 0, f"a claim during the capture was answered with {slot}"
                assert table.let_go(slot, table.generation) == FREE
        runtime.wait_for_news(0)  # raises what ended admission
    return f"{claims} claims during the capture"


# PyTorch.


def _small_batcher(device: Any) -> Any:
    """A small network of random weights, the same on every device."""
    from dataplane.runtime.gguf_weights import Shape
    from dataplane.runtime.smollm2_torch import TorchBatcher

    shape = Shape(
        layers=2, width=64, hidden=96, heads=6, kv_heads=2, head_size=16, rotary=16,
        rotary_base=10_000.0, epsilon=1e-5, vocab_size=50, trained_context=128,
    )  # fmt: skip
    numbers = np.random.default_rng(1)
    weights = {
        name: (numbers.normal(0, 0.2, size) + (len(size) == 1)).astype(np.float32)
        for name, size in shape.tensors()
    }
    return TorchBatcher(shape, weights, 3, 100, 16, device)


def _logits(batcher: Any, runtime: Any) -> Any:
    """Read a prompt where it lies, run a chunk and a step; the logits of both, and an id drawn."""
    region = runtime.runtime.region
    ids = list(range(3, 15))
    lib.dp_prompt(region.native, 1)[0 : len(ids)] = ids
    found = []
    with batcher.reading(region, runtime.mapped):
        batcher.begin(1, 0.8, 0.9, 10, 7)
        assert batcher.prefill_chunk(1, region.prompt_address(1), 0, len(ids), True) == 0
        first = batcher.sample(1, 0)
        found.append(batcher.network.logits[1].float().cpu().numpy().copy())
        assert batcher.decode([1], [5], [len(ids)]) == 0
        batcher.begin(1, 0.0, 0.0, 0, 0)
        batcher.sample(1, 0)
        found.append(batcher.network.logits[1].float().cpu().numpy().copy())
        batcher.forget(1)
    assert 0 <= first < found[0].size
    return np.stack(found)


def check_torch(gpu: cuda.Gpu) -> str:
    """Captured steps give what they give eagerly, and about what the CPU gives."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("gguf") is None:
        raise WaivedError("PyTorch is not installed with what the extra `torch` names")
    import torch

    on_host = isinstance(gpu, HostGpu)
    if not on_host and not torch.cuda.is_available():
        raise WaivedError(f"PyTorch {torch.__version__} sees no GPU")
    with alone(gpu, slots=3, context=64) as runtime:
        there = _small_batcher(torch.device("cpu" if on_host else "cuda"))
        captured = _logits(there, runtime)
        there._steps.clear()
        eager = _logits(there, runtime)
        here = _logits(_small_batcher(torch.device("cpu")), runtime)
        size = float(np.abs(here).max())
        by_capture = float(np.abs(captured - eager).max())
        by_device = float(np.abs(captured - here).max())
        assert by_capture <= 0.02 * size, f"captured and eager logits differ by {by_capture:g}"
        assert by_device <= 0.1 * size, f"the GPU's and the CPU's differ by {by_device:g}"
    return (
        f"logits of up to {size:.2f}: captured against eager {by_capture:g}, against the CPU"
        f" {by_device:.3g}"
    )


# compute-sanitizer.


def check_sanitizer(gpu: cuda.Gpu) -> str:
    """Admission's kernels touch no memory that is not theirs."""
    if isinstance(gpu, HostGpu):
        raise WaivedError("host threads have sanitizers of their own: `make tsan`")
    tool = shutil.which(
        "compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin"
    )
    if tool is None:
        raise WaivedError("there is no compute-sanitizer on the PATH")
    program = str(Path(__file__).with_name("gpu_runs.py"))
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--report-api-errors", "no"]
    ended = run_apart(
        [*command, sys.executable, program, "--check", _SANITIZED], _SANITIZER_WITHIN_S
    )
    print(ended.output)
    summary = [line for line in ended.output.splitlines() if "ERROR SUMMARY" in line]
    said = f"memcheck of {_SANITIZED!r}: {' '.join(summary).lstrip('= ')}"
    assert ended.why is None, f"{said}, {ended.why}"
    assert ended.found["state"] == "passed", f"{said}, {ended.found['said']}"
    return said


CHECKS: dict[str, Check] = {
    "region": check_region,
    "admission by tick": check_tick,
    "admission by a resident kernel": check_persistent,
    "stop and relaunch": check_stop,
    "abandoned claim": check_abandoned,
    "capture beside admission": check_capture,
    "cuda-echo": check_echo,
    "cuda-echo beside a resident kernel": check_echo_beside,
    "engine of the host's": check_engine,
    "a model on PyTorch": check_torch,
    "compute-sanitizer": check_sanitizer,
}
OF_THE_DEVICE_ALONE = ("a model on PyTorch", "compute-sanitizer")
"""What no stand-in has."""
