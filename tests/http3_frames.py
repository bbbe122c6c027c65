"""HTTP/3 written by hand for its tests: frames and field sections, the ways to deliver a stream
that must make no difference, and a sink that takes notes.

Field sections are written from literals, independently of the QPACK encoder under test, because
most of them hold what a decent encoder refuses to write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dataplane.http3 import Data, Fields, Http3, Sink
from dataplane.http3_fields import Pair, varint

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
