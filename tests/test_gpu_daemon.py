"""A daemon and a runtime with the `device` table, end to end: `dataplane.runtime.cuda`, its
`cuda-echo` and the kernels as they are, on host threads in a process of their own.

With the packet pump, raw requests are served in C from their first byte to their last.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gpu_programs
import pytest
from aioquic.quic.events import StreamReset
from conftest import StartDaemon
from daemon_process import Chosen, DaemonProcess, command, run, until, wait_until
from device_process import MAX_OUTPUT, SLOTS, echo_on_device, hang
from host_gpu import Library
from test_slow_reader import miser

from dataplane.client import Answer, Client, ResetError, connect
from dataplane.errors import ResetCode

PROMPT = [40_000, 7, 0, 49_999]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which(gpu_programs.cxx()) is None, reason="no C++ compiler here"),
]


@pytest.fixture(params=["pump", "aioquic"])
def engine(request: pytest.FixtureRequest) -> str:
    return "aioquic" if Chosen.engine == "aioquic" else request.param


@pytest.fixture
def bare(engine: str, daemon: StartDaemon) -> DaemonProcess:
    return daemon("--runtime=none", *([] if engine == "pump" else ["--no-pump"]))


def check_claims(daemon: DaemonProcess, engine: str, claims: int) -> None:
    """So many requests got a slot, all of them in C where there is a pump."""
    lines = daemon.get("/metrics")[1].splitlines()
    in_c = claims if engine == "pump" else 0
    assert f"dataplane_claimed_total {claims}" in lines
    assert f"dataplane_pump_claimed_total {in_c}" in lines


@pytest.mark.parametrize("mode", ["tick", "persistent"])
def test_requests_go_through_the_device(
    bare: DaemonProcess, engine: str, library: Library, mode: str
) -> None:
    async def ask() -> None:
        async with connect(bare.address, bare.ca) as client:
            for i in range(20):
                prompt = [i, *PROMPT]
                result = await (await client.submit(prompt)).result()
                assert (result.status, result.token_ids) == (200, prompt)
                assert result.finish_reason == "stop"
                assert result.usage == {"prompt_tokens": 5, "output_tokens": 5}
            many = [await client.submit(PROMPT, max_output=2) for _ in range(3)]
            results = [await one.result() for one in many]
            assert [r.token_ids for r in results] == [PROMPT[:2]] * 3
            assert {r.finish_reason for r in results} == {"length"}

    with echo_on_device(bare, library, mode=mode):
        run(ask())
        bare.wait_idle()
        health = bare.health()
        assert health["requests"]["200"] == 23
        assert health["completed"] == 23
        check_claims(bare, engine, 23)


def test_pickup_is_measured_by_the_devices_timer(bare: DaemonProcess, library: Library) -> None:
    with echo_on_device(bare, library):
        for _ in range(3):
            run(_one(bare))
        page = json.loads(bare.get("/health?latency99")[1])
        assert page["pickup"]["p50"] < 2_000_000
        # The answer was taken when it was there, not when the patience with the device ended.
        assert page["queue"]["p50"] < 800_000
        assert page["count"] == 3
        assert "dataplane_clock_negative_total 0" in bare.get("/metrics")[1]


def test_bad_bodies_free_their_slots(bare: DaemonProcess, engine: str, library: Library) -> None:
    async def ask() -> list[int | None]:
        async with connect(bare.address, bare.ca) as client:
            bad = [await client.submit([1, 60_000]) for _ in range(SLOTS + 1)]
            good = await (await client.submit(PROMPT)).result()
            assert good.status == 200
            return [answer.status for answer in bad]

    with echo_on_device(bare, library):
        assert run(ask()) == [400] * (SLOTS + 1)
        bare.wait_idle()
        check_claims(bare, engine, SLOTS + 2)


@pytest.mark.parametrize("mode", ["tick", "persistent"])
def test_many_at_once_are_served_or_refused(
    bare: DaemonProcess, engine: str, library: Library, mode: str
) -> None:
    """More claims at once than the listener's ring has room for."""

    async def ask(client: Client, prompt: list[int]) -> int:
        answer = await client.submit(prompt)
        if answer.status == 200:
            assert (await answer.result()).token_ids == prompt
        return answer.status or 0

    async def session() -> Counter[int]:
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(connect(bare.address, bare.ca)) for _ in range(3)
            ]
            asked = [ask(clients[i % 3], [i, *PROMPT]) for i in range(150)]
            return Counter(await asyncio.gather(*asked))

    with echo_on_device(bare, library, mode=mode):
        statuses = run(session())
        assert statuses[200] >= SLOTS
        assert statuses[200] + statuses[429] == 150
        bare.wait_idle()
        assert bare.health()["completed"] == statuses[200]
        check_claims(bare, engine, statuses[200])


def test_a_stuck_device_gives_503_within_a_second(
    bare: DaemonProcess, engine: str, library: Library
) -> None:
    async def ask() -> None:
        async with connect(bare.address, bare.ca) as client:
            assert (await (await client.submit(PROMPT)).result()).status == 200
            await asyncio.to_thread(bare.wait_idle)  # no kernel is there that could answer yet
            await asyncio.to_thread(hang, runtime)
            start = time.monotonic()
            waiting = [asyncio.ensure_future(client.submit(PROMPT)) for _ in range(6)]
            refused = await asyncio.gather(*waiting)
            # ANSWER_MS, which test_device_table holds to less than a second; a busy machine adds.
            assert time.monotonic() - start < 3
            assert {answer.status for answer in refused} == {503}
            assert "does not answer" in refused[0].reason
            later = await client.submit(PROMPT)
            assert later.status == 503

    with echo_on_device(bare, library, "stuck") as runtime:
        run(ask())
        bare.wait_for_status("no runtime")
        check_claims(bare, engine, 1)
        assert "left a command unanswered" in bare.stderr
        assert runtime.wait(20) == 1  # it saw that the daemon dropped it, and its kernel hangs
        assert runtime.stderr is not None
        assert "hangs" in runtime.stderr.read()
    # The daemon goes on with the next one.
    with echo_on_device(bare, library):
        run(_one(bare))


def test_a_stuck_kernel_of_the_model_ends_the_attachment(
    bare: DaemonProcess, library: Library
) -> None:
    """Admission goes on beside it, so that requests are taken until the missing steps are seen."""

    async def until_reset(client: Client) -> None:
        for _ in range(50):  # a launch from before is still there and serves some
            answer = await client.submit(PROMPT)
            assert answer.status == 200
            await answer.result()

    async def ask() -> None:
        async with connect(bare.address, bare.ca) as client:
            assert (await (await client.submit(PROMPT)).result()).status == 200
            await asyncio.to_thread(hang, runtime)
            with pytest.raises(ResetError) as caught:
                await until_reset(client)
            assert caught.value.code == ResetCode.RUNTIME_LOST
            assert (await client.submit(PROMPT)).status == 503

    with echo_on_device(bare, library, "hung") as runtime:
        run(ask())
        assert "no step for 5000 ms with work in its slots" in bare.stderr
        assert runtime.wait(20) == 1  # only its end gives back what the kernel uses
    with echo_on_device(bare, library):
        run(_one(bare))


def test_a_device_stuck_for_one_protocol_is_for_the_other(
    bare: DaemonProcess, library: Library
) -> None:
    """Each has a ring of its own, and the first to find out tells the other."""

    async def ask() -> None:
        raw = await stack.enter_async_context(connect(bare.address, bare.ca))
        h3 = await stack.enter_async_context(connect(bare.address, bare.ca, protocol="h3"))
        assert (await (await raw.submit(PROMPT)).result()).status == 200
        assert (await (await h3.submit(PROMPT)).result()).status == 200
        await asyncio.to_thread(bare.wait_idle)  # no kernel is there that could answer yet
        await asyncio.to_thread(hang, runtime)
        assert (await raw.submit(PROMPT)).status == 503
        start = time.monotonic()
        assert (await h3.submit(PROMPT)).status == 503
        assert time.monotonic() - start < 0.8  # nobody waited for it again
        await stack.aclose()

    stack = contextlib.AsyncExitStack()
    with echo_on_device(bare, library, "stuck") as runtime:
        run(ask())
        bare.wait_for_status("no runtime")
        assert bare.stderr.count("left a command unanswered") == 2  # the log, and why it is dropped


async def _one(daemon: DaemonProcess) -> None:
    async with connect(daemon.address, daemon.ca) as client:
        result = await (await client.submit(PROMPT)).result()
        assert (result.status, result.token_ids) == (200, PROMPT)


def test_a_runtime_that_is_killed_inside_a_kernel(bare: DaemonProcess, library: Library) -> None:
    async def ask() -> None:
        async with connect(bare.address, bare.ca) as client:
            answer = await client.submit(PROMPT)
            assert answer.status == 200
            assert isinstance(answer, Answer)
            result = asyncio.ensure_future(answer.result())
            runtime.kill()
            (ended,) = await asyncio.gather(result, return_exceptions=True)
            if isinstance(ended, ResetError):
                assert ended.code == ResetCode.RUNTIME_LOST
            else:
                assert getattr(ended, "token_ids", ended) == PROMPT  # it was faster
            await asyncio.to_thread(bare.wait_for_status, "no runtime")
            assert (await client.submit(PROMPT)).status == 503

    with echo_on_device(bare, library) as runtime:
        run(ask())
    bare.wait_idle()


# Ends, with an engine that takes its time.


@pytest.fixture(params=["tick", "persistent"])
def slow(
    request: pytest.FixtureRequest, bare: DaemonProcess, library: Library
) -> Iterator["subprocess.Popen[str]"]:
    with echo_on_device(bare, library, mode=request.param, program="slow_device.py") as runtime:
        yield runtime


def test_a_deadline_ends_an_answer_with_what_is_out(
    slow: "subprocess.Popen[str]", bare: DaemonProcess, engine: str
) -> None:
    prompt = list(range(1, MAX_OUTPUT + 1))

    async def ask() -> None:
        async with connect(bare.address, bare.ca) as client:
            result = await (await client.submit(prompt, deadline_ms=400)).result()
            assert (result.status, result.finish_reason) == (200, "deadline")
            count = len(result.token_ids)
            assert 0 < count < len(prompt)
            assert result.token_ids == prompt[:count]
            assert result.usage == {"prompt_tokens": len(prompt), "output_tokens": count}
            whole = await (await client.submit(PROMPT, deadline_ms=20_000)).result()
            assert (whole.token_ids, whole.finish_reason) == (PROMPT, "stop")

    run(ask())
    bare.wait_idle()
    check_claims(bare, engine, 2)


def test_what_is_never_taken_ends_by_its_deadline_or_its_client(
    slow: "subprocess.Popen[str]", bare: DaemonProcess, engine: str
) -> None:
    slow.send_signal(signal.SIGUSR2)

    async def ask() -> None:
        async with connect(bare.address, bare.ca) as client:
            left = await client.submit(PROMPT)
            expired = await client.submit(PROMPT, deadline_ms=300)
            assert (left.status, expired.status) == (200, 200)
            await asyncio.to_thread(bare.wait_for_states, "READY", "READY")
            left.cancel()
            result = await expired.result()
            assert (result.finish_reason, result.token_ids) == ("deadline", [])
            await asyncio.to_thread(bare.wait_idle)

    run(ask())
    slow.send_signal(signal.SIGUSR2)
    run(_one(bare))
    health = bare.health()
    assert (health["completed"], health["cancelled"]) == (2, 1)
    check_claims(bare, engine, 3)


def test_a_client_that_leaves_gives_its_slots_back(
    slow: "subprocess.Popen[str]", bare: DaemonProcess, engine: str
) -> None:
    prompt = list(range(1, MAX_OUTPUT + 1))

    async def ask() -> None:
        async with connect(bare.address, bare.ca) as client:
            answers = [await client.submit(prompt) for _ in range(SLOTS)]
            await asyncio.to_thread(bare.wait_for_states, *["RUNNING"] * SLOTS)
            assert (await client.submit(PROMPT)).status == 429
            answers[0].cancel()
            await until("its slot is free", lambda: bare.states().count("FREE") == 1)
            assert (await answers[1].result()).token_ids == prompt

    run(ask())  # and the last one leaves with its connection
    bare.wait_idle()
    health = bare.health()
    assert health["cancelled"] + health["completed"] == SLOTS
    assert health["cancelled"] >= 1
    check_claims(bare, engine, SLOTS)


def test_an_end_that_does_not_wait_resets_what_is_running(
    daemon: StartDaemon, engine: str, library: Library
) -> None:
    flags = [] if engine == "pump" else ["--no-pump"]
    bare = daemon("--runtime=none", "--drain-timeout=0.3", *flags)
    prompt = list(range(1, MAX_OUTPUT + 1))

    async def ask() -> None:
        async with connect(bare.address, bare.ca) as client:
            answer = await client.submit(prompt)
            assert answer.status == 200
            bare.send(signal.SIGTERM)
            with pytest.raises(ResetError) as caught:
                await answer.result()
            assert caught.value.code == ResetCode.SHUTTING_DOWN

    with echo_on_device(bare, library, program="slow_device.py") as runtime:
        run(ask())
        assert bare.wait_for_exit() == 0
        assert runtime.wait(20) == 0


def test_a_slow_reader_holds_no_slot_of_the_device(
    daemon: StartDaemon, engine: str, library: Library
) -> None:
    flags = [] if engine == "pump" else ["--no-pump"]
    bare = daemon("--runtime=none", "--idle-timeout=2", *flags)
    with echo_on_device(bare, library, context=8192, max_output=8192), miser(bare) as client:
        stream_id = client.ask(8192)
        running = client.events()
        while bare.health()["completed"] == 0:
            client.quic.send_ping(1)
            next(running)
        bare.wait_idle()
        run(_one(bare))
        reset = next(event for event in running if isinstance(event, StreamReset))
        assert (reset.stream_id, reset.error_code) == (stream_id, ResetCode.SLOW_READER)
        check_claims(bare, engine, 2)


def test_the_pages_show_the_devices_slots(bare: DaemonProcess, library: Library) -> None:
    with echo_on_device(bare, library):
        run(_one(bare))
        bare.wait_idle()
        rows = bare.slots()
        assert [row["state"] for row in rows] == ["FREE"] * SLOTS
        first = rows[0]["generation"]
        assert sorted((row["generation"] - first) % 2**40 for row in rows)[-1] in (1, 2**40 - 1)


def test_an_idle_device_runtime_sleeps(bare: DaemonProcess, library: Library) -> None:
    def cpu_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    with echo_on_device(bare, library, mode="persistent") as runtime:
        run(_one(bare))

        # The resident kernel goes when nothing was posted for a while.
        def is_idle() -> bool:
            before = cpu_s(runtime.pid)
            time.sleep(0.5)
            return cpu_s(runtime.pid) - before < 0.1

        wait_until("the runtime sleeps", is_idle)
        run(_one(bare))


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU here")
def test_without_cuda_the_bundled_runtime_says_what_is_missing(tmp_path: Path) -> None:
    """The daemon stays and answers 503, as a driver or a card may come back."""
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command(tmp_path, "--runtime=cuda-echo", "--listen=127.0.0.1:0"), stderr=stderr
        ) as process,
    ):
        try:
            again = "cuda-echo ended with status 1; it starts again"
            wait_until("it is started again", lambda: log.read_text().count(again) >= 2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
    told = log.read_text()
    assert "pip install -e '.[cuda13]'" in told or "driver" in told
