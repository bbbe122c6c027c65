"""Plain requests that come whole take a shortcut through C. Whatever comes whole, the outcome is
the one that the framing leads to, which is asked the same here.
"""

import random
from array import array
from collections.abc import Callable

import pylsqpack
import pytest
from http3_recorder import Answer, Pairs, Recorder
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_requests import (
    AT_NS,
    CONTEXT,
    IDS,
    PLAIN,
    SLOTS,
    VOCAB,
    Server,
    bare,
    instead,
    message,
    same,
    section,
    without,
)

from dataplane._native import ffi, lib
from dataplane.fronts.session import Session
from dataplane.http3 import data_frame_header
from dataplane.http3_fields import decode_section


@pytest.fixture(scope="module", params=[True, False], ids=["null", "held"])
def server(request: pytest.FixtureRequest) -> Server:
    return Server(request.param)


SHORT = {
    "plain": PLAIN,
    "max tokens": [*PLAIN, (b"x-max-tokens", b"8")],
    "max tokens, zeros": [*PLAIN, (b"x-max-tokens", b"0000000008")],
    "no max tokens": [*PLAIN, (b"x-max-tokens", b"0")],
    "identifier": [*PLAIN, (b"x-request-id", b"my-own_id/7!?")],
    "longest identifier": [*PLAIN, (b"x-request-id", b"i" * 64)],
    "any form": [*PLAIN, (b"accept", b"*/*")],
    "binary form": [*PLAIN, (b"accept", b"application/octet-stream")],
    "a browser's": [
        *PLAIN,
        (b"user-agent", b"Mozilla/5.0 (X11; Linux x86_64; rv:128.0) <Gecko> {1} `2` ^3~"),
        (b"accept-encoding", b"gzip, deflate, br"),
        (b"accept-language", b"de,en;q=0.5"),
        (b"cache-control", b"no-cache"),
        (b"authorization", b"Bearer abc"),
        (b"authorization", b"Bearer def"),
    ],
}

LONG = {
    "no method": without(b":method"),
    "no scheme": without(b":scheme"),
    "no authority": without(b":authority"),
    "no path": without(b":path"),
    "no media type": without(b"content-type"),
    "no length": without(b"content-length"),
    "GET": instead(b":method", b"GET"),
    "post": instead(b":method", b"post"),
    "http": instead(b":scheme", b"http"),
    "user information": instead(b":authority", b"me@localhost"),
    "query": instead(b":path", b"/v1/generate?a=1"),
    "another path": instead(b":path", b"/v1/generates"),
    "width": instead(b"content-type", b"application/octet-stream;width=2"),
    "JSON": instead(b"content-type", b"application/json"),
    "longer": instead(b"content-length", b"68"),
    "shorter": instead(b"content-length", b"60"),
    "sign": instead(b"content-length", b"+64"),
    "empty": instead(b"content-length", b""),
    "many digits": instead(b"content-length", b"00000000000064"),
    "overflow": instead(b"content-length", b"4294967360"),
    "twice": [*PLAIN, (b"content-length", b"64")],
    "authority twice": [PLAIN[2], *PLAIN],
    "pseudo behind": [*PLAIN[:3], *PLAIN[4:], PLAIN[3]],
    "pseudo behind indexed": [*PLAIN[:3], (b"accept-encoding", b"gzip, deflate, br"), *PLAIN[3:]],
    "host": [*PLAIN, (b"host", b"localhost:4433")],
    "another host": [*PLAIN, (b"host", b"elsewhere")],
    "te": [*PLAIN, (b"te", b"gzip")],
    "connection": [*PLAIN, (b"connection", b"close")],
    "upper case": [*PLAIN, (b"X-Max-Tokens", b"8")],
    "control": [*PLAIN, (b"user-agent", b"a\x00b")],
    "space at the end": [*PLAIN, (b"user-agent", b"a ")],
    "tab": [*PLAIN, (b"user-agent", b"a\tb")],
    "high": [*PLAIN, (b"user-agent", b"a\xe9b")],
    "backslash": [*PLAIN, (b"user-agent", b"a" * 20 + b"\\b")],
    "strange identifier": [*PLAIN, (b"x-request-id", b"a b")],
    "long identifier": [*PLAIN, (b"x-request-id", b"i" * 65)],
    "two identifiers": [*PLAIN, (b"x-request-id", b"a"), (b"x-request-id", b"b")],
    "too much": [*PLAIN, (b"x-max-tokens", b"33")],
    "max tokens, sign": [*PLAIN, (b"x-max-tokens", b"-1")],
    "max tokens, digits": [*PLAIN, (b"x-max-tokens", b"00000000008")],
    "max tokens, range": [*PLAIN, (b"x-max-tokens", b"4294967296")],
    "max tokens twice": [*PLAIN, (b"x-max-tokens", b"8"), (b"x-max-tokens", b"8")],
    "temperature": [*PLAIN, (b"x-temperature", b"0.5")],
    "affinity": [*PLAIN, (b"x-affinity", b"3")],
    "deadline": [*PLAIN, (b"x-deadline-ms", b"10000")],
    "JSON form": [*PLAIN, (b"accept", b"application/json")],
    "unknown": [*PLAIN, (b"x-unheard-of", b"1")],
    "large": [*PLAIN, (b"user-agent", b"~" * 1000)],
    "many": [*PLAIN, *[(b"via", b"1.1 a")] * 40],
}  # fmt: skip


@pytest.mark.parametrize("encode", [section, bare], ids=["compressed", "bare"])
@pytest.mark.parametrize("pairs", SHORT.values(), ids=SHORT.keys())
def test_plain_request_takes_the_shortcut_to_the_same_end(
    server: Server, pairs: Pairs, encode: Callable[[Pairs], bytes]
) -> None:
    assert same(server, message(pairs, encode=encode))


@pytest.mark.parametrize("encode", [section, bare], ids=["compressed", "bare"])
@pytest.mark.parametrize("pairs", LONG.values(), ids=LONG.keys())
def test_other_request_does_not(
    server: Server, pairs: Pairs, encode: Callable[[Pairs], bytes]
) -> None:
    if encode is bare and pairs is LONG["backslash"]:
        pytest.skip("only its compressed form is rare")
    assert not same(server, message(pairs, encode=encode))


BODIES = {
    "none": b"",
    "odd": IDS[:63],
    "too long": array("I", [1] * (CONTEXT + 1)).tobytes(),
    "bad token": array("I", [1, 2, VOCAB, 3]).tobytes(),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_bad_body_does_not(server: Server, body: bytes) -> None:
    assert not same(server, message(instead(b"content-length", b"%d" % len(body)), body))


FRAMES = {
    "reserved frame before": b"\x21\x00" + message(PLAIN),
    "reserved frame behind": message(PLAIN) + b"\x21\x00",
    "empty DATA": message(PLAIN) + b"\0\0",
    "two DATA": message(PLAIN, b"") + data_frame_header(32) + IDS[:32] + b"\0\x20" + IDS[32:],
    "trailers": message(PLAIN) + b"\x01\x02\0\0",
    "nothing": b"",
    "DATA alone": data_frame_header(64) + IDS,
    "long length": b"\x01\x80\0\0" + bytes((len(section(PLAIN)),)) + section(PLAIN)
    + b"\0\x80\0\0\x40" + IDS,
    "insert count": b"\x01\x03\x01\0\x80",
    "SETTINGS": b"\x04\0" + message(PLAIN),
}  # fmt: skip


@pytest.mark.parametrize("data", FRAMES.values(), ids=FRAMES.keys())
def test_frames_mean_the_same_both_ways(server: Server, data: bytes) -> None:
    same(server, data)


def test_cut_or_longer_at_any_byte_is_the_same(server: Server) -> None:
    data = message([*PLAIN, (b"x-request-id", b"abc"), (b"x-max-tokens", b"8")])
    for end in range(len(data)):
        assert not same(server, data[:end])
    assert not same(server, data + b"\0")


def test_mutated_requests_are_the_same(server: Server) -> None:
    chance = random.Random(7)
    cases = [
        message(pairs, encode=encode) for pairs in SHORT.values() for encode in (section, bare)
    ]
    taken = 0
    for _ in range(6000):
        data = bytearray(chance.choice(cases))
        for _ in range(chance.choice((1, 1, 2, 3))):
            # Most of it where something is decided.
            at = min(chance.randrange(len(data)), chance.randrange(len(data)))
            data[at] = chance.choice((chance.randrange(256), data[at] ^ 1 << chance.randrange(8)))
        taken += same(server, bytes(data))
    assert 200 < taken < 5000


FIELD = st.sampled_from(
    sorted({pair for pairs in (*SHORT.values(), *LONG.values()) for pair in pairs})
)


@settings(max_examples=300, deadline=None)
@given(extra=st.lists(FIELD, max_size=4), seed=st.integers(0, 2**32), compressed=st.booleans())
def test_any_mixture_of_fields_is_the_same(extra: Pairs, seed: int, compressed: bool) -> None:
    pairs = [*PLAIN, *extra]
    if seed % 3 == 0:
        random.Random(seed).shuffle(pairs)
    same(MIXED, message(pairs, encode=section if compressed else bare))


MIXED = Server(False)


@settings(max_examples=200, deadline=None)
@given(
    value=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=64)
)
def test_identifier_comes_back_as_it_was(value: str) -> None:
    given_id = value.encode()
    data = message([*PLAIN, (b"x-request-id", given_id)])
    connection, short = MIXED.ask(data, True)
    MIXED.ingress.egress.flush()
    if not short:
        assert b"\\" in given_id  # its code is longer than the shortcut knows
    ((_, sent, _),) = connection.told
    fields = dict(decode_section(sent[3:]))
    assert fields[b"x-request-id"] == fields[b"request-id"] == given_id
    for exchange in MIXED.live():
        MIXED.ingress.leave(exchange)


def test_stream_that_began_before_is_for_the_framing(server: Server) -> None:
    connection = Recorder()
    session = connection.extra = Session(server.front, connection)
    data = message(PLAIN)
    session.http3.receive(0, data[:1], False, session)
    assert not session.take_whole(0, data, 0, len(data), AT_NS)
    assert not session.take_whole(2, data, 0, len(data), AT_NS)
    assert session.take_whole(4, data, 0, len(data), AT_NS)
    for exchange in server.live():
        server.ingress.leave(exchange)


@pytest.fixture
def held() -> Server:
    return Server(False)


def test_full_table_refuses_both_ways(held: Server) -> None:
    data = message([*PLAIN, (b"x-request-id", b"mine")])
    for _ in range(SLOTS):
        assert held.ask(data, True)[1]
    busy, short = held.ask(data, True)
    assert short
    other, _ = held.ask(data, False)
    answers = [Answer(told[1]) for connection in (busy, other) for told in connection.told]
    for answer in answers:
        assert dict(answer.fields)[b":status"] == b"429"
        assert dict(answer.fields)[b"x-request-id"] == b"mine"
    assert answers[0].body == answers[1].body
    assert held.ingress.stats.answers[429] == 2


def test_drained_or_capped_is_for_the_framing(held: Server) -> None:
    data = message(PLAIN)
    held.ingress.draining = True
    assert not same(held, data)
    held.ingress.draining = False
    held.ingress.max_writing = 0
    assert not same(held, data)


HEADERS = ffi.new("uint8_t[]", lib.DP_H3_ACCEPTED_MAX + lib.DP_H3_IDS_MAX)


@settings(max_examples=200, deadline=None)
@given(
    queue=st.integers(0, 2**32 - 1),
    ingress=st.integers(0, 2**32 - 1),
    counts=st.tuples(*[st.integers(0, 2**32 - 1)] * 3),
    number=st.integers(1, 2**64 - 1),
    given_id=st.binary(max_size=64),
    ids=st.binary(max_size=512).map(lambda ids: ids * 4),
    finish=st.integers(0, 3),
)
def test_answer_is_what_another_decoder_reads(
    queue: int, ingress: int, counts: tuple[int, int, int], number: int, given_id: bytes,
    ids: bytes, finish: int,
) -> None:  # fmt: skip
    slots, free_left, slot = counts
    size = lib.dp_h3_binary(
        HEADERS, given_id, len(given_id), number, queue, ingress, slots, free_left, slot, ids,
        len(ids), finish, 77,
    )  # fmt: skip
    data = ffi.buffer(HEADERS)[:size]
    length = int.from_bytes(data[1:3], "big") & 0x3FFF
    request_id = given_id or b"%016x" % number
    assert data[0] == 1
    assert pylsqpack.Decoder(0, 0).feed_header(0, data[3 : 3 + length])[1] == [
        (b":status", b"200"),
        (b"content-type", b"application/octet-stream"),
        (b"x-request-id", request_id),
        (b"request-id", request_id),
        (b"x-queue-time", b"%.3fms" % (queue / 1000)),
        (b"x-ratelimit-limit", b"%d" % slots),
        (b"x-ratelimit-remaining", b"%d" % free_left),
        (b"x-slot", b"%d" % slot),
        (b"server-timing", b"queue;dur=%.3f, ingress;dur=%.3f" % (queue / 1000, ingress / 1000)),
    ]
    body = ids
    if finish:
        body += array("I", [2**32 - 1, finish, 77, len(ids) // 4, 0]).tobytes()
    assert data[3 + length :] == (data_frame_header(len(body)) + body if body else b"")
