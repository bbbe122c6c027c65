"""Raw QUIC against a real daemon: what is answered, what bad input gets, what it leaves behind.

Each bad input is followed by a good request on the same connection, and at the end of each test
nothing is in flight and every slot is FREE.
"""

import asyncio
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import StartDaemon
from daemon_process import DaemonProcess, daemon_process, run

from dataplane.client import Answer, Client, connect
from dataplane.prompt1 import Request, encode_request

# What asks the file's one daemon. The rest runs on the reference by `make test-reference`.
both_engines = pytest.mark.both_engines

CONTEXT, MAX_OUTPUT, VOCAB = 64, 32, 1000


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory, daemon_engine: str) -> Iterator[DaemonProcess]:
    """One echo daemon for the file."""
    directory: Path = tmp_path_factory.mktemp("echo")
    with daemon_process(
        directory,
        "--runtime=echo",
        "--slots=4",
        f"--context={CONTEXT}",
        f"--max-output={MAX_OUTPUT}",
        f"--vocab-size={VOCAB}",
        "--body-timeout=1",
    ) as daemon:
        yield daemon


def header(n_tokens: int = 4, **changes: tuple[int, str, float]) -> bytes:
    """Return a header, with fields overwritten by (offset, format, value)."""
    data = bytearray(encode_request(Request(n_tokens)))
    for offset, form, value in changes.values():
        struct.pack_into(form, data, offset, value)
    return bytes(data)


def ids(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


GOOD = header(4) + ids(1, 2, 3, 4)

BAD = {
    "wrong magic": (b"QQQQ" + GOOD[4:], "magic"),
    "wrong first byte alone": (b"X", "magic"),
    "header length 0": (header(a=(4, "<H", 0)) + ids(1, 2, 3, 4), "header length is 0"),
    "header length 47": (header(a=(4, "<H", 47)) + ids(1, 2, 3, 4), "header length is 47"),
    "header length 4097": (header(a=(4, "<H", 4097)) + ids(1, 2, 3, 4), "header length is 4097"),
    "header length 65535": (header(a=(4, "<H", 65535)) + ids(1, 2, 3, 4), "length is 65535"),
    "id width 3": (header(a=(6, "<B", 3)) + ids(1, 2, 3, 4), "id width is 3"),
    "unknown flags": (header(a=(7, "<B", 0x82)) + ids(1, 2, 3, 4), "unknown flags 0x82"),
    "no tokens": (header(0), "empty"),
    "context + 1": (header(CONTEXT + 1) + ids(*range(CONTEXT + 1)), "context is 64"),
    "2^31 tokens": (header(2**31), "2147483648 tokens"),
    "2^32-1 tokens": (header(2**32 - 1), "4294967295 tokens"),
    "fewer ids": (header(4) + ids(1, 2, 3), "after 3 of 4 tokens"),
    "fewer bytes": (header(4) + ids(1, 2, 3) + b"\1\0", "3 of 4 tokens and 2 bytes"),
    "more ids": (GOOD + ids(5), "longer than the 4 tokens"),
    "one byte more": (GOOD + b"\0", "longer than the 4 tokens"),
    "FIN inside the header": (GOOD[:30], "ended inside the header, after 30 bytes"),
    "FIN at once": (b"", "ended inside the header, after 0 bytes"),
    "id of the vocabulary's size": (header(2) + ids(1, VOCAB), "token 1 is 1000"),
    "id 0xFFFFFFFF": (header(2) + ids(0xFFFFFFFF, 1), "token 0 is 4294967295"),
    "temperature NaN": (header(a=(28, "<f", float("nan"))) + ids(1, 2, 3, 4), "temperature is nan"),
    "temperature < 0": (header(a=(28, "<f", -0.5)) + ids(1, 2, 3, 4), "temperature is -0.5"),
    "temperature infinite": (header(a=(28, "<f", float("inf"))) + ids(1, 2, 3, 4), "is inf"),
    "top_p 1.5": (header(a=(32, "<f", 1.5)) + ids(1, 2, 3, 4), "top_p is 1.5"),
    "max_output": (header(a=(12, "<I", MAX_OUTPUT + 1)) + ids(1, 2, 3, 4), "room for 32"),
    "truncated extension": (header(a=(4, "<H", 50)) + b"\1\0" + ids(1, 2, 3, 4), "cut off"),
    "extension too long": (header(a=(4, "<H", 52)) + b"\1\0\x09\0" + ids(1), "says 9 bytes"),
}


async def answered(client: Client, data: bytes) -> Answer:
    answer = await client.raw(data)
    await answer.result()
    return answer


@both_engines
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_and_spares_the_connection(echo: DaemonProcess, name: str) -> None:
    data, reason = BAD[name]

    async def session() -> None:
        async with connect(echo.address, echo.ca) as client:
            bad = await answered(client, data)
            assert bad.status == 400
            assert reason in bad.reason
            assert bad.slot is None
            good = await answered(client, GOOD)
            assert (good.status, good.token_ids) == (200, [1, 2, 3, 4])

    run(session())
    echo.wait_idle()


@both_engines
def test_every_bad_input_at_once_spares_a_good_one_among_them(echo: DaemonProcess) -> None:
    async def session() -> None:
        async with connect(echo.address, echo.ca) as client:
            answers = [await client.raw(data) for data, _ in BAD.values()]
            await asyncio.gather(*(answer.result() for answer in answers))
            # Beside real 400s, one that needed a slot may have met none.
            assert {answer.status for answer in answers} <= {400, 429}
            assert (await answered(client, GOOD)).token_ids == [1, 2, 3, 4]

    run(session())
    echo.wait_idle()


@both_engines
def test_a_prompt_of_exactly_the_context_is_accepted(echo: DaemonProcess) -> None:
    async def session() -> None:
        async with connect(echo.address, echo.ca) as client:
            prompt = list(range(CONTEXT))
            for width in (2, 4):
                result = await (await client.submit(prompt, width=width)).result()
                assert result.token_ids == prompt[:MAX_OUTPUT]
                assert result.finish_reason == "length"
                assert result.usage == {"prompt_tokens": CONTEXT, "output_tokens": MAX_OUTPUT}

    run(session())


@both_engines
@pytest.mark.parametrize("step", [1, 7])
def test_a_request_may_come_in_pieces(echo: DaemonProcess, step: int) -> None:
    async def session() -> None:
        async with connect(echo.address, echo.ca) as client:
            answer = await client.raw(GOOD[:step], fin=False)
            for at in range(step, len(GOOD), step):
                answer.send(GOOD[at : at + step], at + step >= len(GOOD))
                await asyncio.sleep(0)
            await answer.result()
            assert answer.token_ids == [1, 2, 3, 4]

    run(session())
    echo.wait_idle()


@both_engines
def test_a_body_that_stops_coming_times_out(echo: DaemonProcess) -> None:
    async def session() -> None:
        async with connect(echo.address, echo.ca) as client:
            halves = [await client.raw(GOOD[:length], fin=False) for length in (20, 48, 55)]
            await asyncio.gather(*(answer.result() for answer in halves))
            assert [answer.status for answer in halves] == [408, 408, 408]
            assert "20 bytes of the header" in halves[0].reason
            assert "0 of 4 tokens" in halves[1].reason
            assert "1 of 4 tokens" in halves[2].reason
            assert (await answered(client, GOOD)).status == 200

    run(session())
    echo.wait_idle()


@both_engines
def test_a_connection_holds_at_most_half_of_the_slots_unwritten(echo: DaemonProcess) -> None:
    async def session() -> None:
        async with (
            connect(echo.address, echo.ca) as greedy,
            connect(echo.address, echo.ca) as other,
        ):
            held = [await greedy.raw(GOOD[:48], fin=False) for _ in range(2)]
            third = await answered(greedy, GOOD)
            assert third.status == 429
            assert "its cap" in third.reason
            assert (await answered(other, GOOD)).status == 200
            for answer in held:
                answer.send(GOOD[48:], True)
                await answer.result()
                assert answer.status == 200

    run(session())
    echo.wait_idle()


@both_engines
def test_the_verdict_says_what_the_contract_says(echo: DaemonProcess) -> None:
    async def session() -> None:
        async with connect(echo.address, echo.ca) as client:
            answer = await client.submit([1, 2], request_id=0xABCDEF0123456789, affinity=6)
            await answer.result()
            verdict = answer.verdict
            assert verdict is not None
            assert verdict.request_id == 0xABCDEF0123456789
            assert verdict.slot == 6 % 4
            assert verdict.free_left == 3
            assert 0 < verdict.queue_us < 1_000_000
            assert 0 < verdict.ingress_us < 1_000_000
            assert verdict.retry_after_ms == 0
            other = await client.submit([1])
            await other.result()
            assert other.request_id

    run(session())


def test_full_means_429_with_a_time_and_strict_affinity_means_its_slot(
    daemon: StartDaemon,
) -> None:
    process = daemon("--runtime=echo", "--slots=2", "--token-delay-ms=20", "--max-writing=2")

    async def session() -> None:
        async with connect(process.address, process.ca) as client:
            long = [await client.submit(list(range(40)), affinity=1, strict=True)]
            await long[0].opened()
            mine = await client.submit([1], affinity=1, strict=True)
            await mine.result()
            assert (mine.status, mine.reason) == (429, "every slot is taken")
            long.append(await client.submit(list(range(40)), affinity=1))
            await long[1].opened()
            assert {answer.slot for answer in long} == {0, 1}
            refused = await client.submit([1])
            await refused.result()
            verdict = refused.verdict
            assert verdict is not None
            assert (verdict.status, verdict.slot, verdict.free_left) == (429, None, 0)
            assert verdict.retry_after_ms > 0
            for answer in long:
                assert len((await answer.result()).token_ids) == 40

    run(session())
    process.wait_idle()


def test_a_deadline_in_running_ends_with_what_is_out(daemon: StartDaemon) -> None:
    process = daemon("--runtime=echo", "--slots=1", "--token-delay-ms=30")

    async def session() -> None:
        async with connect(process.address, process.ca) as client:
            result = await (await client.submit(list(range(200)), deadline_ms=300)).result()
            assert result.finish_reason == "deadline"
            assert result.token_ids == list(range(len(result.token_ids)))
            assert 1 <= len(result.token_ids) <= 10

    run(session())
    process.wait_idle()


def test_a_client_that_cancels_or_closes_frees_its_slot(daemon: StartDaemon) -> None:
    process = daemon("--runtime=echo", "--slots=2", "--token-delay-ms=10")

    async def session() -> None:
        async with connect(process.address, process.ca) as client:
            answer = await client.submit(list(range(500)))
            await answer.opened()
            answer.cancel()
            async with connect(process.address, process.ca) as other:
                await (await other.submit(list(range(500)))).opened()
                half = await other.raw(GOOD[:50], fin=False)
                assert half.status is None
            await asyncio.to_thread(process.wait_idle)
            assert (await answered(client, GOOD)).status == 200

    run(session())
    assert process.health()["cancelled"] == 3 or process.health()["cancelled"] == 2


def test_the_null_runtime_answers_nothing_and_frees_at_once(daemon: StartDaemon) -> None:
    process = daemon("--runtime=null", "--slots=1")

    async def session() -> None:
        async with connect(process.address, process.ca) as client:
            for _ in range(20):
                result = await (await client.submit([1, 2, 3])).result()
                assert (result.status, result.token_ids) == (200, [])
                assert result.usage == {"prompt_tokens": 3, "output_tokens": 0}

    run(session())
    health = process.health()
    assert (health["in_flight"], health["requests"]) == (0, {"200": 20})


def test_without_a_runtime_every_request_is_503(daemon: StartDaemon) -> None:
    process = daemon("--runtime=none")
    assert (process.slots_count, process.context) == (0, 0)

    async def session() -> None:
        async with connect(process.address, process.ca) as client:
            answer = await answered(client, GOOD)
            assert (answer.status, answer.reason) == (503, "no runtime is attached")
            assert answer.verdict is not None
            assert answer.verdict.retry_after_ms > 0
            assert (await answered(client, b"nonsense")).status == 400

    run(session())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_drain_refuses_new_work_and_finishes_what_is_in_flight(
    daemon: StartDaemon, number: int
) -> None:
    process = daemon("--runtime=echo", "--slots=2", "--token-delay-ms=20")

    async def session() -> None:
        async with connect(process.address, process.ca) as client:
            running = await client.submit(list(range(50)))
            await running.opened()
            process.send(number)
            await asyncio.to_thread(process.wait_for_status, "draining")
            late = await answered(client, GOOD)
            assert late.status == 503
            assert "shutting down" in late.reason
            assert len((await running.result()).token_ids) == 50

    run(session())
    assert process.wait_for_exit() == 0


def test_a_terminal_that_closes_ends_nothing_under_nohup(daemon: StartDaemon) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what is ignored, children ignore too
    try:
        process = daemon("--runtime=null")
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send(signal.SIGHUP)
    assert process.get("/livez") == (200, "ok\n")
    assert process.health()["status"] == "ok"
    assert process.stop() == 0


def test_many_large_slots_cost_the_daemon_their_region_and_little_else(daemon: StartDaemon) -> None:
    """At most 120 MB of its own; the region is shared memory and counted apart."""
    process = daemon("--runtime=echo", "--slots=32", "--context=8192", "--max-output=8192")
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    rows = dict(line.split(":", 1) for line in status.splitlines())
    own_kib = sum(int(rows[name].split()[0]) for name in ("RssAnon", "RssFile"))
    assert 10_000 < own_kib < 120_000
