"""What only a GPU can show; `make test-gpu` runs this file.

Each check prints one line: passed, FAILED, or waived with the reason where there is no GPU. The
exit status is 1 when one failed. All of it ends within `LIMIT_S`. The same checks run on host
threads in `test_gpu_checks.py`, so that they are known to work before there is a GPU.
"""

import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from daemon_process import daemon_process, run
from native_region import open_region

from dataplane._native import ffi, lib
from dataplane.client import connect
from dataplane.device_table import DeviceTable
from dataplane.errors import DataplaneError
from dataplane.manifest import Manifest
from dataplane.prompt1 import Request
from dataplane.region import Region
from dataplane.runtime import DetachedError, Finish, cuda, cuda_engine
from dataplane.runtime.cuda_alone import alone
from dataplane.runtime.cuda_echo import main as cuda_echo

LIMIT_S = 100
CLAIMS = 200
REQUESTS = 50
FREE = 0
UNANSWERED = -7

Check = Callable[[cuda.Gpu], str]


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
        for _ in range(3):
            lib.dp_device_stop(native, 0)
            before = lib.dp_device_beat(native)
            on.stream.launch("dp_admission_resident", 1, 1, on.device, 2**31, 200)
            until = time.monotonic() + 5
            while lib.dp_device_beat(native) == before:
                assert time.monotonic() < until, "the heartbeat stands still"
            assert not on.stream.is_done()
            lib.dp_device_stop(native, 1)
            start = time.monotonic()
            on.stream.wait()
            assert time.monotonic() - start < 1
        return "started and stopped 3 times"


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

    with (
        tempfile.TemporaryDirectory(prefix="dataplane-gpu-") as folder,
        daemon_process(Path(folder), "--runtime=none") as daemon,
    ):
        ready = threading.Event()

        def say(text: str) -> None:
            free.append(gpu.free_memory())
            ready.set()

        arguments = (daemon.socket, 4, 64, 16, 50_000, say, gpu)
        thread = threading.Thread(target=runtime, args=arguments)
        thread.start()
        assert ready.wait(30), "the runtime was not ready"
        daemon.wait_for_status("ok")
        run(ask(daemon.address, daemon.ca))
        free.append(gpu.free_memory())
        daemon.finish()
        thread.join()
    assert free[0] == free[1], f"the device's free memory went from {free[0]} to {free[1]}"
    rest = statistics.median(took[1:])
    return f"first {took[0] * 1e6:.0f} us, later {rest * 1e6:.0f} us, memory constant"


def check_echo(gpu: cuda.Gpu) -> str:
    """`cuda-echo` answers through a daemon."""
    return _through_a_daemon(gpu, cuda_echo)


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


CHECKS: dict[str, Check] = {
    "region": check_region,
    "admission by tick": check_tick,
    "admission by a resident kernel": check_persistent,
    "stop and relaunch": check_stop,
    "abandoned claim": check_abandoned,
    "cuda-echo": check_echo,
    "engine of the host's": check_engine,
}


def run_checks(gpu: cuda.Gpu, only: tuple[str, ...] = ()) -> bool:
    """Run the checks on a device; whether none failed."""
    sound = True
    for name in only or CHECKS:
        try:
            print(f"{name}: passed: {CHECKS[name](gpu)}", flush=True)
        except Exception as error:
            sound = False
            print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
    return sound


def _give_up() -> None:
    print(f"FAILED: not done within {LIMIT_S} s", flush=True)
    os._exit(1)


def main() -> int:
    timer = threading.Timer(LIMIT_S - 5, _give_up)
    timer.daemon = True
    timer.start()
    try:
        gpu = cuda.CupyGpu()
    except DataplaneError as error:
        reason = " ".join(str(error).split())
        for name in CHECKS:
            print(f"{name}: waived: {reason}")
        return 0
    print(f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}")
    for number, text in ((86, "host native atomics"), (91, "host pointers of registered memory")):
        print(f"attribute {number} ({text}): {gpu.attribute(number)}")
    return 0 if run_checks(gpu) else 1


if __name__ == "__main__":
    sys.exit(main())
