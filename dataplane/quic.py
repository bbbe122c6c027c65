"""The names of aioquic that it does not promise, all of them here (aioquic is pinned to the version
they were read in).

`check()` fails in words when one is gone; a test calls it. Everything else in the package uses
aioquic's public names.
"""

from collections import deque
from typing import Any

from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection, QuicConnectionState
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicErrorCode, QuicFrameType, QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.quic.stream import QuicStream

from dataplane.errors import DataplaneError

_CONNECTION_NAMES = ("_close_event", "_events", "_streams", "_close_at", "_logger", "_state")
_SENDER_NAMES = ("_buffer_start", "_buffer_stop", "_reset_error_code")


def check() -> None:
    """Raise `DataplaneError` naming what this version of aioquic lacks."""
    probe = QuicConnection(configuration=QuicConfiguration(is_client=True))
    stream = QuicStream(stream_id=0)
    sender = stream.sender
    missing = [name for name in _CONNECTION_NAMES if not hasattr(probe, name)]
    missing += [f"sender.{name}" for name in _SENDER_NAMES if not hasattr(sender, name)]
    if not hasattr(stream, "is_blocked"):
        missing.append("stream.is_blocked")
    if missing:
        raise DataplaneError(f"this version of aioquic lacks {', '.join(missing)}: install 1.7.2")


class _Silent:
    """Takes the place of a connection's log: it writes a line a stream, formatted or not."""

    def debug(self, *args: object, **kwargs: object) -> None: ...

    info = warning = debug


_SILENT = _Silent()


def silence(quic: QuicConnection) -> None:
    """Keep a connection from logging."""
    quic._logger = _SILENT  # type: ignore[assignment]


def events_of(quic: QuicConnection) -> "deque[Any]":
    """Return the queue behind `next_event`, to look into it without a call an event."""
    return quic._events


def is_closing(quic: QuicConnection) -> bool:
    """Whether either side closed.

    The public event comes three probe time-outs later, when the closing period ends (RFC 9000
    section 10.2); slots go back at once.
    """
    return quic._close_event is not None


def buffered(quic: QuicConnection) -> int:
    """Return the bytes in the connection's send buffers, sent or not, until acknowledged."""
    return sum(
        stream.sender._buffer_stop - stream.sender._buffer_start
        for stream in quic._streams.values()
    )


def acknowledged(quic: QuicConnection) -> dict[int, int]:
    """Return how far the peer has acknowledged each stream that still has bytes to send."""
    return {
        stream_id: stream.sender._buffer_start
        for stream_id, stream in quic._streams.items()
        if stream.sender._buffer_stop > stream.sender._buffer_start
        and not stream.sender.is_finished
        and stream.sender._reset_error_code is None
    }


def is_untouched(quic: QuicConnection) -> bool:
    """Whether nothing that came could be decrypted yet: nobody may be there."""
    return quic._state is QuicConnectionState.FIRSTFLIGHT


def nothing_sent(quic: QuicConnection, stream_id: int) -> bool:
    """Whether a stream is there on which this side has not written anything."""
    stream = quic._streams.get(stream_id)
    return stream is not None and stream.sender._buffer_stop == 0


def dismantle(quic: QuicConnection) -> None:
    """Empty a connection that is over; nothing may be asked of it any more."""
    for part in (getattr(quic, "tls", None), getattr(quic, "_loss", None), quic):
        if part is not None:
            vars(part).clear()


def is_blocked(quic: QuicConnection, stream_id: int) -> bool | None:
    """Whether a stream waits for the peer to allow more streams; None: no such stream."""
    stream = quic._streams.get(stream_id)
    return None if stream is None else stream.is_blocked


def encode_refusal(version: int, source_cid: bytes, destination_cid: bytes, reason: str) -> bytes:
    """Return an Initial packet that refuses a connection, CONNECTION_REFUSED (RFC 9000 section
    20.1).

    Keeps no state: `source_cid` is the connection ID that the client chose, from which the Initial
    keys derive (RFC 9001 section 5.2).
    """
    crypto = CryptoPair()
    crypto.setup_initial(cid=source_cid, is_client=False, version=version)
    builder = QuicPacketBuilder(
        host_cid=source_cid,
        is_client=False,
        max_datagram_size=1200,
        peer_cid=destination_cid,
        version=version,
    )
    text = reason.encode()
    builder.start_packet(QuicPacketType.INITIAL, crypto)
    frame: Buffer = builder.start_frame(QuicFrameType.TRANSPORT_CLOSE, capacity=32 + len(text))
    frame.push_uint_var(QuicErrorCode.CONNECTION_REFUSED)
    frame.push_uint_var(QuicFrameType.PADDING)
    frame.push_uint_var(len(text))
    frame.push_bytes(text)
    datagrams, _ = builder.flush()
    return bytes(datagrams[0])
