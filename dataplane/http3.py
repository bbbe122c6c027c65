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
import re
from typing import Final, Protocol

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
    parse_settings,
    read_frame_header,
    read_varint,
    varint,
)

__all__ = ["Code", "Data", "Fields", "Http3", "Sink", "data_frame_header"]

# Frame types (RFC 9114 section 7.2).
_DATA: Final = 0x00
_HEADERS: Final = 0x01
_CANCEL_PUSH: Final = 0x03
_SETTINGS: Final = 0x04
_PUSH_PROMISE: Final = 0x05
_GOAWAY: Final = 0x07
_MAX_PUSH_ID: Final = 0x0D
# Types that HTTP/2 used and HTTP/3 has not (RFC 9114 section 7.2.8), then with those of the
# control stream: neither may come on a request stream.
_HTTP2_FRAMES = frozenset((0x02, 0x06, 0x08, 0x09))
_NOT_IN_A_REQUEST = _HTTP2_FRAMES | {_CANCEL_PUSH, _SETTINGS, _GOAWAY, _MAX_PUSH_ID}
_NOT_IN_CONTROL = _HTTP2_FRAMES | {_DATA, _HEADERS, _PUSH_PROMISE}
_IN_CONTROL = frozenset((_SETTINGS, _CANCEL_PUSH, _GOAWAY, _MAX_PUSH_ID))

# Settings (RFC 9114 section 7.2.4.1, RFC 9204 section 5).
_QPACK_MAX_TABLE_CAPACITY: Final = 0x01
_MAX_FIELD_SECTION_SIZE: Final = 0x06
_QPACK_BLOCKED_STREAMS: Final = 0x07
_SETTINGS_BYTES_MAX: Final = 1024

# Unidirectional streams (RFC 9114 section 6.2, RFC 9204 section 4.2).
_CONTROL: Final = 0x00
_PUSH: Final = 0x01
_ENCODER: Final = 0x02
_DECODER: Final = 0x03

# The frame that the last event ended in: none, or its type plus one; unknown types are one.
_BETWEEN, _IN_DATA, _IN_HEADERS, _IN_UNKNOWN = range(4)
# The part of a message that a stream has reached.
_START, _BODY, _TRAILED = range(3)
# Frames without effect cost time out of proportion to their two bytes.
_IDLE_FRAMES_MAX: Final = 100

# With no dynamic table the peer's decoder can only cancel streams, and its encoder only set the
# capacity to 0 (RFC 9204 sections 4.3 and 4.4); 9 bytes of continuation hold a 62-bit stream id.
_ENCODER_SETS_ZERO: Final = b"\x20"
_CANCELLATIONS = re.compile(rb"(?:[\x40-\x7e]|\x7f[\x80-\xff]{0,8}[\x00-\x7f])*+")
_CANCELLATION_BEGUN = re.compile(rb"(?:\x7f[\x80-\xff]{0,8})?")


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


class _Uni:
    """One of the peer's unidirectional streams."""

    __slots__ = ("held", "kind", "need")

    def __init__(self) -> None:
        self.kind = -1  # not read yet
        self.need = 0  # bytes of an unknown frame still to skip
        self.held = bytearray()


_DISCARDED: Final = _Stream()
_IGNORED: Final = _Uni()


class Http3:
    """One connection's HTTP/3, as server or as client.

    Attributes:
        closed: Whether it failed; nothing more is said of any stream.
        buffered: Bytes that are held.
        peer_settings: None until they came.
        streams: The messages of which something came, and more may: to be read only.
    """

    def __init__(self, is_client: bool, max_field_section: int = 16384) -> None:
        self.closed = False
        self.buffered = 0
        self.peer_settings: dict[int, int] | None = None
        self._is_client = is_client
        self._section_max = max_field_section
        self.streams: dict[int, _Stream] = {}
        self._unis: dict[int, _Uni] = {}
        self._opened: set[int] = set()
        self._heads: set[int] = set()
        self._goaway: int | None = None
        self._max_push_id = -1

    # Out

    def start(self, uni_stream_ids: tuple[int, int, int]) -> list[tuple[int, bytes]]:
        """What to send first on the control, encoder and decoder stream (RFC 9114 section 3.2)."""
        grease = 0x1F * random.randrange(1 << 24) + 0x21  # RFC 9114 section 7.2.4.1
        settings = b"".join(
            varint(key) + varint(value)
            for key, value in (
                (_QPACK_MAX_TABLE_CAPACITY, 0),
                (_MAX_FIELD_SECTION_SIZE, self._section_max),
                (_QPACK_BLOCKED_STREAMS, 0),
                (grease, 0),
            )
        )
        control, encoder, decoder = uni_stream_ids
        return [
            (control, bytes((_CONTROL, _SETTINGS, len(settings))) + settings),
            (encoder, bytes((_ENCODER,))),
            (decoder, bytes((_DECODER,))),
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
        return bytes((_GOAWAY, len(payload))) + payload

    # In

    def receive(self, stream_id: int, data: Data, fin: bool, sink: Sink) -> None:
        """Take what came next on a stream, in order."""
        if self.closed:
            return
        try:
            if stream_id & 3:
                self._receive_uni(stream_id, data, fin, sink)
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
            self.buffered -= len(stream.held)

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
            self.buffered -= len(stream.held)
        uni = self._unis.pop(stream_id, None)
        if uni is not None:
            self.buffered -= len(uni.held)
            if uni.kind in self._opened and not self.closed:
                reason = "a critical stream was reset"
                self._fail(ProtocolError(Code.CLOSED_CRITICAL_STREAM, reason), sink)

    def _fail(self, error: ProtocolError, sink: Sink) -> None:
        self.closed = True
        self.buffered = 0
        self.streams.clear()
        self._unis.clear()
        sink.on_connection_error(error.code, error.reason)

    def _let_go(self, stream_id: int, stream: _Stream, fin: bool) -> None:
        self.buffered -= len(stream.held)
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
            self.buffered -= len(stream.held)
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
                self.buffered += end - pos
                break
            stop = pos + length
            if stop > end:
                stream.need = stop - end
                stream.part = kind + 1 if kind <= _HEADERS else _IN_UNKNOWN
                stop = end
            if kind == _DATA:
                if stream.state != _BODY or not length:
                    self._check_data(stream)
                if stream.left is not None:
                    stream.left -= length
                    if stream.left < 0:
                        raise MessageError("the body is longer than its content-length")
                if stop > pos and not sink.on_data(stream_id, data, pos, stop):
                    return False
            elif kind == _HEADERS:
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
                self.buffered -= len(block)
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
        if kind in _NOT_IN_A_REQUEST or (kind == _PUSH_PROMISE and not self._is_client):
            raise ProtocolError(Code.FRAME_UNEXPECTED, "a frame that no request stream may have")
        if kind == _PUSH_PROMISE:
            # No MAX_PUSH_ID was sent, so every push id is too large (RFC 9114 section 7.2.5).
            raise ProtocolError(Code.ID_ERROR, "a push was promised that was not allowed")
        self._count_idle(stream)

    def _count_idle(self, stream: _Stream) -> None:
        stream.idle += 1
        if stream.idle > _IDLE_FRAMES_MAX:
            raise MessageError("too many frames without effect", 400, Code.EXCESSIVE_LOAD)

    def _hold(self, stream: _Stream, piece: Data) -> None:
        """Keep a piece of a field section until the rest is there."""
        self.buffered += len(piece)
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

    # Unidirectional streams

    def _receive_uni(self, stream_id: int, data: Data, fin: bool, sink: Sink) -> None:
        """Bytes of a stream that is not a request's (RFC 9114 sections 6.1 and 6.2)."""
        if stream_id & 3 != (3 if self._is_client else 2):
            raise ProtocolError(Code.STREAM_CREATION_ERROR, "a stream of a kind that has no use")
        uni = self._unis.get(stream_id)
        if uni is None:
            uni = self._unis[stream_id] = _Uni()
        if uni.kind < 0 and uni is not _IGNORED:
            self.buffered -= len(uni.held)
            data = bytes(uni.held) + data
            uni.held.clear()
            kind, pos = read_varint(data, 0, len(data))
            if pos < 0:
                uni.held += data
                self.buffered += len(data)
            else:
                uni = self._open_uni(stream_id, uni, kind)
                data = data[pos:]
        if uni.kind == _CONTROL:
            self._control(uni, data, sink)
        elif uni.kind == _ENCODER:
            if bytes(data).strip(_ENCODER_SETS_ZERO):
                raise ProtocolError(
                    Code.QPACK_ENCODER_STREAM_ERROR, "an insertion into a table of size 0"
                )
        elif uni.kind == _DECODER:
            self._decoder_stream(uni, data)
        if fin:
            if uni.kind in self._opened:
                raise ProtocolError(Code.CLOSED_CRITICAL_STREAM, "a critical stream was closed")
            # One without a whole type may end too (RFC 9114 section 6.2).
            self.buffered -= len(uni.held)
            del self._unis[stream_id]

    def _open_uni(self, stream_id: int, uni: _Uni, kind: int) -> _Uni:
        """A unidirectional stream has said what it is for."""
        if kind == _PUSH:
            if self._is_client:
                raise ProtocolError(Code.ID_ERROR, "a push that was not allowed")
            raise ProtocolError(Code.STREAM_CREATION_ERROR, "clients do not push")
        if kind not in (_CONTROL, _ENCODER, _DECODER):
            self._unis[stream_id] = _IGNORED
            return _IGNORED
        if kind in self._opened:
            raise ProtocolError(Code.STREAM_CREATION_ERROR, "a critical stream came twice")
        self._opened.add(kind)
        uni.kind = kind
        return uni

    def _decoder_stream(self, uni: _Uni, data: Data) -> None:
        """Instructions of the peer's decoder: cancellations only (RFC 9204 section 4.4)."""
        text = bytes(uni.held) + data
        match = _CANCELLATIONS.match(text)
        rest = text[match.end() if match else 0 :]
        if not _CANCELLATION_BEGUN.fullmatch(rest):
            raise ProtocolError(
                Code.QPACK_DECODER_STREAM_ERROR, "an acknowledgement of what was never sent"
            )
        self.buffered += len(rest) - len(uni.held)
        uni.held[:] = rest

    def _control(self, uni: _Uni, data: Data, sink: Sink) -> None:
        """Frames of the control stream (RFC 9114 section 6.2.1)."""
        skipped = min(uni.need, len(data))
        uni.need -= skipped
        self.buffered -= len(uni.held)
        held = uni.held
        held += data[skipped:]
        pos, end = 0, len(held)
        while (header := read_frame_header(held, pos, end)) is not None:
            kind, length, start = header
            self._check_control_frame(kind, length)
            if kind in _IN_CONTROL:
                if end - start < length:
                    break
                self._control_frame(kind, bytes(held[start : start + length]), sink)
            pos = min(start + length, end)
            uni.need = start + length - pos
        del held[:pos]
        self.buffered += len(held)

    def _check_control_frame(self, kind: int, length: int) -> None:
        """Whether this frame may come now, and be so long, before any of it is held."""
        if kind in _HTTP2_FRAMES:
            raise ProtocolError(Code.FRAME_UNEXPECTED, "a frame of HTTP/2")
        if self.peer_settings is None and kind != _SETTINGS:
            raise ProtocolError(Code.MISSING_SETTINGS, "the first control frame is no SETTINGS")
        if kind in _NOT_IN_CONTROL or (kind == _MAX_PUSH_ID and self._is_client):
            raise ProtocolError(Code.FRAME_UNEXPECTED, "a frame that no control stream may have")
        if kind == _SETTINGS:
            if self.peer_settings is not None:
                raise ProtocolError(Code.FRAME_UNEXPECTED, "SETTINGS came twice")
            if length > _SETTINGS_BYTES_MAX:
                raise ProtocolError(Code.EXCESSIVE_LOAD, "too many settings")
        elif kind in _IN_CONTROL and not 1 <= length <= 8:
            raise ProtocolError(Code.FRAME_ERROR, "a control frame of a wrong length")

    def _control_frame(self, kind: int, payload: bytes, sink: Sink) -> None:
        """A whole frame of the control stream: SETTINGS, or one that holds one number."""
        if kind == _SETTINGS:
            self.peer_settings = parse_settings(payload)
            return
        number, pos = read_varint(payload, 0, len(payload))
        if pos != len(payload):
            raise ProtocolError(Code.FRAME_ERROR, "a control frame of a wrong length")
        if kind == _CANCEL_PUSH:
            # Nothing was ever promised here nor allowed to the peer (RFC 9114 section 7.2.3).
            raise ProtocolError(Code.ID_ERROR, "a push was cancelled that cannot be")
        if kind == _MAX_PUSH_ID:
            if number < self._max_push_id:
                raise ProtocolError(Code.ID_ERROR, "MAX_PUSH_ID went down")
            self._max_push_id = number
            return
        if self._is_client and number & 3:
            raise ProtocolError(Code.ID_ERROR, "GOAWAY names a stream that is no request's")
        if self._goaway is not None and number > self._goaway:
            raise ProtocolError(Code.ID_ERROR, "GOAWAY went up")
        self._goaway = number
        sink.on_goaway(number)


def data_frame_header(length: int) -> bytes:
    """What goes before `length` bytes of a body: the head of a DATA frame."""
    if length < 0x40:
        return length.to_bytes(2, "big")
    if length < 0x4000:
        return (0x4000 | length).to_bytes(3, "big")
    return b"\0" + varint(length)
