"""The client's half of `/v1/generate`: the same whole answer wherever it is split, or an error."""

import json
import struct
from typing import Any

import pytest

from dataplane.client.http import (
    Body,
    End,
    EventsBody,
    Head,
    IdsBody,
    ReasonBody,
    body_of,
    decode_json,
    parameter_fields,
    read_head,
    text_body,
)
from dataplane.errors import UsageError
from dataplane.fronts.parameters import read_header_parameters
from dataplane.prompt1 import ProtocolError, Request

TIMES = {"queue": 41, "ingress": 63, "pickup": 90, "first_token": 9000, "total": 30000}
USAGE = {"prompt_tokens": 5, "output_tokens": 3}
IDS_ANSWER = struct.pack("<3I", 7, 8, 9) + struct.pack("<5I", 0xFFFFFFFF, 2, 5, 3, 0)


def event(document: Any) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


SUMMARY = event({"finish_reason": "length", "usage": USAGE, "timings_us": TIMES})
DONE = b"data: [DONE]\n\n"
EVENTS_ANSWER = (
    event({"token_ids": [7, 8], "text": "h"})
    + event({"token_ids": [9], "text": "\u00e9"})
    + event({"token_ids": [], "text": "\ufffd"})
    + SUMMARY
    + DONE
)


def read(body: Body, *parts: bytes) -> tuple[list[int], str, End]:
    ids: list[int] = []
    text = ""
    for part in parts:
        more, pieces = body.feed(part)
        ids += more
        text += "".join(pieces)
    return ids, text, body.end()


@pytest.mark.parametrize(
    ("kind", "data", "text", "times"),
    [(IdsBody, IDS_ANSWER, "", {}), (EventsBody, EVENTS_ANSWER, "h\u00e9\ufffd", TIMES)],
)
def test_an_answer_reads_the_same_wherever_it_is_split(
    kind: type[IdsBody] | type[EventsBody], data: bytes, text: str, times: dict[str, int]
) -> None:
    expected = ([7, 8, 9], text, End("length", USAGE, times))
    for cut in range(len(data) + 1):
        assert read(kind(), data[:cut], data[cut:]) == expected
    assert read(kind(), *[data[at : at + 1] for at in range(len(data))]) == expected


@pytest.mark.parametrize(("kind", "data"), [(IdsBody, IDS_ANSWER), (EventsBody, EVENTS_ANSWER)])
def test_an_answer_that_ends_early_is_no_answer(
    kind: type[IdsBody] | type[EventsBody], data: bytes
) -> None:
    for length in range(len(data)):
        with pytest.raises(ProtocolError, match="the answer ended"):
            read(kind(), data[:length])


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"event: x\n\n", "no event of an answer: 'event: x'"),
        (b"data: {\n\n", "an event cannot be read"),
        (b'data: {"token_ids": ["1"]}\n\n', "an event cannot be read"),
        (b'data: {"text": "\xff"}\n\n', "an event cannot be read"),
        (DONE + DONE, "no event of an answer"),
        (SUMMARY + event({"token_ids": [1]}), "output comes behind the summary"),
        (DONE, "ended before its last event"),
        (SUMMARY, "ended before its last event"),
        (SUMMARY + DONE + b"data", "ended before its last event"),
    ],
)
def test_events_that_are_none_are_said(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        read(EventsBody(), data)


def test_an_event_without_end_is_not_held() -> None:
    body = EventsBody()
    body.feed(b"x" * 2**24)
    with pytest.raises(ProtocolError, match="over 16777216 bytes"):
        body.feed(b"x")


# ---------------------------------------------------------------- headers


def test_a_header_is_read_whole() -> None:
    head = read_head(
        {
            b":status": b"200",
            b"content-type": b"Text/Event-Stream; charset=utf-8",
            b"x-request-id": b"000000000000002a",
            b"x-slot": b"3",
            b"server-timing": b"queue;dur=0.041, ingress;dur=1.063",
        }
    )
    assert head == Head(200, b"text/event-stream", "000000000000002a", 3, 41, 1063, None)
    assert isinstance(body_of(head), EventsBody)


def test_a_refusals_header_is_read_too() -> None:
    head = read_head({b":status": b"429", b"x-queue-time": b"0.007ms", b"retry-after-ms": b"250"})
    assert head == Head(429, b"", "", None, 7, None, 250)


def test_odd_fields_are_left_out() -> None:
    fields = {
        b":status": b"200",
        b"x-slot": b"three",
        b"server-timing": b"queue;dur=abc, cdn;dur=9",
        b"x-queue-time": b"1s",
        b"retry-after-ms": b"9" * 20,
    }
    assert read_head(fields) == Head(200, b"", "", None, None, None, None)


def test_an_answer_of_another_type_is_none() -> None:
    with pytest.raises(ProtocolError, match="of the type 'text/html'"):
        body_of(read_head({b":status": b"200", b"content-type": b"text/html"}))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            b'{"title": "Too Many", "detail": "every slot is t\\u00e5ken"}',
            "every slot is t\u00e5ken",
        ),
        (b'{"title": "Too Many"}', "Too Many"),
        (b"upstream is away\n", "upstream is away"),
        (b'{"detail": 3}', '{"detail": 3}'),
        (b"\xff", "\ufffd"),
        (b"", ""),
    ],
)
def test_a_reason_is_found_in_a_problem_or_any_text(data: bytes, reason: str) -> None:
    body = ReasonBody()
    for at in range(len(data)):
        body.feed(data[at : at + 1])
    assert body.reason == reason


def test_a_reason_is_bounded() -> None:
    with pytest.raises(ProtocolError, match="over 65536 bytes"):
        ReasonBody().feed(b"x" * 65537)


def test_a_page_that_is_no_json_is_said() -> None:
    assert decode_json(b"[1]") == [1]
    with pytest.raises(ProtocolError, match="the page cannot be read"):
        decode_json(b"\xff")


# ---------------------------------------------------------------- to the wire


@pytest.mark.parametrize(
    "request_",
    [
        Request(0),
        Request(0, max_output=9, top_k=40, seed=2**32 - 1, affinity=3, strict=True, deadline_ms=1),
        Request(0, temperature=0.5, top_p=0.25),
        Request(0, temperature=100.0, top_p=1.0),
        Request(0, temperature=1e-7),
        Request(0, temperature=10),
    ],
)
def test_parameters_are_read_as_they_were_meant(request_: Request) -> None:
    fields = dict(parameter_fields(request_, None))
    assert read_header_parameters(fields) == request_


def test_a_request_id_goes_along() -> None:
    assert parameter_fields(Request(0), "abc") == [(b"x-request-id", b"abc")]
    for wrong in ("", "a b", "x" * 65, "\u00e9"):
        with pytest.raises(UsageError, match="1 to 64 visible ASCII"):
            parameter_fields(Request(0), wrong)


def test_a_value_that_does_not_fit_is_refused() -> None:
    for name in ("max_output", "top_k", "seed", "affinity", "deadline_ms"):
        for value in (-1, 2**32):
            values: dict[str, Any] = {name: value}
            with pytest.raises(UsageError, match=f"{name} is {value}; it must be from 0"):
                parameter_fields(Request(0)._replace(**values), None)


def test_text_is_a_prompt_or_messages() -> None:
    assert json.loads(text_body("h\u00e9")) == {"prompt": "h\u00e9", "stream": True}
    messages = [{"role": "user", "content": "hi"}]
    assert json.loads(text_body(messages)) == {"messages": messages, "stream": True}
    with pytest.raises(UsageError, match="lone surrogate"):
        text_body("\udcff")
