"""The names of aioquic that it does not promise, all of them here (aioquic is pinned to the version
they were read in).

`check()` fails in words when one is gone; a test calls it. Everything else in the package uses
aioquic's public names.
"""

import hashlib
import hmac
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any

from aioquic._buffer import Buffer, BufferReadError
from aioquic._crypto import CryptoError
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
    pull_quic_header,
    pull_quic_transport_parameters,
)
from aioquic.quic.packet_builder import QuicDeliveryState, QuicPacketBuilder, QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.quic.stream import QuicStream
from aioquic.tls import Epoch, ExtensionType

from dataplane.errors import DataplaneError

_CONNECTION_NAMES = ("_close_event", "_events", "_streams", "_close_at", "_logger", "_state")
_SENDER_NAMES = ("_buffer_start", "_buffer_stop", "_reset_error_code")
# Of a connection that is handed over to the packet pump (dataplane.hand_over).
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
    "_cc", "_rtt_initialized", "_rtt_min", "_rtt_smoothed", "_rtt_variance", "get_probe_timeout",
    "max_ack_delay",
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

_TAG_BYTES = 16
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


# ---------------------------------------------------------------- the hand-over to the packet pump


Deliveries = list[tuple[Callable[..., None], Any]]
"""aioquic's handlers of a packet's fate, with their arguments."""


class Captured:
    """A 1-RTT packet that aioquic built: its frames, which the pump sends in one of its own."""

    __slots__ = ("deliveries", "elicits", "frames", "number", "sealed")

    def __init__(self, number: int, frames: bytes, sealed: bytes) -> None:
        self.number = number
        self.frames = frames
        self.sealed = sealed  # what stands in its place in aioquic's datagram
        self.deliveries: Deliveries = []
        self.elicits = False


class _Keys:
    """Takes the place of one direction's keys: they are there until the connection ends."""

    __slots__ = ("_valid",)

    def __init__(self) -> None:
        self._valid = True

    def is_valid(self) -> bool:
        return self._valid

    def teardown(self) -> None:
        self._valid = False


class Tap:
    """Takes the place of the 1-RTT keys: plaintext passes through it, both ways.

    Attributes:
        captured: The packets that were built since the last look.
    """

    aead_tag_size = _TAG_BYTES
    key_phase = 0

    def __init__(self) -> None:
        self.recv, self.send = _Keys(), _Keys()
        self.captured: list[Captured] = []
        self._incoming: tuple[int, bytes] | None = None
        self._mark = secrets.token_bytes(_TAG_BYTES)

    def teardown(self) -> None:
        self.recv.teardown()
        self.send.teardown()

    def update_key(self) -> None:
        """Key updates are the pump's."""

    def offer(self, number: int, frames: bytes) -> None:
        """Have the next packet read as this."""
        self._incoming = number, frames

    def offer_nothing(self) -> None:
        """Nothing is to be read, whether the last offer was taken or not."""
        self._incoming = None

    def decrypt_packet(
        self, packet: bytes, encrypted_offset: int, expected_packet_number: int
    ) -> tuple[bytes, bytes, int]:
        incoming, self._incoming = self._incoming, None
        if incoming is None:
            raise CryptoError("1-RTT packets are the pump's")
        number, frames = incoming
        return packet[:encrypted_offset], frames, number

    def encrypt_packet(
        self, plain_header: bytes, plain_payload: bytes, packet_number: int
    ) -> bytes:
        # The mark makes the place of this packet in its datagram unmistakable.
        sealed = plain_header + plain_payload + self._mark
        self.captured.append(Captured(packet_number, plain_payload, sealed))
        return sealed


class _NoneYet:
    """Takes the place of the packet numbers that came: the pump drops duplicates itself."""

    def add(self, packet_number: int) -> None: ...

    def __contains__(self, packet_number: int) -> bool:
        return False


def is_complete(quic: QuicConnection) -> bool:
    """Whether the handshake is complete."""
    return quic._handshake_complete


def split(datagram: bytes, cid_bytes: int) -> int:
    """Return where the 1-RTT packet of a datagram begins: behind the long-header packets that it is
    coalesced with (RFC 9000 section 12.2); the datagram's size if there is none."""
    buffer, at = Buffer(data=datagram), 0
    while at < len(datagram) and datagram[at] & 0x80:
        try:
            header = pull_quic_header(buffer, host_cid_length=cid_bytes)
        except (ValueError, BufferReadError):
            return len(datagram)
        at += header.packet_length
        buffer.seek(at)
    # Behind packets that are padded out, zeros may stand; a 1-RTT packet has the fixed bit.
    if at < len(datagram) and not datagram[at] & 0x40:
        return len(datagram)
    return at


def _ack_delay_exponent(quic: QuicConnection) -> int:
    """Return the exponent that the peer announced: aioquic reads it and does not keep it."""
    for kind, data in quic.tls.received_extensions or ():
        if kind == ExtensionType.QUIC_TRANSPORT_PARAMETERS:
            parameters = pull_quic_transport_parameters(Buffer(data=data))
            if parameters.ack_delay_exponent is not None:
                return int(parameters.ack_delay_exponent)
    return 3


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def hand_over(quic: QuicConnection) -> dict[str, Any]:
    """Return the fields of `struct dp_hand_over`, but the path, of a complete handshake."""
    keys, loss = quic._cryptos[Epoch.ONE_RTT], quic._loss
    peer_cid = quic._peer_cid.cid
    assert keys.recv.secret is not None
    assert keys.send.secret is not None
    assert keys.recv.cipher_suite is not None
    measured = loss._rtt_initialized
    return {
        "version": quic._version,
        "suite": int(keys.recv.cipher_suite),
        "is_client": quic._is_client,
        "secret_bytes": len(keys.recv.secret),
        "receive_secret": keys.recv.secret,
        "send_secret": keys.send.secret,
        "receive_phase": keys.recv.key_phase,
        "send_phase": keys.send.key_phase,
        "host_cid_bytes": quic._configuration.connection_id_length,
        "peer_cid_bytes": len(peer_cid),
        "peer_cid": peer_cid,
        "max_datagram": quic._max_datagram_size,
        "next_packet_number": quic._packet_number,
        "local_max_data": quic._local_max_data.value,
        "local_max_stream_data_bidi_local": quic._local_max_stream_data_bidi_local,
        "local_max_stream_data_bidi_remote": quic._local_max_stream_data_bidi_remote,
        "local_max_stream_data_uni": quic._local_max_stream_data_uni,
        "local_max_streams_bidi": quic._local_max_streams_bidi.value,
        "local_max_streams_uni": quic._local_max_streams_uni.value,
        "remote_max_data": quic._remote_max_data,
        "remote_max_stream_data_bidi_local": quic._remote_max_stream_data_bidi_local,
        "remote_max_stream_data_bidi_remote": quic._remote_max_stream_data_bidi_remote,
        "remote_max_stream_data_uni": quic._remote_max_stream_data_uni,
        "remote_max_streams_bidi": quic._remote_max_streams_bidi,
        "remote_max_streams_uni": quic._remote_max_streams_uni,
        "next_bidi": quic._local_next_stream_id_bidi,
        "next_uni": quic._local_next_stream_id_uni,
        "peer_ack_delay_exponent": _ack_delay_exponent(quic),
        "peer_max_ack_delay": _ns(loss.max_ack_delay),
        "local_max_ack_delay": _ns(_LOCAL_MAX_ACK_DELAY_S),
        "smoothed_rtt": _ns(loss._rtt_smoothed) if measured else 0,
        "rtt_variance": _ns(loss._rtt_variance) if measured else 0,
        "minimum_rtt": _ns(loss._rtt_min) if measured else 0,
    }


_LOCAL_MAX_ACK_DELAY_S = 0.025  # what aioquic announces


def install(quic: QuicConnection, tap: Tap) -> None:
    """Put the tap in the place of the 1-RTT keys.

    What aioquic sent before with these keys counts as lost, and is repeated through the tap. A
    server's preferred address is not gone to: paths are bytes here, which aioquic cannot compare
    with an address.
    """
    space = quic._spaces[Epoch.ONE_RTT]
    early = list(space.sent_packets.values())
    _unregister(quic, space, early)
    for packet in early:
        lose(packet.delivery_handlers)
    quic._cryptos[Epoch.ONE_RTT] = tap  # type: ignore[assignment]
    space.received_packets = _NoneYet()  # type: ignore[assignment]
    quic._key_update_pending = False
    quic._remote_preferred_address = None
    _acknowledge_nothing(space)


def _acknowledge_nothing(space: QuicPacketSpace) -> None:
    """Acknowledging 1-RTT packets is the pump's."""
    space.ack_at = None
    if len(space.ack_queue):
        space.ack_queue = RangeSet()


def _unregister(
    quic: QuicConnection, space: QuicPacketSpace, packets: list[QuicSentPacket]
) -> None:
    """Take packets back out of aioquic's recovery."""
    if packets:
        quic._loss._cc.on_packets_expired(packets=[p for p in packets if p.in_flight])
        space.sent_packets.clear()
    space.ack_eliciting_in_flight = 0
    space.loss_time = None


def collect(quic: QuicConnection, tap: Tap) -> list[Captured]:
    """Take what was built since the last look, with its handlers; aioquic's recovery is spared."""
    space = quic._spaces[Epoch.ONE_RTT]
    found, tap.captured = tap.captured, []
    if space.sent_packets:
        packets = dict(space.sent_packets)
        _unregister(quic, space, list(packets.values()))
        for captured in found:
            packet = packets.get(captured.number)
            if packet is not None:
                captured.elicits = packet.is_ack_eliciting
                captured.deliveries = packet.delivery_handlers
    return found


def deliver(deliveries: Deliveries) -> None:
    """Tell aioquic that a packet was acknowledged."""
    for handler, arguments in deliveries:
        handler(QuicDeliveryState.ACKED, *arguments)


def lose(deliveries: Deliveries) -> None:
    """Tell aioquic that a packet was lost: it writes what matters again."""
    for handler, arguments in deliveries:
        handler(QuicDeliveryState.LOST, *arguments)


def feed(
    quic: QuicConnection,
    tap: Tap,
    cid: bytes,
    number: int,
    frames: bytes,
    probes: bool,
    size: int,
    path: bytes,
    now: float,
) -> None:
    """Have aioquic read frames of its own, out of a packet of `size` bytes that the pump opened.

    With `probes` the packet may not move the connection to its path.
    """
    space = quic._spaces[Epoch.ONE_RTT]
    if probes:
        space.largest_received_packet = max(space.largest_received_packet, number)
    # One frame goes ahead: a packet has to have one, and the pump kept those that made it more than
    # a probe. PADDING is a probing frame, PING is not (RFC 9000 section 9.1).
    lead = QuicFrameType.PADDING if probes else QuicFrameType.PING
    tap.offer(number, bytes((lead,)) + frames)
    header = b"\x40" + cid
    quic.receive_datagram(header.ljust(max(size, len(header) + 1), b"\0"), path, now)
    tap.offer_nothing()
    _acknowledge_nothing(space)


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
