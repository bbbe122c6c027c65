"""A daemon and an engine of the host's on the `device` table, end to end, on host threads; and the
bundled engine's loop, which has to answer there as it does on the `host` table."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import StartDaemon
from daemon_process import DaemonProcess, run, wait_until
from host_gpu import HostGpu, Library
from native_region import manifest

from dataplane._native import ffi
from dataplane.client import Answer, ResetError, connect
from dataplane.runtime import DetachedError, Finish, attach, cuda_engine, smollm2

SLOTS, MAX_OUTPUT, VOCABULARY = 3, 40, 50_000
STOP_ID = 7

pytestmark = pytest.mark.slow


@pytest.fixture
def bare(daemon: StartDaemon) -> DaemonProcess:
    return daemon("--runtime=none")


@contextlib.contextmanager
def serving(daemon: DaemonProcess, runtime: Any, loop: Callable[[], None]) -> Iterator[None]:
    """Run an engine's loop in a thread, until the daemon is asked to go."""
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            while True:
                loop()
        except DetachedError:
            pass
        except BaseException as error:
            failed.append(error)
        finally:
            runtime.detach()

    runtime.ready()
    engine = threading.Thread(target=serve)
    engine.start()
    try:
        daemon.wait_for_status("ok")
        yield
        daemon.wait_idle()
    finally:
        daemon.finish()
        engine.join(20)
    assert not engine.is_alive()
    assert failed == []


def on_device(daemon: DaemonProcess, library: Library, mode: Any = "tick") -> Any:
    stated = manifest(
        table="device", slots=SLOTS, max_output=MAX_OUTPUT, vocab_size=VOCABULARY, max_step_ms=5000
    )
    return cuda_engine.attach(daemon.socket, stated, gpu=HostGpu(library), mode=mode)


def on_host(daemon: DaemonProcess) -> Any:
    stated = manifest(slots=SLOTS, max_output=MAX_OUTPUT, vocab_size=VOCABULARY, max_step_ms=5000)
    return attach(daemon.socket, stated)


# An engine that echoes, an id a step.


class Echo:
    """The loop that an engine in Python is."""

    def __init__(self, runtime: Any, gate: threading.Event | None = None) -> None:
        self.runtime = runtime
        self.gate = gate
        self.left: dict[Any, list[int]] = {}
        self.cancelled = 0

    def loop(self) -> None:
        for request in self.runtime.take(0 if self.left else 0.1):
            self.left[request] = request.tokens.tolist()[: request.max_output]
        for request, left in list(self.left.items()):
            if request.cancelled:
                self.cancelled += 1
            elif left and (self.gate is None or self.gate.is_set()):
                assert request.emit([left.pop(0)])
            if request.cancelled or not left:
                reason = Finish.STOP if len(request.tokens) < request.max_output else Finish.LENGTH
                assert request.finish(reason)
                del self.left[request]
        self.runtime.step()


@pytest.mark.parametrize("mode", ["tick", "persistent"])
def test_requests_go_through(bare: DaemonProcess, library: Library, mode: str) -> None:
    async def ask() -> None:
        async with connect(bare.address, bare.ca) as client:
            for number in range(6):
                prompt = [number, 40_000, 9]
                result = await (await client.submit(prompt)).result()
                assert (result.status, result.token_ids) == (200, prompt)
                assert result.finish_reason == "stop"
            many = [await client.submit([1, 2, 3], max_output=2) for _ in range(SLOTS)]
            results = [await one.result() for one in many]
            assert [one.token_ids for one in results] == [[1, 2]] * SLOTS
            assert {one.finish_reason for one in results} == {"length"}

    runtime = on_device(bare, library, mode)
    with serving(bare, runtime, Echo(runtime).loop):
        run(ask())
        bare.wait_idle()
        assert bare.health()["completed"] == 6 + SLOTS
    assert runtime.cuda.gpu.allocated == {}
    assert runtime.cuda.gpu.mapped == {}


def test_a_client_that_goes_away_frees_its_slot(bare: DaemonProcess, library: Library) -> None:
    gate = threading.Event()

    async def ask() -> None:
        async with connect(bare.address, bare.ca) as client:
            answers = [await client.submit([1, 2]) for _ in range(SLOTS)]
            assert {one.status for one in answers} == {200}
            await asyncio.to_thread(bare.wait_for_states, *["RUNNING"] * SLOTS)
            assert (await client.submit([1])).status == 429
        # The connection closed: the engine is told, though it emits nothing.
        await asyncio.to_thread(bare.wait_idle)

    runtime = on_device(bare, library)
    echo = Echo(runtime, gate)
    with serving(bare, runtime, echo.loop):
        run(ask())
        wait_until("the engine saw it", lambda: echo.cancelled == SLOTS)
        gate.set()


def test_a_request_that_fails_is_reset(bare: DaemonProcess, library: Library) -> None:
    runtime = on_device(bare, library)

    def fail() -> None:
        for request in runtime.take(0.1):
            assert request.emit([5])
            assert request.finish(Finish.ERROR)
        runtime.step()

    async def ask() -> None:
        async with connect(bare.address, bare.ca) as client:
            answer = await client.submit([1])
            assert isinstance(answer, Answer)
            with pytest.raises(ResetError):
                await answer.result()

    with serving(bare, runtime, fail):
        run(ask())


# The bundled engine's loop.


class Sums:
    """A batcher whose answer follows from the prompt: the next id is made of the ones before."""

    slots, chunk = SLOTS, 8

    def __init__(self) -> None:
        self.state = [0] * SLOTS

    def begin(self, seq: int, temperature: float, top_p: float, top_k: int, seed: int) -> None:
        self.state[seq] = seed

    def _add(self, seq: int, token: int) -> None:
        self.state[seq] = (self.state[seq] * 31 + token + 1) % 997

    def prefill_chunk(self, seq: int, token_address: int, start: int, n: int, last: bool) -> int:
        for token in ffi.cast("int32_t *", token_address)[0:n]:
            self._add(seq, token)
        return 0

    def decode(self, seqs: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> int:
        for seq, token in zip(seqs, tokens, strict=True):
            self._add(seq, token)
        return 0

    def sample(self, seq: int, index: int) -> int:
        return STOP_ID if self.state[seq] % 23 == 0 else self.state[seq] + 1000

    def rewind(self, seq: int, position: int) -> None: ...
    def forget(self, seq: int) -> None: ...
    def complaint(self) -> str:
        return ""


async def _answers(daemon: DaemonProcess) -> list[tuple[Any, ...]]:
    """Three at a time: prompts of a chunk and of several, short answers and whole ones."""
    found = []
    async with connect(daemon.address, daemon.ca) as client:
        for number in range(8):
            asked = [
                await client.submit(
                    list(range(number, number + length)), max_output=most, seed=number + 1
                )
                for length, most in ((3, 5), (8, MAX_OUTPUT), (30, 20))
            ]
            results = [await one.result() for one in asked]
            found += [(one.token_ids, one.finish_reason, one.usage) for one in results]
    return found


def test_the_bundled_loop_answers_as_on_the_host_table(
    daemon: StartDaemon, tmp_path: Path, library: Library
) -> None:
    found = []
    for table in ("host", "device"):
        serves = daemon("--runtime=none")
        runtime = on_host(serves) if table == "host" else on_device(serves, library)
        said: list[str] = []
        engine = smollm2.Engine(runtime, Sums(), [STOP_ID], said.append)
        with serving(serves, runtime, engine.turn):
            found.append(run(_answers(serves)))
        assert said == []
    assert found[0] == found[1]
    assert {reason for _, reason, _ in found[0]} == {"stop", "length"}
