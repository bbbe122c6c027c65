"""How a CUDA runtime ends: one that could not start, one whose kernel failed, and one whose engine
does not come back.

On host threads."""

import contextlib
import functools
import gc
import os
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import gpu_programs
import pytest
from daemon_process import wait_until
from host_gpu import HostGpu, HostStream, Library
from local_device import local_device

from dataplane.device_table import DeviceTable
from dataplane.errors import AttachError, DetachedError
from dataplane.prompt1 import Request
from dataplane.runtime import cuda, cuda_watchdog
from dataplane.runtime.cuda_alone import alone
from dataplane.runtime.cuda_engine import CudaEngineRuntime
from dataplane.runtime.cuda_watchdog import Progress, Watchdog

pytestmark = pytest.mark.skipif(
    shutil.which(gpu_programs.cxx()) is None, reason="no C++ compiler here"
)


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


# One whose engine does not come back.

GRACE_S = 0.05


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why the process would have ended."""
    why: list[str] = []
    monkeypatch.setattr(cuda_watchdog, "end_process", why.append)
    monkeypatch.setattr(cuda_watchdog, "GRACE_S", GRACE_S)
    monkeypatch.setattr(cuda_watchdog, "_LOOK_S", 0.005)
    return why


class Seen(Progress):
    """Counts how often it was asked; `away_s` is added to what it answers."""

    def __init__(self, away_s: float = 0) -> None:
        super().__init__()
        self.asked = 0
        self.away_s = away_s

    def still_s(self) -> float:
        self.asked += 1
        return super().still_s() + self.away_s


class Watched:
    """An attachment and an engine as a watchdog sees them."""

    def __init__(self, work: bool, away_s: float = 0) -> None:
        self.progress = Seen(away_s)
        self.work = work
        self.asked_daemon = self.asked_work = 0
        self._daemon = os.eventfd(0)

    def fileno(self) -> int:
        self.asked_daemon += 1
        return self._daemon

    def is_working(self) -> bool:
        self.asked_work += 1
        return self.work

    def leave(self) -> None:
        """End the attachment as a daemon does."""
        os.eventfd_write(self._daemon, 1)

    @contextlib.contextmanager
    def by_watchdog(self, max_step_s: float) -> Iterator[None]:
        watchdog = Watchdog(self, self.progress, self.is_working, max_step_s)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.stop()
            os.close(self._daemon)
        assert not watchdog.is_alive()


def test_an_engine_without_work_may_be_away_for_ever(ends: list[str]) -> None:
    watched = Watched(work=False)
    with watched.by_watchdog(0):
        watched.leave()
        # It is asked for its work only once it has stood still for too long.
        wait_until("it was looked at", lambda: watched.asked_work > 5)
        assert ends == []


def test_an_engine_that_waits_for_a_kernel_is_ended(ends: list[str]) -> None:
    watched = Watched(work=False)
    with watched.by_watchdog(0), watched.progress:
        watched.leave()
        wait_until("it was ended", lambda: bool(ends))
        assert "a kernel hangs" in ends[0]


def test_an_engine_with_work_that_makes_no_step_is_ended(ends: list[str]) -> None:
    watched = Watched(work=True)
    with watched.by_watchdog(0.15):
        watched.leave()
        wait_until("it was ended", lambda: bool(ends))
        assert "made no step for 0.2 s" in ends[0]


@pytest.mark.parametrize("waits", [False, True], ids=["computes", "waits"])
def test_a_step_may_take_as_long_as_was_agreed(ends: list[str], waits: bool) -> None:
    watched = Watched(work=True)
    with watched.by_watchdog(60), watched.progress if waits else contextlib.nullcontext():
        watched.leave()
        wait_until("it was looked at", lambda: watched.progress.asked > 5)
        assert ends == []


def test_nothing_is_ended_while_the_daemon_is_there(ends: list[str]) -> None:
    watched = Watched(work=True, away_s=1e6)
    with watched.by_watchdog(0), watched.progress:
        wait_until("it was looked at", lambda: watched.asked_daemon > 5)
        assert ends == []


def test_who_slept_for_long_may_find_out_first(
    ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work and the daemon's end may come at once."""
    monkeypatch.setattr(cuda_watchdog, "GRACE_S", 0.5)
    watched = Watched(work=True, away_s=1e6)
    with watched.by_watchdog(0):
        start = time.monotonic()
        watched.leave()
        wait_until("it was ended", lambda: bool(ends))
        assert time.monotonic() - start > 0.5


def test_every_wait_for_the_device_counts(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    with local_device(library, slots=2) as on:
        cuda_runtime = on.runtime.cuda
        progress = cuda_runtime._progress
        seen: dict[str, int] = {}

        def noting(owner: object, name: str, what: str) -> None:
            call = getattr(owner, name)

            def note() -> object:
                seen[what] = progress.calls
                return call()

            monkeypatch.setattr(owner, name, note)

        stream = HostStream(on.gpu)
        noting(stream, "is_done", "follow")
        noting(stream, "wait", "wait_for")
        noting(on.runtime._stream, "wait", "turn")
        noting(cuda_runtime._owned, "close", "detach")
        cuda_runtime.follow(stream)
        cuda_runtime.wait_for(stream)
        on.ask([1])
        assert len(on.runtime.take(0)) == 1
        assert progress.calls == 0
    assert seen == {"follow": 1, "wait_for": 1, "turn": 1, "detach": 1}


def test_what_an_engine_does_is_written_down(library: Library) -> None:
    with local_device(library, slots=2) as on:
        cuda_runtime = on.runtime.cuda
        moves: list[None] = []
        cuda_runtime._progress.move = lambda: moves.append(None)  # type: ignore[method-assign]
        on.runtime.step()
        assert len(moves) == 1
        cuda_runtime.wait(0)
        assert len(moves) == 2
        cuda_runtime.wait_for(HostStream(on.gpu))
        assert len(moves) == 4


def test_an_engine_at_work_on_the_host_finds_out_by_itself(
    library: Library, ends: list[str]
) -> None:
    with local_device(library, slots=2) as on:
        on.ask([1, 2, 3])
        (request,) = on.runtime.take(0)
        watchdog: Any = on.runtime.cuda._watchdog
        watchdog._progress = seen = Seen()
        on.leave()
        wait_until("the watchdog looked", lambda: seen.asked > 5)
        assert ends == []
        request.emit([9])
        with pytest.raises(DetachedError):
            on.runtime.take(0)
