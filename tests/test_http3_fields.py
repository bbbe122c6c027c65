"""HTTP/3's numbers and fields: against the rules written plainly, and there and back again."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from http3_frames import OK, POST, Event, Log, frame, headers, server, wide
from http3_vectors import BAD_SECTION, HOST
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.http3 import Http3, data_frame_header
from dataplane.http3_fields import MessageError, Pair, content_length, read_varint, varint

# content-length on its own


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (b"0", 0),
        (b"512", 512),
        (b"007", 7),
        (b"9223372036854775807", 2**63 - 1),
        (b"0" * 50, 0),
        (b"0" * 50 + b"42", 42),
        (b"999999999999999999", 10**18 - 1),
    ],
)
def test_content_lengths(value: bytes, number: int) -> None:
    assert content_length(value) == number


@pytest.mark.parametrize(
    "value", [b"9223372036854775808", b"1" + b"0" * 19, b"1" * 20, b"9" * 9999]
)
def test_content_lengths_that_are_too_large(value: bytes) -> None:
    with pytest.raises(MessageError, match="over 2") as caught:
        content_length(value)
    assert (caught.value.status, caught.value.code) == (400, 0x10E)


@settings(deadline=None)
@given(st.binary(max_size=30))
def test_a_content_length_is_digits_or_an_error(value: bytes) -> None:
    digits = bool(value) and all(0x30 <= c <= 0x39 for c in value)
    try:
        number = content_length(value)
    except MessageError:
        assert not digits or int(value) >= 2**63
    else:
        assert digits
        assert number == int(value) < 2**63


# Round trips


@settings(deadline=None)
@given(st.integers(0, 2**62 - 1), st.binary(max_size=3))
def test_numbers_in_every_width(number: int, tail: bytes) -> None:
    for size in (1, 2, 4, 8):
        if number >> (8 * size - 2):
            continue
        assert read_varint(wide(number, size) + tail, 0, size + len(tail)) == (number, size)
        assert read_varint(wide(number, size), 0, size - 1) == (0, -1)
    assert read_varint(varint(number), 0, 8) == (number, len(varint(number)))


names = st.from_regex(rb"\Ax-[a-z0-9!#$%&'*+.^_`|~-]{1,12}\Z")
values = st.from_regex(rb"\A(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]{0,20}[!-~\x80-\xff])?)?\Z")
extra_fields = st.lists(st.tuples(names, values), max_size=8, unique_by=lambda pair: pair[0])


@settings(deadline=None)
@given(st.data(), extra_fields, st.lists(st.binary(max_size=80), max_size=5), st.booleans())
def test_round_trips_in_both_directions(
    draw: st.DataObject, extra: list[Pair], parts: list[bytes], to_server: bool
) -> None:
    body = b"".join(parts)
    pairs = [*(POST if to_server else OK), *extra, (b"content-length", b"%d" % len(body))]
    sender, receiver = Http3(to_server), Http3(not to_server)
    stream = sender.encode_headers(8, pairs)
    stream += b"".join(data_frame_header(len(part)) + part for part in parts)
    trailers: list[Pair] = draw.draw(st.just([]) | st.just([(b"x-sum", b"1")]))
    if trailers:
        stream += sender.encode_headers(8, trailers)
    at = sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    log = Log()
    edges = [0, *at, len(stream)]
    for start, stop in pairwise(edges):
        receiver.receive(8, stream[start:stop], False, log)
    receiver.receive(8, b"", True, log)
    want: list[Event] = [("headers", 8, dict(pairs), len(body))]
    want += [("data", 8, body)] if body else []
    want += [("trailers", 8, dict(trailers))] if trailers else []
    assert log.events == [*want, ("end", 8)]
    assert receiver.buffered == 0


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_a_block_is_decoded_or_ends_the_connection(block: bytes) -> None:
    h3, log = server()
    h3.receive(0, frame(1, block), False, log)
    assert log.events[0][0] in ("headers", "message_error") or log.events == [BAD_SECTION]


# The rules for fields once more, written plainly


def plain_request_rules(pairs: list[Pair]) -> bool:
    """RFC 9114 sections 4.2, 4.3 and 4.3.1 byte by byte, for https and without CONNECT."""
    token = set(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz")
    pseudo: dict[bytes, bytes] = {}
    regular: dict[bytes, list[bytes]] = {}
    for name, value in pairs:
        if any((c < 0x20 and c != 9) or c == 0x7F for c in value) or value != value.strip(b" \t"):
            return False
        if name[:1] == b":":
            if regular or name in pseudo:
                return False
            pseudo[name] = value
            continue
        if not name or not set(name) <= token:
            return False
        if name in (b"connection", b"upgrade") or (name == b"te" and value != b"trailers"):
            return False
        regular.setdefault(name, []).append(value)
    hosts = regular.get(b"host", [])
    lengths = regular.get(b"content-length", [])
    authority = pseudo.pop(b":authority", None)
    named = [*hosts, *([] if authority is None else [authority])]
    return (
        pseudo.keys() == {b":method", b":scheme", b":path"}
        and pseudo[b":path"].startswith(b"/")
        and len(hosts) < 2
        and len(lengths) < 2
        and len(regular.get(b"te", [])) < 2
        and all(length.isdigit() for length in lengths)
        and len(set(named)) == 1
        and named[0] != b""
    )


some_pairs = st.one_of(
    st.sampled_from([*POST, *POST, *POST, HOST, (b":path", b"x"), (b":status", b"200")]),
    st.sampled_from([(b"te", b"trailers"), (b"te", b"gzip"), (b"connection", b"close")]),
    st.sampled_from([(b"host", b""), (b"host", b"other"), (b"content-length", b"5")]),
    st.tuples(st.sampled_from([b"accept", b"x-own", b"content-length"]), st.binary(max_size=4)),
    st.tuples(st.binary(min_size=1, max_size=4), st.just(b"v")),
    st.tuples(names, values),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(some_pairs, max_size=4), st.booleans(), st.randoms())
def test_the_quick_check_agrees_with_the_plain_one(
    extra: list[Pair], shuffled: bool, rng: random.Random
) -> None:
    pairs = [*POST, *extra]
    if shuffled:
        rng.shuffle(pairs)
    h3, log = server()
    h3.receive(0, headers(pairs), False, log)
    assert not h3.closed
    assert (log.events[0][0] == "headers") == plain_request_rules(pairs)
