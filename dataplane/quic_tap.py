"""aioquic without its 1-RTT packets: it reads and writes their frames, the packets are the pump's.

The names of aioquic that this takes and that it does not promise are checked by
`dataplane.quic.check`. `dataplane.hand_over` has the rules.
"""

import secrets
from collections.abc import Callable
from typing import Any

from aioquic._buffer import Buffer, BufferReadError
from aioquic._crypto import CryptoError
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import (
    QuicFrameType,
    pull_quic_header,
    pull_quic_transport_parameters,
)
from aioquic.quic.packet_builder import QuicDeliveryState, QuicSentPacket
from aioquic.quic.rangeset import RangeSet
from aioquic.quic.recovery import QuicPacketSpace
from aioquic.tls import Epoch, ExtensionType

TAG_BYTES = 16
_LOCAL_MAX_ACK_DELAY_S = 0.025  # what aioquic announces

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

    aead_tag_size = TAG_BYTES
    key_phase = 0

    def __init__(self) -> None:
        self.recv, self.send = _Keys(), _Keys()
        self.captured: list[Captured] = []
        self._incoming: tuple[int, bytes] | None = None
        self._mark = secrets.token_bytes(TAG_BYTES)

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
