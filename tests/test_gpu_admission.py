"""The admission thread (`native/gpu/admission_loop.c`) on a driver that runs the kernels on host
threads: what it carries out, what it says when a call of the driver fails, and how it ends."""

import contextlib
import ctypes
import os
import select
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_programs
import pytest
from daemon_process import wait_until
from gpu_checks import Mapped, mapped
from host_gpu import HostGpu, Library
from native_region import open_region

from bench import gpu_parts
from bench.results import Form
from dataplane._native import lib
from dataplane.device_table import DeviceTable
from dataplane.prompt1 import Request
from dataplane.runtime import cuda, cuda_admission
from dataplane.runtime.cuda_admission import Admission
from dataplane.runtime.cuda_alone import alone
from dataplane.slots import UNANSWERED

FREE = 0
TICK, RESIDENT = "dp_admission_tick", "dp_admission_resident"
BOTH = pytest.mark.parametrize("stays", [False, True], ids=["tick", "persistent"])
FAILED = ("a kernel failed", "CUDA_ERROR_LAUNCH_FAILED, 719: unspecified launch failure")

pytestmark = pytest.mark.skipif(
    shutil.which(gpu_programs.cxx()) is None, reason="no C++ compiler here"
)


@pytest.fixture
def gpu(library: Library) -> HostGpu:
    return HostGpu(library)


@pytest.fixture
def on(gpu: HostGpu) -> Iterator[Mapped]:
    with mapped(gpu) as found:
        yield found


def made(
    on: Mapped, stays: bool, daemon: int = -1, work: int = -1, gpu: cuda.Gpu | None = None
) -> Admission:
    return Admission(gpu or on.gpu, on.stream, on.region, on.device, stays, daemon, work)


def gpu_of(on: Mapped) -> HostGpu:
    assert isinstance(on.gpu, HostGpu)
    return on.gpu


@contextlib.contextmanager
def running(on: Mapped, stays: bool, daemon: int = -1, work: int = -1) -> Iterator[Admission]:
    admission = made(on, stays, daemon, work)
    admission.start()
    try:
        yield admission
    finally:
        gpu_of(on).get_stuck(False)
        assert admission.end()


def claim(on: Mapped, owner: int = 1, answer_ms: int = 900) -> int:
    """Claim a slot and let it go; the slot, or a status."""
    table = DeviceTable(on.region, owner, answer_ms=answer_ms)
    slot = table.admit(Request(1), 1, 8)
    if slot >= 0:
        assert table.let_go(slot, table.generation) == FREE
    return slot


def is_asleep(on: Mapped) -> bool:
    return bool(on.region.native.header.runtime_sleeping.value == 1)


def wait_for_sleep(on: Mapped) -> None:
    """A resident kernel yields 200,000 times before its end: long, where others want the cores."""
    wait_until("it sleeps", lambda: is_asleep(on), within=120.0)


def is_resident(on: Mapped) -> bool:
    before = lib.dp_device_beat(on.region.native)
    time.sleep(0.01)
    return bool(lib.dp_device_beat(on.region.native) != before)


# What it carries out.


@BOTH
def test_claims_are_answered(on: Mapped, gpu: HostGpu, stays: bool) -> None:
    with running(on, stays):
        assert [claim(on) >= 0 for _ in range(50)] == [True] * 50
        wait_until("all is let go", lambda: on.words() == [FREE] * 4)
    # Both ran once before; and a tick comes before a resident kernel.
    assert gpu.launched(TICK) > 1
    assert (gpu.launched(RESIDENT) > 1) is stays


@BOTH
def test_an_engine_may_capture_a_graph_meanwhile(on: Mapped, gpu: HostGpu, stays: bool) -> None:
    with running(on, stays) as admission:
        assert claim(on) >= 0
        gpu.capture()
        try:
            assert [claim(on) >= 0 for _ in range(20)] == [True] * 20
        finally:
            gpu.capture(False)
        assert admission.error is None


@BOTH
def test_every_listener_is_served(gpu: HostGpu, stays: bool) -> None:
    # A slot for each: what one lets go of need not be back before another one claims.
    with open_region(listeners=3, slots=3, table="device") as region:
        on = Mapped(gpu, region)
        with running(on, stays):
            assert [claim(on, owner) >= 0 for owner in (3, 1, 2)] == [True] * 3
        on.close()


@BOTH
def test_a_sleeping_listener_is_rung(on: Mapped, stays: bool) -> None:
    table = DeviceTable(on.region)
    output = on.region.native.outputs[0]
    with running(on, stays):
        slot = table.admit(Request(1), 1, 8)
        wait_until("its verdict was told of", lambda: not lib.dp_device_pending(on.region.native))
        table.drain()
        assert table.sleep()
        assert table.let_go(slot, table.generation) == FREE
        assert select.select([output], [], [], 5)[0], "nobody rang"
        table.wake()


@BOTH
def test_the_engine_is_told_of_a_prompt(on: Mapped, stays: bool) -> None:
    work = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    with running(on, stays, work=work):
        table = DeviceTable(on.region)
        slot = table.admit(Request(1), 1, 8)
        assert not select.select([work], [], [], 0)[0]
        assert table.submit(slot, table.generation, b"\1\0\0\0", 0, 4) > 0
        assert select.select([work], [], [], 5)[0], "nobody told"
    os.close(work)


@BOTH
def test_with_nothing_to_do_it_sleeps(on: Mapped, gpu: HostGpu, stays: bool) -> None:
    with running(on, stays):
        assert claim(on) >= 0
        wait_until("all is let go", lambda: on.words() == [FREE] * 4)
        # The resident kernel goes when nothing was posted for a while.
        wait_for_sleep(on)
        before = gpu.calls("cuLaunchKernel")
        assert not is_resident(on)
        assert gpu.calls("cuLaunchKernel") == before
        assert claim(on) >= 0


def test_a_long_kernel_is_waited_for_and_not_asked_on_and_on(on: Mapped, gpu: HostGpu) -> None:
    with running(on, stays=False):
        waits = gpu.calls("cuStreamSynchronize")
        gpu.get_stuck()
        answers: list[int] = []
        thread = threading.Thread(target=lambda: answers.append(claim(on, answer_ms=20_000)))
        thread.start()
        wait_until("the driver waits", lambda: gpu.calls("cuStreamSynchronize") > waits)
        asked = gpu.calls("cuStreamQuery")
        time.sleep(0.05)
        assert gpu.calls("cuStreamQuery") == asked
        gpu.get_stuck(False)
        thread.join()
        assert answers[0] >= 0


@pytest.mark.parametrize("mode", cuda.MODES)
def test_claims_go_on_while_a_thread_holds_the_interpreters_lock(
    gpu: HostGpu, mode: cuda.Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_parts.compile_host(tmp_path)
    # A PyDLL's functions keep the lock: no Python runs until every claim was answered.
    holding = ctypes.PyDLL(str(tmp_path / "libgpuhost.so"))
    monkeypatch.setattr(gpu_parts, "_COUNTS", {Form.QUICK: 40})
    bench = gpu_parts.Bench(gpu, None, None, holding, Form.QUICK)
    assert gpu_parts._claims(bench, mode, 15)["claims"] == 40


# The time at which a slot was taken.

HOUR_NS = 3_600_000_000_000


@pytest.fixture
def timer(library: Library) -> Iterator[Callable[[int, int], None]]:
    """Sets how far ahead the device's timer is, in ns, and how many millionths too fast."""
    yield library.native.host_set_timer
    library.native.host_set_timer(0, 0)


def take(on: Mapped) -> tuple[int, int, int, int]:
    """Have a slot claimed, published and taken; the times of the claim, before the take, as the
    device told it, and after it."""
    host_take = gpu_of(on).library.native.host_take
    table = DeviceTable(on.region)
    claimed = time.time_ns()
    slot = table.admit(Request(1), 1, 8)
    assert table.submit(slot, table.generation, b"\1\0\0\0", 0, 4) > 0
    until = time.monotonic() + 10
    generation = ctypes.c_uint64()
    before = time.time_ns()
    while host_take(on.device, slot, ctypes.byref(generation)) < 0:
        assert time.monotonic() < until, "it is not READY"
        before = time.time_ns()
    after = time.time_ns()
    taken = on.region.native.requests[slot].taken_ns
    table.let_go(slot, table.generation)
    gpu_of(on).library.native.host_finish(on.device, slot, generation, lib.DP_FINISH_STOP)
    return claimed, before, taken, after


@pytest.mark.parametrize(
    ("stays", "ppm"),
    [(False, 0), (False, 200), (False, -200), (True, -200),
     pytest.param(True, 0, marks=pytest.mark.slow),
     pytest.param(True, 200, marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_taken_time_is_true_for_days(
    on: Mapped, stays: bool, ppm: int, timer: Callable[[int, int], None]
) -> None:
    def check() -> None:
        claimed, before, taken, after = take(on)
        # The timer was looked at after the claim; one that is too slow lost so much since.
        lost = (after - claimed) * max(0, -ppm) // 1_000_000 + 1
        assert before - lost <= taken
        assert taken < after + HOUR_NS // 2

    timer(-20 * HOUR_NS, ppm)
    with running(on, stays):
        check()
        check()
        # What a timer does in years: it is another hour away, this way or that.
        for ahead in (-19, -20, -21):
            wait_for_sleep(on)
            timer(ahead * HOUR_NS, ppm)
            check()
        check()


def test_after_a_pause_one_command_is_carried_out_before_the_clock_is_looked_at(
    on: Mapped, gpu: HostGpu
) -> None:
    table = DeviceTable(on.region)
    admission = made(on, stays=False)
    before = gpu.launched(TICK)
    time.sleep(0.15)  # the pause
    for _ in range(3):
        table.let_go_all()
    admission.start()
    wait_until("all is carried out", lambda: not lib.dp_device_pending(on.region.native))
    assert admission.end()
    assert gpu.launched(TICK) - before > 1


# Errors of the driver.


@pytest.mark.parametrize(
    ("call", "stays", "doing"),
    [
        ("cuCtxSetCurrent", False, "using the device's context on the admission thread"),
        (
            "cuThreadExchangeStreamCaptureMode",
            False,
            "using the device's context on the admission thread",
        ),
        ("cuLaunchKernel", False, f"launching {TICK}"),
        ("cuLaunchKernel", True, f"launching {TICK}"),
        ("cuStreamQuery", False, "the admission kernel on the device"),
        ("cuStreamQuery", True, "the admission kernel on the device"),
        ("cuStreamSynchronize", False, "the admission kernel on the device"),
    ],
)
def test_a_call_that_fails_ends_it_in_words(
    on: Mapped, gpu: HostGpu, call: str, stays: bool, doing: str, capfd: pytest.CaptureFixture[str]
) -> None:
    admission = made(on, stays)
    gpu.fail(call, 719)
    if call == "cuStreamSynchronize":
        gpu.get_stuck()  # else asking is enough
    admission.start()
    if call != "cuCtxSetCurrent":
        assert claim(on, answer_ms=100) == UNANSWERED or call == "cuStreamQuery"
    admission.join(10)
    assert not admission.is_alive()
    told = str(admission.error)
    assert told.startswith(doing)
    for words in FAILED:
        assert words in told
    assert told in capfd.readouterr().err
    gpu.get_stuck(False)
    on.stream.wait()


def test_a_resident_kernel_that_cannot_be_launched_again(on: Mapped, gpu: HostGpu) -> None:
    admission = made(on, stays=True)
    admission.start()
    assert claim(on) >= 0
    wait_until("the kernel is resident", lambda: is_resident(on))
    gpu.fail("cuLaunchKernel", 719)
    lib.dp_device_stop(on.region.native, 1)  # as at the end of its looks
    admission.join(10)
    assert not admission.is_alive()
    assert str(admission.error).startswith(f"launching {RESIDENT}")


@pytest.mark.parametrize(
    ("call", "doing"),
    [
        ("cuCtxGetCurrent", "asking for the device's context"),
        ("cuCtxSetCurrent", "using the device's context on the admission thread"),
        ("cuLaunchKernel", f"launching {RESIDENT}"),
        ("cuStreamQuery", "the admission kernel on the device"),
    ],
)
def test_a_call_that_fails_at_once_is_known_before_ready(
    gpu: HostGpu, call: str, doing: str
) -> None:
    gpu.fail(call, 719)
    with alone(gpu, slots=1, context=16) as runtime:
        with pytest.raises(cuda.CudaError) as caught:
            runtime.ready()
        gpu.fail(call, 0)
    assert str(caught.value).startswith(doing)
    assert FAILED[1] in str(caught.value)
    assert gpu.allocated == {}


@pytest.mark.parametrize(
    ("result", "told"),
    [(4, "shut down"), (201, "start the runtime again"), (700, "touched memory"),
     (709, "start the runtime again"), (9999, "see what CUDA says (an unknown CUDA error, 9999")],
)  # fmt: skip
def test_results_have_their_advice(on: Mapped, gpu: HostGpu, result: int, told: str) -> None:
    gpu.fail("cuLaunchKernel", result)
    with pytest.raises(cuda.CudaError) as caught:
        made(on, stays=False)
    assert told in str(caught.value)


@pytest.mark.parametrize("mode", cuda.MODES)
def test_the_engine_hears_of_it_in_its_wait(gpu: HostGpu, mode: cuda.Mode) -> None:
    with alone(gpu, mode, slots=1, context=16) as runtime:
        runtime.ready()
        assert runtime.wait(0) is False
        gpu.fail("cuLaunchKernel", 719)
        table = DeviceTable(runtime.runtime.region, answer_ms=50)
        assert table.admit(Request(1), 1, 8) == UNANSWERED
        start = time.monotonic()
        with pytest.raises(cuda.CudaError, match=r"launching .* a kernel failed"):
            runtime.wait(60)
        assert time.monotonic() - start < 30
        gpu.fail("cuLaunchKernel", 0)


def test_without_the_drivers_library_it_says_what_to_install(on: Mapped, tmp_path: Path) -> None:
    class Missing(HostGpu):
        driver = str(tmp_path / "libcuda.so.1")

    with pytest.raises(cuda.CudaError) as caught:
        made(on, stays=False, gpu=Missing(gpu_of(on).library))
    assert "install the NVIDIA driver" in str(caught.value)
    assert "cannot open shared object file" in str(caught.value)


def test_a_library_that_is_no_driver(on: Mapped) -> None:
    class NoDriver(HostGpu):
        driver = "libc.so.6"

    with pytest.raises(cuda.CudaError, match="it has no cuCtxGetCurrent"):
        made(on, stays=False, gpu=NoDriver(gpu_of(on).library))


def test_a_device_that_is_not_current_is_not_used(on: Mapped, gpu: HostGpu) -> None:
    class Elsewhere(HostGpu):
        def make_current(self) -> None:
            self.library.native.host_make_current(None)

    with pytest.raises(cuda.CudaError, match="no context of the device is current"):
        made(on, stays=False, gpu=Elsewhere(gpu.library))


# The end.


@BOTH
def test_it_ends_while_it_sleeps(on: Mapped, stays: bool) -> None:
    with running(on, stays) as admission:
        wait_for_sleep(on)
    assert not admission.is_alive()
    assert admission.error is None


@BOTH
def test_it_ends_while_claims_come(on: Mapped, stays: bool) -> None:
    ending = threading.Event()
    served: list[int] = []

    def ask() -> None:
        while not ending.is_set():
            served.append(claim(on, answer_ms=50))

    with running(on, stays) as admission:
        thread = threading.Thread(target=ask)
        thread.start()
        wait_until("claims are served", lambda: len(served) > 20)
    ending.set()
    thread.join()
    assert admission.error is None
    assert all(slot >= 0 for slot in served[:20])


def test_it_ends_a_kernel_that_is_resident(on: Mapped, gpu: HostGpu) -> None:
    with running(on, stays=True) as admission:
        assert claim(on) >= 0
        wait_until("the kernel is resident", lambda: is_resident(on))
    assert admission.error is None
    assert not is_resident(on)
    assert on.stream.is_done()


def test_what_ended_before_it_began_does_nothing(on: Mapped, gpu: HostGpu) -> None:
    admission = made(on, stays=False)
    before = gpu.calls("cuLaunchKernel")
    lib.dp_admission_end(admission._loop)
    admission.start()
    admission.join(10)
    assert not admission.is_alive()
    assert gpu.calls("cuLaunchKernel") == before


@pytest.mark.parametrize("state", ["asleep", "resident"])
def test_it_ends_when_the_daemon_does(on: Mapped, state: str) -> None:
    here, there = socket.socketpair()
    admission = made(on, state == "resident", here.fileno())
    admission.start()
    assert claim(on) >= 0
    if state == "resident":
        wait_until("the kernel is resident", lambda: is_resident(on))
    else:
        wait_for_sleep(on)
    there.close()
    admission.join(10)
    assert not admission.is_alive()
    assert admission.error is None
    here.close()


def test_a_descriptor_that_was_closed_is_not_taken_for_another(on: Mapped) -> None:
    here, there = socket.socketpair()
    number = here.fileno()
    with running(on, stays=False, daemon=number) as admission:
        here.close()
        assert there.recv(1) == b"", "the daemon does not see that the runtime left"
        other = os.eventfd(1)
        if other != number:
            os.dup2(other, number)
        assert claim(on) >= 0
        wait_for_sleep(on)
        assert claim(on) >= 0
        assert admission.is_alive()
    for fd in {other, number}:
        os.close(fd)
    there.close()


def test_a_kernel_that_hangs_is_told_of(
    on: Mapped, gpu: HostGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_admission, "END_WITHIN_S", 0.1)
    admission = made(on, stays=False)
    admission.start()
    gpu.get_stuck()
    assert claim(on, answer_ms=50) == UNANSWERED
    assert not admission.end()
    gpu.get_stuck(False)
    admission.join(10)
    assert not admission.is_alive()
