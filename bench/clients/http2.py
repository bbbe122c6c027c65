"""HTTP/2 from the client's side, as lean as it can be; no sockets here.

Headers are sent as literals that need no table, so a request is the same bytes each time but for
its stream's number. The table of the other direction is set to 0 bytes, so that an answer's 200 is
one fixed byte. Flow control is kept to as a sender; as a receiver it is opened so wide that no run
comes to its end.
"""

import struct
from collections import deque

from bench.clients import WrongAnswerError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HEADER_TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 1, 2, 4, 5
STATUS_200 = 0x88
_DEFAULT_WINDOW = 65_535
_WIDE = 1 << 30


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """Return a frame."""
    return frame_head(len(payload), kind, flags, stream_id) + payload


def frame_head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Return the 9 bytes in front of a payload."""
    return struct.pack(">BHBBI", length >> 16, length & 0xFFFF, kind, flags, stream_id)


def header_block(path: str, content_type: str, length: int) -> bytes:
    """Return a request's fields, each in the static table or a literal that is not indexed."""

    def literal(index: int, value: str) -> bytes:
        name = bytes([index]) if index < 15 else bytes([15, index - 15])
        return name + bytes([len(value)]) + value.encode("ascii")

    # :method POST and :scheme https; :authority is 1 of the static table, :path 4,
    # content-type 31, content-length 28.
    return (
        b"\x83\x87"
        + literal(1, "localhost")
        + literal(4, path)
        + literal(31, content_type)
        + literal(28, str(length))
    )


class _Upload:
    """A body that is not sent whole yet."""

    __slots__ = ("rest", "stream_id", "window")

    def __init__(self, stream_id: int, rest: memoryview, window: int) -> None:
        self.stream_id = stream_id
        self.rest = rest
        self.window = window


class Http2:
    """One connection.

    Args:
        block: Every request's fields.
        body: Every request's body.
        expected: Every answer's body.
    """

    opening = (
        PREFACE
        + frame(
            SETTINGS,
            0,
            0,
            struct.pack(
                ">HIHIHI", HEADER_TABLE_SIZE, 0, ENABLE_PUSH, 0, INITIAL_WINDOW_SIZE, _WIDE
            ),
        )
        + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", _WIDE))
    )
    alpn = "h2"

    def __init__(self, block: bytes, body: bytes, expected: bytes) -> None:
        self._headers = block
        self._body = body
        self._expected = expected
        self._next_id = 1
        self._began: dict[int, int] = {}
        self._answers: dict[int, bytes] = {}
        self._uploads: deque[_Upload] = deque()
        self._window = self._stream_window = _DEFAULT_WINDOW
        self._frame_size = 16_384
        self._held = b""

    @property
    def in_flight(self) -> int:
        return len(self._began)

    def begin(self, began_ns: int) -> bytes:
        """Return what to send for a request that began then; the rest follows as it may."""
        stream_id = self._next_id
        self._next_id += 2
        self._began[stream_id] = began_ns
        head = frame(HEADERS, END_HEADERS, stream_id, self._headers)
        self._uploads.append(_Upload(stream_id, memoryview(self._body), self._stream_window))
        return head + self._pump()

    def receive(self, data: bytes) -> tuple[tuple[int, ...], bytes]:
        """Return when the requests that are now answered began, and what else to send.

        Raises:
            WrongAnswerError: An answer is another one, or the server gave one up.
        """
        if self._held:
            data = self._held + data
        at, size = 0, len(data)
        ended: list[int] = []
        answers: list[bytes] = []
        while size - at >= 9:
            length = int.from_bytes(data[at : at + 3], "big")
            if size - at < 9 + length:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream_id = int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFF_FFFF
            payload = data[at + 9 : at + 9 + length]
            at += 9 + length
            if kind in (DATA, HEADERS):
                self._take_answer(kind, flags, stream_id, payload)
                if flags & END_STREAM:
                    ended.append(self._end(stream_id))
            else:
                answers.append(self._take_control(kind, flags, stream_id, payload))
        self._held = data[at:]
        if answers and self._uploads:
            answers.append(self._pump())
        return tuple(ended), b"".join(answers)

    def _take_answer(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if flags & PADDED or stream_id not in self._began:
            raise WrongAnswerError(f"an unexpected frame on stream {stream_id}: {payload[:100]!r}")
        if kind == DATA:
            self._answers[stream_id] = self._answers.get(stream_id, b"") + payload
        elif stream_id not in self._answers:
            # Before the status there may be updates of the table's size, 001xxxxx.
            at = 0
            while at < len(payload) and payload[at] >> 5 == 1:
                at += 1
            if payload[at : at + 1] != bytes([STATUS_200]):
                raise WrongAnswerError(f"the answer is no 200: {payload[:100]!r}")
            self._answers[stream_id] = b""

    def _end(self, stream_id: int) -> int:
        body = self._answers.pop(stream_id)
        if body != self._expected:
            raise WrongAnswerError(f"answered {body[:300]!r}")
        return self._began.pop(stream_id)

    def _take_control(self, kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
        if kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == INITIAL_WINDOW_SIZE:
                    for upload in self._uploads:
                        upload.window += value - self._stream_window
                    self._stream_window = value
                elif name == MAX_FRAME_SIZE:
                    self._frame_size = value
            return frame(SETTINGS, ACK, 0, b"")
        if kind == PING and not flags & ACK:
            return frame(PING, ACK, 0, payload)
        if kind == WINDOW_UPDATE:
            self._widen(stream_id, int.from_bytes(payload, "big"))
        elif kind in (RST_STREAM, GOAWAY):
            raise WrongAnswerError(f"the server gave up: frame {kind}, {payload!r}")
        return b""

    def _widen(self, stream_id: int, more: int) -> None:
        if not stream_id:
            self._window += more
            return
        for upload in self._uploads:
            if upload.stream_id == stream_id:
                upload.window += more

    def _pump(self) -> bytes:
        """Return what of the bodies may be sent now."""
        out: list[bytes | memoryview] = []
        blocked: deque[_Upload] = deque()
        while self._uploads and self._window:
            upload = self._uploads.popleft()
            rest = upload.rest
            while rest and self._window and upload.window > 0:
                size = min(len(rest), self._window, upload.window, self._frame_size)
                self._window -= size
                upload.window -= size
                flags = END_STREAM if size == len(rest) else 0
                out.append(frame_head(size, DATA, flags, upload.stream_id))
                out.append(rest[:size])
                rest = rest[size:]
            if rest:
                upload.rest = rest
                blocked.append(upload)
        blocked.extend(self._uploads)
        self._uploads = blocked
        return b"".join(out)
