"""A device that hangs, or is slow, in one partition: the other does not feel it."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import StartDaemon
from daemon_process import Chosen, DaemonProcess, run, wait_until
from device_process import echo_on_device, hang
from host_gpu import Library
from two_partitions import TWO, ask, client, is_ready, tenants_file

from dataplane.client import Client, connect


@pytest.fixture(params=["pump", "aioquic"])
def beside_a_device(
    request: pytest.FixtureRequest, daemon: StartDaemon, tmp_path: Path
) -> DaemonProcess:
    """Two partitions, on each engine."""
    without = request.param == "aioquic" and Chosen.engine != "aioquic"
    return daemon(
        "--runtime=none", *TWO, tenants_file(tmp_path, {"a": "a", "b": "b"}),
        *(["--no-pump"] if without else []),
    )  # fmt: skip


@contextlib.contextmanager
def echo_in_b(daemon: DaemonProcess) -> Iterator[None]:
    arguments = ("--socket", str(daemon.socket), "--partition=b=1", "--slots=32")
    with subprocess.Popen(
        [sys.executable, "-m", "dataplane", "runtime", "echo", *arguments],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            wait_until("b is served", lambda: is_ready(daemon, "b"))
            yield
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def hanging(
    daemon: DaemonProcess, runtime: "subprocess.Popen[str]", protocol: Any
) -> AsyncIterator[Client]:
    """One connection for both keys, once the device of partition a hangs."""
    await asyncio.to_thread(wait_until, "a is served", lambda: is_ready(daemon, "a"))
    async with connect(daemon.address, daemon.ca, protocol=protocol) as both:
        assert await ask(both, "a") == await ask(both, "b") == 200
        await asyncio.to_thread(daemon.wait_idle)  # no kernel is there that could answer yet
        await asyncio.to_thread(hang, runtime)
        yield both


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["raw", "h3"])
def test_a_device_that_hangs_in_one_holds_up_nobody_in_the_other(
    beside_a_device: DaemonProcess, library: Library, protocol: str
) -> None:
    daemon = beside_a_device

    async def main(runtime: "subprocess.Popen[str]") -> None:
        async with hanging(daemon, runtime, protocol) as both:
            stuck = [asyncio.create_task(both.submit([1], api_key="alpha")) for _ in range(3)]
            await asyncio.sleep(0)  # they are sent first
            others = [asyncio.create_task(ask(both, "b")) for _ in range(20)]
            assert await asyncio.gather(*others) == [200] * 20
            assert not any(one.done() for one in stuck)
            refused = await asyncio.gather(*stuck)
            assert {answer.status for answer in refused} == {503}
            assert "does not answer" in refused[0].reason
            assert await ask(both, "b") == 200

    with echo_in_b(daemon):
        with echo_on_device(daemon, library, "stuck", "a") as runtime:
            run(main(runtime))
            assert runtime.wait(20) == 1
        assert is_ready(daemon, "b")
        assert daemon.stderr.count("left a command unanswered") == 2  # the log, and why it ended
        with echo_on_device(daemon, library, "stuck", "a"):
            wait_until("a is served", lambda: is_ready(daemon, "a"))
            run(_both_serve(daemon))
        daemon.wait_idle()


async def _both_serve(daemon: DaemonProcess) -> None:
    async with client(daemon) as both:
        assert await ask(both, "a") == await ask(both, "b") == 200


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["raw", "h3"])
def test_a_slow_device_in_one_holds_up_nobody_in_the_other(
    beside_a_device: DaemonProcess, library: Library, protocol: str
) -> None:
    daemon = beside_a_device

    async def main(runtime: "subprocess.Popen[str]") -> None:
        async with hanging(daemon, runtime, protocol) as both:
            slow = asyncio.create_task(both.submit([1], api_key="alpha"))
            await asyncio.sleep(0)  # it is sent first
            others = [asyncio.create_task(ask(both, "b")) for _ in range(20)]
            assert await asyncio.gather(*others) == [200] * 20
            assert not slow.done()
            await asyncio.to_thread(hang, runtime, "it goes on")
            answer = await slow
            assert answer.status == 200
            assert (await answer.result()).token_ids == [1]

    with echo_in_b(daemon), echo_on_device(daemon, library, "slow", "a") as runtime:
        run(main(runtime))
        daemon.wait_idle()
