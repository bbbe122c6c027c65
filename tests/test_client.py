"""The client library: answers, refusals, and every way in which an answer can break off."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import (
    INGRESS_US,
    QUEUE_US,
    Behaviour,
    FakeDaemon,
    Stream,
    fake_daemon,
    refusal,
    verdict,
    whole_answer,
    words,
)

from dataplane.client import Client, ResetError, connect
from dataplane.client import link as client_link
from dataplane.client.wire import reset_words
from dataplane.errors import ResetCode, UnavailableError, UsageError
from dataplane.prompt1 import ProtocolError, Request, encode_end, encode_request

pytestmark = pytest.mark.usefixtures("engine")

IDS = [0, 7, 256, 65535, 70000, 2**32 - 2]
ANSWER = whole_answer(IDS)

Test = Callable[[Client, FakeDaemon], Awaitable[None]]


def run(tmp_path: Path, behave: Behaviour, test: Test, **options: Any) -> None:
    """Run `test` with a client that is connected to a daemon that behaves like `behave`."""

    async def main() -> None:
        async with (
            asyncio.timeout(20),
            fake_daemon(tmp_path, behave, **options) as daemon,
            connect(daemon.address, daemon.ca) as client,
        ):
            await test(client, daemon)

    asyncio.run(main())


async def answer_whole(stream: Stream) -> None:
    stream.send(ANSWER, fin=True)


async def answer_nothing(stream: Stream) -> None:
    pass


# ---------------------------------------------------------------- a whole answer


def test_an_answer_comes_with_all_that_it_says(tmp_path: Path) -> None:
    async def test(client: Client, daemon: FakeDaemon) -> None:
        answer = await client.submit([1, 2, 3])
        assert (answer.status, answer.slot, answer.request_id) == (200, 3, 42)
        assert [number async for ids in answer for number in ids] == IDS
        assert answer.finish_reason == "stop"
        assert answer.usage == {"prompt_tokens": 5, "output_tokens": len(IDS)}
        times = answer.timings_us
        assert (times["queue"], times["ingress"], times["pickup"]) == (QUEUE_US, INGRESS_US, None)
        assert times["first_token"] is not None
        assert times["total"] is not None
        assert answer.verdict_us is not None
        assert 0 < answer.verdict_us <= times["first_token"] <= times["total"]
        result = await answer.result()
        assert (result.token_ids, result.status, result.reason) == (IDS, 200, "")
        assert [ids async for ids in answer] == []

    run(tmp_path, answer_whole, test)


def test_a_request_carries_all_that_was_asked(tmp_path: Path) -> None:
    async def test(client: Client, daemon: FakeDaemon) -> None:
        await client.submit(
            (n for n in (1, 2, 65535)),
            max_output=16,
            temperature=0.5,
            top_p=0.25,
            top_k=40,
            seed=9,
            affinity=2,
            strict=True,
            deadline_ms=1500,
            request_id=2**64 - 1,
            api_key="këy",
            width=2,
        )
        await client.submit([])
        asked, empty = daemon.streams
        assert asked.request._replace(header_bytes=0) == Request(
            3, 2, 16, 2**64 - 1, 2, True, 0.5, 0.25, 40, 9, 1500, "këy".encode(), 0
        )
        assert asked.ids == [1, 2, 65535]
        assert bytes(empty.data) == encode_request(Request(0))

    run(tmp_path, answer_whole, test)


@pytest.mark.parametrize(("code", "word"), [(1, "stop"), (2, "length"), (3, "deadline")])
def test_a_finish_reason_is_a_word(tmp_path: Path, code: int, word: str) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(whole_answer([], code), fin=True)

    async def test(client: Client, daemon: FakeDaemon) -> None:
        result = await (await client.submit([1])).result()
        assert (result.finish_reason, result.token_ids) == (word, [])
        assert result.timings_us["first_token"] is None

    run(tmp_path, behave, test)


def test_an_answer_in_single_bytes_comes_out_whole(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        for place in range(len(ANSWER)):
            stream.send(ANSWER[place : place + 1], fin=place == len(ANSWER) - 1)
            await asyncio.sleep(0)

    async def test(client: Client, daemon: FakeDaemon) -> None:
        answer = await client.submit([1])
        assert [number async for ids in answer for number in ids] == IDS
        assert answer.finish_reason == "stop"

    run(tmp_path, behave, test)


def test_ids_are_there_as_soon_as_they_came(tmp_path: Path) -> None:
    more = asyncio.Event()

    async def behave(stream: Stream) -> None:
        stream.send(verdict() + words([1, 2]) + b"\3")
        await more.wait()
        stream.send(b"\0\0\0" + encode_end(2, 1, 3), fin=True)

    async def test(client: Client, daemon: FakeDaemon) -> None:
        answer = await client.submit([1])
        got = await anext(answer)
        assert got == [1, 2]
        assert answer.finish_reason is None
        more.set()
        assert [ids async for ids in answer] == [[3]]
        assert answer.token_ids == [1, 2, 3]

    run(tmp_path, behave, test)


def test_many_requests_share_a_connection(tmp_path: Path) -> None:
    """More than the streams that a peer allows at once."""

    async def behave(stream: Stream) -> None:
        stream.send(whole_answer(stream.ids), fin=True)

    async def test(client: Client, daemon: FakeDaemon) -> None:
        async def ask(number: int) -> list[int]:
            answer = await client.submit([number] * (number % 50 + 1))
            return (await answer.result()).token_ids

        answers = await asyncio.gather(*(ask(number) for number in range(300)))
        assert answers == [[number] * (number % 50 + 1) for number in range(300)]
        assert len(daemon.connections) == 1

    run(tmp_path, behave, test)


def test_a_long_prompt_and_a_long_answer(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(whole_answer(stream.ids), fin=True)

    async def test(client: Client, daemon: FakeDaemon) -> None:
        prompt = list(range(20_000))
        assert (await (await client.submit(prompt)).result()).token_ids == prompt

    run(tmp_path, behave, test)


# ---------------------------------------------------------------- refusals


def test_a_refusal_is_an_answer_with_its_reason(tmp_path: Path) -> None:
    data = refusal(429, "every slot is taken")

    async def behave(stream: Stream) -> None:
        stream.send(data[:35])
        await asyncio.sleep(0.01)
        stream.send(data[35:], fin=True)

    async def test(client: Client, daemon: FakeDaemon) -> None:
        answer = await client.submit([1])
        assert (answer.status, answer.slot) == (429, None)
        assert answer.reason == "every slot is taken"
        assert [ids async for ids in answer] == []
        result = await answer.result()
        assert (result.status, result.reason) == (429, "every slot is taken")
        assert (result.finish_reason, result.usage) == (None, None)
        assert (result.timings_us["queue"], result.timings_us["ingress"]) == (QUEUE_US, None)

    run(tmp_path, behave, test)


def test_a_refusal_counts_though_its_reason_is_cut_off(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(refusal(503, "drain"))
        stream.close_connection()

    async def test(client: Client, daemon: FakeDaemon) -> None:
        answer = await client.submit([1])
        assert (answer.status, answer.reason) == (503, "drain")

    run(tmp_path, behave, test)


def test_a_refusal_comes_before_the_body_is_sent(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(refusal(429, "full"), fin=True)
        stream._protocol._quic.stop_stream(stream.number, 0)
        stream._protocol.transmit()

    async def test(client: Client, daemon: FakeDaemon) -> None:
        answer = await client.submit([5] * 1_000_000)
        assert (answer.status, answer.reason) == (429, "full")
        assert (await client.submit([5])).status == 429

    run(tmp_path, behave, test, at_once=True)


# ---------------------------------------------------------------- answers that break off


@pytest.mark.parametrize("code", [*ResetCode, 99])
def test_a_reset_after_200_names_its_code_in_words(tmp_path: Path, code: int) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(verdict() + words([1, 2]))
        await asyncio.sleep(0.01)  # or the reset overtakes what it follows
        stream.reset(code)

    async def test(client: Client, daemon: FakeDaemon) -> None:
        answer = await client.submit([1])
        assert await anext(answer) == [1, 2]
        with pytest.raises(ResetError) as caught:
            await anext(answer)
        assert caught.value.code == code
        assert reset_words(code) in str(caught.value)
        assert answer.finish_reason is None
        with pytest.raises(ResetError):
            await answer.result()

    run(tmp_path, behave, test)


def test_a_reset_instead_of_a_verdict_raises(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        stream.reset(ResetCode.SHUTTING_DOWN)

    async def test(client: Client, daemon: FakeDaemon) -> None:
        with pytest.raises(ResetError, match="shutting down"):
            await client.submit([1])

    run(tmp_path, behave, test)


@pytest.mark.parametrize("said", [b"", verdict()[:20], verdict(), verdict() + words([1])])
def test_a_connection_that_closes_ends_every_wait(tmp_path: Path, said: bytes) -> None:
    async def behave(stream: Stream) -> None:
        if said:
            stream.send(said)
        if len(daemons[0].streams) == 2:
            stream.close_connection(7, "that is all")

    daemons = []

    async def test(client: Client, daemon: FakeDaemon) -> None:
        daemons.append(daemon)
        waits = []
        for _ in range(2):
            answer = await client.raw(encode_request(Request(1)) + words([1]))
            waits += [answer.opened(), answer.result(), anext(answer)]
        results = await asyncio.gather(*waits, return_exceptions=True)
        errors = [error for error in results if isinstance(error, UnavailableError)]
        assert len(errors) >= 2
        assert all("with code 7: that is all" in str(error) for error in errors)
        assert not [r for r in results if isinstance(r, Exception) and r not in errors]
        assert client.lost is not None
        with pytest.raises(UnavailableError, match="that is all"):
            await client.submit([1])

    run(tmp_path, behave, test)


def test_an_answer_that_ends_without_a_trailer_raises(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(verdict() + words([1]), fin=True)

    async def test(client: Client, daemon: FakeDaemon) -> None:
        answer = await client.submit([1])
        with pytest.raises(ProtocolError, match="without its trailer"):
            await answer.result()

    run(tmp_path, behave, test)


def test_rubbish_ends_its_stream_only(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        if stream.number == 0:
            stream.send(b"x" * 40)
            await asyncio.wait_for(stream.stopped.wait(), 5)
        else:
            stream.send(ANSWER, fin=True)

    async def test(client: Client, daemon: FakeDaemon) -> None:
        with pytest.raises(ProtocolError, match="not with the magic DPV1"):
            await client.submit([1])
        assert (await client.submit([1])).status == 200
        await daemon.streams[0].stopped.wait()

    run(tmp_path, behave, test)


def test_a_daemon_that_was_killed_is_noticed(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(verdict() + words([1]))
        await asyncio.sleep(0.01)
        daemons[0].vanish()

    daemons = []

    async def test(client: Client, daemon: FakeDaemon) -> None:
        daemons.append(daemon)
        answer = await client.submit([1])
        with pytest.raises(UnavailableError, match="nobody listens there any more"):
            await answer.result()

    run(tmp_path, behave, test)


def test_closing_this_side_ends_every_wait(tmp_path: Path) -> None:
    async def test(client: Client, daemon: FakeDaemon) -> None:
        answer = await client.raw(b"DPQ1", fin=False)
        waiting = asyncio.ensure_future(answer.result())
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(UnavailableError, match="closed by this side"):
            await waiting
        client.close()

    run(tmp_path, answer_nothing, test)


# ---------------------------------------------------------------- giving up


def test_cancel_gives_the_stream_up_on_the_wire(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(verdict() + words([1]))

    async def test(client: Client, daemon: FakeDaemon) -> None:
        answer = await client.submit([1])
        assert await anext(answer) == [1]
        answer.cancel()
        answer.cancel()
        assert [ids async for ids in answer] == []
        result = await answer.result()
        assert (result.token_ids, result.finish_reason) == ([1], None)
        await daemon.streams[0].stopped.wait()

    run(tmp_path, behave, test)


def test_cancel_after_the_end_does_nothing(tmp_path: Path) -> None:
    async def test(client: Client, daemon: FakeDaemon) -> None:
        answer = await client.submit([1])
        await answer.result()
        answer.cancel()
        assert (await answer.result()).finish_reason == "stop"

    run(tmp_path, answer_whole, test)


def test_a_submit_that_is_cancelled_gives_its_request_up(tmp_path: Path) -> None:
    async def test(client: Client, daemon: FakeDaemon) -> None:
        submitting = asyncio.ensure_future(client.submit([1]))
        await daemon.wait_for_streams(1)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await daemon.streams[0].stopped.wait()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.submit([1]), 0.01)
        await daemon.streams[1].stopped.wait()

    run(tmp_path, answer_nothing, test)


def test_giving_up_a_request_that_waits_for_a_stream_harms_no_other(tmp_path: Path) -> None:
    """The peer allows 128 streams; a reset of one beyond would end the connection."""
    more = asyncio.Event()

    async def behave(stream: Stream) -> None:
        await more.wait()
        stream.send(ANSWER, fin=True)

    async def test(client: Client, daemon: FakeDaemon) -> None:
        request = encode_request(Request(1)) + words([1])
        answers = [await client.raw(request) for _ in range(130)]
        await daemon.wait_for_streams(128)
        answers[129].cancel()
        await asyncio.sleep(0.05)
        assert client.lost is None
        more.set()
        for answer in answers[:129]:
            assert (await answer.result()).token_ids == IDS
        assert (await (await client.submit([1])).result()).token_ids == IDS

    run(tmp_path, behave, test)


# ---------------------------------------------------------------- raw bytes


def test_raw_sends_any_bytes_in_pieces(tmp_path: Path) -> None:
    async def test(client: Client, daemon: FakeDaemon) -> None:
        data = encode_request(Request(2)) + words([8, 9])
        answer = await client.raw(data[:3], fin=False)
        assert answer.status is None
        assert answer.send(data[3:50])
        assert answer.send(data[50:], fin=True)
        assert (await answer.opened()).status == 200
        assert daemon.streams[0].ids == [8, 9]
        assert not answer.send(b"more")

    run(tmp_path, answer_whole, test)


def test_a_value_that_does_not_fit_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    async def test(client: Client, daemon: FakeDaemon) -> None:
        with pytest.raises(UsageError, match="seed is 4294967296; it must be from 0 to"):
            await client.submit([1], seed=2**32)
        with pytest.raises(UsageError, match="request_id is -1"):
            await client.submit([1], request_id=-1)
        for length in (4045, 70_000):
            with pytest.raises(UsageError, match=f"has {length} bytes; 4044 fit a header"):
                await client.submit([1], api_key=b"x" * length)
        assert (await client.submit([1], api_key=b"x" * 4044)).status == 200
        assert len(daemon.streams) == 1

    run(tmp_path, answer_whole, test)


def test_an_answer_may_take_longer_than_a_connection_may_be_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_link, "KEEP_ALIVE_S", 0.1)

    async def behave(stream: Stream) -> None:
        await asyncio.sleep(1.6)
        stream.send(ANSWER, fin=True)

    async def test(client: Client, daemon: FakeDaemon) -> None:
        assert (await (await client.submit([1])).result()).token_ids == IDS

    run(tmp_path, behave, test, idle_timeout=0.8)
