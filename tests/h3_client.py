"""An HTTP/3 client that does what a test tells it: every frame and field line is written by hand.

It shares nothing with the daemon's framing but pylsqpack, with which it reads the answers, so that
a mistake there hides none here. What it is told to send it sends, right or wrong.
"""

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import pylsqpack
from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionTerminated,
    QuicEvent,
    StopSendingReceived,
    StreamDataReceived,
    StreamReset,
)
from daemon_process import DaemonProcess

Pairs = list[tuple[bytes, bytes]]
Fields = Mapping[str, str]

BINARY = b"application/octet-stream"
JSON = b"application/json"
EVENTS = b"text/event-stream"
PROBLEM = b"application/problem+json"
NO_ERROR = 0x100
INTERNAL_ERROR = 0x102
REQUEST_CANCELLED = 0x10C

ANSWER_WITHIN_S = 10.0
_DATA, _HEADERS = 0, 1
_NONE: Fields = {}


# ---------------------------------------------------------------- writing


def varint(number: int) -> bytes:
    """A number as QUIC writes it (RFC 9000 section 16)."""
    for size, tag in ((1, 0), (2, 1), (4, 2), (8, 3)):
        if number < 1 << (8 * size - 2):
            return (number | tag << (8 * size - 2)).to_bytes(size, "big")
    raise ValueError(number)


def frame(kind: int, payload: bytes) -> bytes:
    """Type, length, payload."""
    return varint(kind) + varint(len(payload)) + payload


def _prefixed(number: int, bits: int, first: int) -> bytes:
    """An integer with a prefix of so many bits (RFC 7541 section 5.1)."""
    most = (1 << bits) - 1
    if number < most:
        return bytes([first | number])
    out, rest = bytearray([first | most]), number - most
    while rest >= 128:
        out.append(rest % 128 + 128)
        rest //= 128
    return bytes(out) + bytes([rest])


def section(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A field section of literals with literal names (RFC 9204 section 4.5.6)."""
    lines = [
        _prefixed(len(name), 3, 0x20) + name + _prefixed(len(value), 7, 0) + value
        for name, value in pairs
    ]
    return b"\0\0" + b"".join(lines)


def head(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A HEADERS frame."""
    return frame(_HEADERS, section(pairs))


def body_frame(data: bytes) -> bytes:
    """A DATA frame."""
    return frame(_DATA, data)


def request_fields(method: bytes = b"POST", path: bytes = b"/v1/generate") -> Pairs:
    """The four pseudo-fields."""
    return [
        (b":method", method),
        (b":scheme", b"https"),
        (b":authority", b"localhost"),
        (b":path", path),
    ]


def post_fields(length: int, content_type: bytes = BINARY, more: Fields = _NONE) -> Pairs:
    """The fields of a `/v1/generate`."""
    return [
        *request_fields(),
        (b"content-type", content_type),
        (b"content-length", b"%d" % length),
        *_encoded(more),
    ]


def _encoded(fields: Fields) -> Pairs:
    return [(name.encode(), value.encode()) for name, value in fields.items()]


def words(ids: Iterable[int]) -> bytes:
    """Ids as u32."""
    return b"".join(struct.pack("<I", number) for number in ids)


def shorts(ids: Iterable[int]) -> bytes:
    """Ids as u16."""
    return b"".join(struct.pack("<H", number) for number in ids)


# ---------------------------------------------------------------- reading


def _read_varint(data: bytes, at: int) -> tuple[int, int] | None:
    if at >= len(data):
        return None
    size = 1 << (data[at] >> 6)
    if at + size > len(data):
        return None
    return int.from_bytes(data[at : at + size], "big") & (1 << (8 * size - 2)) - 1, at + size


def read_frames(data: bytes) -> list[tuple[int, bytes]]:
    """The whole frames at the beginning of `data`."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while True:
        kind = _read_varint(data, at)
        length = _read_varint(data, kind[1]) if kind else None
        if kind is None or length is None or length[1] + length[0] > len(data):
            return found
        found.append((kind[0], data[length[1] : length[1] + length[0]]))
        at = length[1] + length[0]


class Answer:
    """A response as far as it is there.

    Attributes:
        status: 0 before its header.
        pairs: Its other fields in order.
        body: What came of it.
    """

    def __init__(self, data: bytes) -> None:
        self.status = 0
        self.pairs: Pairs = []
        self.body = b""
        for kind, payload in read_frames(data):
            if kind == _HEADERS:
                assert not self.status, "a second HEADERS frame"
                _, pairs = pylsqpack.Decoder(0, 0).feed_header(0, payload)
                assert pairs[0][0] == b":status"
                self.status, self.pairs = int(pairs[0][1]), pairs[1:]
            elif kind == _DATA:
                assert self.status, "DATA before HEADERS"
                self.body += payload
            else:
                raise AssertionError(f"a frame of type {kind}")

    @property
    def fields(self) -> dict[str, str]:
        """Its fields, none of which may come twice."""
        fields = {name.decode(): value.decode() for name, value in self.pairs}
        assert len(fields) == len(self.pairs)
        return fields

    def json(self) -> Any:
        return json.loads(self.body)

    def problem(self) -> dict[str, Any]:
        """The problem document that this has to be."""
        assert self.fields["content-type"] == PROBLEM.decode(), (self.status, self.body)
        document: dict[str, Any] = self.json()
        assert list(document) == ["type", "title", "status", "detail", "request_id"]
        assert (document["type"], document["status"]) == ("about:blank", self.status)
        assert document["request_id"] == self.fields["x-request-id"] == self.fields["request-id"]
        assert self.fields["content-length"] == str(len(self.body))
        return document

    def events(self) -> list[Any]:
        """The data of its server-sent events; `[DONE]` is text."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == "", "the last event has no end"
        assert all(part.startswith("data: ") and "\n" not in part for part in parts), parts
        return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts]

    def ids(self) -> list[int]:
        """The ids of its binary body, which has to be whole; see `trailer`."""
        assert self.fields["content-type"] == BINARY.decode(), (self.status, self.body)
        numbers = list(struct.unpack(f"<{len(self.body) // 4}I", self.body))
        assert numbers[-5] == 0xFFFFFFFF, numbers
        assert numbers[-2] == len(numbers) - 5
        assert numbers[-1] == 0
        return numbers[:-5]

    def trailer(self) -> tuple[int, int, int]:
        """Finish reason, prompt tokens, output tokens."""
        reason, prompt, output, _ = struct.unpack("<4I", self.body[-16:])
        return reason, prompt, output


# ---------------------------------------------------------------- streams


class Stream:
    """One request.

    Attributes:
        data, fin: What came.
        was_reset: The code of a RESET_STREAM.
        stopped: The code of a STOP_SENDING.
    """

    def __init__(self, client: "H3Client", number: int) -> None:
        self._client = client
        self.number = number
        self.data = b""
        self.fin = False
        self.was_reset: int | None = None
        self.stopped: int | None = None

    def send(self, data: bytes, fin: bool = False) -> "Stream":
        """Send more, at once."""
        self._client.protocol._quic.send_stream_data(self.number, data, fin)
        self._client.protocol.transmit()
        return self

    def reset(self, code: int = REQUEST_CANCELLED) -> None:
        """Give up sending."""
        self._client.protocol._quic.reset_stream(self.number, code)
        self._client.protocol.transmit()

    def stop(self, code: int = REQUEST_CANCELLED) -> None:
        """Want no answer."""
        self._client.protocol._quic.stop_stream(self.number, code)
        self._client.protocol.transmit()

    @property
    def so_far(self) -> Answer:
        return Answer(self.data)

    async def until(self, what: str, condition: Callable[[], Any]) -> None:
        """Wait until something holds of this stream."""
        await self._client.until(what, condition)

    async def answer(self) -> Answer:
        """Wait for the whole answer."""
        await self.until("the answer ends", lambda: self.fin or self.was_reset is not None)
        assert self.was_reset is None, f"it was reset with {self.was_reset:#x}"
        return self.so_far

    async def header(self) -> Answer:
        """Wait for the answer's header."""
        await self.until("there is a header", lambda: self.so_far.status)
        return self.so_far

    async def body_beyond(self, length: int) -> None:
        """Wait until more than so many bytes of the body are there."""
        await self.until("more of the body", lambda: len(self.so_far.body) > length)

    async def reset_code(self) -> int:
        """Wait for a RESET_STREAM."""
        await self.until("it is reset", lambda: self.was_reset is not None)
        assert self.was_reset is not None
        return self.was_reset

    async def stop_code(self) -> int:
        """Wait for a STOP_SENDING."""
        await self.until("it is stopped", lambda: self.stopped is not None)
        assert self.stopped is not None
        return self.stopped


class _Protocol(QuicConnectionProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.streams: dict[int, Stream] = {}
        self.server_streams: dict[int, bytes] = {}
        self.ended: ConnectionTerminated | None = None
        self.changed = asyncio.Event()

    def quic_event_received(self, event: QuicEvent) -> None:
        if isinstance(event, StreamDataReceived):
            if event.stream_id & 1:
                before = self.server_streams.get(event.stream_id, b"")
                self.server_streams[event.stream_id] = before + event.data
            else:
                stream = self.streams[event.stream_id]
                stream.data += event.data
                stream.fin = stream.fin or event.end_stream
        elif isinstance(event, StreamReset):
            self.streams[event.stream_id].was_reset = event.error_code
        elif isinstance(event, StopSendingReceived):
            self.streams[event.stream_id].stopped = event.error_code
        elif isinstance(event, ConnectionTerminated):
            self.ended = event
        self.changed.set()


class H3Client:
    """A connection."""

    def __init__(self, protocol: _Protocol) -> None:
        self.protocol = protocol

    @property
    def close_code(self) -> int | None:
        """The code that the daemon closed the connection with."""
        event = self.protocol._quic._close_event
        return None if event is None else event.error_code

    def control_frames(self) -> list[tuple[int, bytes]]:
        """The frames of the daemon's control stream so far."""
        for data in self.protocol.server_streams.values():
            if data[:1] == b"\0":
                return read_frames(data[1:])
        return []

    async def until(self, what: str, condition: Callable[[], Any]) -> None:
        """Wait until something holds."""
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                while not condition():
                    assert self.protocol.ended is None, f"closed: {self.protocol.ended}"
                    self.protocol.changed.clear()
                    await self.protocol.changed.wait()
        except TimeoutError:
            raise AssertionError(f"within {ANSWER_WITHIN_S:g} s it never came: {what}") from None

    def open(self, data: bytes, fin: bool = False) -> Stream:
        """Open a stream with these bytes."""
        number = self.protocol._quic.get_next_available_stream_id()
        stream = self.protocol.streams[number] = Stream(self, number)
        return stream.send(data, fin)

    def post(self, body: bytes, content_type: bytes = BINARY, more: Fields = _NONE) -> Stream:
        """A whole `/v1/generate`."""
        fields = post_fields(len(body), content_type, more)
        return self.open(head(fields) + body_frame(body), True)

    def post_json(self, document: Any, more: Fields = _NONE) -> Stream:
        """A whole `/v1/generate` with a JSON body."""
        return self.post(json.dumps(document).encode(), JSON, more)

    def get(self, path: str, method: bytes = b"GET", more: Fields = _NONE) -> Stream:
        """A whole request without a body."""
        return self.open(head([*request_fields(method, path.encode()), *_encoded(more)]), True)


@contextlib.asynccontextmanager
async def h3_client(daemon: DaemonProcess) -> AsyncIterator[H3Client]:
    """Connect, and close at the end, without the closing period that aioquic would wait for."""
    configuration = QuicConfiguration(
        is_client=True, alpn_protocols=["h3"], server_name="localhost"
    )
    configuration.load_verify_locations(cafile=str(daemon.ca))
    transport, protocol = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: _Protocol(QuicConnection(configuration=configuration)),
        local_addr=("127.0.0.1", 0),
    )
    try:
        protocol.connect(("127.0.0.1", daemon.port))
        async with asyncio.timeout(ANSWER_WITHIN_S):
            await protocol.wait_connected()
        quic = protocol._quic
        for kind in (0, 2, 3):  # control with empty SETTINGS, QPACK encoder, QPACK decoder
            number = quic.get_next_available_stream_id(is_unidirectional=True)
            quic.send_stream_data(number, varint(kind) + (frame(4, b"") if kind == 0 else b""))
        protocol.transmit()
        yield H3Client(protocol)
    finally:
        protocol.close()
        transport.close()
