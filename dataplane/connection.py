"""One QUIC connection, guarded: whatever goes wrong in it ends it and nothing else.

Wraps aioquic's sans-IO connection: datagrams and times come in, stream events go to the front that
the ALPN chose, and what there is to send is asked for once a pass. Never touches a socket.
`dataplane.pumped` derives from it a connection whose established traffic is the packet pump's; to a
front both are alike.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionIdIssued,
    ConnectionIdRetired,
    ConnectionTerminated,
    HandshakeCompleted,
    StopSendingReceived,
    StreamDataReceived,
    StreamReset,
)
from aioquic.quic.packet import QuicErrorCode, QuicFrameType

from dataplane import quic as private

_log = logging.getLogger("dataplane.connection")

CID_BYTES = 8
"""Of the connection IDs that are given out here; what is no longer than that is no packet."""
UNREAD_PATIENCE_S = 3.0
"""At the end, a peer that takes nothing for so long is not waited for."""
BUFFER_LIMIT = 4 << 20
"""Bytes of answers that may wait for one connection's reader before its answers are broken off."""


class StreamFront(Protocol):
    """What a connection tells a front (`dataplane.fronts`).

    `NO_ERROR` is the code with which the protocol closes a connection in peace.
    """

    NO_ERROR: int

    def opened(self, connection: Any) -> None: ...
    def stream_data(
        self, connection: Any, stream_id: int, data: bytes, fin: bool, at_ns: int
    ) -> None: ...
    def stream_reset(self, connection: Any, stream_id: int) -> None: ...
    def stop_sending(self, connection: Any, stream_id: int) -> bool: ...
    def left(self, connection: Any) -> None: ...
    def unread(self, connection: Any, stream_id: int) -> None: ...
    def drain(self, connection: Any) -> None: ...


class Owner(Protocol):
    """What a connection tells the listener."""

    fronts: dict[str, StreamFront]

    def cid_issued(self, connection: "Connection", cid: bytes) -> None: ...
    def cid_retired(self, connection: "Connection", cid: bytes) -> None: ...
    def touched(self, connection: "Connection") -> None: ...


class Connection:
    """A connection of a listener.

    Attributes:
        streams: The front's state by stream.
        writing: Slots held in WRITING, counted by ingress.
        cids: Under which the listener routes to it.
        established: Whether the handshake is complete.
        stopped: Streams that the peer stopped before their request came; what comes is not read.
        gone: Whether it is over for the front: what it held was given back.
        over: Whether the listener forgot it and nothing may be asked of it any more.
        dirty: Whether it waits to transmit in this pass.
        timer_at: The earliest entry of it in the listener's timer heap.
    """

    # fmt: off
    __slots__ = (
        "_buffered", "_events", "_owner", "_unread", "cids", "dirty", "ended", "established",
        "extra", "front", "gone", "over", "quic", "socket", "stopped", "streams", "timer_at",
        "writing",
    )
    # fmt: on

    def __init__(self, quic: QuicConnection, owner: Owner, socket: Any) -> None:
        self.quic = quic
        self.socket = socket
        self.front: StreamFront | None = None
        self.streams: dict[int, Any] = {}
        self.cids: set[bytes] = set()
        self.stopped: set[int] = set()
        self.writing = 0
        self.established = self.gone = self.ended = self.over = self.dirty = False
        self.timer_at: float | None = None
        self.extra: Any = None
        self._owner = owner
        private.silence(quic)
        private.give_reset_tokens(quic)
        self._events = private.events_of(quic)
        self._buffered = 0
        self._unread: dict[int, tuple[int, float]] = {}

    def writing_in_pump(self, ingress: Any) -> int:
        """Count the slots of this ingress's that it holds in WRITING without Python's knowing."""
        return 0

    # In.

    def receive(self, data: bytes, path: bytes, now: float, at_ns: int) -> None:
        """Take a datagram that the kernel received at `at_ns` and act on what it says."""
        try:
            self.quic.receive_datagram(data, path, now)
            if self._events:
                self._handle_events(at_ns)
            if not self.gone and private.is_closing(self.quic):
                self._leave()
        except Exception as error:
            self.broken(error)

    def handle_timer(self, now: float) -> None:
        """Let the connection's timer fire."""
        try:
            self._fire(now)
            self._handle_events(0)
        except Exception as error:
            self.broken(error)

    def _fire(self, now: float) -> None:
        self.quic.handle_timer(now)

    def get_timer(self) -> float | None:
        """Return when `handle_timer` is due."""
        return self.quic.get_timer()

    def _handle_events(self, at_ns: int) -> None:
        events = self._events
        while events:
            event = events.popleft()
            kind = event.__class__
            if kind is StreamDataReceived:
                if self.stopped and event.stream_id in self.stopped:
                    if event.end_stream:
                        self.stopped.discard(event.stream_id)
                elif self.front is not None and not self.gone:
                    self.front.stream_data(
                        self, event.stream_id, event.data, event.end_stream, at_ns
                    )
            else:
                handler = _HANDLERS.get(kind)
                if handler:
                    handler(self, event)

    def _handshake_completed(self, event: HandshakeCompleted) -> None:
        private.give_reset_tokens(self.quic)
        self.established = True
        self.front = self._owner.fronts[event.alpn_protocol or ""]
        self.front.opened(self)

    def _stream_reset(self, event: StreamReset) -> None:
        self.stopped.discard(event.stream_id)
        if self.front is not None and not self.gone:
            self.front.stream_reset(self, event.stream_id)

    def _stop_sending(self, event: StopSendingReceived) -> None:
        if self.front is None or self.gone:
            return
        stream_id = event.stream_id
        known = self.front.stop_sending(self, stream_id)
        # Packets overtake each other: a request may be stopped before any of it has come.
        if not known and private.nothing_sent(self.quic, stream_id):
            self.stopped.add(stream_id)

    def _cid_issued(self, event: ConnectionIdIssued) -> None:
        self._owner.cid_issued(self, event.connection_id)

    def _cid_retired(self, event: ConnectionIdRetired) -> None:
        private.give_reset_tokens(self.quic)  # another one takes its place
        self._owner.cid_retired(self, event.connection_id)

    def _terminated(self, event: ConnectionTerminated) -> None:
        self._leave()
        self.ended = True

    def _leave(self) -> None:
        if not self.gone:
            self.gone = True
            if self.front is not None:
                self.front.left(self)

    def broken(self, error: Exception) -> None:
        """Something raised that should not have: this connection ends, its slots go back."""
        _log.error("a connection failed and was closed: %s", error, exc_info=error)
        self.abandon(QuicErrorCode.INTERNAL_ERROR, "internal error")

    # Out.

    def send(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Queue stream data; it is dropped when the peer stopped this stream meanwhile."""
        if self.over:
            return
        try:
            self.quic.send_stream_data(stream_id, data, fin)
        except RuntimeError:
            # The peer's STOP_SENDING came in the same packet as what is answered here.
            return
        except Exception as error:
            self.broken(error)
        self._buffered += len(data)
        if not self.dirty:
            self._owner.touched(self)

    def next_uni_stream_id(self) -> int:
        """Return the next unidirectional stream that this side may open."""
        return self.quic.get_next_available_stream_id(is_unidirectional=True)

    def reset(self, stream_id: int, code: int) -> None:
        """Break off what is sent on a stream."""
        if self.over:
            return
        try:
            self.quic.reset_stream(stream_id, code)
        except Exception as error:
            self.broken(error)
        self._owner.touched(self)

    def stop(self, stream_id: int, code: int) -> None:
        """Ask the peer to stop sending on a stream."""
        if self.over:
            return
        try:
            self.quic.stop_stream(stream_id, code)
        except ValueError:
            return  # The stream is gone already.
        self._owner.touched(self)

    def overfull(self) -> bool:
        """Whether more waits for this connection's reader than may.

        The running sum only grows, so the true figure is counted when the sum passes the limit.
        """
        if self._buffered <= BUFFER_LIMIT or self.over:
            return False
        self._buffered = self._unacknowledged()
        return self._buffered > BUFFER_LIMIT

    def _unacknowledged(self) -> int:
        """Return the bytes that wait to be acknowledged."""
        return private.buffered(self.quic)

    def _may_wait(self) -> bool:
        """Whether bytes may wait to be acknowledged, as far as that is known without counting."""
        return self._buffered > 0

    def _progress(self) -> dict[int, int]:
        """Return up to where each stream with bytes that wait is acknowledged."""
        return private.acknowledged(self.quic)

    def has_unread(self, now: float) -> bool:
        """Whether the peer is taking bytes of answers, or may yet begin to."""
        if self.gone or self.over or not self._may_wait():
            return False
        for stream_id, taken in self._progress().items():
            before = self._unread.get(stream_id)
            if before is None or before[0] != taken or now - before[1] <= UNREAD_PATIENCE_S:
                return True
        return False

    def dismantle(self) -> None:
        """Cut what ties a connection that is over to itself.

        aioquic's objects refer to each other in circles, and timers that lie ahead still refer to
        this one: without this its memory would wait for them and for a full collection.
        """
        self.over = True
        self.extra = self.front = None
        self.streams.clear()
        self.stopped.clear()
        self._unread = {}
        private.dismantle(self.quic)

    def stalled(self, now: float, patience: float) -> list[int]:
        """Return the streams whose reader took nothing for `patience` seconds.

        Looked at about once a second. A peer that answers pings but takes no data would otherwise
        keep its answers here for as long as it likes.
        """
        if self.over or not self._may_wait():
            return []
        waiting = self._progress()
        if not waiting:
            self._buffered = 0
        before = self._unread
        self._unread = {
            stream_id: before[stream_id]
            if stream_id in before and before[stream_id][0] == taken
            else (taken, now)
            for stream_id, taken in waiting.items()
        }
        return [stream_id for stream_id, (_, at) in self._unread.items() if now - at > patience]

    def break_off(self, stream_id: int) -> None:
        """Give up on an answer that nobody reads."""
        if self.front is not None and not self.gone:
            self.front.unread(self, stream_id)

    def close(self, code: int, reason: str) -> None:
        """Close in order: the peer is told."""
        if self.over:
            return
        self._leave()
        self.quic.close(error_code=code, reason_phrase=reason)
        self._owner.touched(self)

    def abandon(self, code: int, reason: str) -> None:
        """Close after a failure: tell the peer if that still works, and keep nothing."""
        if self.ended:
            return
        try:
            self._leave()
        except Exception as error:
            _log.error("giving back the slots of a failed connection failed: %s", error)
        try:
            # With a frame type, PADDING, it is the transport that closes (RFC 9000 section 19.19).
            self.quic.close(error_code=code, frame_type=QuicFrameType.PADDING, reason_phrase=reason)
        except Exception as error:
            _log.error("closing a failed connection failed: %s", error)
        self.ended = True
        self._owner.touched(self)

    def transmit(self, now: float, queue: Callable[[bytes, bytes], None]) -> float | None:
        """Hand every datagram that is due to `queue`; return when the timer is due."""
        if self.over:
            return None
        try:
            if not self.established and private.is_untouched(self.quic):
                self.ended = True  # Its first datagram could not be decrypted: nobody is there.
                return None
            for data, path in self._outgoing(now):
                queue(data, path)
            # aioquic may have queued events of its own while it built packets.
            if self._events:
                self._handle_events(0)
            return None if self.ended else self.get_timer()
        except Exception as error:
            self.broken(error)
            return None

    def _outgoing(self, now: float) -> list[tuple[bytes, bytes]]:
        return self.quic.datagrams_to_send(now)


_HANDLERS: dict[type, Callable[[Connection, Any], None]] = {
    # By its name: a connection with a pump has its own.
    HandshakeCompleted: lambda connection, event: connection._handshake_completed(event),
    StreamReset: Connection._stream_reset,
    StopSendingReceived: Connection._stop_sending,
    ConnectionIdIssued: Connection._cid_issued,
    ConnectionIdRetired: Connection._cid_retired,
    ConnectionTerminated: Connection._terminated,
}
