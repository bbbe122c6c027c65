"""A client's QUIC connection without a socket, on aioquic alone or with the packet pump beneath it.

Both are asked the same: datagrams in, events out, streams, timers. With the pump, aioquic makes the
connection and keeps what belongs to it as a whole (`dataplane.hand_over`), and the packets with the
streams are the pump's; what it tells of a stream is put into aioquic's own queue of events, so that
whoever reads them sees one order and does not see which it was.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import StreamDataReceived, StreamReset

from dataplane import pump as pumping
from dataplane import quic as private
from dataplane.hand_over import HandOver
from dataplane.pump import Event, Pump

_CONTROL_PLANE = frozenset((pumping.CONTROL, pumping.DELIVERED, pumping.FAILED))


class Transport:
    """A connection on aioquic alone.

    Attributes:
        events: What happened, oldest first: aioquic's own queue.
    """

    __slots__ = ("_peer", "_quic", "events")

    def __init__(self, quic: QuicConnection, peer: Any) -> None:
        private.silence(quic)
        self._quic = quic
        self._peer = peer
        self.events: deque[Any] = private.events_of(quic)

    # In and out.

    def connect(self, now: float) -> None:
        """Begin the handshake."""
        self._quic.connect(self._peer, now)

    def receive(self, data: bytes, now: float) -> None:
        """Take a datagram."""
        # The socket is connected: the peer has one address, whatever form the kernel gives it.
        self._quic.receive_datagram(data, self._peer, now)

    def datagrams(self, now: float) -> list[bytes]:
        """Return what is to be sent now."""
        return [data for data, _ in self._quic.datagrams_to_send(now)]

    def timer(self) -> float | None:
        """Return when `handle_timer` is due."""
        return self._quic.get_timer()

    def handle_timer(self, now: float) -> None:
        """Let the timer fire."""
        self._quic.handle_timer(now)

    # Streams.

    def open(self, data: bytes, fin: bool, *, uni: bool = False) -> int:
        """Open a stream with its first bytes; its number, or -1 when the connection is over."""
        stream_id = self._quic.get_next_available_stream_id(is_unidirectional=uni)
        self._quic.send_stream_data(stream_id, data, fin)
        return stream_id

    def send(self, stream_id: int, data: bytes, fin: bool) -> bool:
        """Send more on a stream; False if the peer has stopped it."""
        try:
            self._quic.send_stream_data(stream_id, data, fin)
        except (RuntimeError, ValueError):
            return False
        return True

    def is_blocked(self, stream_id: int) -> bool | None:
        """Whether a stream waits for the peer to allow more; None: there is no such stream."""
        return private.is_blocked(self._quic, stream_id)

    def give_up(self, stream_id: int, code: int) -> None:
        """End both halves of a stream: STOP_SENDING and RESET_STREAM."""
        self._quic.stop_stream(stream_id, code)
        self._quic.reset_stream(stream_id, code)

    # The connection.

    def ping(self) -> None:
        """Have the peer show that it is there, and see that this side is."""
        self._quic.send_ping(0)

    def close(self, code: int) -> None:
        """Close it, unless it is closed."""
        self._quic.close(error_code=code)

    @property
    def is_closing(self) -> bool:
        """Whether either side closed it; its end is an event when the closing period is over."""
        return private.is_closing(self._quic)

    def skip_closing_period(self) -> None:
        """Have the end now. RFC 9000 section 10.2 has it wait for stray packets, which matter to a
        server's port and not to a socket that goes away."""
        timer = self._quic.get_timer()
        if timer is not None:
            self._quic.handle_timer(timer)

    def free(self) -> None:
        """Give back what it holds; only what has come may still be asked for."""


class Hub:
    """A pump and the connections on it.

    Attributes:
        threaded: Whether the pump's own thread does the packets.
    """

    def __init__(self) -> None:
        self.pump = Pump()
        self.threaded = False
        self._transports: dict[int, PumpTransport] = {}

    def pull(self, other: Callable[[Event], None] | None = None) -> None:
        """Take all that the pump has to tell; what is no connection's goes to `other`."""
        transports = self._transports
        while events := self.pump.events():
            for event in events:
                transport = transports.get(event.connection)
                if transport is not None:
                    transport.take(event)
                elif other is not None:
                    other(event)

    def add(self, handle: int, transport: "PumpTransport") -> None:
        self._transports[handle] = transport

    def remove(self, handle: int) -> None:
        self._transports.pop(handle, None)


class PumpTransport(Transport):
    """A connection that the pump takes over once its handshake is complete.

    Args:
        quic: The connection, before its handshake.
        peer: The address of its connected socket.
        hub: The pump; without one it has a pump of its own.
        front: Who reads the streams (`dataplane.pump.FRONT_*`).
        socket: The number of its socket in the pump.

    Attributes:
        handle: The pump's, 0 before it has the connection.
        on_event: Is told when something happened that the pump's thread brought.
    """

    __slots__ = ("_hand_over", "_hub", "_pump", "handle", "on_event")

    def __init__(
        self,
        quic: QuicConnection,
        peer: Any,
        hub: Hub | None = None,
        front: int = pumping.FRONT_EVENTS,
        socket: int = 0,
    ) -> None:
        super().__init__(quic, pumping.path_of(peer))
        self._hub = hub or Hub()
        self._pump = self._hub.pump
        self._hand_over = HandOver(quic, self._pump, front, socket)
        self.handle = 0
        self.on_event: Callable[[], None] | None = None

    def take(self, event: Event) -> None:
        """Take note of what the pump tells of this connection."""
        kind = event.kind
        if kind == pumping.DATA:
            self.events.append(
                StreamDataReceived(
                    data=event.body, end_stream=bool(event.flags), stream_id=event.stream
                )
            )
        elif kind == pumping.RESET:
            self.events.append(StreamReset(error_code=event.number, stream_id=event.stream))
        elif kind in _CONTROL_PLANE:
            self._hand_over.on_event(event)
        if self.on_event is not None:
            self.on_event()

    # In and out.

    def receive(self, data: bytes, now: float) -> None:
        hand_over = self._hand_over
        hand_over.receive(data, self._peer, now, time.time_ns())
        if not self.handle and hand_over.adopted:
            self.handle = hand_over.handle
            self._hub.add(self.handle, self)
        if not self._hub.threaded:
            self._hub.pull()

    def datagrams(self, now: float) -> list[bytes]:
        found = [data for data, _ in self._hand_over.transmit(now)]
        handle = self.handle
        if handle and not self._hub.threaded:
            build, now_ns = self._pump.build, int(now * 1e9)
            while (built := build(handle, now_ns)) is not None:
                found.append(built[0])
        return found

    def timer(self) -> float | None:
        due = self._hand_over.get_timer()
        if self.handle and not self._hub.threaded:
            due_ns = self._pump.timer(self.handle)
            if due_ns < pumping.NEVER and (due is None or due_ns / 1e9 < due):
                return due_ns / 1e9
        return due

    def handle_timer(self, now: float) -> None:
        due = self._hand_over.get_timer()
        if due is not None and due <= now:
            self._hand_over.handle_timer(now)
        if self.handle and not self._hub.threaded:
            # Rounded up, since a moment in float seconds may lie before the nanosecond meant.
            self._pump.on_timer(self.handle, int(now * 1e9) + 1000)
            self._hub.pull()

    # Streams.

    def open(self, data: bytes, fin: bool, *, uni: bool = False) -> int:
        stream_id = self._pump.open(self.handle, uni)
        if stream_id >= 0 and (data or fin):
            self._pump.send(self.handle, stream_id, data, fin)
        return stream_id

    def send(self, stream_id: int, data: bytes, fin: bool) -> bool:
        return self._pump.send(self.handle, stream_id, data, fin)

    def is_blocked(self, stream_id: int) -> bool | None:
        return self._pump.is_waiting(self.handle, stream_id)

    def give_up(self, stream_id: int, code: int) -> None:
        self._pump.stop(self.handle, stream_id, code)
        self._pump.reset(self.handle, stream_id, code)

    # The connection.

    @property
    def heard_ns(self) -> int:
        """When the pump last took a packet of it, 0 for never."""
        return self._pump.last_received(self.handle) if self.handle else 0

    def ping(self) -> None:
        if self.handle:
            self._pump.ping(self.handle)

    def close(self, code: int) -> None:
        self._hand_over.close(code, "")

    def skip_closing_period(self) -> None:
        timer = self._hand_over.get_timer()
        if timer is not None:
            self._hand_over.handle_timer(timer)

    def free(self) -> None:
        self._hub.remove(self.handle)
        self._hand_over.forget()
        self.handle = 0
        self.on_event = None
