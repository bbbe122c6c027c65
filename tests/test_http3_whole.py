"""Plain requests that come whole take a shortcut through C. Whatever comes whole, the outcome is
the one that the framing leads to, which is asked the same here.
"""

import random
import re
from array import array
from collections.abc import Callable
from typing import Any

import pylsqpack
import pytest
from http3_recorder import Answer, Pairs, Quiet, Recorder
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane._native import ffi, lib
from dataplane.exchange import Exchange
from dataplane.fronts.generate import Generate
from dataplane.fronts.session import Session
from dataplane.http3 import data_frame_header
from dataplane.http3_fields import decode_section
from dataplane.ingress import Ingress
from dataplane.manifest import Manifest
from dataplane.region import create_region
from dataplane.stats import Stats
from dataplane.table import HostTable

VOCAB, SLOTS, CONTEXT, MOST = 1000, 4, 64, 32
AT_NS = 1_000_000_000
IDS = array("I", range(16)).tobytes()
# What differs from one request to the next whichever way it took.
VARYING = {b"x-queue-time", b"server-timing"}
MADE_UP = {b"x-request-id", b"request-id"}


class Server:
    """A front with slots of its own; `null` as the runtime of that name."""

    def __init__(self, null: bool) -> None:
        manifest = Manifest(
            model="m", slots=SLOTS, context=CONTEXT, max_output=MOST, vocab_size=VOCAB
        )
        self.ingress = Ingress(Stats(), 5.0, SLOTS)
        self.table = HostTable(create_region(manifest, 1, 2))
        self.ingress.attach(self.table, null)
        pages: Any = Quiet()
        self.front = Generate(self.ingress, pages)

    def ask(self, data: bytes, whole: bool) -> tuple[Recorder, bool]:
        """Give a stream's bytes; what was told, and whether the shortcut was taken."""
        connection = Recorder()
        session = connection.extra = Session(self.front, connection)
        if whole and session.take_whole(0, data, 0, len(data), AT_NS):
            return connection, True
        session.at_ns, session.fin = AT_NS, True
        session.http3.receive(0, data, True, session)
        return connection, False

    def outcome(self, data: bytes, whole: bool) -> tuple[Any, bool]:
        """Everything that can be seen of a request, but what differs each time."""
        before = self.counted()
        connection, short = self.ask(data, whole)
        self.ingress.egress.flush()
        seen: list[Any] = []
        for kind, *rest in connection.told:
            if kind == "send":
                answer = Answer(rest[0]) if rest[1] else None
                seen.append((kind, rest[1], self.readable(rest[0], answer)))
            else:
                seen.append((kind, *rest))
        held = []
        for exchange in self.live():
            request = self.table.request(exchange.slot)
            ids = self.table.region.prompt(exchange.slot, request.n_tokens).tolist()
            ids = [] if exchange.writing else ids  # what stands there is another request's
            held.append((request.n_tokens, request.max_output, ids, request.temperature,
                         request.top_p, request.top_k, request.seed, exchange.n_tokens,
                         exchange.max_output, exchange.stream_id, exchange.complete_ns,
                         exchange.answered, exchange.writing, exchange.sent))  # fmt: skip
            self.ingress.leave(exchange)
        return (seen, held, self.counted(before), connection.writing), short

    def live(self) -> list[Exchange]:
        return [exchange for exchange in self.ingress._exchanges if exchange.live]

    def counted(self, before: tuple[int, ...] = (0,) * 8) -> tuple[int, ...]:
        stats = self.ingress.stats
        totals = [stats.latency.total(series).within[-1] for series in (0, 1)]
        now = (stats.claimed, stats.completed, stats.failed, stats.answers[200],
               stats.answers[400], stats.answers[429], *totals)  # fmt: skip
        return tuple(a - b for a, b in zip(now, before, strict=False))

    @staticmethod
    def readable(data: bytes, answer: Answer | None) -> Any:
        if answer is None:
            # The beginning of an answer: its HEADERS frame alone.
            return sorted(name for name, _ in decode_section(data[3:]))
        fields = []
        for name, value in answer.fields:
            if name in VARYING or (name in MADE_UP and len(value) == 16) or name == b"x-slot":
                value = b"?" * (name != b"content-length")
            fields.append((name, value))
        body = answer.body
        if (b"content-type", b"application/problem+json") in answer.fields:
            at = body.index(b'"request_id"')
            body = body[:at]
        elif (b"content-type", b"application/json") in answer.fields:
            body = re.sub(rb"[0-9a-f]{16}|[0-9]+", b"?", body)
        return fields, body


@pytest.fixture(scope="module", params=[True, False], ids=["null", "held"])
def server(request: pytest.FixtureRequest) -> Server:
    return Server(request.param)


PLAIN: Pairs = [
    (b":method", b"POST"),
    (b":scheme", b"https"),
    (b":authority", b"localhost:4433"),
    (b":path", b"/v1/generate"),
    (b"content-type", b"application/octet-stream"),
    (b"content-length", b"%d" % len(IDS)),
]


def section(pairs: Pairs) -> bytes:
    return bytes(pylsqpack.Encoder().encode(0, pairs)[1])


def bare(pairs: Pairs) -> bytes:
    """A section of literals that are not compressed."""

    def number(first: int, bits: int, value: int) -> bytes:
        most = (1 << bits) - 1
        if value < most:
            return bytes((first | value,))
        value, out = value - most, bytes((first | most,))
        while value >= 0x80:
            out += bytes((value & 0x7F | 0x80,))
            value >>= 7
        return out + bytes((value,))

    return b"\0\0" + b"".join(
        number(0x20, 3, len(name)) + name + number(0, 7, len(value)) + value
        for name, value in pairs
    )


def message(pairs: Pairs, body: bytes = IDS, encode: Callable[[Pairs], bytes] = section) -> bytes:
    block = encode(pairs)
    head = (0x014000 | len(block)).to_bytes(3, "big") + block
    return head + (data_frame_header(len(body)) + body if body else b"")


def without(name: bytes) -> Pairs:
    return [pair for pair in PLAIN if pair[0] != name]


def instead(name: bytes, value: bytes) -> Pairs:
    return [(n, value if n == name else v) for n, v in PLAIN]


def same(server: Server, data: bytes) -> bool:
    """The outcome is the same both ways; whether the shortcut was taken."""
    by_whole, short = server.outcome(data, True)
    by_framing, _ = server.outcome(data, False)
    assert by_whole == by_framing
    return short


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
VISIBLE = st.characters(min_codepoint=0x21, max_codepoint=0x7E)


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
