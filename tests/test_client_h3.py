"""The client library over HTTP/3: against real daemons, and against one that misbehaves."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from conftest import StartDaemon
from daemon_process import DaemonProcess, run, until
from fake_daemon import Behaviour, FakeDaemon, Stream, fake_daemon
from generate_checks import attached, finish, take
from h3_client import body_frame, frame, head, words
from raw_runtime import Puppet
from tiny_tokenizer import TEMPLATE, byte_ids, chat_ids, make_tokenizer

from dataplane.client import Http3Client, ResetError, connect
from dataplane.errors import UnavailableError, UsageError
from dataplane.prompt1 import ProtocolError
from dataplane.runtime import Finish

pytestmark = pytest.mark.usefixtures("engine")

IDS = [5, 6, 7]


def session(
    daemon: DaemonProcess,
    test: Callable[[Http3Client, Puppet], Awaitable[None]],
    tokenizer: Path | None = None,
) -> None:
    """Run a test with a client and the runtime that answers it."""

    async def main(runtime: Puppet) -> None:
        async with connect(daemon.address, daemon.ca, protocol="h3") as client:
            await test(client, runtime)

    with attached(daemon, tokenizer, TEMPLATE) as runtime:
        run(main(runtime))
        daemon.wait_idle()
    daemon.wait_for_status("no runtime")


# ---------------------------------------------------------------- answers


def test_ids_are_answered_with_all_there_is(bare_daemon: DaemonProcess) -> None:
    async def test(client: Http3Client, runtime: Puppet) -> None:
        asking = asyncio.ensure_future(
            client.submit(IDS, max_output=9, temperature=0.5, seed=3, width=2, request_id="mine")
        )
        taken = (await take(runtime))[0]
        answer = await asking
        assert (answer.status, answer.request_id, answer.reason) == (200, "mine", "")
        assert answer.slot == taken.slot
        assert taken.tokens.tolist() == IDS
        assert (taken.max_output, taken.temperature, taken.seed) == (9, 0.5, 3)
        taken.emit([8])
        assert await anext(answer) == [8]
        assert (answer.finish_reason, answer.usage) == (None, None)
        taken.emit([9])
        taken.finish(Finish.LENGTH)
        result = await answer.result()
        assert (result.token_ids, result.text, result.finish_reason) == ([8, 9], None, "length")
        assert result.usage == {"prompt_tokens": 3, "output_tokens": 2}
        times = result.timings_us
        assert list(times) == ["queue", "ingress", "pickup", "first_token", "total"]
        assert times["queue"] is not None
        assert times["ingress"] is not None
        assert times["pickup"] is None
        assert times["first_token"] is not None
        assert times["total"] is not None
        assert answer.verdict_us is not None
        assert 0 < answer.verdict_us <= times["first_token"] <= times["total"]
        assert answer.retry_after_ms is None

    session(bare_daemon, test)


def test_text_streams_both_ways(bare_daemon: DaemonProcess, tmp_path: Path) -> None:
    async def test(client: Http3Client, runtime: Puppet) -> None:
        asking = asyncio.ensure_future(client.ask([{"role": "user", "content": "h\u00ef"}]))
        taken = (await take(runtime))[0]
        assert taken.tokens.tolist() == chat_ids("h\u00ef")
        answer = await asking
        texts = answer.texts()
        for part, piece in ((b"a", "a"), (b"b\xc3", "b"), (b"\xa9", "\u00e9")):
            taken.emit(list(part))
            assert await anext(texts) == piece
        taken.finish(Finish.STOP)
        assert [piece async for piece in texts] == []
        result = await answer.result()
        assert (result.text, result.token_ids) == ("ab\u00e9", list(b"ab\xc3\xa9"))
        assert (result.finish_reason, result.usage) == (
            "stop",
            {"prompt_tokens": len(chat_ids("h\u00ef")), "output_tokens": 4},
        )
        assert result.timings_us["pickup"] is not None
        asking = asyncio.ensure_future(client.ask("plain", max_output=1))
        taken = (await take(runtime))[0]
        assert (taken.tokens.tolist(), taken.max_output) == (byte_ids("plain"), 1)
        finish(taken, [])
        assert (await (await asking).result()).text is None

    session(bare_daemon, test, make_tokenizer(tmp_path / "tokenizer.json"))


def test_a_refusal_is_an_answer_with_its_reason(daemon: StartDaemon) -> None:
    null = daemon("--runtime=null", "--slots=1", "--context=4")

    async def main() -> None:
        async with connect(null.address, null.ca, protocol="h3") as client:
            for answer, status, reason in (
                (await client.submit([]), 400, "the prompt is empty"),
                (await client.submit([1] * 5), 400, "the prompt has 5 tokens; the context is 4"),
                (await client.submit([1] * 1_000_000), 400, "the prompt has 1000000 tokens"),
                (await client.ask("hi"), 501, "the runtime has no tokeniser"),
            ):
                assert answer.status == status
                assert reason in answer.reason
                result = await answer.result()
                assert (result.status, result.reason) == (status, answer.reason)
                assert (result.finish_reason, result.usage, result.token_ids) == (None, None, [])
                assert [ids async for ids in answer] == []
            with pytest.raises(UsageError, match="seed is -1"):
                await client.submit([1], seed=-1)
            assert (await (await client.submit([1])).result()).finish_reason == "stop"

    run(main())


def test_a_429_says_when_to_try_again(bare_daemon: DaemonProcess) -> None:
    async def test(client: Http3Client, runtime: Puppet) -> None:
        waiting = [asyncio.ensure_future(client.submit(IDS)) for _ in range(4)]
        taken = await take(runtime, 4)
        refused = await client.submit(IDS)
        assert (refused.status, refused.reason) == (429, "every slot is taken")
        assert refused.retry_after_ms is not None
        assert refused.retry_after_ms > 0
        for each in taken:
            finish(each, [1])
        for each_answer in await asyncio.gather(*waiting):
            assert (await each_answer.result()).token_ids == [1]

    session(bare_daemon, test)


def test_pages_are_fetched(bare_daemon: DaemonProcess, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")

    async def test(client: Http3Client, runtime: Puppet) -> None:
        page = await client.get("/tokenizer.json")
        assert (page.status, page.content_type) == (200, "application/json")
        assert page.body == tokenizer.read_bytes()
        page = await client.get("/nowhere")
        assert (page.status, page.content_type) == (404, "application/problem+json")

    session(bare_daemon, test, tokenizer)


def test_many_requests_share_a_connection(daemon: StartDaemon) -> None:
    """More than the streams that a peer allows at once."""
    null = daemon("--runtime=null", "--slots=4", "--max-writing=4")

    async def main() -> None:
        async with connect(null.address, null.ca, protocol="h3") as client:
            answers = await asyncio.gather(*(client.submit([number]) for number in range(300)))
            assert {answer.status for answer in answers} <= {200, 429}
            assert client.lost is None

    run(main())
    null.wait_idle()


# ---------------------------------------------------------------- ends


def test_an_answer_that_the_daemon_gives_up_raises(bare_daemon: DaemonProcess) -> None:
    async def test(client: Http3Client, runtime: Puppet) -> None:
        asking = asyncio.ensure_future(client.submit(IDS))
        taken = (await take(runtime))[0]
        taken.emit([1])
        answer = await asking
        assert await anext(answer) == [1]
        taken.finish(Finish.ERROR)
        with pytest.raises(ResetError, match="could not finish it") as caught:
            await answer.result()
        assert caught.value.code == 0x102
        assert answer.token_ids == [1]

    session(bare_daemon, test)


def test_cancelling_frees_the_slot(bare_daemon: DaemonProcess) -> None:
    async def test(client: Http3Client, runtime: Puppet) -> None:
        asking = asyncio.ensure_future(client.submit(IDS))
        taken = (await take(runtime))[0]
        answer = await asking
        answer.cancel()
        answer.cancel()
        await until("the runtime is told", lambda: taken.cancelled)
        finish(taken, [])
        assert (await answer.result()).finish_reason is None
        assert [ids async for ids in answer] == []
        assert client.lost is None

    session(bare_daemon, test)


def test_a_drain_is_heard_and_what_runs_ends_well(daemon: StartDaemon) -> None:
    draining = daemon("--runtime=none")

    async def main(runtime: Puppet) -> None:
        async with connect(draining.address, draining.ca, protocol="h3") as client:
            asking = asyncio.ensure_future(client.submit(IDS))
            taken = (await take(runtime))[0]
            answer = await asking
            draining.send(15)
            await until("GOAWAY comes", lambda: client._link._goaway)
            with pytest.raises(UnavailableError, match="shutting down and takes no more"):
                await client.submit(IDS)
            finish(taken, [1])
            assert (await answer.result()).token_ids == [1]

    with attached(draining) as runtime:
        run(main(runtime))
        assert draining.wait_for_exit() == 0


def test_a_daemon_that_is_killed_ends_every_wait(daemon: StartDaemon) -> None:
    killed = daemon("--runtime=none")

    async def main() -> None:
        async with connect(killed.address, killed.ca, protocol="h3") as client:
            asking = asyncio.ensure_future(client.submit(IDS))
            await asyncio.to_thread(killed.wait_for_states, "READY")
            answer = await asking
            killed.kill()
            with pytest.raises(UnavailableError, match="nobody listens there any more"):
                await answer.result()
            for ask in (client.submit(IDS), client.ask("hi"), client.get("/props")):
                with pytest.raises(UnavailableError):
                    await ask

    with attached(killed):
        run(main())


# ---------------------------------------------------------------- a daemon that misbehaves

Test = Callable[[Http3Client, FakeDaemon], Awaitable[None]]


def misbehave(tmp_path: Path, behave: Behaviour, test: Test) -> None:
    async def main() -> None:
        async with (
            fake_daemon(tmp_path, behave, alpn="h3") as daemon,
            connect(daemon.address, daemon.ca, protocol="h3") as client,
        ):
            await test(client, daemon)

    run(main())


def answer_head(*fields: tuple[bytes, bytes], status: bytes = b"200") -> bytes:
    return head([(b":status", status), *fields])


OCTETS = (b"content-type", b"application/octet-stream")
WHOLE = answer_head(OCTETS) + body_frame(words([1, 0xFFFFFFFF, 1, 3, 1, 0]))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (answer_head((b"content-type", b"text/html")), "of the type 'text/html'"),
        (answer_head(OCTETS) + body_frame(words([1])), "ended after 1 ids, without its trailer"),
        (answer_head(OCTETS) + body_frame(words([0xFFFFFFFF, 9, 0, 0, 0])), "reason 9 is unknown"),
        (answer_head(OCTETS, (b"content-length", b"9")), "no good HTTP/3: the body is shorter"),
        (head([(b"x-a", b"b")]), "no good HTTP/3: :status is missing"),
        (b"", "no good HTTP/3: the stream ended without a response"),
    ],
)
def test_what_is_no_answer_ends_its_stream_only(tmp_path: Path, data: bytes, says: str) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(WHOLE if stream.number else data, fin=True)

    async def test(client: Http3Client, daemon: FakeDaemon) -> None:
        with pytest.raises(ProtocolError, match=says):
            await (await client.submit(IDS)).result()
        assert (await (await client.submit(IDS)).result()).token_ids == [1]

    misbehave(tmp_path, behave, test)


def test_an_interim_answer_is_passed_over(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(answer_head(status=b"103") + WHOLE, fin=True)

    async def test(client: Http3Client, daemon: FakeDaemon) -> None:
        assert (await (await client.submit(IDS)).result()).token_ids == [1]

    misbehave(tmp_path, behave, test)


def test_a_refusal_counts_though_its_reason_is_cut_off(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(answer_head(status=b"503") + body_frame(b"away"))
        await asyncio.sleep(0.01)  # or the reset overtakes what it follows
        stream.reset(0x10B)

    async def test(client: Http3Client, daemon: FakeDaemon) -> None:
        answer = await client.submit(IDS)
        assert (answer.status, answer.reason) == (503, "away")

    misbehave(tmp_path, behave, test)


@pytest.mark.parametrize(
    ("code", "says"),
    [(0x10B, "H3_REQUEST_REJECTED"), (0x102, "H3_INTERNAL_ERROR"), (0x77, "code 0x77")],
)
def test_a_reset_is_said_in_words(tmp_path: Path, code: int, says: str) -> None:
    async def behave(stream: Stream) -> None:
        stream.reset(code)

    async def test(client: Http3Client, daemon: FakeDaemon) -> None:
        for ask in (client.submit(IDS), client.ask("hi"), client.get("/props")):
            with pytest.raises(ResetError, match=says):
                await ask

    misbehave(tmp_path, behave, test)


def test_what_breaks_http3_ends_the_connection(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(frame(0, b"data before its header"))

    async def test(client: Http3Client, daemon: FakeDaemon) -> None:
        with pytest.raises(UnavailableError, match="the server broke HTTP/3: DATA before HEADERS"):
            await client.submit(IDS)
        assert client.lost is not None

    misbehave(tmp_path, behave, test)


def test_goaway_ends_what_will_not_be_answered(tmp_path: Path) -> None:
    more = asyncio.Event()
    stopped = []

    async def behave(stream: Stream) -> None:
        if stream.number == 0:
            await more.wait()
            stream.send(WHOLE, fin=True)
            return
        quic = stream._protocol._quic
        control = quic.get_next_available_stream_id(is_unidirectional=True)
        quic.send_stream_data(control, b"\0" + frame(4, b"") + frame(7, b"\4"))
        stream._protocol.transmit()
        await stream.stopped.wait()
        stopped.append(stream.number)

    async def test(client: Http3Client, daemon: FakeDaemon) -> None:
        first = asyncio.ensure_future(client.submit(IDS))
        await until("it comes", lambda: any(stream.number == 0 for stream in daemon.streams))
        with pytest.raises(UnavailableError, match="did not take the request"):
            await client.submit(IDS)
        with pytest.raises(UnavailableError, match="takes no more requests"):
            await client.get("/health")
        await until("the request is given up", lambda: stopped == [4])
        more.set()
        assert (await (await first).result()).token_ids == [1]

    misbehave(tmp_path, behave, test)


def test_a_daemon_that_speaks_raw_only_is_said(tmp_path: Path) -> None:
    async def behave(stream: Stream) -> None:
        raise AssertionError("no stream can come")

    async def main() -> None:
        async with fake_daemon(tmp_path, behave) as daemon:
            with pytest.raises(UnavailableError, match="speaks another protocol"):
                async with connect(daemon.address, daemon.ca, protocol="h3"):
                    pass

    run(main())


def test_a_protocol_is_raw_or_h3() -> None:
    with pytest.raises(UsageError, match="'h2' is not known; it must be raw or h3"):
        connect("localhost:1", protocol="h2")  # type: ignore[call-overload]
