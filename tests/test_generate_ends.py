"""Over HTTP/3, against a real daemon: answers that come early, break off, or that nobody wants."""

import asyncio
import signal
from collections.abc import Callable

import pytest
from conftest import StartDaemon
from daemon_process import DaemonProcess, run, until
from generate_checks import IDS, attached, check_retry, check_whole, finish, take
from h3_client import (
    BINARY,
    EVENTS,
    INTERNAL_ERROR,
    JSON,
    NO_ERROR,
    REQUEST_CANCELLED,
    Stream,
    body_frame,
    h3_client,
    head,
    post_fields,
    request_fields,
    words,
)
from raw_runtime import Puppet, puppet

from dataplane.runtime import Finish

# ---------------------------------------------------------------- early answers


async def check_early(stream: Stream, status: int) -> None:
    """The whole answer and its end come, and then the request is not read on."""
    answer = await stream.answer()
    assert answer.status == status
    answer.problem()
    assert await stream.stop_code() == NO_ERROR == 0x100
    assert stream.was_reset is None


def test_a_refusal_does_not_wait_for_the_body(bare_daemon: DaemonProcess) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            first = client.post(words(IDS))
            taken = await take(runtime)
            await check_early(client.open(head(post_fields(16))), 429)
            await check_early(client.open(head(post_fields(16, JSON))), 429)
            await check_early(client.open(head(post_fields(16, b"text/plain"))), 415)
            await check_early(client.open(head(post_fields(400))), 400)
            await check_early(client.open(head(request_fields(b"PUT"))), 405)
            await check_early(client.open(head(request_fields(b"POST", b"/nowhere"))), 404)
            await check_early(client.open(head(request_fields())), 411)
            await check_early(client.open(head([*request_fields(), (b"x-a", b"a" * 20_000)])), 431)
            finish(taken[0], [1])
            check_whole(await first.answer(), [1], 3, "stop")

    with puppet(bare_daemon, slots=1) as runtime:
        run(session(runtime))


def test_a_bad_id_ends_its_request_before_the_rest_comes(bare_daemon: DaemonProcess) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            data = head(post_fields(40)) + body_frame(words([1, 50_000]))
            await check_early(client.open(data), 400)
            await check_early(client.open(head(post_fields(8)) + body_frame(words(IDS))), 400)
            bare_daemon.wait_idle()

    with puppet(bare_daemon) as runtime:
        run(session(runtime))


def test_what_came_to_its_end_is_not_stopped(bare_daemon: DaemonProcess) -> None:
    """STOP_SENDING would be about nothing."""

    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            streams = [
                client.post(b"1"),
                client.post(words([50_000])),
                client.post_json({"token_ids": [50_000]}),
                client.post(words(IDS), b"text/plain"),
                client.open(head(post_fields(16)) + body_frame(words(IDS)), fin=True),
                client.get("/nowhere"),
                client.get("/health"),
            ]
            for stream in streams:
                await stream.answer()
            # Whatever was to come with these answers came before the next one.
            await client.get("/health").answer()
            assert [stream.stopped for stream in streams] == [None] * len(streams)

    with puppet(bare_daemon, slots=8) as runtime:
        run(session(runtime))


def test_a_page_does_not_wait_for_the_end_of_its_request(bare_daemon: DaemonProcess) -> None:
    async def session() -> None:
        async with h3_client(bare_daemon) as client:
            stream = client.open(head(request_fields(b"GET", b"/health")))
            assert (await stream.answer()).status == 200
            assert await stream.stop_code() == NO_ERROR

    run(session())


def test_one_connection_may_fill_half_of_the_slots(bare_daemon: DaemonProcess) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client, h3_client(bare_daemon) as other:
            filling = [client.open(head(post_fields(12))) for _ in range(2)]
            refused = await client.post(words(IDS)).answer()
            check_retry(refused, 429, "Too Many Requests", "this connection already holds 2 slots")
            theirs = other.post(words(IDS))
            for stream in filling:
                stream.send(body_frame(words(IDS)), fin=True)
            for taken in await take(runtime, 3):
                finish(taken, [1])
            for stream in (*filling, theirs):
                check_whole(await stream.answer(), [1], 3, "stop")

    with puppet(bare_daemon, slots=4) as runtime:
        run(session(runtime))
    bare_daemon.wait_idle()


# ---------------------------------------------------------------- failures


def test_a_failure_of_the_runtime_resets_the_answer(bare_daemon: DaemonProcess) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            for form in (BINARY, JSON, EVENTS):
                stream = client.post(words(IDS), more={"accept": form.decode()})
                taken = (await take(runtime))[0]
                taken.emit([1])
                assert (await stream.header()).status == 200
                taken.finish(Finish.ERROR)
                assert await stream.reset_code() == INTERNAL_ERROR == 0x102
                assert not stream.fin
            good = client.post(words(IDS))
            finish((await take(runtime))[0], [9])
            check_whole(await good.answer(), [9], 3, "stop")

    with puppet(bare_daemon) as runtime:
        run(session(runtime))
        bare_daemon.wait_idle()


def test_a_runtime_that_leaves_breaks_off_what_it_had(bare_daemon: DaemonProcess) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            running, ready = (
                client.post(words(IDS)),
                client.post(words(IDS), more={"accept": EVENTS.decode()}),
            )
            writing = client.open(head(post_fields(12)))
            gathering = client.open(head(post_fields(12, JSON)))
            await take(runtime, 2)
            for stream in (running, ready):
                assert (await stream.header()).status == 200
            runtime.runtime.detach()
            for stream in (running, ready):
                assert await stream.reset_code() == INTERNAL_ERROR
            for stream in (writing, gathering):
                check_retry(
                    await stream.answer(), 503, "Service Unavailable", "the runtime was lost"
                )
                assert await stream.stop_code() == NO_ERROR
            assert (await client.post(words(IDS)).answer()).status == 503

    with puppet(bare_daemon, slots=8) as runtime:
        run(session(runtime))


# ---------------------------------------------------------------- giving up


GIVE_UP: list[Callable[[Stream], None]] = [Stream.reset, Stream.stop]


@pytest.mark.parametrize("content_type", [BINARY, JSON])
@pytest.mark.parametrize("give_up", GIVE_UP)
def test_giving_up_an_unfinished_request_frees_its_slot(
    bare_daemon: DaemonProcess, content_type: bytes, give_up: Callable[[Stream], None]
) -> None:
    async def session() -> None:
        async with h3_client(bare_daemon) as client:
            stream = client.open(head(post_fields(12, content_type)) + body_frame(words([1])))
            await until("it is being written", lambda: bare_daemon.states()[0] == "WRITING")
            give_up(stream)
            await until("it is free", lambda: bare_daemon.states() == ["FREE"])
            assert await stream.reset_code() == REQUEST_CANCELLED
            if give_up is Stream.stop:
                assert await stream.stop_code() == NO_ERROR
            assert (await client.get("/health").answer()).status == 200

    with puppet(bare_daemon, slots=1):
        run(session())
        bare_daemon.wait_idle()


@pytest.mark.parametrize("form", [BINARY, JSON, EVENTS])
def test_stopping_an_answer_frees_its_slot(bare_daemon: DaemonProcess, form: bytes) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            # Published and not taken: the slot comes back at once.
            ready = client.post(words(IDS), more={"accept": form.decode()})
            assert (await ready.header()).status == 200
            ready.stop()
            await until("it is free", lambda: bare_daemon.states() == ["FREE"])
            # Running: the runtime is told, and gives it back.
            running = client.post(words(IDS), more={"accept": form.decode()})
            taken = (await take(runtime))[0]
            taken.emit([1])
            await running.header()
            running.stop()
            await until("it is cancelled", lambda: taken.cancelled)
            assert bare_daemon.states() == ["CANCELLING"]
            finish(taken, [])
            await until("it is free", lambda: bare_daemon.states() == ["FREE"])
            for stream in (ready, running):
                assert await stream.reset_code() == REQUEST_CANCELLED
            assert bare_daemon.health()["cancelled"] - before == 2

    before = bare_daemon.health()["cancelled"]
    with puppet(bare_daemon, slots=1) as runtime:
        run(session(runtime))
        bare_daemon.wait_idle()


def test_closing_the_connection_frees_every_slot(bare_daemon: DaemonProcess) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            client.post(words(IDS))
            taken = await take(runtime)
            client.post(words(IDS))
            client.open(head(post_fields(12)))
            client.open(head(post_fields(12, JSON)))
            await until(
                "all are there",
                lambda: sorted(bare_daemon.states()) == ["READY", "RUNNING", "WRITING", "WRITING"],
            )
        await until(
            "they are free, but for the one that the runtime has",
            lambda: sorted(bare_daemon.states()) == ["CANCELLING", "FREE", "FREE", "FREE"],
        )
        finish(taken[0], [])

    with puppet(bare_daemon, slots=4) as runtime:
        run(session(runtime))
        bare_daemon.wait_idle()


# ---------------------------------------------------------------- the daemon ends


def test_a_drain_tells_and_lets_answers_end(daemon: StartDaemon) -> None:
    draining = daemon("--runtime=none", "--drain-timeout=20")

    async def session(runtime: Puppet) -> None:
        async with h3_client(draining) as client:
            streams = [client.post(words(IDS), more={"accept": EVENTS.decode()}) for _ in range(2)]
            taken = await take(runtime, 2)
            for stream in streams:
                await stream.header()
            draining.send(signal.SIGTERM)
            await client.until("GOAWAY", lambda: (7, b"\x08") in client.control_frames())
            refused = await client.post(words(IDS)).answer()
            check_retry(refused, 503, "Service Unavailable", "shutting down: send the request to")
            for each in taken:
                finish(each, [4])
            for stream in streams:
                check_whole(await stream.answer(), [4], 3, "stop")

    with attached(draining) as runtime:
        run(session(runtime))
        assert draining.wait_for_exit() == 0


def test_a_drain_that_takes_too_long_breaks_off(daemon: StartDaemon) -> None:
    draining = daemon("--runtime=none", "--drain-timeout=0.1")

    async def session(runtime: Puppet) -> None:
        async with h3_client(draining) as client:
            stream = client.post(words(IDS), more={"accept": EVENTS.decode()})
            await take(runtime)
            await stream.header()
            draining.send(signal.SIGTERM)
            assert await stream.reset_code() == INTERNAL_ERROR
            await asyncio.to_thread(draining.wait_for_exit)

    with attached(draining) as runtime:
        run(session(runtime))
