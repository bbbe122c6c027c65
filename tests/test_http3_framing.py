"""HTTP/3 framing: vectors in every cut, limits, streams that end otherwise, what is sent."""

from __future__ import annotations

import time

import pytest
from http3_frames import (
    GET,
    GREASE,
    LIMIT,
    OK,
    POST,
    SETTINGS,
    Log,
    Vector,
    client,
    cuts,
    data,
    frame,
    headers,
    section,
    server,
)
from http3_vectors import (
    DONE,
    GOOD_FIELDS,
    LONG,
    TRUNCATED,
    VECTORS,
    answer,
    broken,
    got,
    message_error,
    sized,
)

from dataplane.http3 import Code, Data, Http3, data_frame_header
from dataplane.http3_fields import Pair, encode_section, read_varint, varint


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v.name)
def test_a_vector_gives_the_same_events_however_it_is_cut(vector: Vector) -> None:
    for how, pieces in cuts(vector.stream):
        for own_fin in (False, True):
            h3, log = vector.run(pieces, own_fin)
            assert log.events == vector.want, (how, own_fin)
            assert h3.closed == any(event[0] == "connection_error" for event in vector.want)
            assert h3.buffered <= 15, how
            if vector.fin:
                assert h3.buffered == 0


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v.name)
def test_a_tail_in_the_same_event_changes_nothing(vector: Vector) -> None:
    """What follows an error is not looked at; what follows a message may be an extension's frame.
    Either way other streams go on as if nothing had been."""
    _, without_end = Vector(
        vector.name, vector.stream, [], False, vector.stream_id, vector.is_client, vector.heads
    ).run([vector.stream], own_fin=False)
    tail = b""
    if without_end.events == vector.want and vector.want and "error" in vector.want[-1][0]:
        tail = b"\x00\x01\x02\x04\x00\xff" * 9
    elif vector.want[-1:] == [DONE]:
        tail = GREASE
    h3, log = vector.run([vector.stream + tail], own_fin=False)
    assert log.events == vector.want
    other = OK if vector.is_client else GET
    h3.receive(400, headers(other), True, log)
    more = [] if h3.closed else [("headers", 400, dict(other), None), ("end", 400)]
    assert log.events == vector.want + more


@pytest.mark.parametrize(("name", "pairs", "more"), GOOD_FIELDS, ids=[g[0] for g in GOOD_FIELDS])
def test_requests_that_must_pass(name: str, pairs: list[Pair], more: dict[bytes, bytes]) -> None:
    for block in (section(pairs), encode_section(pairs)):
        h3, log = server()
        h3.receive(0, frame(1, block), True, log)
        assert log.events == [got([*dict(pairs).items(), *more.items()]), DONE]


# Sizes and what is held


def section_of_size(size: int) -> list[Pair]:
    """A request whose section counts `size` by RFC 9114 section 4.2.2, most of it in one value."""
    pairs = [*GET, (b"x-own", b"")]
    rest = size - sum(len(n) + len(v) + 32 for n, v in pairs)
    return [*GET, (b"x-own", b"v" * rest)]


@pytest.mark.parametrize("fields", [0, 100, 400])
def test_the_field_section_limit_is_exact(fields: int) -> None:
    for extra, want in ((0, "headers"), (1, "message_error")):
        small = [(b"accept" if i % 2 else b"x-%d" % i, b"") for i in range(fields)]
        used = sum(len(n) + len(v) + 32 for n, v in small)
        pairs = [*section_of_size(LIMIT + extra - used), *small]
        h3, log = server()
        h3.receive(0, frame(1, encode_section(pairs)), False, log)
        assert log.events[0][0] == want
        if extra:
            assert log.events == [message_error(Code.EXCESSIVE_LOAD, 431)]


def test_known_names_alone_reach_the_limit_exactly() -> None:
    pairs = [*GET, (b"user-agent", b"v")]
    rest = LIMIT - sum(len(n) + len(v) + 32 for n, v in pairs)
    for extra, want in ((0, "headers"), (1, "message_error")):
        h3, log = server()
        h3.receive(0, headers([*GET, (b"user-agent", b"v" * (1 + rest + extra))]), True, log)
        # The encoded section is shorter than the decoded one counts, so its own limit is not met.
        assert log.events[0][0] == want


def test_a_headers_frame_over_the_limit_is_refused_before_any_of_it_is_held() -> None:
    for length in (LIMIT + 1, 1 << 20, (1 << 62) - 1):
        h3, log = server()
        h3.receive(0, b"\x01" + varint(length), False, log)
        assert log.events == [message_error(Code.EXCESSIVE_LOAD, 431)]
        for _ in range(100):
            h3.receive(0, bytes(1000), False, log)
            assert h3.buffered == 0
        h3.receive(0, b"", True, log)
        assert len(log.events) == 1
        h3.receive(4, headers(GET), True, log)
        assert log.events[-1] == ("end", 4)


def test_a_headers_frame_of_the_limit_is_waited_for() -> None:
    h3, log = server()
    h3.receive(0, b"\x01" + varint(LIMIT) + b"\0", False, log)
    assert not log.events
    assert h3.buffered == 1


def test_trailers_over_the_limit_are_refused() -> None:
    h3, log = server()
    h3.receive(0, headers(GET) + b"\x01" + varint(LIMIT + 1), True, log)
    assert log.events == [got(GET), message_error(Code.EXCESSIVE_LOAD, 431)]


def test_one_byte_references_do_not_get_past_the_limit() -> None:
    h3, log = server()
    h3.receive(0, frame(1, b"\0\0" + b"\xd1" * (LIMIT - 2)), True, log)
    assert log.events == [message_error(Code.EXCESSIVE_LOAD, 431)]


def test_what_is_held_is_counted_and_bounded() -> None:
    h3, log = server()
    part = headers(section_of_size(16000))[:10000]
    for stream_id in range(0, 24, 4):
        h3.receive(stream_id, part, False, log)
        assert h3.buffered == 9997 * (stream_id // 4 + 1)
    h3.receive(24, part, False, log)
    assert log.events == [("message_error", 24, 431, Code.EXCESSIVE_LOAD)]
    assert h3.buffered == 6 * 9997
    h3.reset(0, log)
    h3.discard(4)
    assert h3.buffered == 4 * 9997
    h3.receive(8, headers(section_of_size(16000))[10000:], True, log)
    assert h3.buffered == 3 * 9997
    assert log.events[-1] == ("end", 8)
    h3.receive(12, b"", True, log)
    assert log.events[-1] == TRUNCATED
    assert h3.buffered == 0


def test_long_extensions_are_skipped_without_holding_them() -> None:
    h3, log = server()
    h3.receive(2, b"\x21", False, log)
    h3.receive(6, SETTINGS + varint(0x21) + varint(1 << 40), False, log)
    h3.receive(0, headers(GET) + varint(0x21) + varint(1 << 40), False, log)
    for _ in range(50):
        for stream_id in (0, 2, 6):
            h3.receive(stream_id, bytes(60000), False, log)
            assert h3.buffered == 0
    assert log.events == [got(GET)]


def test_a_whole_request_leaves_nothing_behind() -> None:
    h3, log = server()
    for stream_id in range(0, 4000, 4):
        h3.receive(stream_id, headers(sized(3)) + data(b"abc"), True, log)
    h3.receive(4000, headers(sized(3)), False, log)
    assert list(h3.streams) == [4000]
    h3.receive(4000, data(b"abc"), True, log)
    assert not h3.streams
    assert not h3.peer


def test_a_client_forgets_its_heads() -> None:
    h3, log = client()
    for stream_id in (0, 4, 8):
        h3.encode_headers(stream_id, [(b":method", b"HEAD"), *GET[1:]])
    h3.receive(0, headers(answer(9)), True, log)
    h3.receive(4, headers([]), False, log)
    h3.reset(8, log)
    assert [event[0] for event in log.events] == ["headers", "end", "message_error"]
    assert not h3._heads


def test_a_body_is_handed_on_where_it_lies() -> None:
    h3, log = server()
    event = memoryview(headers(POST) + data(LONG))
    h3.receive(0, event, False, log)
    h3.receive(0, data_frame_header(500), False, log)
    more = bytes(500)
    h3.receive(0, more, True, log)
    (first, start, end), (second, *at) = log.pieces
    assert first is event
    assert first[start:end] == LONG
    assert second is more
    assert at == [0, 500]


def test_no_section_takes_more_than_linear_time() -> None:
    """Generous bounds: a quadratic step over 16 KiB takes seconds."""
    worst: list[list[Pair]] = [
        [*GET, *[(b"x", b"")] * 480],
        [*GET, *[(b"cookie", b" " * 20)] * 200],
        [*GET, (b"user-agent", b" " * 16000 + b"\0")],
        [*GET, (b"user-agent", b"a" + b" \t" * 8000 + b"a")],
        [*GET, (b"x" * 16000 + b"A", b"")],
        [*GET, (b"content-length", b"1" * 16000)],
        [*GET, (b"content-length", b"0" * 16000)],
        [(b":method", b"A" * 16000 + b" "), *GET[1:]],
        [*GET, *[(b"%dx" % i, b"%d" % i) for i in range(400)]],
    ]
    blocks = [frame(1, section(pairs)[: LIMIT + 1]) for pairs in worst]
    blocks += [
        frame(1, b"\0\0" + byte * (LIMIT - 2)) for byte in (b"\xc0", b"\xd1", b"\x20", b"\x50")
    ]
    for block in blocks:
        h3, log = server()
        begun = time.process_time()
        h3.receive(0, block, True, log)
        assert time.process_time() - begun < 0.25
        assert log.events
    h3, log = server()
    begun = time.process_time()
    h3.receive(2, b"\x03" + b"\x7f\x80\x80\x00" * 50000 + b"\x40" * 200000, False, log)
    h3.receive(6, SETTINGS + b"\x21\x00" * 20000, False, log)
    assert time.process_time() - begun < 2
    assert not log.events


# Streams that end otherwise


def test_a_sink_that_wants_no_more_hears_no_more() -> None:
    h3, log = server()
    log.refuse_headers = True
    h3.receive(0, headers(POST) + data(b"abc"), False, log)
    h3.receive(0, data(b"more") + b"\x04\x00", False, log)
    h3.receive(0, b"\x00", True, log)
    h3.receive(4, headers(POST) + data(b"abc"), True, log)
    assert log.events == [got(POST), ("headers", 4, dict(POST), None)]
    log.refuse_headers, log.refuse_data = False, True
    log.events.clear()
    h3.receive(8, headers(POST) + data(b"abc") + data(b"def"), False, log)
    h3.receive(8, data(b"ghi"), True, log)
    h3.receive(12, headers(POST) + b"\x00\x03a", False, log)
    h3.receive(12, b"bc", True, log)
    assert [event[0] for event in log.events] == ["headers", "data"] * 2
    assert not h3.streams


def test_a_refusal_within_a_frame_that_goes_on() -> None:
    h3, log = server()
    h3.receive(0, headers(POST) + b"\x00\x03a", False, log)
    log.refuse_data = True
    h3.receive(0, b"b", False, log)
    h3.receive(0, b"c", False, log)
    assert log.events == [got(POST), ("data", 0, b"ab")]


def test_discard() -> None:
    h3, log = server()
    assert not h3.discard(0)
    h3.receive(0, headers(POST) + b"\x00\x03a", False, log)
    assert not h3.is_discarded(0)
    assert h3.discard(0)
    assert h3.is_discarded(0)
    assert not h3.discard(0)
    h3.receive(0, b"bc" + b"\x04\x00", False, log)
    h3.receive(0, b"", True, log)
    assert not h3.discard(0)
    assert not h3.is_discarded(0)
    assert log.events == [got(POST), ("data", 0, b"a")]
    assert not h3.streams


def test_a_sink_may_discard_before_it_returns_false() -> None:
    h3 = Http3(is_client=False)

    class Impatient(Log):
        def on_data(self, stream_id: int, data: Data, start: int, end: int) -> bool:
            super().on_data(stream_id, data, start, end)
            h3.discard(stream_id)
            return False

        def on_message_error(self, stream_id: int, status: int, code: int, reason: str) -> None:
            super().on_message_error(stream_id, status, code, reason)
            h3.discard(stream_id)

    log = Impatient()
    for stream_id, fin in ((0, False), (4, True)):
        h3.receive(stream_id, headers(POST) + data(b"a") + data(b"b") + b"\x00", fin, log)
        h3.receive(stream_id + 8, headers(sized(1)) + data(b"ab"), fin, log)
    kinds = ["headers", "data", "headers", "message_error"]
    assert [event[0] for event in log.events] == 2 * kinds
    assert list(h3.streams) == [0, 8]
    assert h3.buffered == 0


def test_reset_of_a_request_is_no_error() -> None:
    h3, log = server()
    h3.receive(0, headers(POST)[:9], False, log)
    h3.reset(0, log)
    h3.reset(4, log)
    h3.receive(2, b"\x40", False, log)
    h3.reset(2, log)
    h3.receive(6, b"\x21abc", False, log)
    h3.reset(6, log)
    assert not log.events
    assert h3.buffered == 0


@pytest.mark.parametrize("kind", [b"\0", b"\x02", b"\x03"])
def test_critical_streams_are_one_each_and_stay(kind: bytes) -> None:
    h3, log = server()
    h3.receive(2, kind, False, log)
    h3.receive(6, kind, False, log)
    assert log.events == [broken(Code.STREAM_CREATION_ERROR)]
    h3, log = server()
    h3.receive(2, kind, False, log)
    h3.reset(2, log)
    h3.reset(2, log)
    assert log.events == [broken(Code.CLOSED_CRITICAL_STREAM)]
    h3.receive(0, headers(GET), True, log)
    assert len(log.events) == 1


def test_a_server_stream_seen_by_a_server_is_refused() -> None:
    for stream_id in (1, 3):
        h3, log = server()
        h3.receive(stream_id, b"\0", False, log)
        assert log.events == [broken(Code.STREAM_CREATION_ERROR)]


def test_one_broken_section_spoils_no_other_connection() -> None:
    bad, bad_log = server()
    bad.receive(0, frame(1, section(GET)[:-1]), True, bad_log)
    assert bad.closed
    h3, log = server()
    h3.receive(0, headers(GET), True, log)
    assert log.events == [got(GET), DONE]


def test_the_length_goes_along() -> None:
    h3, log = server()
    h3.receive(0, headers(sized(0)), True, log)
    h3.receive(4, headers(POST), True, log)
    assert [event[3] for event in log.events if event[0] == "headers"] == [0, None]


# What is sent


def test_codes_are_those_of_the_rfcs() -> None:
    assert [int(code) for code in Code] == [*range(0x100, 0x10F), 0x200, 0x201, 0x202]
    assert (Code.NO_ERROR, Code.INTERNAL_ERROR, Code.MESSAGE_ERROR) == (0x100, 0x102, 0x10E)
    assert (Code.FRAME_UNEXPECTED, Code.REQUEST_INCOMPLETE) == (0x105, 0x10D)


def test_start_says_settings_and_opens_the_qpack_streams() -> None:
    h3, _ = server()
    (control, settings), encoder, decoder = h3.start((3, 7, 11))
    assert (control, encoder, decoder) == (3, (7, b"\x02"), (11, b"\x03"))
    peer, log = client()
    peer.receive(3, settings, False, log)
    assert not log.events
    said = dict(peer.peer.settings or {})
    assert [said.pop(key) for key in (1, 6, 7)] == [0, 16384, 0]
    ((grease, _),) = said.items()
    assert grease % 0x1F == 0x21 % 0x1F


@pytest.mark.parametrize(
    ("length", "head"),
    [
        (0, "0000"),
        (1, "0001"),
        (63, "003f"),
        (64, "004040"),
        (512, "004200"),
        (16383, "007fff"),
        (16384, "0080004000"),
        (2**30, "00c000000040000000"),
    ],
)
def test_data_frame_headers(length: int, head: str) -> None:
    assert data_frame_header(length) == bytes.fromhex(head)


def test_goaway_and_long_sections() -> None:
    h3, log = server()
    assert h3.goaway(0) == b"\x07\x01\x00"
    assert h3.goaway(4000) == b"\x07\x02\x4f\xa0"
    peer, log = client()
    peer.receive(3, SETTINGS + h3.goaway(2**62 - 4), False, log)
    assert log.events == [("goaway", 2**62 - 4)]
    long = h3.encode_headers(0, [(b":status", b"200"), *[(b"x-own", b"~" * 9000)] * 2])
    assert long[0] == 1
    length, at = read_varint(long, 1, len(long))
    assert length == len(long) - at > 16384
