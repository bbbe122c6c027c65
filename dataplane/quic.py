"""The names of aioquic that it does not promise: all of them here, and in `quic_tap`, which takes
its 1-RTT packets away (aioquic is pinned to the version they were read in).

`check()` fails in words when one is gone, of either module; a test calls it. Everything else in the
package uses aioquic's public names.
"""

import hashlib
import hmac
import secrets
from collections import deque
from typing import Any

from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import (
    QuicConnection,
    QuicConnectionId,
    QuicConnectionState,
    QuicNetworkPath,
)
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.events import ConnectionTerminated
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicFrameType,
    QuicPacketType,
)
from aioquic.quic.packet_builder import QuicPacketBuilder, QuicSentPacket
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream
from aioquic.tls import Epoch

from dataplane.errors import DataplaneError

_CONNECTION_NAMES = ("_close_event", "_events", "_streams", "_close_at", "_logger", "_state")
_SENDER_NAMES = ("_buffer_start", "_buffer_stop", "_reset_error_code")
# Of a connection that is handed over to the packet pump (dataplane.quic_tap).
_HAND_OVER_NAMES = (
    "_close_end", "_close_pending", "_configuration", "_cryptos", "_handshake_complete",
    "_host_cid_seq", "_host_cids", "_idle_timeout", "_is_client", "_key_update_pending",
    "_local_max_data", "_local_max_stream_data_bidi_local", "_local_max_stream_data_bidi_remote",
    "_local_max_stream_data_uni", "_local_max_streams_bidi", "_local_max_streams_uni",
    "_local_next_stream_id_bidi", "_local_next_stream_id_uni", "_loss", "_max_datagram_size",
    "_network_paths", "_packet_number", "_peer_cid", "_peer_cid_available", "_remote_max_data",
    "_remote_max_stream_data_bidi_local", "_remote_max_stream_data_bidi_remote",
    "_remote_max_stream_data_uni", "_remote_max_streams_bidi", "_remote_max_streams_uni",
    "_remote_preferred_address", "_spaces", "_version",
)  # fmt: skip
_LOSS_NAMES = (
    "_cc", "_pto_count", "_rtt_initialized", "_rtt_min", "_rtt_smoothed", "_rtt_variance",
    "get_probe_timeout", "handshake_confirmed", "max_ack_delay", "reschedule_data",
)  # fmt: skip
_SPACE_NAMES = (
    "ack_at", "ack_eliciting_in_flight", "ack_queue", "largest_received_packet", "loss_time",
    "received_packets", "sent_packets",
)  # fmt: skip
# What the tap takes the place of, and what a key context holds.
_PAIR_NAMES = (
    "aead_tag_size", "decrypt_packet", "encrypt_packet", "key_phase", "recv", "send", "teardown",
    "update_key",
)  # fmt: skip
_CONTEXT_NAMES = ("cipher_suite", "is_valid", "key_phase", "secret", "teardown")
_CID_NAMES = ("cid", "stateless_reset_token", "was_sent")
_PATH_NAMES = ("addr", "is_validated")
_PACKET_NAMES = ("delivery_handlers", "in_flight", "is_ack_eliciting", "packet_number")

_RESET_TOKEN_BYTES = 16


def check() -> None:
    """Raise `DataplaneError` naming what this version of aioquic lacks."""
    probe = QuicConnection(configuration=QuicConfiguration(is_client=True))
    stream = QuicStream(stream_id=0)
    sender = stream.sender
    missing = [name for name in _CONNECTION_NAMES if not hasattr(probe, name)]
    missing += [name for name in _HAND_OVER_NAMES if not hasattr(probe, name)]
    pair = CryptoPair()
    packet = QuicSentPacket(Epoch.ONE_RTT, False, False, False, 0, QuicPacketType.ONE_RTT)
    parts: tuple[tuple[str, object, tuple[str, ...]], ...] = (
        ("sender", sender, _SENDER_NAMES),
        ("stream", stream, ("is_blocked",)),
        ("loss", getattr(probe, "_loss", None), _LOSS_NAMES),
        ("space", QuicPacketSpace(), _SPACE_NAMES),
        ("pair", pair, _PAIR_NAMES),
        ("keys", pair.recv, _CONTEXT_NAMES),
        ("cid", QuicConnectionId(b"", 0), _CID_NAMES),
        ("path", QuicNetworkPath(None), _PATH_NAMES),
        ("packet", packet, _PACKET_NAMES),
    )
    for what, part, names in parts:
        missing += [f"{what}.{name}" for name in names if not hasattr(part, name)]
    if missing:
        raise DataplaneError(f"this version of aioquic lacks {', '.join(missing)}: install 1.7.2")


class ProbingConnection(QuicConnection):
    """A connection whose handshake is probed for with two datagrams a time-out, not with one.

    The time-out doubles each time, so that the loss of a few single datagrams costs tens of
    seconds; RFC 9002 section 6.2.4 allows two for that reason, and the pump sends as many. A flight
    that takes two or more goes out once: aioquic repeats all of it.
    """

    _probes_twice = False

    def handle_timer(self, now: float) -> None:
        before = self._loss._pto_count
        super().handle_timer(now)
        self._probes_twice = self._loss._pto_count > before

    def datagrams_to_send(self, now: float) -> list[tuple[bytes, Any]]:
        datagrams = super().datagrams_to_send(now)
        if self._probes_twice:
            self._probes_twice = False
            # What came since may have completed the handshake: then it is not probed for any more.
            if len(datagrams) == 1 and not self._loss.handshake_confirmed and not is_closing(self):
                self._loss.reschedule_data(now=now)
                datagrams += super().datagrams_to_send(now)
        return datagrams


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


# ---------------------------------------------------------------- stateless resets


_reset_secret = secrets.token_bytes(32)


def reset_token(cid: bytes) -> bytes:
    """Return the token that ends a connection of this process that is not known any more.

    Derived, so that one can be told of a connection whose state is gone (RFC 9000 section 10.3.2).
    """
    return hmac.digest(_reset_secret, cid, hashlib.sha256)[:_RESET_TOKEN_BYTES]


def give_reset_tokens(quic: QuicConnection) -> None:
    """Have derived tokens go out with the connection IDs that were not announced yet.

    Called when the connection is made, since a server's first one goes out in its transport
    parameters, and whenever new ones were made.
    """
    for connection_id in quic._host_cids:
        if connection_id.sequence_number == 0:  # it is announced in the handshake, by servers alone
            announced = quic._is_client or quic._handshake_complete
        else:
            announced = connection_id.was_sent
        if not announced:
            connection_id.stateless_reset_token = reset_token(connection_id.cid)


def is_reset(quic: QuicConnection, datagram: bytes) -> bool:
    """Whether a datagram that could not be opened ends with a token that the peer announced."""
    token = datagram[-_RESET_TOKEN_BYTES:]
    known = [quic._peer_cid, *quic._peer_cid_available]
    known += [path.peer_cid for path in quic._network_paths if path.peer_cid is not None]
    return any(
        connection_id.stateless_reset_token
        and hmac.compare_digest(connection_id.stateless_reset_token, token)
        for connection_id in known
    )


def end_now(quic: QuicConnection, code: int, reason: str) -> None:
    """End a connection at once; the peer is not told, since it does not know of it any more."""
    if quic._close_event is None:
        quic._close_event = ConnectionTerminated(
            error_code=code, frame_type=QuicFrameType.PADDING, reason_phrase=reason
        )
    if quic._state is not QuicConnectionState.TERMINATED:
        quic._close_end()


# ---------------------------------------------------------------- where a connection stands


def is_complete(quic: QuicConnection) -> bool:
    """Whether the handshake is complete."""
    return quic._handshake_complete


def path_in_use(quic: QuicConnection) -> tuple[bytes, bool]:
    """Return the path that is sent on, and whether it is validated."""
    path = quic._network_paths[0]
    return path.addr, path.is_validated


def peer_cid(quic: QuicConnection) -> bytes:
    """Return the connection ID that is sent to."""
    return quic._peer_cid.cid


def host_cids(quic: QuicConnection) -> set[bytes]:
    """Return the connection IDs that the peer may send to."""
    return {connection_id.cid for connection_id in quic._host_cids}


def is_closing_pending(quic: QuicConnection) -> bool:
    """Whether a CONNECTION_CLOSE is to be sent."""
    return quic._close_pending


def is_draining(quic: QuicConnection) -> bool:
    """Whether the peer closed."""
    return quic._state is QuicConnectionState.DRAINING


def is_over(quic: QuicConnection) -> bool:
    """Whether not even the closing period is left."""
    return quic._state is QuicConnectionState.TERMINATED


def stay_until(quic: QuicConnection, heard_at: float) -> None:
    """Count the idle time from `heard_at`, if the connection does not close anyhow."""
    if quic._state is QuicConnectionState.CONNECTED and quic._close_at is not None:
        quic._close_at = max(quic._close_at, heard_at + quic._idle_timeout())


def idle_at(quic: QuicConnection) -> float | None:
    """Return when the connection was silent for too long."""
    return quic._close_at


# ---------------------------------------------------------------- refusals


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
