"""`/v1/generate` over HTTP/3, against a real daemon: requests and answers in all their forms."""

import json
from collections.abc import Iterator
from functools import partial

import pytest
from conftest import StartDaemon
from daemon_process import DaemonProcess, daemon_process, run
from generate_checks import COMMON, HELD, IDS, check_common, check_whole, finish, take
from h3_client import (
    BINARY,
    EVENTS,
    JSON,
    body_frame,
    h3_client,
    head,
    post_fields,
    shorts,
    words,
)
from raw_runtime import Puppet, puppet

from dataplane.runtime import Finish

CONTEXT, MAX_OUTPUT = 64, 32


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """An echo that gives a whole prompt back at once."""
    with daemon_process(
        tmp_path_factory.mktemp("echo"),
        "--runtime=echo",
        "--slots=4",
        f"--context={CONTEXT}",
        f"--max-output={MAX_OUTPUT}",
    ) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def slow_echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """An echo that gives an id back every 10 ms."""
    with daemon_process(
        tmp_path_factory.mktemp("slow"), "--runtime=echo", "--slots=4", "--token-delay-ms=10"
    ) as daemon:
        yield daemon


# ---------------------------------------------------------------- forms

REQUESTS = {
    "width 4": (BINARY, words(IDS), "application/octet-stream"),
    "width 2": (BINARY + b"; width=2", shorts(IDS), "application/octet-stream"),
    "width 4 said": (b"Application/Octet-Stream;width=4", words(IDS), "application/octet-stream"),
    "JSON": (JSON, json.dumps({"token_ids": IDS}).encode(), "application/json"),
    "JSON, charset": (
        b"application/json; charset=utf-8",
        json.dumps({"token_ids": IDS}).encode(),
        "application/json",
    ),
    "JSON, stream": (
        JSON,
        json.dumps({"token_ids": IDS, "stream": True}).encode(),
        "text/event-stream",
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("accept", [None, BINARY, JSON, EVENTS])
def test_every_request_form_has_every_answer_form(
    echo: DaemonProcess, name: str, accept: bytes | None
) -> None:
    content_type, body, default = REQUESTS[name]

    async def session() -> None:
        async with h3_client(echo) as client:
            more = {} if accept is None else {"accept": accept.decode()}
            answer = await client.post(body, content_type, more).answer()
            check_whole(answer, IDS, 3, "stop")
            expected = default if accept is None else accept.decode()
            assert answer.fields["content-type"] == expected
            assert set(answer.fields) == COMMON | HELD
            check_common(answer, limit=4, remaining=3)

    run(session())
    echo.wait_idle()


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("*/*", BINARY),
        ("text/html, */*;q=0.8", BINARY),
        ("text/html", BINARY),
        ("application/json, text/event-stream", JSON),
        ("application/json;q=0.5, text/event-stream", EVENTS),
        ("text/event-stream;q=0.1, application/json; q=0.9, application/octet-stream;q=0", JSON),
        ("Application/JSON", JSON),
    ],
)
def test_accept_chooses_the_form_it_ranks_highest(
    echo: DaemonProcess, accept: str, form: bytes
) -> None:
    async def session() -> None:
        async with h3_client(echo) as client:
            answer = await client.post(words(IDS), more={"accept": accept}).answer()
            assert answer.fields["content-type"] == form.decode()

    run(session())


@pytest.mark.parametrize("kind", ["width 4", "width 2", "JSON"])
def test_a_prompt_of_exactly_the_context_is_taken(echo: DaemonProcess, kind: str) -> None:
    ids = list(range(CONTEXT))
    content_type, body = {
        "width 4": (BINARY, words(ids)),
        "width 2": (BINARY + b"; width=2", shorts(ids)),
        "JSON": (JSON, json.dumps({"token_ids": ids}).encode()),
    }[kind]

    async def session() -> None:
        async with h3_client(echo) as client:
            answer = await client.post(body, content_type, {"accept": BINARY.decode()}).answer()
            check_whole(answer, ids[:MAX_OUTPUT], CONTEXT, "length")

    run(session())


def test_a_body_may_come_in_any_pieces(echo: DaemonProcess) -> None:
    data = head(post_fields(12)) + body_frame(words(IDS)[:5]) + body_frame(words(IDS)[5:])

    async def session() -> None:
        async with h3_client(echo) as client:
            for size in (1, 7):
                stream = client.open(data[:size])
                for at in range(size, len(data), size):
                    stream.send(data[at : at + size])
                stream.send(b"", fin=True)
                check_whole(await stream.answer(), IDS, 3, "stop")

    run(session())


def test_many_requests_share_a_connection(echo: DaemonProcess) -> None:
    """More than the streams that may be open at once; slots allowing, as a busy client would."""

    async def session() -> None:
        async with h3_client(echo) as client:
            for start in range(0, 300, 2):
                pair = [client.post(words([start + n])) for n in (0, 1)]
                for n, stream in enumerate(pair):
                    check_whole(await stream.answer(), [start + n], 1, "stop")

    run(session())
    echo.wait_idle()


def test_null_answers_without_output(daemon: StartDaemon) -> None:
    null = daemon("--runtime=null", "--slots=2")

    async def session() -> None:
        async with h3_client(null) as client:
            for content_type, body, _ in REQUESTS.values():
                check_whole(await client.post(body, content_type).answer(), [], 3, "stop")
            answer = await client.post(words(IDS), more={"accept": JSON.decode()}).answer()
            times = answer.json()["timings_us"]
            assert (times["pickup"], times["first_token"], times["total"]) == (None, None, None)

    run(session())
    null.wait_idle()


# ---------------------------------------------------------------- streaming


@pytest.mark.parametrize("form", [BINARY, EVENTS])
def test_output_is_sent_as_it_comes(bare_daemon: DaemonProcess, form: bytes) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            stream = client.post(words(IDS), more={"accept": form.decode()})
            header = await stream.header()
            assert (header.status, header.body) == (200, b"")
            taken = (await take(runtime))[0]
            for number in (11, 12, 13):
                before = len(stream.so_far.body)
                taken.emit([number])
                await stream.body_beyond(before)
                assert not stream.fin
            taken.finish(Finish.STOP)
            answer = await stream.answer()
            check_whole(answer, [11, 12, 13], 3, "stop")
            if form == EVENTS:
                assert len(answer.events()) == 5

    with puppet(bare_daemon) as runtime:
        run(session(runtime))


def test_a_json_answer_comes_whole_at_its_end(bare_daemon: DaemonProcess) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            stream = client.post_json({"token_ids": IDS})
            taken = (await take(runtime))[0]
            taken.emit([1, 2])
            await stream.header()
            taken.emit([3])
            taken.finish(Finish.LENGTH)
            check_whole(await stream.answer(), [1, 2, 3], 3, "length")

    with puppet(bare_daemon) as runtime:
        run(session(runtime))


def test_an_echo_with_a_delay_streams_its_events(slow_echo: DaemonProcess) -> None:
    async def session() -> None:
        async with h3_client(slow_echo) as client:
            answer = await client.post_json({"token_ids": IDS, "stream": True}).answer()
            check_whole(answer, IDS, 3, "stop")
            assert len(answer.events()) > 3  # so the ids came in more than one piece
            assert answer.events()[-2]["timings_us"]["total"] >= 30_000

    run(session())


def test_a_deadline_ends_the_answer_with_what_is_out(slow_echo: DaemonProcess) -> None:
    async def session() -> None:
        async with h3_client(slow_echo) as client:
            stream = client.post(
                words(range(1000)), more={"x-deadline-ms": "200", "accept": JSON.decode()}
            )
            document = (await stream.answer()).json()
            assert document["finish_reason"] == "deadline"
            assert 0 < len(document["token_ids"]) < 30
            assert document["token_ids"] == list(range(len(document["token_ids"])))
            assert document["usage"]["output_tokens"] == len(document["token_ids"])

    run(session())
    slow_echo.wait_idle()


# ---------------------------------------------------------------- parameters


def test_parameters_reach_the_runtime_from_either_place(bare_daemon: DaemonProcess) -> None:
    fields = {
        "x-max-tokens": "9",
        "x-temperature": "0.5",
        "x-top-p": "0.25",
        "x-top-k": "40",
        "x-seed": "4294967295",
    }
    own = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.25, "top_k": 40, "seed": 4294967295}
    some = {"token_ids": IDS, "sampling_params": {"top_k": -1, "seed": 3, "temperature": 1}}

    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            for open_stream, seed, top_k, temperature in (
                (partial(client.post, words(IDS), more=fields), 4294967295, 40, 0.5),
                (partial(client.post_json, {"token_ids": IDS}, fields), 4294967295, 40, 0.5),
                (partial(client.post_json, {**some, "sampling_params": own}), 4294967295, 40, 0.5),
                (partial(client.post_json, some, fields), 3, 0, 1.0),
            ):
                stream = open_stream()
                taken = (await take(runtime))[0]
                assert taken.tokens.tolist() == IDS
                assert (taken.seed, taken.top_k, taken.temperature) == (seed, top_k, temperature)
                assert (taken.max_output, taken.top_p) == (9, 0.25)
                finish(taken, [1])
                check_whole(await stream.answer(), [1], 3, "stop")

    with puppet(bare_daemon) as runtime:
        run(session(runtime))


def test_without_parameters_the_runtime_gets_its_own_limits(bare_daemon: DaemonProcess) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            for content_type, body, _ in (REQUESTS["width 4"], REQUESTS["JSON"]):
                stream = client.post(body, content_type)
                taken = (await take(runtime))[0]
                assert (taken.max_output, taken.temperature) == (16, 0.0)
                assert (taken.top_p, taken.top_k) == (0.0, 0)
                finish(taken, [])
                check_whole(await stream.answer(), [], 3, "stop")

    with puppet(bare_daemon, max_output=16) as runtime:
        run(session(runtime))


def test_affinity_chooses_the_slot(bare_daemon: DaemonProcess) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            first = client.post(words(IDS), more={"x-affinity": "5"})
            taken = await take(runtime)
            assert (await first.header()).fields["x-slot"] == "1"
            strict = client.post(words(IDS), more={"x-affinity": "5", "x-affinity-strict": "1"})
            assert (await strict.answer()).status == 429
            loose = client.post(words(IDS), more={"x-affinity": "5", "x-affinity-strict": "0"})
            taken += await take(runtime)
            assert (await loose.header()).fields["x-slot"] in ("0", "2", "3")
            for each in taken:
                finish(each, [1])
            await first.answer()
            await loose.answer()

    with puppet(bare_daemon, slots=4) as runtime:
        run(session(runtime))
