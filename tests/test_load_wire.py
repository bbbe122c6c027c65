"""What a load says, and what it takes for an answer: both wires, split anywhere, and rubbish."""

import struct

import pytest
from fake_daemon import INGRESS_US, refusal, verdict, whole_answer
from http3_recorder import Heard

from dataplane.http3 import Http3, data_frame_header
from dataplane.load.wire import Exchange, H3Dialogue, RawDialogue, dialogues, h3_request
from dataplane.prompt1 import ProtocolError, encode_end, parse_request

IDS = struct.pack("<3I", 5, 6, 7)


def raw_dialogue() -> RawDialogue:
    dialogue = dialogues("raw", "localhost", IDS, 9)[1]()
    assert isinstance(dialogue, RawDialogue)
    return dialogue


def take_all(pieces: list[bytes]) -> Exchange:
    exchange, dialogue = Exchange(0), raw_dialogue()
    for place, piece in enumerate(pieces, 1):
        dialogue.take(exchange, 0, piece, place == len(pieces))
    return exchange


def test_a_raw_request_says_what_was_asked_for() -> None:
    data = raw_dialogue().request
    request = parse_request(data, True)
    assert (request.n_tokens, request.max_output) == (3, 9)  # type: ignore[union-attr]
    assert data[48:] == IDS
    keyed = parse_request(dialogues("raw", "localhost", IDS, 9, b"alpha")[1]().request, True)
    assert keyed.api_key == b"alpha"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("answer", "status", "ingress"),
    [
        (whole_answer([1, 0xFFFFFFFF - 1, 3]), 200, INGRESS_US),
        (whole_answer([]), 200, INGRESS_US),
        (refusal(429, "every slot is taken"), 429, -1),
        (refusal(503, ""), 503, -1),
    ],
)
def test_a_raw_answer_may_be_split_anywhere(answer: bytes, status: int, ingress: int) -> None:
    splits = [[answer[:at], answer[at:]] for at in range(len(answer) + 1)]
    for pieces in [*splits, [answer[i : i + 1] for i in range(len(answer))]]:
        exchange = take_all(pieces)
        assert (exchange.status, exchange.ingress_us) == (status, ingress)


def test_a_raw_verdict_is_there_with_its_last_byte() -> None:
    exchange, dialogue = Exchange(0), raw_dialogue()
    answer = whole_answer([1])
    dialogue.take(exchange, 0, answer[:31], False)
    assert exchange.status == 0
    dialogue.take(exchange, 0, answer[31:32], False)
    assert exchange.status == 200


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (verdict()[:31], "inside its verdict"),
        (b"", "inside its verdict"),
        (verdict(), "without its trailer"),
        (whole_answer([1])[:-1], "without its trailer"),
        (whole_answer([1]) + b"\0", "without its trailer"),
        (verdict() + b"\1\0\0\0" + encode_end(1, 3, 2), "counts 2 ids; 4 bytes came"),
        (b"HTTP" + verdict()[4:], "magic"),
    ],
)
def test_a_raw_answer_that_is_none_is_said(answer: bytes, words: str) -> None:
    for pieces in ([answer], [answer[:5], answer[5:]]):
        with pytest.raises(ProtocolError, match=words):
            take_all(pieces)


def h3_answer(fields: dict[bytes, bytes], body: bytes) -> bytes:
    head = Http3(is_client=False).encode_headers(0, list(fields.items()))
    return head + data_frame_header(len(body)) + body


def h3_dialogue() -> H3Dialogue:
    return H3Dialogue(h3_request("localhost:1", IDS, 9))


TIMED = {b":status": b"200", b"server-timing": b"queue;dur=0.041, ingress;dur=0.063"}


def test_an_h3_request_says_what_was_asked_for() -> None:
    server, heard, dialogue = Http3(is_client=False), Heard(), h3_dialogue()
    for stream_id, data in dialogue.opening(2):
        server.receive(stream_id, data, False, heard)
    server.receive(0, dialogue.request, True, heard)
    assert server.peer.settings is not None
    assert (heard.body, heard.ended) == (IDS, True)
    assert heard.fields == {
        b":method": b"POST",
        b":scheme": b"https",
        b":authority": b"localhost:1",
        b":path": b"/v1/generate",
        b"content-type": b"application/octet-stream",
        b"content-length": b"12",
        b"x-max-tokens": b"9",
    }


@pytest.mark.parametrize(
    ("fields", "body", "status", "ingress"),
    [
        (TIMED, whole_answer([4, 5])[32:], 200, 63),
        ({b":status": b"200"}, whole_answer([])[32:], 200, -1),
        ({b":status": b"429", b"server-timing": b"queue;dur=0.041"}, b"{}", 429, -1),
    ],
)
def test_an_h3_answer_may_be_split_anywhere(
    fields: dict[bytes, bytes], body: bytes, status: int, ingress: int
) -> None:
    answer = h3_answer(fields, body)
    splits = [[answer[:at], answer[at:]] for at in range(len(answer) + 1)]
    for pieces in [*splits, [answer[i : i + 1] for i in range(len(answer))]]:
        exchange, dialogue = Exchange(0), h3_dialogue()
        for place, piece in enumerate(pieces, 1):
            dialogue.take(exchange, 0, piece, place == len(pieces))
        assert (exchange.status, exchange.ingress_us) == (status, ingress)


def test_h3_answers_may_come_between_each_other() -> None:
    dialogue, one, two = h3_dialogue(), Exchange(0), Exchange(0)
    first = h3_answer(TIMED, whole_answer([4, 5])[32:])
    second = h3_answer({b":status": b"429"}, b"{}")
    dialogue.take(one, 0, first[:-3], False)
    dialogue.take(two, 4, second[:-1], False)
    dialogue.take(one, 0, first[-3:], True)
    dialogue.take(two, 4, second[-1:], True)
    assert (one.status, one.ingress_us, two.status) == (200, 63, 429)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (h3_answer({b"content-type": b"x/y"}, b""), "no HTTP/3 message"),
        (h3_answer(TIMED, b"12345"), "without its trailer"),
        (h3_answer(TIMED, b"\1\0\0\0" + encode_end(1, 3, 2)), "counts 2 ids"),
        (b"\0\1x", "does not keep to HTTP/3"),
        (b"", "no HTTP/3 message"),
    ],
)
def test_an_h3_answer_that_is_none_is_said(answer: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        h3_dialogue().take(Exchange(0), 0, answer, True)


def test_after_goaway_an_h3_connection_takes_no_requests() -> None:
    server, dialogue = Http3(is_client=False), h3_dialogue()
    for stream_id, data in server.start((3, 7, 11)):
        dialogue.take_other(stream_id, data, False)
    assert dialogue.taking
    dialogue.take_other(3, server.goaway(4), False)
    assert not dialogue.taking
