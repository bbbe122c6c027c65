"""The runtime's pulse, on a clock of our own; and an attachment server that waits for nobody."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import StartDaemon
from daemon_process import run, until, wait_until
from native_region import CANCELLING, DONE, READY, RUNNING, WRITING, Slot, manifest
from raw_runtime import RawRuntime, manifest_line

from dataplane import attach
from dataplane._native import lib
from dataplane.attach import AttachServer
from dataplane.attachment import Attachment, Place
from dataplane.region import create_region

MAX_STEP_MS = 5000


class Patient:
    """An attachment whose runtime is played by the test, at any pace."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self.header = attachment.region.native.header
        self.now = time.monotonic()

    def beat(self) -> None:
        self.header.heartbeat.value += 1

    def step(self) -> None:
        self.header.step.value += 1

    def after(self, seconds: float) -> str | None:
        """Examine it so much later."""
        self.now += seconds
        return self.attachment.examine(self.now)

    def live(self, seconds: float, step: bool = False) -> str | None:
        """Let time pass with a heartbeat every half second; why it has to be dropped, or None."""
        for _ in range(round(seconds / 0.5)):
            self.beat()
            if step:
                self.step()
            why = self.after(0.5)
            if why:
                return why
        return None

    def hold(self, state: int) -> Slot:
        """Bring a slot to a state."""
        return Slot(self.attachment.region, state)


def make_attachment(max_step_ms: int = MAX_STEP_MS) -> Attachment:
    stated = manifest(max_step_ms=max_step_ms)
    return Attachment(1, stated, create_region(stated, 1, listeners=1), None, os.getpid())


@pytest.fixture
def patient() -> Iterator[Patient]:
    attachment = make_attachment()
    yield Patient(attachment)
    attachment.close()


# ---------------------------------------------------------------- heartbeat


def test_the_first_beat_means_ready(patient: Patient) -> None:
    assert patient.after(0.5) is None
    assert not patient.attachment.ready
    patient.beat()
    assert patient.after(0.5) is None
    assert patient.attachment.ready


def test_a_runtime_has_two_minutes_to_load(patient: Patient) -> None:
    assert patient.after(119.0) is None
    why = patient.after(2.0)
    assert why == "it was not ready within 120 s"


def test_a_late_first_beat_counts_from_then(patient: Patient) -> None:
    assert patient.after(119.0) is None
    patient.beat()
    assert patient.after(0.5) is None
    assert patient.live(20.0) is None


def test_ten_seconds_without_a_beat_end_it(patient: Patient) -> None:
    patient.beat()
    assert patient.after(0.5) is None
    assert patient.after(9.9) is None
    assert patient.after(0.2) == "its heartbeat stood still for 10 s"


def test_one_beat_in_time_is_enough(patient: Patient) -> None:
    for _ in range(5):
        patient.beat()
        assert patient.after(0.5) is None
        assert patient.after(9.0) is None


def test_two_seconds_without_a_beat_are_red() -> None:
    place = Place("default")
    assert not place.is_responsive()
    attachment = place.current = make_attachment()
    patient = Patient(attachment)
    assert not place.is_responsive()
    patient.beat()
    patient.now = time.monotonic() - 1.0
    patient.after(0.0)
    assert place.is_responsive()
    patient.beat()
    patient.now = time.monotonic() - 2.1
    patient.after(0.0)
    assert not place.is_responsive()
    patient.beat()
    patient.now = time.monotonic()
    patient.after(0.0)
    assert place.is_responsive()
    attachment.close()


# ---------------------------------------------------------------- step


@pytest.mark.parametrize("state", [READY, RUNNING, CANCELLING])
def test_a_step_that_stands_still_with_work_ends_it(patient: Patient, state: int) -> None:
    assert patient.live(10.0) is None
    patient.hold(state)
    assert patient.live(5.0) is None
    assert patient.live(1.5) == "no step for 5000 ms with work in its slots"


@pytest.mark.parametrize("state", [None, WRITING, DONE])
def test_an_idle_engine_need_not_step(patient: Patient, state: int | None) -> None:
    if state is not None:
        patient.hold(state)
    assert patient.live(60.0) is None


def test_steps_keep_a_long_request_alive(patient: Patient) -> None:
    patient.hold(RUNNING)
    assert patient.live(60.0, step=True) is None
    assert patient.live(6.5) is not None


def test_before_it_is_ready_nothing_is_asked_of_it(patient: Patient) -> None:
    patient.hold(READY)
    assert patient.after(60.0) is None


def test_work_that_has_just_come_does_not_stand_still() -> None:
    """The pulse is read at intervals; what was idle until the last reading is not late yet."""
    attachment = make_attachment(max_step_ms=100)
    patient = Patient(attachment)
    assert patient.live(5.0) is None
    patient.hold(READY)
    patient.beat()
    assert patient.after(0.25) is None
    patient.step()
    assert patient.after(0.25) is None
    assert patient.after(0.25) == "no step for 100 ms with work in its slots"
    attachment.close()


def test_work_that_comes_and_goes_is_no_stall() -> None:
    attachment = make_attachment(max_step_ms=1000)
    patient = Patient(attachment)
    assert patient.live(1.0) is None
    for _ in range(20):
        slot = patient.hold(RUNNING)
        assert patient.live(0.5) is None
        patient.step()
        for event in (lib.DP_FINISH, lib.DP_RELEASE):
            assert lib.dp_apply(*slot.handle, event) >= 0
        assert patient.live(0.5) is None
    attachment.close()


# ---------------------------------------------------------------- the server


class Log:
    """What an attachment server told its daemon."""

    def __init__(self) -> None:
        self.ready: list[int] = []
        self.dropped: list[tuple[int, str]] = []


Body = Callable[[AttachServer, Log], Awaitable[None]]


def serve(path: Path, body: Body) -> None:
    """Run `body` beside an attachment server."""

    async def main() -> None:
        log = Log()
        server = AttachServer(
            str(path),
            lambda attachment: log.ready.append(attachment.number),
            lambda attachment, why: log.dropped.append((attachment.number, why)),
        )
        await server.start()
        try:
            await body(server, log)
        finally:
            await server.stop()
        assert not path.exists()

    run(main())


async def answer(runtime: RawRuntime) -> dict[str, Any]:
    return await asyncio.to_thread(runtime.answer)


def test_a_silent_client_is_told_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "HANDSHAKE_S", 1.0)
    path = tmp_path / "runtime.sock"

    async def body(server: AttachServer, log: Log) -> None:
        silent = [await asyncio.to_thread(RawRuntime, path) for _ in range(20)]
        silent[0].say(manifest_line()[:30])
        start = time.monotonic()
        with contextlib.closing(RawRuntime(path)) as good:
            good.say(manifest_line())
            assert (await answer(good))["attachment"] == 1
            assert time.monotonic() - start < 0.9
        for runtime in silent:
            assert (await answer(runtime))["error"] == "no whole line within 1 s"
            assert runtime.is_closed()
            runtime.close()

    serve(path, body)


def test_the_daemon_hears_of_every_end(tmp_path: Path) -> None:
    path = tmp_path / "runtime.sock"

    async def body(server: AttachServer, log: Log) -> None:
        with contextlib.closing(RawRuntime(path)) as loading:
            loading.say(manifest_line())
            await answer(loading)
        await until("it is gone", lambda: server.places["default"].current is None)
        with contextlib.closing(RawRuntime(path)) as runtime:
            runtime.say(manifest_line())
            await answer(runtime)
            assert server.places["default"].current is not None
            server.places["default"].current.region.native.header.heartbeat.value += 1
            await until("it is ready", lambda: log.ready == [2])
        await until("it is gone", lambda: len(log.dropped) == 2)
        assert log.dropped == [(n, "the runtime closed the attachment") for n in (1, 2)]
        assert server.places["default"].current is None

    serve(path, body)


def test_a_daemon_that_fails_at_an_end_takes_the_next_runtime(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "runtime.sock"

    def fail(attachment: Attachment, why: str) -> None:
        raise ValueError("of its own")

    async def main() -> None:
        server = AttachServer(str(path), lambda attachment: None, fail)
        await server.start()
        held = len(os.listdir("/proc/self/fd"))
        for number in (1, 2, 3):
            with contextlib.closing(RawRuntime(path)) as runtime:
                runtime.say(manifest_line())
                assert (await answer(runtime))["attachment"] == number
            await until("it is gone", lambda: server.places["default"].current is None)
        await until("nothing is held", lambda: len(os.listdir("/proc/self/fd")) == held)
        await server.stop()

    run(main())
    assert "of its own" in caplog.text


def test_the_end_of_the_daemon_ends_the_attachment(tmp_path: Path) -> None:
    path = tmp_path / "runtime.sock"
    runtimes: list[RawRuntime] = []

    async def body(server: AttachServer, log: Log) -> None:
        runtimes.append(RawRuntime(path))
        runtimes[0].say(manifest_line())
        await answer(runtimes[0])

    serve(path, body)
    assert runtimes[0].is_closed()
    runtimes[0].close()


def test_the_readiness_probe_follows_the_heartbeat(daemon: StartDaemon) -> None:
    """A bundled runtime that hangs turns the probe red, and it recovers."""
    process = daemon("--runtime=echo", "--slots=2")
    (runtime,) = process.children()
    assert process.get("/readyz")[0] == 200
    os.kill(runtime, signal.SIGSTOP)
    start = time.monotonic()
    wait_until("the probe is red", lambda: process.get("/readyz")[0] == 503)
    assert 1.5 < time.monotonic() - start < 5.0
    assert process.health()["status"] == "ok"  # Not dropped yet.
    os.kill(runtime, signal.SIGCONT)
    wait_until("the probe is green", lambda: process.get("/readyz")[0] == 200)
