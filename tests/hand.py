"""A client's end of an established connection, worked by hand: single frames and packets.

A `Hand` has aioquic's keys and nothing else of it, so that a script decides what lies in which
packet, and sees what came as it came.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from aioquic._buffer import Buffer
from aioquic.quic.connection import QuicConnection
from aioquic.tls import Epoch

PACKET_ROOM = 1100
"""Bytes of frames that fit one, to be sure."""
_VERDICT_BYTES = 32


class Frame(NamedTuple):
    """What a client says in a packet: `kind` is stream, reset or stop."""

    kind: str
    stream: int
    offset: int = 0  # of a reset: the final size
    data: bytes = b""
    fin: bool = False
    code: int = 0

    def encode(self) -> bytes:
        buf = Buffer(capacity=len(self.data) + 64)
        if self.kind == "stream":
            buf.push_uint_var(0x0E | self.fin)
            for number in (self.stream, self.offset, len(self.data)):
                buf.push_uint_var(number)
            buf.push_bytes(self.data)
        elif self.kind == "reset":
            for number in (0x04, self.stream, self.code, self.offset):
                buf.push_uint_var(number)
        else:
            for number in (0x05, self.stream, self.code):
                buf.push_uint_var(number)
        return buf.data


# How many numbers follow each of the frames whose meaning is not looked at.
_PLAIN = {0x00: 0, 0x01: 0, 0x10: 1, 0x11: 2, 0x12: 1, 0x13: 1, 0x14: 1, 0x15: 2, 0x16: 1,
          0x17: 1, 0x19: 1, 0x1E: 0}  # fmt: skip
_ACK, _RESET, _STOP, _CRYPTO, _STREAM, _MAX_STREAMS, _NEW_CID, _CLOSE = (
    0x02, 0x04, 0x05, 0x06, 0x08, 0x12, 0x18, 0x1C,
)  # fmt: skip


class Got:
    """What the client has of one stream."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.size: int | None = None
        self.reset: int | None = None
        self.stopped: int | None = None
        self.stopped_in = 0  # which pass

    def take(self, offset: int, data: bytes, fin: bool) -> None:
        before = self.parts.get(offset, b"")
        self.parts[offset] = max(before, data, key=len)
        if fin:
            assert self.size in (None, offset + len(data))
            self.size = offset + len(data)

    @property
    def data(self) -> bytes:
        """What came in order."""
        data = bytearray()
        for offset in sorted(self.parts):
            part = self.parts[offset]
            if offset > len(data):
                break
            again = data[offset : offset + len(part)]
            assert part.startswith(bytes(again)) or again == part, "repeated bytes differ"
            data[offset : offset + len(part)] = part
        return bytes(data)

    @property
    def whole(self) -> bool:
        return self.size is not None and len(self.data) == self.size

    @property
    def over(self) -> bool:
        return self.whole or self.reset is not None

    def meaning(self, ids: Callable[[int], object]) -> tuple[Any, ...]:
        """What it says, without times; `ids` makes a request id comparable."""
        data = b"" if self.reset is not None else self.data
        verdict: tuple[Any, ...] = ()
        if len(data) >= _VERDICT_BYTES:
            magic, status, slot, number, _, _, retry, free = struct.unpack_from("<4sHHQIIII", data)
            # A refusal says what is free when its words are made: with the pump, at a pass's end.
            verdict = (magic, status, slot, ids(number), retry, free if status == 200 else None)
        return (
            verdict, data[_VERDICT_BYTES:], self.whole and self.reset is None, self.reset,
        )  # fmt: skip


class Hand:
    """A client that writes its packets by hand, with the keys of a handshake that aioquic made."""

    def __init__(self, quic: QuicConnection) -> None:
        self._pair = quic._cryptos[Epoch.ONE_RTT]
        self._cid = quic._peer_cid.cid
        self._cid_bytes = len(quic.host_cid)
        self._next = quic._packet_number + 10
        self._expected = 0
        self.streams_allowed = quic._remote_max_streams_bidi
        self.acked: set[int] = set()
        self.got: dict[int, Got] = {}
        self.closed: int | None = None
        self.passes = 0

    def packet(self, payload: bytes) -> bytes:
        number = self._next
        self._next += 1
        phase = self._pair.key_phase << 2
        header = bytes([0x43 | phase]) + self._cid + (number & 0xFFFFFFFF).to_bytes(4, "big")
        sealed: bytes = self._pair.encrypt_packet(header, payload.ljust(4, b"\0"), number)
        return sealed

    def of(self, stream: int) -> Got:
        return self.got.setdefault(stream, Got())

    def receive(self, data: bytes) -> bool:
        """Take a datagram; whether it has to be acknowledged."""
        if data[0] & 0x80:
            return False
        _, payload, number = self._pair.decrypt_packet(data, 1 + self._cid_bytes, self._expected)
        self._expected = max(self._expected, number + 1)
        self.acked.add(number)
        return self._frames(Buffer(data=payload))

    def _frames(self, buf: Buffer) -> bool:
        elicits = False
        while not buf.eof():
            kind = buf.pull_uint_var()
            elicits = elicits or kind not in (0x00, 0x02, 0x03, 0x1C, 0x1D)
            if kind & ~7 == _STREAM:
                self._stream(kind, buf)
            elif kind & ~1 == _ACK:
                self._ack(kind, buf)
            elif kind == _RESET:
                stream, code, _ = (buf.pull_uint_var() for _ in range(3))
                self.of(stream).reset = code
            elif kind == _STOP:
                stream, code = (buf.pull_uint_var() for _ in range(2))
                got = self.of(stream)
                got.stopped, got.stopped_in = code, self.passes
            elif kind == _CRYPTO:
                buf.pull_uint_var()
                buf.pull_bytes(buf.pull_uint_var())
            elif kind == _MAX_STREAMS:
                self.streams_allowed = max(self.streams_allowed, buf.pull_uint_var())
            elif kind == _NEW_CID:
                buf.pull_uint_var()
                buf.pull_uint_var()
                buf.pull_bytes(buf.pull_uint8() + 16)
            elif kind & ~1 == _CLOSE:
                self.closed = buf.pull_uint_var()
                return False
            else:
                for _ in range(_PLAIN[kind]):
                    buf.pull_uint_var()
        return elicits

    def _stream(self, kind: int, buf: Buffer) -> None:
        stream = buf.pull_uint_var()
        offset = buf.pull_uint_var() if kind & 4 else 0
        length = buf.pull_uint_var() if kind & 2 else buf.capacity - buf.tell()
        self.of(stream).take(offset, buf.pull_bytes(length), bool(kind & 1))

    @staticmethod
    def _ack(kind: int, buf: Buffer) -> None:
        buf.pull_uint_var()
        buf.pull_uint_var()
        for _ in range(buf.pull_uint_var() * 2 + 1):
            buf.pull_uint_var()
        for _ in range(3 if kind & 1 else 0):
            buf.pull_uint_var()

    def acknowledgement(self) -> bytes:
        """An ACK frame of the newest ranges that came."""
        ranges: list[list[int]] = []
        for number in sorted(self.acked, reverse=True):
            if ranges and ranges[-1][0] == number + 1:
                ranges[-1][0] = number
            elif len(ranges) < 32:
                ranges.append([number, number])
            else:
                break
        buf = Buffer(capacity=1024)
        (first, last), *rest = ranges
        for value in (_ACK, last, 0, len(rest), last - first):
            buf.push_uint_var(value)
        for low, high in rest:
            buf.push_uint_var(first - high - 2)
            buf.push_uint_var(high - low)
            first = low
        return buf.data
