"""One connection's passage from aioquic to the packet pump, and what the two say to each other.

aioquic makes the handshake and stays the control plane: connection IDs, paths, the close, the idle
time-out. Once the handshake is complete the pump has the 1-RTT packets. The rules that hold here:

- The hand-over comes before aioquic's first 1-RTT packet: nothing but keys and limits moves.
- aioquic's own frames go out in the pump's packets: what it builds is captured in plaintext, and
  its handlers hear of the packet's fate as if it had been aioquic's own.
- Frames that are aioquic's come up from the pump, and are read as a packet that aioquic opened.
- Nothing of aioquic acknowledges, repeats or paces a 1-RTT packet any more, and no stream of it is
  ever used.

Sans-IO, for servers and clients alike. What it leans on in aioquic stands in `dataplane.quic` and
`dataplane.quic_tap`.
"""

import time
from collections.abc import Callable

from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicErrorCode, QuicFrameType

from dataplane import quic as private
from dataplane import quic_tap
from dataplane.pump import CONTROL, DELIVERED, FAILED, PATH_BYTES, TAKEN, Event, Pump

_EARLY_MAX = 8
_PACKET_NUMBER_MAX_BYTES = 4
_UNKNOWN_SIZE = 1200


class HandOver:
    """A connection whose established traffic is the pump's.

    Args:
        quic: The connection, as it was made.
        pump: Takes it over.
        front: Who reads its streams (`enum dp_front`), or what says so for an ALPN.
        socket: The number of the pump's socket that it sends by.

    Attributes:
        adopted: Whether the pump has it.
        handle: Names it to the pump; 0 before.
    """

    __slots__ = (
        "_cid_bytes", "_cids", "_early", "_front", "_lenient_since", "_path", "_peer_cid",
        "_pump", "_quiet", "_refused", "_socket", "_tap", "_token", "_tokens", "adopted", "handle",
        "quic",
    )  # fmt: skip

    def __init__(
        self, quic: QuicConnection, pump: Pump, front: int | Callable[[str], int], socket: int
    ) -> None:
        self.quic = quic
        self.adopted = False
        self.handle = 0
        self._pump = pump
        self._front = front
        self._socket = socket
        self._cid_bytes = quic.configuration.connection_id_length
        self._tap = quic_tap.Tap()
        self._early: list[tuple[bytes, bytes, int]] = []
        self._tokens: dict[int, quic_tap.Deliveries] = {}
        self._token = 0
        self._path: tuple[bytes, bool] = (b"", False)
        self._peer_cid = b""
        self._cids: set[bytes] = set()
        self._quiet = False  # the pump was told that the connection closes
        self._refused = False
        self._lenient_since = 0
        private.give_reset_tokens(quic)

    # In.

    def receive(self, data: bytes, addr: bytes, now: float, at_ns: int) -> None:
        """Take any datagram of this connection's; `at_ns` is the kernel's receive time."""
        if not data:
            return
        at = quic_tap.split(data, self._cid_bytes)
        if at:
            # What stands behind counts for the datagram's size, which an Initial packet needs.
            self.quic.receive_datagram(data[:at].ljust(len(data), b"\0"), addr, now)
            if not self.adopted and private.is_complete(self.quic):
                self._adopt(now)
            self._sync()
        if at < len(data):
            self._receive_short(data[at:], addr, now, at_ns)

    def _receive_short(self, data: bytes, addr: bytes, now: float, at_ns: int) -> None:
        """A 1-RTT packet: the pump's, or kept until it has the connection.

        Packets overtake each other, and a first request lost to that would cost a probe time-out.
        """
        if self.adopted:
            taken = self._pump.inject(self.handle, data, addr, int(now * 1e9), at_ns)
            if taken != TAKEN and private.is_reset(self.quic, data):
                private.end_now(
                    self.quic, QuicErrorCode.NO_ERROR, "the peer does not know this connection"
                )
                self._sync()
        elif len(self._early) < _EARLY_MAX and not self._refused:
            self._early.append((data, addr, at_ns))

    def on_event(self, event: Event, now: float | None = None) -> None:
        """Act on a CONTROL, DELIVERED or FAILED of this connection's."""
        if event.kind == CONTROL:
            self._control(event, time.monotonic() if now is None else now)
        elif event.kind == DELIVERED:
            deliveries = self._tokens.pop(event.number, None)
            if deliveries is not None:
                (quic_tap.deliver if event.flags else quic_tap.lose)(deliveries)
        elif event.kind == FAILED:
            reason = event.body.decode("utf-8", "replace")
            self.quic.close(error_code=event.number, frame_type=event.stream, reason_phrase=reason)

    def _control(self, event: Event, now: float) -> None:
        cid_end = PATH_BYTES + self._cid_bytes
        body = event.body
        quic_tap.feed(
            self.quic,
            self._tap,
            cid=body[PATH_BYTES:cid_end],
            number=event.number,
            frames=body[cid_end:],
            probes=bool(event.flags),
            size=event.stream or _UNKNOWN_SIZE,
            path=body[:PATH_BYTES],
            now=now,
        )
        private.give_reset_tokens(self.quic)
        self._sync()

    # The passage.

    def _adopt(self, now: float) -> None:
        if self._refused:
            return
        quic, pump = self.quic, self._pump
        front = self._front
        if not isinstance(front, int):
            front = front(quic.tls.alpn_negotiated or "")
        self._path = private.path_in_use(quic)
        self._peer_cid = private.peer_cid(quic)
        self.handle = pump.adopt(
            quic_tap.hand_over(quic), self._path[0], front, self._socket, int(now * 1e9)
        )
        if not self.handle:
            self._refused = True
            self._early.clear()
            self.close(QuicErrorCode.INTERNAL_ERROR, "out of memory", QuicFrameType.PADDING)
            return
        self.adopted = True
        quic_tap.install(quic, self._tap)
        private.give_reset_tokens(quic)
        self._sync()
        early, self._early = self._early, []
        for data, addr, at_ns in early:
            self._receive_short(data, addr, now, at_ns)

    def _sync(self) -> None:
        """Tell the pump what aioquic decided: path, connection IDs, the end."""
        if not self.adopted or self._quiet:
            return
        quic, pump, handle = self.quic, self._pump, self.handle
        if private.is_draining(quic) or private.is_over(quic):
            self._quiet = True
            pump.close(handle, b"")
            return
        # First: what goes out on a new path never carries the old path's ID (RFC 9000 section 9.5).
        cid = private.peer_cid(quic)
        if cid != self._peer_cid:
            self._peer_cid = cid
            pump.set_peer_cid(handle, cid)
        path = private.path_in_use(quic)
        if path != self._path:
            (before, _), self._path = self._path, path
            pump.set_path(handle, path[0], path[1], not _is_rebinding(before, path[0]))
        cids = private.host_cids(quic)
        if cids != self._cids:
            for gone in self._cids - cids:
                pump.route(gone, 0)
            for new in cids - self._cids:
                pump.route(new, handle)
            self._cids = cids

    # Out.

    def transmit(self, now: float) -> list[tuple[bytes, bytes]]:
        """Hand aioquic's 1-RTT frames to the pump; return the datagrams that are left to send.

        Those hold Initial and Handshake packets.
        """
        closes = private.is_closing_pending(self.quic)
        datagrams = self.quic.datagrams_to_send(now)
        if not self.adopted:
            return datagrams
        captured = iter(quic_tap.collect(self.quic, self._tap))
        packet = next(captured, None)
        left = []
        for data, addr in datagrams:
            if packet is None or not data.endswith(packet.sealed):
                left.append((data, addr))
                continue
            self._send(packet, addr, closes)
            head = data[: -len(packet.sealed)]
            if head:
                # The padding that an Initial packet needs may have stood in the 1-RTT packet.
                left.append((head.ljust(len(data), b"\0"), addr))
            packet = next(captured, None)
        return left

    def _send(self, packet: quic_tap.Captured, addr: bytes, closes: bool) -> None:
        if self._quiet:
            return
        frames = self._fitting(packet.frames)
        if closes:
            self._quiet = True
            self._pump.close(self.handle, frames)
            return
        path = None if addr == self._path[0] else addr
        if not packet.elicits:
            self._pump.control(self.handle, frames, 0, False, path)
            return
        self._token += 1
        if self._pump.control(self.handle, frames, self._token, True, path):
            self._tokens[self._token] = packet.deliveries
        else:
            quic_tap.lose(packet.deliveries)

    def _fitting(self, frames: bytes) -> bytes:
        """Cut padding that has no room beside the longest packet number."""
        room = self.quic.configuration.max_datagram_size - 1 - len(self._peer_cid)
        room -= _PACKET_NUMBER_MAX_BYTES + quic_tap.TAG_BYTES
        return frames[:room] if len(frames) > room and not any(frames[room:]) else frames

    def close(self, code: int, reason: str, frame_type: int | None = None) -> None:
        """Close; the next `transmit` tells the peer. With a frame type the transport closes."""
        self.quic.close(error_code=code, frame_type=frame_type, reason_phrase=reason)

    def forget(self) -> None:
        """Leave the pump; nothing is sent any more."""
        if self.adopted:
            for cid in self._cids:
                self._pump.route(cid, 0)
            self._pump.forget(self.handle)
        self.adopted = False
        self.handle = 0
        self._refused = True
        self._tokens.clear()
        self._early.clear()

    # Time.

    def get_timer(self) -> float | None:
        """Return when `handle_timer` is due."""
        self._stay()
        return self.quic.get_timer()

    def handle_timer(self, now: float) -> None:
        """Let aioquic's timer fire: the idle time-out, a path's validation, the handshake's."""
        heard = self._stay()
        idle_at = private.idle_at(self.quic)
        if (
            heard
            and idle_at is not None
            and now >= idle_at
            and self._lenient_since != heard
            and self._pump.unacked(self.handle)
        ):
            # Something was sent since, which starts the time anew, once (RFC 9000 section 10.1).
            self._lenient_since = heard
            private.stay_until(self.quic, now)
        due = self.quic.get_timer()  # it looks for losses as well, which `handle_timer` acts on
        if due is not None and due <= now:
            self.quic.handle_timer(now)
        self._sync()

    def _stay(self) -> int:
        """Count the idle time from what the pump heard last; when that was (ns)."""
        if not self.adopted or self._quiet:
            return 0
        heard = self._pump.last_received(self.handle)
        if heard:
            private.stay_until(self.quic, heard / 1e9)
        return heard


def _is_rebinding(before: bytes, after: bytes) -> bool:
    """Whether two paths differ by the peer's port at most, as a NAT changes it (section 9.4)."""
    return before[:2] == after[:2] and before[4:] == after[4:]
