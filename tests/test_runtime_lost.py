"""The runtime is killed, in whatever state a request is; so is the daemon."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from conftest import StartDaemon
from daemon_process import DaemonProcess, command, daemon_process, run, wait_until
from puppet_runtime import DETACHED, RuntimeProcess, runtime_process
from raw_runtime import puppet, serve_one

from dataplane.client import Answer, Client, ResetError, connect
from dataplane.errors import ResetCode
from dataplane.prompt1 import Request, encode_request

PROMPT = [1, 2, 3]
HALF = encode_request(Request(n_tokens=3)) + b"\1\0\0\0\2"

Scene = Callable[[Client, RuntimeProcess], Awaitable[None]]


@contextlib.asynccontextmanager
async def client_of(daemon: DaemonProcess) -> AsyncIterator[Client]:
    async with connect(daemon.address, daemon.ca) as client:
        yield client


def play(daemon: DaemonProcess, scene: Scene) -> None:
    """Play a scene in which the runtime is killed; the next one serves as if nothing was."""
    with runtime_process(daemon, slots=4) as runtime:

        async def main() -> None:
            async with client_of(daemon) as client:
                await scene(client, runtime)
                daemon.wait_for_status("no runtime")
                refused = await client.submit(PROMPT)
                assert refused.status == 503
                assert "the runtime is gone" in refused.reason

        run(main())
    daemon.wait_idle()
    check_that_the_next_one_serves(daemon)


def check_that_the_next_one_serves(daemon: DaemonProcess) -> None:
    async def ask() -> list[int]:
        async with client_of(daemon) as client:
            waiting = asyncio.ensure_future(client.submit(PROMPT))
            (taken,) = await asyncio.to_thread(next_runtime.take)
            serve_one(taken, [7])
            return (await (await waiting).result()).token_ids

    with puppet(daemon) as next_runtime:
        assert run(ask()) == [7]
        daemon.wait_idle()


async def see(daemon: DaemonProcess, *states: str) -> None:
    """Wait for the states of the slots that are held, while the client goes on."""
    await asyncio.to_thread(daemon.wait_for_states, *states)


async def lose(answer: Answer) -> ResetError:
    """The end of an answer that was broken off."""
    with pytest.raises(ResetError) as caught:
        await answer.result()
    return caught.value


# ---------------------------------------------------------------- a request in each state


def test_writing(bare_daemon: DaemonProcess) -> None:
    """No 200 went out yet, so this is a refusal, and worth another try."""

    async def scene(client: Client, runtime: RuntimeProcess) -> None:
        answer = await client.raw(HALF, fin=False)
        await see(bare_daemon, "WRITING")
        runtime.kill()
        verdict = await answer.opened()
        assert (verdict.status, verdict.slot) == (503, None)
        assert "lost before the request reached it" in answer.reason
        assert verdict.retry_after_ms
        answer.send(b"\0\0\0\3\0\0\0", fin=True)  # What still comes is nobody's.

    play(bare_daemon, scene)


def test_ready(bare_daemon: DaemonProcess) -> None:
    async def scene(client: Client, runtime: RuntimeProcess) -> None:
        answer = await client.submit(PROMPT)
        assert answer.status == 200
        await see(bare_daemon, "READY")
        runtime.kill()
        assert (await lose(answer)).code == 1  # runtime lost

    play(bare_daemon, scene)


@pytest.mark.parametrize("ids", [[], [4, 5]])
def test_running(bare_daemon: DaemonProcess, ids: list[int]) -> None:
    """What came out stays with the client; the end is a reset, not a short answer."""

    async def scene(client: Client, runtime: RuntimeProcess) -> None:
        answer = await client.submit(PROMPT)
        runtime.obey("take")
        if ids:
            runtime.obey("emit", *ids)
            assert await anext(answer) == ids
        await see(bare_daemon, "RUNNING")
        runtime.kill()
        assert (await lose(answer)).code == ResetCode.RUNTIME_LOST
        assert (answer.token_ids, answer.finish_reason) == (ids, None)

    play(bare_daemon, scene)


def test_cancelling(bare_daemon: DaemonProcess) -> None:
    async def scene(client: Client, runtime: RuntimeProcess) -> None:
        before = bare_daemon.health()["cancelled"]
        answer = await client.submit(PROMPT)
        runtime.obey("take")
        answer.cancel()
        await see(bare_daemon, "CANCELLING")
        runtime.kill()
        bare_daemon.wait_for_status("no runtime")
        assert bare_daemon.health()["cancelled"] == before + 1

    play(bare_daemon, scene)


def test_done(bare_daemon: DaemonProcess) -> None:
    """The answer is whole when its runtime dies: it goes out. (The daemon sleeps meanwhile, so that
    it finds both at once.)"""

    async def scene(client: Client, runtime: RuntimeProcess) -> None:
        answer = await client.submit(PROMPT)
        runtime.obey("take")
        bare_daemon.send(signal.SIGSTOP)
        try:
            runtime.obey("emit", 4)
            runtime.obey("finish")
            runtime.kill()
        finally:
            bare_daemon.send(signal.SIGCONT)
        result = await answer.result()
        assert (result.token_ids, result.finish_reason) == ([4], "stop")

    play(bare_daemon, scene)


def test_many_at_once(bare_daemon: DaemonProcess) -> None:
    async def scene(client: Client, runtime: RuntimeProcess) -> None:
        half = await client.raw(HALF, fin=False)
        await see(bare_daemon, "WRITING")
        running = await client.submit(PROMPT)
        runtime.obey("take")
        runtime.kill()
        assert (await lose(running)).code == ResetCode.RUNTIME_LOST
        assert (await half.opened()).status == 503

    play(bare_daemon, scene)


# ---------------------------------------------------------------- a bundled runtime


def echo_pid(daemon: DaemonProcess) -> int:
    (pid,) = wait_until("the runtime is there", daemon.children)
    return pid


def check_that_it_echoes(daemon: DaemonProcess) -> None:
    async def ask() -> list[int]:
        async with client_of(daemon) as client:
            return (await (await client.submit(PROMPT)).result()).token_ids

    assert run(ask()) == PROMPT


def test_a_bundled_runtime_is_started_again(daemon: StartDaemon) -> None:
    process = daemon("--runtime=echo", "--slots=2")
    check_that_it_echoes(process)
    for _ in range(2):
        killed = echo_pid(process)
        os.kill(killed, signal.SIGKILL)
        process.wait_for_status("no runtime")
        process.wait_for_status("ok")
        assert echo_pid(process) != killed
        check_that_it_echoes(process)
        process.wait_idle()
    # It served between the two, so each time the shortest wait was enough.
    waits = re.findall(r"status -9; it starts again in (\S+) s", process.stderr)
    assert waits == ["0.5", "0.5"]


@pytest.mark.slow
def test_a_bundled_runtime_that_hangs_is_replaced(daemon: StartDaemon) -> None:
    process = daemon("--runtime=echo", "--slots=2")
    hung = echo_pid(process)
    os.kill(hung, signal.SIGSTOP)
    process.wait_for_status("no runtime")  # after 10 s of silence
    process.wait_for_status("ok")
    assert echo_pid(process) != hung
    check_that_it_echoes(process)


DIES = "import os, sys\nif 'runtime' in sys.orig_argv: print('no model here'); os._exit(3)\n"


def test_a_runtime_that_never_was_ready_ends_the_daemon(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(DIES)
    done = subprocess.run(
        command(tmp_path, "--runtime=echo"),
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("dataplane: the runtime echo ended with status 3 before it was ready")
    assert "no model here" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runtime.sock").exists()


# ---------------------------------------------------------------- the daemon itself


def test_a_killed_daemon_leaves_nothing_in_the_way(daemon: StartDaemon, tmp_path: Path) -> None:
    first = daemon("--runtime=echo", "--slots=2")
    runtime = echo_pid(first)
    check_that_it_echoes(first)
    first.kill()
    wait_until("its runtime has ended by itself", lambda: runtime not in first.processes())
    assert first.processes() == []
    assert first.socket.exists()
    with daemon_process(tmp_path, "--runtime=echo", "--slots=2") as second:
        assert second.ca == first.ca
        assert second.socket == first.socket
        check_that_it_echoes(second)


def test_a_runtime_sees_the_daemons_end(daemon: StartDaemon) -> None:
    """One that was attached by hand is told as well, while it waits for work."""
    process = daemon("--runtime=none")
    with runtime_process(process) as runtime:
        runtime.tell("take")
        process.kill()
        assert runtime.wait() == DETACHED
