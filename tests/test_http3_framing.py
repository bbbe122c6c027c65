"""HTTP/3 framing: vectors in every cut, each rule with its code, aioquic as an oracle, garbage.

The vectors' field sections are written here from literals, independently of the QPACK encoder
under test, because most of them hold what a decent encoder refuses to write.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aioquic.h3.connection import H3Connection
from aioquic.h3.events import DataReceived, H3Event, HeadersReceived
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import StreamDataReceived
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.http3 import Code, Data, Fields, Http3, Sink, data_frame_header
from dataplane.http3_fields import (
    MessageError,
    Pair,
    content_length,
    encode_section,
    read_varint,
    varint,
)

LIMIT = 16384
GET: list[Pair] = [
    (b":method", b"GET"),
    (b":scheme", b"https"),
    (b":authority", b"localhost:4433"),
    (b":path", b"/health"),
]
POST: list[Pair] = [
    (b":method", b"POST"),
    (b":scheme", b"https"),
    (b":authority", b"localhost:4433"),
    (b":path", b"/v1/generate"),
    (b"content-type", b"application/octet-stream"),
]
OK: list[Pair] = [(b":status", b"200"), (b"content-type", b"application/octet-stream")]

Event = tuple[Any, ...]


class Log(Sink):
    """A sink that writes down what it is told; adjacent pieces of a body become one."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.refuse_headers = False
        self.refuse_data = False
        self.pieces: list[tuple[Data, int, int]] = []

    def on_headers(self, stream_id: int, fields: Fields, length: int | None) -> bool:
        self.events.append(("headers", stream_id, dict(fields), length))
        return not self.refuse_headers

    def on_data(self, stream_id: int, data: Data, start: int, end: int) -> bool:
        assert 0 <= start < end <= len(data)
        self.pieces.append((data, start, end))
        piece = bytes(data[start:end])
        last = self.events[-1] if self.events else ()
        if last[:2] == ("data", stream_id):
            self.events[-1] = ("data", stream_id, last[2] + piece)
        else:
            self.events.append(("data", stream_id, piece))
        return not self.refuse_data

    def on_end(self, stream_id: int) -> None:
        self.events.append(("end", stream_id))

    def on_message_error(self, stream_id: int, status: int, code: int, reason: str) -> None:
        assert reason
        assert reason.isprintable()
        self.events.append(("message_error", stream_id, status, code))

    def on_connection_error(self, code: int, reason: str) -> None:
        assert reason
        assert reason.isprintable()
        self.events.append(("connection_error", code))

    def on_trailers(self, stream_id: int, fields: Fields) -> None:
        self.events.append(("trailers", stream_id, dict(fields)))

    def on_interim(self, stream_id: int, fields: Fields) -> None:
        self.events.append(("interim", stream_id, dict(fields)))

    def on_goaway(self, last_id: int) -> None:
        self.events.append(("goaway", last_id))


def wide(number: int, size: int) -> bytes:
    """`number` in `size` bytes, minimal or not."""
    return (({1: 0, 2: 1, 4: 2, 8: 3}[size] << (8 * size - 2)) | number).to_bytes(size, "big")


def frame(kind: int, payload: bytes) -> bytes:
    return varint(kind) + varint(len(payload)) + payload


def prefixed(number: int, bits: int, first: int) -> bytes:
    """An integer with a prefix of `bits` bits (RFC 7541 section 5.1)."""
    top = (1 << bits) - 1
    if number < top:
        return bytes((first | number,))
    out = [first | top]
    number -= top
    while number >= 0x80:
        out.append(0x80 | number & 0x7F)
        number >>= 7
    return bytes([*out, number])


def section(pairs: list[Pair]) -> bytes:
    """A QPACK field section made of literals, whatever they hold."""
    lines = [
        prefixed(len(name), 3, 0x20) + name + prefixed(len(value), 7, 0) + value
        for name, value in pairs
    ]
    return b"\0\0" + b"".join(lines)


def headers(pairs: list[Pair]) -> bytes:
    return frame(1, section(pairs))


def data(body: bytes) -> bytes:
    return frame(0, body)


GREASE = frame(0x21 + 0x1F * 7, b"grease")
SETTINGS = b"\x00" + frame(4, b"")


def server() -> tuple[Http3, Log]:
    return Http3(is_client=False), Log()


def client() -> tuple[Http3, Log]:
    return Http3(is_client=True), Log()


def cuts(stream: bytes) -> Iterator[tuple[str, list[Data]]]:
    """The same bytes in every kind of delivery that the rules must not notice."""
    yield "whole", [stream]
    yield "whole, as memoryview", [memoryview(stream)]
    yield "byte by byte", [stream[i : i + 1] for i in range(len(stream))]
    yield "byte by byte, as bytearray", [bytearray(stream[i : i + 1]) for i in range(len(stream))]
    for at in range(1, min(len(stream), 60)):
        yield f"cut at {at}", [stream[:at], memoryview(stream)[at:]]
    yield "with empty events", [b"", stream, b""]


def play(h3: Http3, log: Log, stream_id: int, pieces: list[Data], fin: bool, own_fin: bool) -> None:
    """Deliver `pieces`; the FIN comes with the last of them, or on its own."""
    for index, piece in enumerate(pieces):
        h3.receive(stream_id, piece, fin and not own_fin and index == len(pieces) - 1, log)
    if fin and (own_fin or not pieces):
        h3.receive(stream_id, b"", True, log)


@dataclass
class Vector:
    name: str
    stream: bytes
    want: list[Event]
    fin: bool = True
    stream_id: int = 0
    is_client: bool = False
    heads: list[Pair] = field(default_factory=list)

    def run(self, pieces: list[Data], own_fin: bool) -> tuple[Http3, Log]:
        h3, log = Http3(self.is_client), Log()
        if self.heads:
            h3.encode_headers(self.stream_id, self.heads)
        play(h3, log, self.stream_id, pieces, self.fin, own_fin)
        return h3, log


def message_error(code: Code = Code.MESSAGE_ERROR, status: int = 400) -> Event:
    return ("message_error", 0, status, code)


def got(pairs: list[Pair], length: int | None = None) -> Event:
    return ("headers", 0, dict(pairs), length)


def sized(length: int) -> list[Pair]:
    return [*POST, (b"content-length", b"%d" % length)]


DONE = ("end", 0)
LONG = bytes(range(256)) * 3


def request(name: str, stream: bytes, *want: Event) -> Vector:
    return Vector(name, stream, list(want))


def uni(name: str, stream: bytes, *want: Event, fin: bool = False) -> Vector:
    """A client's unidirectional stream, seen by the server."""
    return Vector(name, stream, list(want), fin, 2)


def uni_to_client(name: str, stream: bytes, *want: Event) -> Vector:
    return Vector(name, stream, list(want), False, 3, True)


def reply(name: str, stream: bytes, *want: Event, head: bool = False) -> Vector:
    heads = [(b":method", b"HEAD")] if head else []
    return Vector(name, stream, list(want), is_client=True, heads=heads)


def body(content: bytes) -> Event:
    return ("data", 0, content)


SUM: list[Pair] = [(b"x-sum", b"9")]
TRAILERS: Event = ("trailers", 0, dict(SUM))
THREE = sized(3)
GOOD = [
    request("GET", headers(GET), got(GET), DONE),
    request("POST", headers(THREE) + data(b"abc"), got(THREE, 3), body(b"abc"), DONE),
    request(
        "POST of 768", headers(sized(768)) + data(LONG), got(sized(768), 768), body(LONG), DONE
    ),
    request(
        "body of no declared length in three frames",
        headers(POST) + data(b"a") + data(b"") + data(b"bc"),
        *(got(POST), body(b"abc"), DONE),
    ),
    request(
        "frames of later extensions everywhere",
        GREASE + headers(THREE) + GREASE + data(b"a") + GREASE + data(b"bc") + GREASE,
        *(got(THREE, 3), body(b"abc"), DONE),
    ),
    request(
        "trailers",
        headers(THREE) + data(b"abc") + headers(SUM) + GREASE,
        *(got(THREE, 3), body(b"abc"), TRAILERS, DONE),
    ),
    request(
        "trailers without fields",
        headers(GET) + frame(1, b"\0\0"),
        *(got(GET), ("trailers", 0, {}), DONE),
    ),
    *(
        request(
            f"numbers in {a} and {b} bytes",
            wide(1, a)
            + wide(len(section(THREE)), b)
            + section(THREE)
            + wide(0, a)
            + wide(3, b)
            + b"abc",
            *(got(THREE, 3), body(b"abc"), DONE),
        )
        for a in (1, 2, 4, 8)
        for b in (2, 4, 8)
    ),
    request(
        "99 frames without effect, and one more in the tail",
        headers(GET) + 49 * data(b"") + 50 * frame(0x21, b"") + data(b"a"),
        *(got(GET), body(b"a"), DONE),
    ),
    request("content-length 0", headers(sized(0)) + data(b""), got(sized(0), 0), DONE),
]


def with_field(name: bytes, value: bytes) -> list[Pair]:
    return [*GET, (name, value)]


def replaced(name: bytes, value: bytes) -> list[Pair]:
    return [(n, value if n == name else v) for n, v in GET]


def without(name: bytes) -> list[Pair]:
    return [pair for pair in GET if pair[0] != name]


HOST = (b"host", b"localhost:4433")
GOOD_FIELDS: list[tuple[str, list[Pair], dict[bytes, bytes]]] = [
    ("host instead of authority", [*without(b":authority"), HOST], {b"host": HOST[1]}),
    ("host and authority agree", [*GET, HOST], {b"host": HOST[1]}),
    ("pseudo-fields in another order", GET[::-1], {}),
    ("te: trailers", with_field(b"te", b"trailers"), {b"te": b"trailers"}),
    ("te: Trailers", with_field(b"te", b"Trailers"), {b"te": b"Trailers"}),
    ("an empty value", with_field(b"x-empty", b""), {b"x-empty": b""}),
    ("spaces and tabs inside", with_field(b"user-agent", b"a b\tc"), {b"user-agent": b"a b\tc"}),
    ("bytes above 0x7f", with_field(b"x-name", b"\xff\x80"), {b"x-name": b"\xff\x80"}),
    ("every sign of a token", with_field(b"!#$%&'*+-.^_`|~09az", b"v"), {}),
    ("repeated fields", [*GET, (b"accept", b"a"), (b"accept", b"b")], {b"accept": b"a, b"}),
    ("cookies", [*GET, (b"cookie", b"a=1"), (b"cookie", b"b=2")], {b"cookie": b"a=1; b=2"}),
    ("path with a query", replaced(b":path", b"/health?latency99"), {}),
    ("plain http", replaced(b":scheme", b"http"), {}),
    ("scheme in capitals", replaced(b":scheme", b"HTTPS"), {}),
    (
        "another scheme needs neither path nor authority",
        [(b":method", b"GET"), (b":scheme", b"x"), (b":path", b"")],
        {},
    ),
    ("a method of one's own", replaced(b":method", b"M-SEARCH"), {}),
    (
        "OPTIONS *",
        [(b":method", b"OPTIONS"), (b":scheme", b"https"), (b":authority", b"a"), (b":path", b"*")],
        {},
    ),
    ("CONNECT", [(b":method", b"CONNECT"), (b":authority", b"a:1")], {b":authority": b"a:1"}),
]

BAD_FIELDS: list[tuple[str, list[Pair]]] = [
    ("no fields", []),
    ("no :method", without(b":method")),
    ("no :scheme", without(b":scheme")),
    ("no :path", without(b":path")),
    ("neither :authority nor host", without(b":authority")),
    ("empty :authority", replaced(b":authority", b"")),
    ("empty host", [*without(b":authority"), (b"host", b"")]),
    ("empty host beside :authority", with_field(b"host", b"")),
    (":authority and host differ", with_field(b"host", b"localhost:4434")),
    (":authority with a password", replaced(b":authority", b"me:secret@localhost:4433")),
    ("empty :path", replaced(b":path", b"")),
    ("relative :path", replaced(b":path", b"health")),
    ("* without OPTIONS", replaced(b":path", b"*")),
    ("empty :method", replaced(b":method", b"")),
    (":method is no token", replaced(b":method", b"GE T")),
    ("CONNECT with a path", replaced(b":method", b"CONNECT")),
    ("CONNECT with a scheme", [(b":method", b"CONNECT"), *GET[1:3]]),
    ("CONNECT without authority", [(b":method", b"CONNECT")]),
    ("CONNECT with an empty authority", [(b":method", b"CONNECT"), (b":authority", b"")]),
    ("plain http without authority", [GET[0], (b":scheme", b"http"), GET[3]]),
    ("HTTPS without authority", [GET[0], (b":scheme", b"HTTPS"), GET[3]]),
    ("CONNECT with the authority last", [(b":method", b"CONNECT"), HOST, GET[2]]),
    *((f"{name.decode()} twice", [*GET, (name, value)]) for name, value in GET),
    ("host twice", [*without(b":authority"), HOST, HOST]),
    ("pseudo-field after a regular field", [GET[0], (b"accept", b"*"), *GET[1:]]),
    ("pseudo-field last", [*GET[:3], (b"x-own", b"1"), GET[3]]),
    ("unknown pseudo-field", [*GET, (b":protocol", b"websocket")]),
    ("pseudo-field of a response", [*GET, (b":status", b"200")]),
    ("pseudo-field without a name", [*GET, (b":", b"x")]),
    ("capitals in a name", with_field(b"Accept", b"x")),
    ("capital at the end of a name", with_field(b"x-owN", b"x")),
    ("line feed after a name", with_field(b"x-own\n", b"v")),
    *(
        (f"{c!r} in a name", with_field(b"x%bz" % c, b"v"))
        for c in (b" ", b"\0", b"\r", b"\n", b":", b"\x7f", b"\x80", b"(", b'"', b"/")
    ),
    *(
        (f"{c!r} in a value", with_field(b"accept", b"a%bb" % c))
        for c in (b"\0", b"\r", b"\n", b"\x01", b"\x1f", b"\x7f", b"\x0b", b"\x0c")
    ),
    *(
        (f"{c!r} around {name.decode()}: {value!r}", with_field(name, value))
        for c in (b" ", b"\t", b"\n", b"\0")
        for name, value in ((b"accept", c + b"a"), (b"accept", b"a" + c), (b"x-own", c))
    ),
    ("space before a repeated value", [*GET, (b"accept", b"a"), (b"accept", b" b")]),
    ("space after the method", replaced(b":method", b"GET ")),
    *(
        (f"{name} is of the connection", with_field(name.encode(), b"close"))
        for name in ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")
    ),
    ("te: gzip", with_field(b"te", b"gzip")),
    ("te: trailers and more", with_field(b"te", b"trailers, gzip")),
    ("te: gzip hidden behind another", [*GET, (b"te", b"gzip"), (b"te", b"trailers")]),
    ("te empty", with_field(b"te", b"")),
    *(
        (f"content-length {value[:20]!r}", with_field(b"content-length", value))
        for value in (
            *(b"", b"+5", b"-1", b"1_0", b"5 ", b" 5", b"0x5", b"5.0", b"1e3", b"five", b"5,5"),
            *(b"5, 5", "\u0665".encode(), b"9223372036854775808", b"9" * 5000),
        )
    ),
    ("content-length twice", [*GET, (b"content-length", b"5"), (b"content-length", b"5")]),
    ("two content-lengths", [*GET, (b"content-length", b"5"), (b"content-length", b"6")]),
]

TWO = sized(2)
EXTENSION = frame(0x21, b"")
BAD_MESSAGES = [
    *(
        request(name, headers(pairs) + data(b"hello"), message_error())
        for name, pairs in BAD_FIELDS
    ),
    request(
        "body too long in its first frame",
        headers(TWO) + data(b"abc"),
        *(got(TWO, 2), message_error()),
    ),
    request(
        "body too long in a later frame",
        headers(TWO) + data(b"ab") + data(b"c"),
        *(got(TWO, 2), body(b"ab"), message_error()),
    ),
    request(
        "body where none was declared",
        headers(sized(0)) + data(b"a"),
        *(got(sized(0), 0), message_error()),
    ),
    request(
        "body too short",
        headers(TWO) + data(b"a"),
        *(got(TWO, 2), body(b"a"), message_error()),
    ),
    request("no body where one was declared", headers(TWO), got(TWO, 2), message_error()),
    request(
        "trailers before the declared end",
        headers(TWO) + data(b"a") + headers(SUM),
        *(got(TWO, 2), body(b"a"), message_error()),
    ),
    *(
        request(f"{pair!r} in trailers", headers(GET) + headers([pair]), got(GET), message_error())
        for pair in (GET[3], OK[0], (b"upgrade", b"h2c"), (b"te", b"trailers"), (b"X", b"y"))
    ),
    request("nothing", b"", message_error(Code.REQUEST_INCOMPLETE, 0)),
    request("an extension's frame alone", GREASE, message_error(Code.REQUEST_INCOMPLETE, 0)),
    request(
        "101 frames without effect",
        headers(GET) + 101 * data(b"") + data(b"a"),
        *(got(GET), message_error(Code.EXCESSIVE_LOAD)),
    ),
    request(
        "101 frames of an extension",
        101 * EXTENSION + headers(GET),
        message_error(Code.EXCESSIVE_LOAD),
    ),
]


def broken(code: Code) -> Event:
    return ("connection_error", code)


UNEXPECTED = broken(Code.FRAME_UNEXPECTED)
TRUNCATED = broken(Code.FRAME_ERROR)
BAD_ID = broken(Code.ID_ERROR)
CLOSED = broken(Code.CLOSED_CRITICAL_STREAM)
NO_SETTINGS = broken(Code.MISSING_SETTINGS)
BAD_SETTINGS = broken(Code.SETTINGS_ERROR)
BAD_STREAM = broken(Code.STREAM_CREATION_ERROR)
BAD_SECTION = broken(Code.QPACK_DECOMPRESSION_FAILED)
BAD_ENCODER = broken(Code.QPACK_ENCODER_STREAM_ERROR)
BAD_DECODER = broken(Code.QPACK_DECODER_STREAM_ERROR)

ALL_BUT_END = headers(GET) + headers(SUM)
BAD_REQUEST_STREAMS = [
    request("DATA first", data(b"abc"), UNEXPECTED),
    request("empty DATA first", data(b""), UNEXPECTED),
    request("DATA after trailers", ALL_BUT_END + data(b"a"), got(GET), TRAILERS, UNEXPECTED),
    request("HEADERS after trailers", ALL_BUT_END + headers(SUM), got(GET), TRAILERS, UNEXPECTED),
    *(
        request(f"frame of type {kind:#x}", frame(kind, b"\0" * 5), UNEXPECTED)
        for kind in (0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0D)
    ),
    *(
        request(
            f"type {kind} in two bytes", headers(GET) + wide(kind, 2) + b"\0", got(GET), UNEXPECTED
        )
        for kind in (0x02, 0x04, 0x08)
    ),
    request("end within the type", headers(GET) + b"\x40", got(GET), TRUNCATED),
    request("end before the length", headers(GET) + b"\x00", got(GET), TRUNCATED),
    request("end within the length", headers(GET) + b"\x00\x80\x00", got(GET), TRUNCATED),
    request("end within DATA", headers(GET) + b"\x00\x03ab", got(GET), body(b"ab"), TRUNCATED),
    request("end before the payload", headers(GET) + b"\x00\x05", got(GET), TRUNCATED),
    request("end within HEADERS", headers(GET)[:-1], TRUNCATED),
    request("end within an extension", headers(GET) + GREASE[:-1], got(GET), TRUNCATED),
    *(
        request(f"{name} in a field section", frame(1, block) + data(b"a"), BAD_SECTION)
        for name, block in (
            ("nothing", b""),
            ("half a prefix", b"\0"),
            ("a required insert", b"\x02\0\x80"),
            ("a negative base", b"\0\x80"),
            ("a dynamic index", b"\0\0\x80"),
            ("a post-base index", b"\0\0\x10"),
            ("a static index over 98", b"\0\0\xff\x24"),
            ("a literal cut off", section(GET)[:-1]),
            ("bad Huffman padding", b"\0\0\x51\x81\x00"),
            ("an endless number", b"\0\0" + b"\xff" * 12),
            # Well-formed, but ls-qpack does not tell an empty name from a broken section.
            ("an empty name", section([*GET, (b"", b"x")])),
        )
    ),
]

PUSHES_TO_3 = frame(0x0D, b"\x03")


def goaway(last_id: int) -> bytes:
    return frame(7, varint(last_id))


def setting(payload: bytes) -> bytes:
    return b"\0" + frame(4, payload)


UNIDIRECTIONAL = [
    uni("settings", SETTINGS),
    uni("settings and extensions", SETTINGS + GREASE + frame(0x800F0700, b"\0u=1") + GREASE),
    uni(
        "goaway going down",
        SETTINGS + goaway(8) + goaway(4) + goaway(4),
        *(("goaway", 8), ("goaway", 4), ("goaway", 4)),
    ),
    uni("goaway after extensions", SETTINGS + GREASE + goaway(8) + GREASE, ("goaway", 8)),
    uni("goaway going up", SETTINGS + goaway(4) + goaway(8), ("goaway", 4), BAD_ID),
    uni("goaway to a server may name any push", SETTINGS + goaway(7), ("goaway", 7)),
    uni("push ids going up", SETTINGS + PUSHES_TO_3 + frame(13, wide(3, 8)) + frame(13, b"\x04")),
    *(
        uni(name, SETTINGS + rest, want)
        for name, rest, want in (
            ("settings twice", frame(4, b""), UNEXPECTED),
            ("DATA", data(b"a"), UNEXPECTED),
            ("HEADERS", headers(GET), UNEXPECTED),
            ("PUSH_PROMISE", frame(5, b"\0"), UNEXPECTED),
            ("HTTP/2 PRIORITY", frame(2, b"\0\0\0\0\0"), UNEXPECTED),
            ("HTTP/2 PING", frame(6, b"\0" * 8), UNEXPECTED),
            ("HTTP/2 WINDOW_UPDATE", frame(8, b"\0\0\0\1"), UNEXPECTED),
            ("HTTP/2 CONTINUATION", frame(9, b""), UNEXPECTED),
            ("goaway with a tail", frame(7, b"\x04\x00"), TRUNCATED),
            ("goaway without a number", frame(7, b""), TRUNCATED),
            ("goaway cut off", frame(7, b"\x40"), TRUNCATED),
            ("goaway of nine bytes", b"\x07\x09", TRUNCATED),
            ("push ids going down", PUSHES_TO_3 + frame(13, b"\x02"), BAD_ID),
            ("cancelled push", PUSHES_TO_3 + frame(3, b"\x02"), BAD_ID),
        )
    ),
    uni("goaway first", b"\0" + goaway(0), NO_SETTINGS),
    uni("extension first", b"\0" + GREASE, NO_SETTINGS),
    uni("DATA first of all", b"\0" + data(b"a"), NO_SETTINGS),
    uni("a frame of HTTP/2 first", b"\0" + frame(6, b"\0" * 8), UNEXPECTED),
    *(
        uni(f"setting {key} of HTTP/2", setting(varint(key) + b"\1"), BAD_SETTINGS)
        for key in (0, 2, 3, 4, 5)
    ),
    uni("a setting twice", setting(b"\x06\x01\x06\x01"), BAD_SETTINGS),
    uni("an unknown setting twice", setting(b"\x21\x01\x40\x21\x02"), BAD_SETTINGS),
    uni("a setting without value", setting(b"\x06"), TRUNCATED),
    uni("a setting cut off", setting(b"\x06\x40"), TRUNCATED),
    uni("settings over 1 KiB", b"\0\x04" + varint(1025), broken(Code.EXCESSIVE_LOAD)),
    uni("settings of 1 KiB", b"\0\x04" + varint(1024)),
    uni("control stream ends", SETTINGS, CLOSED, fin=True),
    uni("type in eight bytes", wide(0, 8) + frame(4, b"") + data(b""), UNEXPECTED),
    uni_to_client("settings of a server", SETTINGS + goaway(8), ("goaway", 8)),
    uni_to_client("push ids to a client", SETTINGS + PUSHES_TO_3, UNEXPECTED),
    uni_to_client("cancelled push to a client", SETTINGS + frame(3, b"\x02"), BAD_ID),
    uni_to_client("goaway to a client names no request", SETTINGS + goaway(3), BAD_ID),
    uni("encoder", b"\x02\x20\x20"),
    uni("encoder inserts a name", b"\x02\x41a\x01b", BAD_ENCODER),
    uni("encoder refers to a name", b"\x02\xc0\x01b", BAD_ENCODER),
    uni("encoder sets a capacity", b"\x02\x3f\x01", BAD_ENCODER),
    uni("encoder duplicates", b"\x02\x00", BAD_ENCODER),
    uni("encoder ends", b"\x02", CLOSED, fin=True),
    uni("decoder cancels", b"\x03\x40\x7e\x7f\x00\x7f" + b"\xff" * 7 + b"\x7f\x44"),
    uni("decoder acknowledges", b"\x03\x40\x84", BAD_DECODER),
    uni("decoder counts", b"\x03\x01", BAD_DECODER),
    uni("decoder counts 0", b"\x03\x40\x00", BAD_DECODER),
    uni("decoder cancels without end", b"\x03\x7f" + b"\xff" * 9, BAD_DECODER),
    uni("decoder ends", b"\x03", CLOSED, fin=True),
    uni("a stream of a later extension", b"\x21" + bytes(range(256))),
    uni("it ends", b"\x21" + bytes(range(256)), fin=True),
    uni("a stream ends before its type", b"\x40", fin=True),
    uni("a stream ends at once", b"", fin=True),
    uni("a client pushes", b"\x01\x00", BAD_STREAM),
    uni_to_client("a server pushes", b"\x01\x00", BAD_ID),
    Vector("a server opens a bidirectional stream", b"\0", [BAD_STREAM], False, 1, True),
]


def answer(length: int) -> list[Pair]:
    return [*OK, (b"content-length", b"%d" % length)]


INTERIM: list[Pair] = [(b":status", b"103"), (b"link", b"</x>")]
SOON: Event = ("interim", 0, dict(INTERIM))
HUNDRED: Event = ("interim", 0, {b":status": b"100"})
NOT_MODIFIED: list[Pair] = [(b":status", b"304"), (b"content-length", b"9")]
HI = answer(2)
RESPONSES = [
    reply("200", headers(HI) + data(b"hi"), got(HI, 2), body(b"hi"), DONE),
    reply(
        "interim twice",
        headers(INTERIM) + GREASE + headers(INTERIM) + headers(OK) + data(b"a"),
        *(SOON, SOON, got(OK), body(b"a"), DONE),
    ),
    reply("interim 100", headers([(b":status", b"100")]) + headers(OK), HUNDRED, got(OK), DONE),
    reply("response with trailers", headers(OK) + headers(SUM), got(OK), TRAILERS, DONE),
    reply("304 with a length", headers(NOT_MODIFIED), got(NOT_MODIFIED, 9), DONE),
    reply(
        "304 with a body",
        headers(NOT_MODIFIED) + data(b"123456789"),
        *(got(NOT_MODIFIED, 9), message_error()),
    ),
    reply("answer to HEAD", headers(answer(9)), got(answer(9), 9), DONE, head=True),
    reply("too short", headers(HI) + data(b"h"), got(HI, 2), body(b"h"), message_error()),
    reply("too long", headers(HI) + data(b"hi!"), got(HI, 2), message_error()),
    reply("no response", b"", message_error(status=0)),
    reply("interim alone", headers(INTERIM), SOON, message_error(status=0)),
    reply("DATA after interim", headers(INTERIM) + data(b"a"), SOON, UNEXPECTED),
    reply("push", frame(5, b"\0" + section(GET)), BAD_ID),
    *(
        reply(name, headers(pairs), message_error())
        for name, pairs in (
            ("no status", OK[1:]),
            ("status twice", [OK[0], *OK]),
            ("status last", OK[::-1]),
            ("status of two digits", [(b":status", b"20")]),
            ("status 099", [(b":status", b"099")]),
            ("status of four digits", [(b":status", b"2000")]),
            ("status +20", [(b":status", b"+20")]),
            ("status 101", [(b":status", b"101")]),
            ("a request's field", [*OK, (b":path", b"/")]),
            ("te in a response", [*OK, (b"te", b"trailers")]),
            ("connection", [*OK, (b"connection", b"close")]),
            ("content-length +2", [*OK, (b"content-length", b"+2")]),
        )
    ),
]

VECTORS = [*GOOD, *BAD_MESSAGES, *BAD_REQUEST_STREAMS, *UNIDIRECTIONAL, *RESPONSES]


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


# aioquic's HTTP/3 as the peer


class Wire:
    """What H3Connection needs of a QuicConnection; it keeps what would be sent."""

    def __init__(self, is_client: bool) -> None:
        self.configuration = SimpleNamespace(is_client=is_client)
        self._quic_logger = None
        self._remote_max_datagram_frame_size = None
        self._next = {False: 0 if is_client else 1, True: 2 if is_client else 3}
        self.sent: list[tuple[int, bytes, bool]] = []
        self.closed_with: int | None = None

    def get_next_available_stream_id(self, is_unidirectional: bool = False) -> int:
        stream_id = self._next[is_unidirectional]
        self._next[is_unidirectional] += 4
        return stream_id

    def send_stream_data(self, stream_id: int, piece: bytes, end_stream: bool = False) -> None:
        self.sent.append((stream_id, piece, end_stream))

    def close(self, error_code: int, reason_phrase: str = "", **_: object) -> None:
        self.closed_with = error_code


class Pair3:
    """Our side and aioquic's, with SETTINGS exchanged."""

    def __init__(self, we_are_client: bool) -> None:
        self.h3, self.log = Http3(we_are_client), Log()
        self.wire = Wire(not we_are_client)
        self.peer = H3Connection(cast(QuicConnection, self.wire))
        self.heard: list[H3Event] = []
        ours = (2, 6, 10) if we_are_client else (3, 7, 11)
        for stream_id, piece in self.h3.start(ours):
            self.tell(stream_id, piece, False)
        self.listen()

    def tell(self, stream_id: int, piece: bytes, fin: bool) -> None:
        event = StreamDataReceived(data=piece, end_stream=fin, stream_id=stream_id)
        self.heard += self.peer.handle_event(event)
        assert self.wire.closed_with is None

    def listen(self, step: int = 1 << 30) -> None:
        for stream_id, piece, fin in self.wire.sent:
            for at in range(0, max(len(piece), 1), step):
                last = at + step >= len(piece)
                self.h3.receive(stream_id, piece[at : at + step], fin and last, self.log)
        self.wire.sent.clear()


@pytest.mark.parametrize("step", [1, 7, 1 << 30])
def test_aioquic_asks_and_we_answer(step: int) -> None:
    pair = Pair3(we_are_client=False)
    assert pair.h3.peer.settings is not None
    for turn in range(5):
        stream_id = turn * 4
        pair.log.events.clear()
        pair.heard.clear()
        request = [*sized(len(LONG)), (b"x-turn", b"%d" % turn), (b"user-agent", b"a b")]
        pair.peer.send_headers(stream_id, request)
        pair.peer.send_data(stream_id, LONG[:99], end_stream=False)
        pair.peer.send_data(stream_id, LONG[99:], end_stream=False)
        pair.peer.send_headers(stream_id, [(b"x-sum", b"1")], end_stream=True)
        pair.listen(step)
        assert pair.log.events == [
            ("headers", stream_id, dict(request), len(LONG)),
            ("data", stream_id, LONG),
            ("trailers", stream_id, {b"x-sum": b"1"}),
            ("end", stream_id),
        ]
        fields = [*answer(3), (b"x-queue-time", b"0.041ms"), (b"x-turn", b"%d" % turn)]
        stream = pair.h3.encode_headers(stream_id, fields) + data_frame_header(3) + b"abc"
        for at in range(0, len(stream), step):
            pair.tell(stream_id, stream[at : at + step], at + step >= len(stream))
        heads = [event for event in pair.heard if isinstance(event, HeadersReceived)]
        bodies = [event for event in pair.heard if isinstance(event, DataReceived)]
        assert [head.headers for head in heads] == [fields]
        assert b"".join(body.data for body in bodies) == b"abc"
        assert pair.heard[-1].stream_ended  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", [1, 7, 1 << 30])
def test_we_ask_and_aioquic_answers(step: int) -> None:
    pair = Pair3(we_are_client=True)
    for turn in range(5):
        stream_id = turn * 4
        pair.log.events.clear()
        pair.heard.clear()
        request = [*sized(3), (b"x-turn", b"%d" % turn)]
        pair.tell(stream_id, pair.h3.encode_headers(stream_id, request), False)
        pair.tell(stream_id, data_frame_header(3) + b"abc", True)
        assert [type(event) for event in pair.heard] == [HeadersReceived, DataReceived]
        assert cast(HeadersReceived, pair.heard[0]).headers == request
        pair.peer.send_headers(stream_id, [(b":status", b"103")])
        pair.peer.send_headers(stream_id, [*answer(len(LONG)), (b"x-turn", b"%d" % turn)])
        pair.peer.send_data(stream_id, LONG, end_stream=True)
        pair.listen(step)
        fields = {**dict(answer(len(LONG))), b"x-turn": b"%d" % turn}
        assert pair.log.events == [
            ("interim", stream_id, {b":status": b"103"}),
            ("headers", stream_id, fields, len(LONG)),
            ("data", stream_id, LONG),
            ("end", stream_id),
        ]


def test_what_closes_the_connection_in_aioquic_costs_one_stream_here() -> None:
    """The reason for this module: the oracle closes, we go on."""
    bad = headers([*POST, (b"content-length", b"five")])
    wire = Wire(is_client=False)
    oracle = H3Connection(cast(QuicConnection, wire))
    oracle.handle_event(StreamDataReceived(data=SETTINGS, end_stream=False, stream_id=2))
    oracle.handle_event(StreamDataReceived(data=bad, end_stream=True, stream_id=0))
    assert wire.closed_with is not None
    h3, log = server()
    h3.receive(0, bad, True, log)
    h3.receive(4, headers(GET), True, log)
    assert log.events == [message_error(), ("headers", 4, dict(GET), None), ("end", 4)]


# Where the oracle is laxer: it has a dynamic table, and looks less closely at the rest.
ORACLE_SAYS: dict[str, Code | None] = dict.fromkeys((
    "a required insert in a field section", "goaway going up", "goaway with a tail",
    "goaway without a number", "goaway cut off", "goaway of nine bytes", "cancelled push",
    "settings over 1 KiB", "cancelled push to a client", "goaway to a client names no request",
    "encoder inserts a name", "encoder refers to a name", "encoder sets a capacity", "encoder ends",
    "decoder cancels without end", "decoder ends", "a server pushes", "push",
    "a server opens a bidirectional stream",
))  # fmt: skip
# RFC 9114 sections 6.2.1 and 7.2.8 each have a code for this one.
ORACLE_SAYS["a frame of HTTP/2 first"] = Code.MISSING_SETTINGS
BROKEN = [v for v in VECTORS if v.want and v.want[-1][0] == "connection_error" and not v.heads]


@pytest.mark.parametrize("vector", BROKEN, ids=lambda v: v.name)
def test_aioquic_agrees_on_the_codes(vector: Vector) -> None:
    wire = Wire(is_client=vector.is_client)
    oracle = H3Connection(cast(QuicConnection, wire))
    if vector.stream_id == 0:
        control = 3 if vector.is_client else 2
        opening = StreamDataReceived(data=SETTINGS, end_stream=False, stream_id=control)
        oracle.handle_event(opening)
    event = StreamDataReceived(
        data=vector.stream, end_stream=vector.fin, stream_id=vector.stream_id
    )
    oracle.handle_event(event)
    assert wire.closed_with == ORACLE_SAYS.get(vector.name, vector.want[-1][1])


# Garbage


def mutated(rng: random.Random, stream: bytes) -> bytes:
    out = bytearray(stream)
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0:
                out[at : at + 1] = bytes((rng.randrange(256),))
            case 1:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del out[at : at + rng.randrange(1, 9)]
            case 3:
                out[at:at] = wide(rng.getrandbits(rng.choice((5, 13, 29, 61))), 8)
            case 4:
                out[at:at] = rng.choice(VECTORS).stream[:2000]
            case _:
                if at < len(out):
                    out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


@pytest.mark.parametrize("seed", range(8))
def test_garbage_is_reported_and_never_raised_nor_piled_up(seed: int) -> None:
    rng = random.Random(seed)
    heard: set[str] = set()
    for _ in range(1000):
        is_client, limit = rng.random() < 0.3, rng.choice((300, LIMIT))
        h3, log = Http3(is_client, limit), Log()
        bound = 5 * limit + 2048
        pool = [RESPONSES if is_client else GOOD, VECTORS]
        for index in range(rng.randrange(1, 5)):
            vector = rng.choice(pool[rng.random() < 0.3])
            stream_id = vector.stream_id + 4 * index
            stream = mutated(rng, vector.stream)
            while stream:
                take = rng.choice((1, 3, 20, 1 << 20))
                h3.receive(stream_id, stream[:take], False, log)
                stream = stream[take:]
                assert h3.buffered == held(h3) <= bound
            if rng.random() < 0.7:
                h3.receive(stream_id, b"", True, log)
            elif rng.random() < 0.5:
                h3.reset(stream_id, log)
        check_order(log.events)
        heard.update(event[0] for event in log.events)
    assert heard >= {"headers", "data", "end", "message_error", "connection_error", "trailers"}


def held(h3: Http3) -> int:
    requests = sum(len(stream.held) for stream in h3.streams.values())
    return requests + sum(len(stream.held) for stream in h3.peer._streams.values())


def check_order(events: list[Event]) -> None:
    """Whatever came in, a sink sees the calls in an order that makes sense."""
    seen: dict[int, str] = {}
    allowed = {
        "headers": {"", "interim"},
        "interim": {"", "interim"},
        "data": {"headers", "data"},
        "trailers": {"headers", "data"},
        "end": {"headers", "data", "trailers"},
        "message_error": {"", "interim", "headers", "data", "trailers"},
    }
    for index, event in enumerate(events):
        if event[0] == "connection_error":
            assert index == len(events) - 1
        elif event[0] != "goaway":
            assert seen.get(event[1], "") in allowed[event[0]], events
            seen[event[1]] = event[0]
