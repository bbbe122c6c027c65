"""HTTP/3 against a real daemon: every bad input has its status and its reason, and spares the rest.

Each is followed by a good request on the same connection, and at the end of each test nothing is in
flight and every slot is FREE.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from daemon_process import DaemonProcess, daemon_process, run, until
from h3_client import (
    BINARY,
    JSON,
    NO_ERROR,
    REQUEST_CANCELLED,
    H3Client,
    Pairs,
    Stream,
    body_frame,
    frame,
    h3_client,
    head,
    post_fields,
    request_fields,
    shorts,
    words,
)

CONTEXT, MAX_OUTPUT, VOCAB = 64, 32, 1000
BODY_TIMEOUT_S = 0.3


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One echo daemon for the file."""
    directory: Path = tmp_path_factory.mktemp("echo")
    with daemon_process(
        directory,
        "--runtime=echo",
        "--slots=4",
        f"--context={CONTEXT}",
        f"--max-output={MAX_OUTPUT}",
        f"--vocab-size={VOCAB}",
        f"--body-timeout={BODY_TIMEOUT_S}",
    ) as daemon:
        yield daemon


class Bad(NamedTuple):
    """A request that ends after `data`, and what it gets."""

    data: bytes
    status: int
    reason: str
    allow: str | None = None


IDS = words([1, 2, 3, 4])


def with_length(*lengths: bytes, body: bytes = IDS) -> bytes:
    fields = [*request_fields(), (b"content-type", BINARY)]
    return head([*fields, *((b"content-length", length) for length in lengths)]) + body_frame(body)


def with_fields(fields: Pairs, body: bytes = IDS) -> bytes:
    return head(fields) + body_frame(body)


def binary(body: bytes, content_type: bytes = BINARY) -> bytes:
    return head(post_fields(len(body), content_type)) + body_frame(body)


def document(text: str | bytes) -> bytes:
    body = text if isinstance(text, bytes) else text.encode()
    return head(post_fields(len(body), JSON)) + body_frame(body)


def sampling(**values: Any) -> bytes:
    return document(json.dumps({"token_ids": [1], "sampling_params": values}))


def bodiless(method: bytes, path: bytes = b"/v1/generate") -> bytes:
    return head(request_fields(method, path))


FIELDS = post_fields(len(IDS))
DEEP = '{"token_ids": [1], "x": ' + "[" * 10_000 + "]" * 10_000 + "}"
LONG = (b"x-long", b"a" * 17 * 1024)

LENGTHS = {
    "no length": Bad(with_length(), 411, "content-length is needed"),
    "length +5": Bad(with_length(b"+5"), 400, "content-length is not made of digits alone"),
    "length 1_0": Bad(with_length(b"1_0"), 400, "content-length is not made of digits alone"),
    "length -1": Bad(with_length(b"-1"), 400, "content-length is not made of digits alone"),
    "length 0x10": Bad(with_length(b"0x10"), 400, "content-length is not made of digits alone"),
    "length 16, 16": Bad(with_length(b"16, 16"), 400, "is not made of digits alone"),
    "length empty": Bad(with_length(b""), 400, "content-length is not made of digits alone"),
    "length twice": Bad(with_length(b"16", b"16"), 400, "content-length comes more than once"),
    "two lengths": Bad(with_length(b"16", b"8"), 400, "content-length comes more than once"),
    "length 2^63": Bad(with_length(b"%d" % 2**63), 400, "content-length is over 2^63-1"),
    "length 2^63-1": Bad(with_length(b"%d" % (2**63 - 1)), 400, "no whole number of ids"),
    "length 2^62": Bad(with_length(b"%d" % 2**62), 400, "has 4294967295 tokens"),
    "length too large": Bad(with_length(b"20"), 400, "the body is shorter than its content-length"),
    "length too small": Bad(with_length(b"12"), 400, "the body is longer than its content-length"),
    "length, no body": Bad(head(FIELDS), 400, "the body is shorter than its content-length"),
    "length 0": Bad(with_length(b"0", body=b""), 400, "the prompt is empty"),
    "length and more in a second frame": Bad(
        binary(IDS) + body_frame(IDS), 400, "the body is longer than its content-length"
    ),
}

HEADERS = {
    "no :path": Bad(with_fields([p for p in FIELDS if p[0] != b":path"]), 400, ":path is missing"),
    "no :method": Bad(with_fields(FIELDS[1:]), 400, ":method is missing"),
    "empty :path": Bad(bodiless(b"GET", b""), 400, ":path does not begin with a slash"),
    "upper case": Bad(with_fields([*FIELDS, (b"X-Seed", b"1")]), 400, "a field name is empty or"),
    "late pseudo-field": Bad(
        with_fields([*FIELDS[1:], FIELDS[0]]), 400, "a pseudo-field comes after a regular field"
    ),
    "unknown pseudo-field": Bad(with_fields([(b":x", b"1"), *FIELDS]), 400, "is unknown or out of"),
    "line break in a value": Bad(with_fields([*FIELDS, (b"x-a", b"a\r\nb")]), 400, "not allowed"),
    "connection": Bad(with_fields([*FIELDS, (b"connection", b"close")]), 400, "not allowed in"),
    "17 KiB of fields": Bad(with_fields([*FIELDS, LONG]), 431, "the field section is too large"),
    "1 MiB of fields": Bad(
        with_fields([*FIELDS, (b"x-long", b"a" * 2**20)]), 431, "the field section is too large"
    ),
    "many small fields": Bad(
        with_fields([*FIELDS, *[(b"x-a", b"")] * 500]), 431, "the field section is too large"
    ),
    "method PUT": Bad(bodiless(b"PUT"), 405, "only POST", "POST"),
    "method GET": Bad(bodiless(b"GET"), 405, "only POST", "POST"),
    "method unknown": Bad(bodiless(b"BREW"), 405, "only POST", "POST"),
    "POST to a page": Bad(bodiless(b"POST", b"/health"), 405, "only GET, HEAD", "GET, HEAD"),
    "path unknown": Bad(bodiless(b"POST", b"/v1/generates"), 404, "no such path"),
    "path of the admin port": Bad(bodiless(b"GET", b"/livez"), 404, "no such path"),
    "path that is no URL": Bad(bodiless(b"GET", b"//["), 404, "no such path"),
    "media type text": Bad(binary(IDS, b"text/plain"), 415, "application/octet-stream or"),
    "media type empty": Bad(binary(IDS, b""), 415, "application/octet-stream or"),
    "no media type": Bad(
        with_fields([p for p in FIELDS if p[0] != b"content-type"]), 415, "must be application/"
    ),
    "width 3": Bad(binary(IDS, BINARY + b"; width=3"), 400, "width, which is 2 or 4"),
    "width twice": Bad(binary(IDS, BINARY + b";width=2;width=4"), 400, "width, which is 2 or 4"),
    "other parameter": Bad(binary(IDS, BINARY + b"; charset=utf-8"), 400, "only parameter is"),
}

U32 = "must be a whole number from 0 to 4294967295"


def parameter(name: str, value: str, reason: str) -> Bad:
    return Bad(with_fields([*FIELDS, (name.encode(), value.encode())]), 400, reason)


PARAMETERS = {
    **{
        f"{name} {value[:10]!r}": parameter(name, value, f"{name} {U32}")
        for name in ("x-max-tokens", "x-top-k", "x-seed", "x-affinity", "x-deadline-ms")
        for value in ("", "-1", "+1", "1_0", "1.0", "4294967296", "9" * 4000)
    },
    **{
        f"{name} {value!r}": parameter(
            name, value, f"{name} must be a decimal number from 0 to {most}"
        )
        for name, most in (("x-temperature", 100), ("x-top-p", 1))
        for value in ("", "-1", "nan", "inf", "1e1", ".5", "100.5", "1,0")
    },
    "x-max-tokens over the slot": parameter(
        "x-max-tokens", "33", "max_output is 33; a slot has room for 32"
    ),
    "x-affinity-strict": parameter("x-affinity-strict", "yes", "x-affinity-strict must be 0 or 1"),
    "x-seed twice": Bad(
        with_fields([*FIELDS, (b"x-seed", b"1"), (b"x-seed", b"1")]), 400, f"x-seed {U32}"
    ),
}

PROMPTS = {
    "context+1, width 4": Bad(binary(words([1] * 65)), 400, "has 65 tokens; the context is 64"),
    "context+1, width 2": Bad(
        binary(shorts([1] * 65), BINARY + b"; width=2"), 400, "has 65 tokens; the context is 64"
    ),
    "context+1, JSON": Bad(
        document(json.dumps({"token_ids": [1] * 65})), 400, "has 65 tokens; the context is 64"
    ),
    "id of the vocabulary's size": Bad(
        binary(words([1, VOCAB])), 400, "token 1 is 1000; the vocabulary has 1000"
    ),
    "id 2^32-1": Bad(binary(words([2**32 - 1])), 400, "token 0 is 4294967295"),
    "JSON id of the vocabulary's size": Bad(
        document('{"token_ids": [1, 1000]}'), 400, "token 1 is 1000; the vocabulary has 1000"
    ),
    "half an id": Bad(binary(IDS + b"\1\0"), 400, "the body of 18 bytes is no whole number of ids"),
    "half an id of 2": Bad(binary(b"\1\0\1", BINARY + b";width=2"), 400, "ids of 2 bytes"),
}

UNUSABLE = "the JSON body cannot be used"
BODIES = {
    "JSON empty": Bad(document(""), 400, UNUSABLE),
    "no JSON": Bad(document("prompt=hello"), 400, UNUSABLE),
    "no UTF-8": Bad(document(b'{"prompt": "\xff"}'), 400, UNUSABLE),
    "lone surrogate": Bad(document('{"prompt": "\\ud800"}'), 400, UNUSABLE),
    "JSON cut off": Bad(document('{"token_ids": [1, 2'), 400, UNUSABLE),
    "JSON and more": Bad(document('{"token_ids": [1]} {}'), 400, UNUSABLE),
    "JSON array": Bad(document("[1, 2]"), 400, "Expected `object`, got `array`"),
    "string id": Bad(document('{"token_ids": [1, "2"]}'), 400, "at `$.token_ids[1]`"),
    "float id": Bad(document('{"token_ids": [1.0]}'), 400, "Expected `int`, got `float`"),
    "boolean id": Bad(document('{"token_ids": [true]}'), 400, "Expected `int`, got `bool`"),
    "negative id": Bad(document('{"token_ids": [7, -1]}'), 400, "token 1 is -1; a token id is"),
    "id 2^32": Bad(document('{"token_ids": [4294967296]}'), 400, "token 0 is 4294967296; a token"),
    "id of 30 digits": Bad(document(f'{{"token_ids": [{"9" * 30}]}}'), 400, "a token id is"),
    "id of 5,000 digits": Bad(document(f'{{"token_ids": [{"9" * 5000}]}}'), 400, "out of range"),
    "no ids": Bad(document('{"token_ids": []}'), 400, "the prompt is empty"),
    "nothing asked": Bad(document("{}"), 400, "one of token_ids, prompt, messages is needed, not"),
    "prompt and ids": Bad(
        document('{"prompt": "a", "token_ids": [1]}'), 400, "not token_ids and prompt"
    ),
    "all three": Bad(
        document('{"prompt": "a", "token_ids": [1], "messages": []}'), 400, "and messages"
    ),
    "ids as text": Bad(document('{"token_ids": "1,2"}'), 400, "Expected `array"),
    "messages as text": Bad(document('{"messages": "hello"}'), 400, "Expected `array"),
    "stream as text": Bad(document('{"token_ids": [1], "stream": "no"}'), 400, "`$.stream`"),
    "10,000 deep": Bad(document(DEEP), 400, "nested too deeply"),
    "text without tokeniser": Bad(document('{"prompt": "hello"}'), 501, "no tokeniser: send token"),
    "messages without tokeniser": Bad(
        document('{"messages": [{"role": "user", "content": "a"}]}'), 501, "send token_ids instead"
    ),
    "JSON over the limit": Bad(
        document(json.dumps({"token_ids": [1], "x": "a" * 66_560})), 413, "at most 66560 are taken"
    ),
    "top_k -2": Bad(sampling(top_k=-2), 400, "sampling_params.top_k is -2; it must be from 0"),
    "max_tokens -1": Bad(sampling(max_tokens=-1), 400, "sampling_params.max_tokens is -1"),
    "max_tokens 2^40": Bad(sampling(max_tokens=2**40), 400, "max_tokens is 1099511627776"),
    "max_tokens over the slot": Bad(sampling(max_tokens=33), 400, "max_output is 33; a slot has"),
    "seed 2^32": Bad(sampling(seed=2**32), 400, "sampling_params.seed is 4294967296"),
    "seed 1.5": Bad(sampling(seed=1.5), 400, "at `$.sampling_params.seed`"),
    "temperature -0.1": Bad(sampling(temperature=-0.1), 400, "sampling_params.temperature is -0.1"),
    "temperature 101": Bad(sampling(temperature=101), 400, "it must be from 0 to 100"),
    "top_p 1.1": Bad(sampling(top_p=1.1), 400, "sampling_params.top_p is 1.1; it must be from 0"),
    "sampling as a list": Bad(
        document('{"token_ids": [1], "sampling_params": []}'), 400, "`$.sampling_params`"
    ),
}

ALL = {**LENGTHS, **HEADERS, **PARAMETERS, **PROMPTS, **BODIES}

UNSUPPORTED = (
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p",
    "min_tokens", "stop", "stop_token_ids", "bad_words", "ignore_eos",
    "include_stop_str_in_output", "logprobs", "prompt_logprobs", "logit_bias",
    "allowed_token_ids", "logits_processors", "detokenize", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens", "guided_decoding",
    "structured_outputs",
)  # fmt: skip


async def check_good(client: H3Client) -> None:
    good = await client.post(IDS).answer()
    assert (good.status, good.ids()) == (200, [1, 2, 3, 4])


async def check_refused(stream: Stream, status: int, reason: str) -> dict[str, str]:
    """Hold an answer to be this refusal; return its fields."""
    answer = await stream.answer()
    assert answer.status == status, answer.body
    assert reason in answer.problem()["detail"]
    return answer.fields


@pytest.mark.parametrize("name", ALL)
def test_bad_input_is_told_and_spares_the_connection(echo: DaemonProcess, name: str) -> None:
    bad = ALL[name]

    async def session() -> None:
        async with h3_client(echo) as client:
            stream = client.open(bad.data, fin=True)
            fields = await check_refused(stream, bad.status, bad.reason)
            assert fields.get("allow") == bad.allow
            await check_good(client)

    run(session())
    echo.wait_idle()


def test_every_bad_input_at_once_spares_a_good_one_among_them(echo: DaemonProcess) -> None:
    async def session() -> None:
        async with h3_client(echo) as client:
            for start in range(0, len(ALL), 50):
                some = list(ALL.values())[start : start + 50]
                streams = [client.open(bad.data, fin=True) for bad in some]
                for bad, stream in zip(some, streams, strict=True):
                    answer = await stream.answer()
                    # One whose body is at fault needed a slot first, and may have met none.
                    assert answer.status in (bad.status, 429)
            await check_good(client)

    run(session())
    echo.wait_idle()


def test_a_sampling_field_that_is_not_supported_is_named(echo: DaemonProcess) -> None:
    async def session() -> None:
        async with h3_client(echo) as client:
            for name in UNSUPPORTED:
                for value in (1, "a", [1], {"a": 1}, False, 0.0):
                    stream = client.open(sampling(**{name: value}), fin=True)
                    await check_refused(
                        stream, 400, f"sampling_params.{name} is not supported: leave it out"
                    )
            answer = await client.open(
                sampling(**dict.fromkeys(UNSUPPORTED), top_k=-1, something_new=1), fin=True
            ).answer()
            assert (answer.status, answer.json()["token_ids"]) == (200, [1])

    run(session())
    echo.wait_idle()


def test_50_mb_of_json_are_not_read(echo: DaemonProcess) -> None:
    body = b'{"prompt": "' + b"a" * 50_000_000 + b'"}'

    async def session() -> None:
        async with h3_client(echo) as client:
            stream = client.post(body, JSON)
            await check_refused(stream, 413, "the JSON body has 50000014 bytes; at most 66560")
            assert await stream.stop_code() == NO_ERROR
            await check_good(client)

    run(session())
    echo.wait_idle()
    assert echo.health()["rss_bytes"] < 150_000_000


PREFIXES = {
    "header alone": (head(post_fields(16)), "only 0 of 4 tokens came in time"),
    "half the body": (head(post_fields(16)) + body_frame(IDS)[:10], "only 2 of 4 tokens came"),
    "all but FIN": (
        head(post_fields(16)) + body_frame(IDS),
        "all tokens came, but not the request's end",
    ),
    "JSON header": (head(post_fields(9, JSON)), "only 0 of 9 bytes of the body came in time"),
    "half the JSON": (head(post_fields(9, JSON)) + body_frame(b'{"toke'), "only 6 of 9 bytes of"),
}


@pytest.mark.parametrize("name", PREFIXES)
def test_a_body_that_stops_coming_is_408(echo: DaemonProcess, name: str) -> None:
    data, reason = PREFIXES[name]

    async def session() -> None:
        async with h3_client(echo) as client:
            stream = client.open(data)
            fields = await check_refused(stream, 408, reason)
            assert fields["x-slot"] in "0123"
            assert await stream.stop_code() == NO_ERROR
            await check_good(client)

    run(session())
    echo.wait_idle()


def test_a_deadline_that_passes_while_the_body_comes_is_408(echo: DaemonProcess) -> None:
    fields = post_fields(16, more={"x-deadline-ms": "50"})

    async def session() -> None:
        async with h3_client(echo) as client:
            stream = client.open(head(fields) + body_frame(IDS)[:6])
            await check_refused(stream, 408, "only 1 of 4 tokens came in time")
            await check_good(client)

    run(session())
    echo.wait_idle()


# ---------------------------------------------------------------- cut off anywhere

WHOLE = head(post_fields(16)) + body_frame(IDS[:8]) + frame(0x21, b"xx") + body_frame(IDS[8:])
WHOLE_JSON = head(post_fields(24, JSON)) + body_frame(b'{"token_ids"') + body_frame(b": [1, 2, 3]}")


@pytest.mark.parametrize("data", [WHOLE, WHOLE_JSON], ids=["binary", "JSON"])
@pytest.mark.parametrize("end", ["reset", "stop"])
def test_a_request_may_be_given_up_after_any_byte(
    echo: DaemonProcess, data: bytes, end: str
) -> None:
    async def session() -> None:
        async with h3_client(echo) as client:
            for length in range(1, len(data) + 1):
                stream = client.open(data[:length])
                if end == "reset":
                    stream.reset()
                else:
                    stream.stop()
                    # The daemon stops reading as well, in its own time.
                    await stream.stop_code()
                if length % 40 == 0:
                    await check_good(client)
            await check_good(client)

    run(session())
    echo.wait_idle()


def test_giving_up_the_whole_request_harms_nothing(echo: DaemonProcess) -> None:
    async def session() -> None:
        async with h3_client(echo) as client:
            for give_up in (Stream.reset, Stream.stop) * 10:
                give_up(client.open(WHOLE, fin=True))
            echo.wait_idle()
            await check_good(client)

    run(session())
    echo.wait_idle()


def test_a_request_without_any_answer_left_to_give_is_reset(echo: DaemonProcess) -> None:
    """A stream that ends without a request: RFC 9114 section 4.1 has a code for it."""

    async def session() -> None:
        async with h3_client(echo) as client:
            assert await client.open(b"", fin=True).reset_code() == 0x10D
            await check_good(client)

    run(session())
    echo.wait_idle()


BREACHES = {
    "FIN inside a frame": (WHOLE[:-1], True, 0x106),
    "DATA first": (body_frame(IDS), False, 0x105),
    "a control frame": (frame(4, b""), False, 0x105),
    "QPACK from the dynamic table": (frame(1, b"\2\0\x80"), False, 0x200),
}


@pytest.mark.parametrize("name", BREACHES)
def test_what_breaks_the_protocol_ends_its_own_connection(echo: DaemonProcess, name: str) -> None:
    data, fin, code = BREACHES[name]

    async def session() -> None:
        async with h3_client(echo) as other, h3_client(echo) as client:
            held = client.open(WHOLE[:-3])
            client.open(data, fin)
            await until("the daemon closes", lambda: client.close_code is not None)
            assert client.close_code == code
            assert held.data == b""
            await check_good(other)

    run(session())
    echo.wait_idle()
    assert "Traceback" not in echo.stderr


def test_nothing_of_all_this_was_an_error_of_the_daemon(echo: DaemonProcess) -> None:
    assert "Traceback" not in echo.stderr
    assert "failed" not in echo.stderr
    assert REQUEST_CANCELLED == 0x10C
