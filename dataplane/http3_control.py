"""HTTP/3 beside the messages: the streams that go one way, and the names of frames, settings and
streams (RFC 9114 sections 6.2 and 7.2, RFC 9204 section 4).

What the peer says on its control stream and on those of its QPACK encoder and decoder is checked to
be allowed, and little of it matters: its settings, and that it goes away. The rules of
`dataplane.http3` hold here too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from dataplane.http3_fields import (
    Code,
    Data,
    ProtocolError,
    parse_settings,
    read_frame_header,
    read_varint,
)

# Frame types (RFC 9114 section 7.2).
DATA: Final = 0x00
HEADERS: Final = 0x01
CANCEL_PUSH: Final = 0x03
SETTINGS: Final = 0x04
PUSH_PROMISE: Final = 0x05
GOAWAY: Final = 0x07
MAX_PUSH_ID: Final = 0x0D
HTTP2_FRAMES = frozenset((0x02, 0x06, 0x08, 0x09))
"""Types that HTTP/2 used and HTTP/3 has not (RFC 9114 section 7.2.8)."""
_NOT_IN_CONTROL = HTTP2_FRAMES | {DATA, HEADERS, PUSH_PROMISE}
_IN_CONTROL = frozenset((SETTINGS, CANCEL_PUSH, GOAWAY, MAX_PUSH_ID))

# Settings (RFC 9114 section 7.2.4.1, RFC 9204 section 5).
QPACK_MAX_TABLE_CAPACITY: Final = 0x01
MAX_FIELD_SECTION_SIZE: Final = 0x06
QPACK_BLOCKED_STREAMS: Final = 0x07
_SETTINGS_BYTES_MAX: Final = 1024

# Unidirectional streams (RFC 9114 section 6.2, RFC 9204 section 4.2).
CONTROL: Final = 0x00
PUSH: Final = 0x01
ENCODER: Final = 0x02
DECODER: Final = 0x03

# With no dynamic table the peer's decoder can only cancel streams, and its encoder only set the
# capacity to 0 (RFC 9204 sections 4.3 and 4.4); 9 bytes of continuation hold a 62-bit stream id.
_ENCODER_SETS_ZERO: Final = b"\x20"
_CANCELLATIONS = re.compile(rb"(?:[\x40-\x7e]|\x7f[\x80-\xff]{0,8}[\x00-\x7f])*+")
_CANCELLATION_BEGUN = re.compile(rb"(?:\x7f[\x80-\xff]{0,8})?")


class _Uni:
    """One of the peer's unidirectional streams."""

    __slots__ = ("held", "kind", "need")

    def __init__(self) -> None:
        self.kind = -1  # not read yet
        self.need = 0  # bytes of an unknown frame still to skip
        self.held = bytearray()


_IGNORED: Final = _Uni()


class ControlStreams:
    """The unidirectional streams of one connection's peer.

    Attributes:
        buffered: Bytes that are held.
        settings: None until they came.
    """

    def __init__(self, is_client: bool) -> None:
        self.buffered = 0
        self.settings: dict[int, int] | None = None
        self._is_client = is_client
        self._streams: dict[int, _Uni] = {}
        self._opened: set[int] = set()
        self._goaway: int | None = None
        self._max_push_id = -1

    def __len__(self) -> int:
        """How many of them are open."""
        return len(self._streams)

    def receive(
        self, stream_id: int, data: Data, fin: bool, on_goaway: Callable[[int], None]
    ) -> None:
        """Take what came next on a stream that is not a request's, in order.

        Args:
            on_goaway: Is told from which id on the peer takes nothing.

        Raises:
            ProtocolError: Something came that ends the connection.
        """
        if stream_id & 3 != (3 if self._is_client else 2):
            raise ProtocolError(Code.STREAM_CREATION_ERROR, "a stream of a kind that has no use")
        uni = self._streams.get(stream_id)
        if uni is None:
            uni = self._streams[stream_id] = _Uni()
        if uni.kind < 0 and uni is not _IGNORED:
            self.buffered -= len(uni.held)
            data = bytes(uni.held) + data
            uni.held.clear()
            kind, pos = read_varint(data, 0, len(data))
            if pos < 0:
                uni.held += data
                self.buffered += len(data)
            else:
                uni = self._open(stream_id, uni, kind)
                data = data[pos:]
        if uni.kind == CONTROL:
            self._control(uni, data, on_goaway)
        elif uni.kind == ENCODER:
            if bytes(data).strip(_ENCODER_SETS_ZERO):
                raise ProtocolError(
                    Code.QPACK_ENCODER_STREAM_ERROR, "an insertion into a table of size 0"
                )
        elif uni.kind == DECODER:
            self._decoder_stream(uni, data)
        if fin:
            if uni.kind in self._opened:
                raise ProtocolError(Code.CLOSED_CRITICAL_STREAM, "a critical stream was closed")
            # One without a whole type may end too (RFC 9114 section 6.2).
            self.buffered -= len(uni.held)
            del self._streams[stream_id]

    def forget(self, stream_id: int) -> bool:
        """Nothing more comes on a stream. Whether it was one that has to stay."""
        uni = self._streams.pop(stream_id, None)
        if uni is None:
            return False
        self.buffered -= len(uni.held)
        return uni.kind in self._opened

    def clear(self) -> None:
        """The connection is over."""
        self.buffered = 0
        self._streams.clear()

    def _open(self, stream_id: int, uni: _Uni, kind: int) -> _Uni:
        """A unidirectional stream has said what it is for."""
        if kind == PUSH:
            if self._is_client:
                raise ProtocolError(Code.ID_ERROR, "a push that was not allowed")
            raise ProtocolError(Code.STREAM_CREATION_ERROR, "clients do not push")
        if kind not in (CONTROL, ENCODER, DECODER):
            self._streams[stream_id] = _IGNORED
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

    def _control(self, uni: _Uni, data: Data, on_goaway: Callable[[int], None]) -> None:
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
                self._control_frame(kind, bytes(held[start : start + length]), on_goaway)
            pos = min(start + length, end)
            uni.need = start + length - pos
        del held[:pos]
        self.buffered += len(held)

    def _check_control_frame(self, kind: int, length: int) -> None:
        """Whether this frame may come now, and be so long, before any of it is held."""
        if kind in HTTP2_FRAMES:
            raise ProtocolError(Code.FRAME_UNEXPECTED, "a frame of HTTP/2")
        if self.settings is None and kind != SETTINGS:
            raise ProtocolError(Code.MISSING_SETTINGS, "the first control frame is no SETTINGS")
        if kind in _NOT_IN_CONTROL or (kind == MAX_PUSH_ID and self._is_client):
            raise ProtocolError(Code.FRAME_UNEXPECTED, "a frame that no control stream may have")
        if kind == SETTINGS:
            if self.settings is not None:
                raise ProtocolError(Code.FRAME_UNEXPECTED, "SETTINGS came twice")
            if length > _SETTINGS_BYTES_MAX:
                raise ProtocolError(Code.EXCESSIVE_LOAD, "too many settings")
        elif kind in _IN_CONTROL and not 1 <= length <= 8:
            raise ProtocolError(Code.FRAME_ERROR, "a control frame of a wrong length")

    def _control_frame(self, kind: int, payload: bytes, on_goaway: Callable[[int], None]) -> None:
        """A whole frame of the control stream: SETTINGS, or one that holds one number."""
        if kind == SETTINGS:
            self.settings = parse_settings(payload)
            return
        number, pos = read_varint(payload, 0, len(payload))
        if pos != len(payload):
            raise ProtocolError(Code.FRAME_ERROR, "a control frame of a wrong length")
        if kind == CANCEL_PUSH:
            # Nothing was ever promised here nor allowed to the peer (RFC 9114 section 7.2.3).
            raise ProtocolError(Code.ID_ERROR, "a push was cancelled that cannot be")
        if kind == MAX_PUSH_ID:
            if number < self._max_push_id:
                raise ProtocolError(Code.ID_ERROR, "MAX_PUSH_ID went down")
            self._max_push_id = number
            return
        if self._is_client and number & 3:
            raise ProtocolError(Code.ID_ERROR, "GOAWAY names a stream that is no request's")
        if self._goaway is not None and number > self._goaway:
            raise ProtocolError(Code.ID_ERROR, "GOAWAY went up")
        self._goaway = number
        on_goaway(number)
