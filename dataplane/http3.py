"""HTTP/3 framing without sockets: bytes of QUIC streams in, calls on a sink out (RFC 9114).

Why not a library: `aioquic.h3` closes the connection over one malformed message, reads `+5` as a
content-length, bounds neither frames nor field sections, and spends more on checking fields than
the rest of a request costs. Here one bad message costs its own stream, and a whole request in one
event takes two frame headers, one QPACK call and one pass over the fields.

Rules that hold here:

- Nothing raises because of what a peer sent. A breach that RFC 9114 counts against a message is
  `Sink.on_message_error`, one that it counts against the connection is `Sink.on_connection_error`;
  after the first nothing more is said of that stream, after the second nothing of any.
- Bodies are never held or copied: `Sink.on_data` names a range of the bytes that came in. The one
  exception is a frame header split over two events, whose rest is glued to it.
- What is held is a frame header (15 bytes a stream), an unfinished field section (at most
  `max_field_section`, and four times that for all streams together) and unfinished control frames
  (at most 1 KiB). `buffered` is the exact count. All else is skipped by counting.
- A stream has an entry only between events: one that comes whole leaves nothing behind.
- QPACK without dynamic table, so that a field section never waits for another stream.
- Neither server push nor extended CONNECT nor datagrams.
"""

from __future__ import annotations

import random
from typing import Final, Protocol

from dataplane.http3_control import (
    CANCEL_PUSH,
    CONTROL,
    DATA,
    DECODER,
    ENCODER,
    GOAWAY,
    HEADERS,
    HTTP2_FRAMES,
    MAX_FIELD_SECTION_SIZE,
    MAX_PUSH_ID,
    PUSH_PROMISE,
    QPACK_BLOCKED_STREAMS,
    QPACK_MAX_TABLE_CAPACITY,
    SETTINGS,
    ControlStreams,
)
from dataplane.http3_fields import (
    Code,
    Data,
    Fields,
    MessageError,
    Pair,
    ProtocolError,
    check_request,
    check_response,
    check_trailers,
    decode_section,
    encode_section,
    read_frame_header,
    varint,
)

__all__ = ["Code", "Data", "Fields", "Http3", "Sink", "data_frame_header"]

# Neither HTTP/2's frames nor those of the control stream may come on a request stream.
_NOT_IN_A_REQUEST = HTTP2_FRAMES | {CANCEL_PUSH, SETTINGS, GOAWAY, MAX_PUSH_ID}

# The frame that the last event ended in: none, or its type plus one; unknown types are one.
_BETWEEN, _IN_DATA, _IN_HEADERS, _IN_UNKNOWN = range(4)
# The part of a message that a stream has reached.
_START, _BODY, _TRAILED = range(3)
# Frames without effect cost time out of proportion to their two bytes.
_IDLE_FRAMES_MAX: Final = 100


class Sink(Protocol):
    """What happens on the streams. A class that inherits it need not write the last three.

    Within a call a sink ends its interest in that stream by returning False (`Http3.discard` may
    be called besides, not instead). What it raises goes through to the caller of `receive`.
    """

    def on_headers(self, stream_id: int, fields: Fields, length: int | None) -> bool:
        """A message begins; `length` is its content-length. False: discard the rest of it."""
        ...

    def on_data(self, stream_id: int, data: Data, start: int, end: int) -> bool:
        """`data[start:end]`, never empty, comes next in the body. False: discard the rest."""
        ...

    def on_end(self, stream_id: int) -> None:
        """The message is complete and its body has the length that it declared."""
        ...

    def on_message_error(self, stream_id: int, status: int, code: int, reason: str) -> None:
        """The message is no good. Answer `status` if it is not 0 and an answer has not begun,
        else reset the stream with `code`."""
        ...

    def on_connection_error(self, code: int, reason: str) -> None:
        """Close the connection with `code`."""
        ...

    def on_trailers(self, stream_id: int, fields: Fields) -> None:
        """Trailers came after the body."""

    def on_interim(self, stream_id: int, fields: Fields) -> None:
        """To a client: a response of status 1xx came, another follows."""

    def on_goaway(self, last_id: int) -> None:
        """The peer takes no requests (to a server: pushes) from `last_id` on."""


class _Stream:
    """A message under way between two events."""

    __slots__ = ("held", "idle", "left", "need", "part", "state")

    def __init__(self) -> None:
        self.state = _START
        self.part = _BETWEEN
        self.need = 0  # payload bytes of the frame still to come
        self.left: int | None = None  # bytes of the declared body not yet in any frame header
        self.held: bytes | bytearray = b""  # of a frame header (bytes) or a field section
        self.idle = 0


_DISCARDED: Final = _Stream()


class Http3:
    """One connection's HTTP/3, as server or as client.

    Attributes:
        closed: Whether it failed; nothing more is said of any stream.
        peer: The peer's unidirectional streams.
        streams: The messages of which something came, and more may: to be read only.
    """

    def __init__(self, is_client: bool, max_field_section: int = 16384) -> None:
        self.closed = False
        self.peer = ControlStreams(is_client)
        self._held = 0  # bytes that messages hold
        self._is_client = is_client
        self._section_max = max_field_section
        self.streams: dict[int, _Stream] = {}
        self._heads: set[int] = set()

    @property
    def buffered(self) -> int:
        """Bytes that are held."""
        return self._held + self.peer.buffered

    # Out

    def start(self, uni_stream_ids: tuple[int, int, int]) -> list[tuple[int, bytes]]:
        """What to send first on the control, encoder and decoder stream (RFC 9114 section 3.2)."""
        grease = 0x1F * random.randrange(1 << 24) + 0x21  # RFC 9114 section 7.2.4.1
        settings = b"".join(
            varint(key) + varint(value)
            for key, value in (
                (QPACK_MAX_TABLE_CAPACITY, 0),
                (MAX_FIELD_SECTION_SIZE, self._section_max),
                (QPACK_BLOCKED_STREAMS, 0),
                (grease, 0),
            )
        )
        control, encoder, decoder = uni_stream_ids
        return [
            (control, bytes((CONTROL, SETTINGS, len(settings))) + settings),
            (encoder, bytes((ENCODER,))),
            (decoder, bytes((DECODER,))),
        ]

    def encode_headers(self, stream_id: int, pairs: list[Pair]) -> bytes:
        """A HEADERS frame: request, response or trailers. The fields are taken as they are."""
        if self._is_client and (b":method", b"HEAD") in pairs:
            self._heads.add(stream_id)
        block = encode_section(pairs)
        size = len(block)
        if size < 0x4000:
            return (0x014000 | size).to_bytes(3, "big") + block
        return b"\x01" + varint(size) + block

    def goaway(self, last_id: int) -> bytes:
        """A GOAWAY frame, for the control stream (RFC 9114 section 5.2)."""
        payload = varint(last_id)
        return bytes((GOAWAY, len(payload))) + payload

    # In

    def receive(self, stream_id: int, data: Data, fin: bool, sink: Sink) -> None:
        """Take what came next on a stream, in order."""
        if self.closed:
            return
        try:
            if stream_id & 3:
                self.peer.receive(stream_id, data, fin, sink.on_goaway)
                return
            streams = self.streams
            stream = streams.pop(stream_id, None) if fin else streams.get(stream_id)
            if stream is None:
                stream = _Stream()
                if not fin:
                    streams[stream_id] = stream
            elif stream is _DISCARDED:
                return
            try:
                if not self._receive_message(stream_id, stream, data, sink):
                    self._let_go(stream_id, stream, fin)
                elif fin:
                    if stream.state == _START or stream.part or stream.held or stream.left:
                        self._end_early(stream)
                    if self._heads:
                        self._heads.discard(stream_id)
                    sink.on_end(stream_id)
            except MessageError as error:
                self._let_go(stream_id, stream, fin)
                sink.on_message_error(stream_id, error.status, error.code, error.reason)
        except ProtocolError as error:
            self._fail(error, sink)

    def discard(self, stream_id: int) -> bool:
        """Nothing more that comes on this stream is wanted. False: nothing more was awaited."""
        stream = self.streams.get(stream_id)
        if stream is None or stream is _DISCARDED:
            self._heads.discard(stream_id)
            return False
        self._let_go(stream_id, stream, fin=False)
        return True

    def forget(self, stream_id: int) -> None:
        """Nothing more will be handed in of this stream. Not from within a call on the sink."""
        self._heads.discard(stream_id)
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            self._held -= len(stream.held)

    def awaits_header(self, stream_id: int) -> bool:
        """Whether something of a message came, and not its whole header."""
        stream = self.streams.get(stream_id)
        return stream is not None and stream is not _DISCARDED and stream.state == _START

    def is_discarded(self, stream_id: int) -> bool:
        """Whether more may come on this stream, and is not wanted."""
        return self.streams.get(stream_id) is _DISCARDED

    def reset(self, stream_id: int, sink: Sink) -> None:
        """The peer reset its side of the stream, so no FIN comes."""
        self._heads.discard(stream_id)
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            self._held -= len(stream.held)
        if self.peer.forget(stream_id) and not self.closed:
            reason = "a critical stream was reset"
            self._fail(ProtocolError(Code.CLOSED_CRITICAL_STREAM, reason), sink)

    def _fail(self, error: ProtocolError, sink: Sink) -> None:
        self.closed = True
        self._held = 0
        self.streams.clear()
        self.peer.clear()
        sink.on_connection_error(error.code, error.reason)

    def _let_go(self, stream_id: int, stream: _Stream, fin: bool) -> None:
        self._held -= len(stream.held)
        self._heads.discard(stream_id)
        if not fin:
            self.streams[stream_id] = _DISCARDED

    # Messages

    def _receive_message(self, stream_id: int, stream: _Stream, data: Data, sink: Sink) -> bool:
        """Go through the frames in `data`. False: the sink wants no more."""
        pos = 0
        if stream.part:
            pos = self._resume(stream_id, stream, data, sink)
            if pos < 0:
                return False
        elif stream.held:
            self._held -= len(stream.held)
            data = stream.held + data
            stream.held = b""
        end = len(data)
        while pos < end:
            kind = data[pos]
            # Nearly every frame: type and length in two or three bytes.
            if kind < 2 and end - pos > 2 and data[pos + 1] < 0x80:
                length = data[pos + 1]
                pos += 2
                if length >= 0x40:
                    length = (length & 0x3F) << 8 | data[pos]
                    pos += 1
            elif (header := read_frame_header(data, pos, end)) is not None:
                kind, length, pos = header
            else:
                stream.held = bytes(data[pos:])
                self._held += end - pos
                break
            stop = pos + length
            if stop > end:
                stream.need = stop - end
                stream.part = kind + 1 if kind <= HEADERS else _IN_UNKNOWN
                stop = end
            if kind == DATA:
                if stream.state != _BODY or not length:
                    self._check_data(stream)
                if stream.left is not None:
                    stream.left -= length
                    if stream.left < 0:
                        raise MessageError("the body is longer than its content-length")
                if stop > pos and not sink.on_data(stream_id, data, pos, stop):
                    return False
            elif kind == HEADERS:
                if stream.state == _TRAILED or length > self._section_max:
                    self._refuse_headers(stream)
                if stream.part:
                    self._hold(stream, data[pos:stop])
                elif not self._section(stream_id, stream, data[pos:stop], sink):
                    return False
            else:
                self._check_unknown(stream, kind)
            pos = stop
        return True

    def _resume(self, stream_id: int, stream: _Stream, data: Data, sink: Sink) -> int:
        """Go on with the frame that the last event ended in; where it ends in `data`, or -1."""
        part = stream.part
        stop = min(stream.need, len(data))
        stream.need -= stop
        wanted = True
        if part == _IN_DATA:
            if stop:
                wanted = sink.on_data(stream_id, data, 0, stop)
        elif part == _IN_HEADERS:
            self._hold(stream, data[:stop])
            if not stream.need:
                block = stream.held
                self._held -= len(block)
                stream.held = b""
                wanted = self._section(stream_id, stream, block, sink)
        if not stream.need:
            stream.part = _BETWEEN
        return stop if wanted else -1

    def _check_data(self, stream: _Stream) -> None:
        """A DATA frame is out of place (RFC 9114 section 4.1) or empty."""
        if stream.state != _BODY:
            raise ProtocolError(Code.FRAME_UNEXPECTED, "DATA before HEADERS or after trailers")
        self._count_idle(stream)

    def _refuse_headers(self, stream: _Stream) -> None:
        """A HEADERS frame is out of place or too long: nothing of it is held."""
        if stream.state == _TRAILED:
            raise ProtocolError(Code.FRAME_UNEXPECTED, "HEADERS after trailers")
        raise MessageError("the field section is too large", 431, Code.EXCESSIVE_LOAD)

    def _check_unknown(self, stream: _Stream, kind: int) -> None:
        """Any other frame; those of later extensions are skipped (RFC 9114 section 9)."""
        if kind in _NOT_IN_A_REQUEST or (kind == PUSH_PROMISE and not self._is_client):
            raise ProtocolError(Code.FRAME_UNEXPECTED, "a frame that no request stream may have")
        if kind == PUSH_PROMISE:
            # No MAX_PUSH_ID was sent, so every push id is too large (RFC 9114 section 7.2.5).
            raise ProtocolError(Code.ID_ERROR, "a push was promised that was not allowed")
        self._count_idle(stream)

    def _count_idle(self, stream: _Stream) -> None:
        stream.idle += 1
        if stream.idle > _IDLE_FRAMES_MAX:
            raise MessageError("too many frames without effect", 400, Code.EXCESSIVE_LOAD)

    def _hold(self, stream: _Stream, piece: Data) -> None:
        """Keep a piece of a field section until the rest is there."""
        self._held += len(piece)
        if not stream.held:
            stream.held = bytearray()
        stream.held += piece
        if self.buffered > 4 * self._section_max:
            reason = "too many unfinished field sections on this connection"
            raise MessageError(reason, 431, Code.EXCESSIVE_LOAD)

    def _section(self, stream_id: int, stream: _Stream, block: Data, sink: Sink) -> bool:
        """A field section is complete: headers, an interim response's, or trailers."""
        pairs = decode_section(block if type(block) is bytes else bytes(block))
        if stream.state == _BODY:
            if stream.left:
                raise MessageError("the body is shorter than its content-length")
            stream.state = _TRAILED
            sink.on_trailers(stream_id, check_trailers(pairs, self._section_max))
            return True
        if not self._is_client:
            fields, length = check_request(pairs, self._section_max)
            stream.left = length
        else:
            fields, status, length = check_response(pairs, self._section_max)
            if status < 200:
                sink.on_interim(stream_id, fields)
                return True
            # These have no body, whatever length they declare (RFC 9110 section 6.4.1).
            bodiless = stream_id in self._heads or status in (204, 304)
            stream.left = 0 if bodiless else length
        stream.state = _BODY
        return sink.on_headers(stream_id, fields, length)

    def _end_early(self, stream: _Stream) -> None:
        """The stream ended and the message had not (RFC 9114 sections 4.1, 4.1.2 and 7.1)."""
        if stream.held or stream.part:
            raise ProtocolError(Code.FRAME_ERROR, "a stream ended within a frame")
        if stream.left:
            raise MessageError("the body is shorter than its content-length")
        if self._is_client:
            raise MessageError("the stream ended without a response", 0)
        raise MessageError("the stream ended without a request", 0, Code.REQUEST_INCOMPLETE)


def data_frame_header(length: int) -> bytes:
    """What goes before `length` bytes of a body: the head of a DATA frame."""
    if length < 0x40:
        return length.to_bytes(2, "big")
    if length < 0x4000:
        return (0x4000 | length).to_bytes(3, "big")
    return b"\0" + varint(length)
