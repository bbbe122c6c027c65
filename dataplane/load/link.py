"""One connection of a load: a socket, QUIC without asyncio, and the requests in flight on it.

Datagrams are read in one go and acted on afterwards, so that a time is that of the reading and not
of the turn that the interpreter had for it. Whatever ends a connection (a close, a time-out, a
refused datagram) counts its requests as lost; nothing is raised for it.
"""

import contextlib
import socket
import time

from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    StreamDataReceived,
    StreamReset,
)

from dataplane.client.link import closing_words
from dataplane.client.transport import Transport
from dataplane.load.tally import LOST, RESET, Tally
from dataplane.load.wire import Dialogue, Exchange

BATCH = 64
_DATAGRAM = 2048
_REFUSED = "nobody listens there"
_FIRST_UNI = 2
"""A client's first unidirectional stream (RFC 9000 section 2.1); none is opened before."""
_OVER = "the connection is closing"


class Link:
    """A connection.

    Attributes:
        up: Whether the handshake is complete.
        lost: Why it is over, or None.
        moved: Whether something came that the caller waits for; the caller clears it.
        heard_ns: When a datagram last came.
        tally: Where the requests of this run are counted.
        exchanges: Requests in flight, by stream.
        socket, quic: What it runs on; the socket is connected.
        roomy, touched, timer_at: The loop's own marks.
    """

    # fmt: off
    __slots__ = (
        "_begun_bytes", "_dialogue", "_events", "exchanges", "heard_ns", "lost", "moved", "quic",
        "roomy", "socket", "tally", "timer_at", "touched", "up",
    )
    # fmt: on

    def __init__(self, sock: socket.socket, quic: Transport, dialogue: Dialogue) -> None:
        self.exchanges: dict[int, Exchange] = {}
        self.up = self.moved = self.roomy = self.touched = False
        self.lost: str | None = None
        self._begun_bytes = 0
        self.tally = Tally(0)
        self.timer_at: float | None = None
        self._dialogue = dialogue
        self.socket = sock
        self.quic = quic
        self._events = quic.events
        self.heard_ns = time.monotonic_ns()
        self.quic.connect(self.heard_ns / 1e9)

    @property
    def usable(self) -> bool:
        """Whether it takes new requests."""
        return self.up and self.lost is None and self._dialogue.taking

    # Out.

    def begin(self, began_ns: int) -> int:
        """Hand a request to the transport; the bytes of requests since it last sent."""
        request = self._dialogue.request
        stream_id = self.quic.open(request, True)
        self.exchanges[stream_id] = Exchange(began_ns)
        if stream_id < 0:
            self.lose(_OVER)
        self._begun_bytes += len(request)
        return self._begun_bytes

    def transmit(self, now: float) -> float | None:
        """Send what is due; return when the connection's timer is."""
        self._begun_bytes = 0
        send = self.socket.send
        try:
            for data in self.quic.datagrams(now):
                send(data)
        except BlockingIOError:
            pass  # The rest of the batch is dropped; QUIC repeats it.
        except OSError as error:
            self.fail(error)
            return None
        return self.quic.timer()

    def ping(self) -> None:
        """Keep an idle connection from timing out."""
        self.quic.ping()

    def close(self) -> None:
        """Tell the server, if it is still there. The socket is the caller's to close."""
        if self.lost is None:
            self.quic.close(self._dialogue.close_code)
            with contextlib.suppress(OSError):
                for data in self.quic.datagrams(time.monotonic()):
                    self.socket.send(data)
            self.lost = "closed"

    def free(self) -> None:
        """Give back what the connection holds; the socket is the caller's to close."""
        self.quic.free()

    # In.

    def read(self) -> list[bytes]:
        """Return the datagrams that wait, up to a batch."""
        received: list[bytes] = []
        take, receive = received.append, self.socket.recv
        try:
            for _ in range(BATCH):
                take(receive(_DATAGRAM))
        except BlockingIOError:
            pass
        except OSError as error:
            self.fail(error)
        return received

    def receive(self, datagrams: list[bytes], read_ns: int) -> None:
        """Act on datagrams that were read at `read_ns`."""
        now = read_ns / 1e9
        self.heard_ns = read_ns
        receive, events = self.quic.receive, self._events
        for data in datagrams:
            receive(data, now)
            if events:
                self.take_events(read_ns)
        self.see_closing()

    def see_closing(self) -> None:
        """Have a connection that either side closed be over now."""
        if self.lost is None and self.quic.is_closing:
            self.quic.skip_closing_period()
            self.take_events(time.monotonic_ns())

    def handle_timer(self, now: float) -> None:
        """Let the connection's timer fire."""
        self.quic.handle_timer(now)
        self.take_events(time.monotonic_ns())

    def take_events(self, read_ns: int) -> None:
        """Act on what the connection tells."""
        events = self._events
        while events:
            event = events.popleft()
            kind = event.__class__
            if kind is StreamDataReceived:
                self._take_data(event, read_ns)
            elif kind is StreamReset:
                if self.exchanges.pop(event.stream_id, None) is not None:
                    self.moved = True
                    self.tally.failed(RESET)
            elif kind is HandshakeCompleted:
                self.up = self.moved = True
                for _, data in self._dialogue.opening(_FIRST_UNI):
                    self.quic.open(data, False, uni=True)
            elif kind is ConnectionTerminated:
                self.lose(closing_words(event, self.up))

    def _take_data(self, event: StreamDataReceived, read_ns: int) -> None:
        exchange = self.exchanges.get(event.stream_id)
        if exchange is None:
            self._dialogue.take_other(event.stream_id, event.data, event.end_stream)
            return
        self.moved = True
        waiting = not exchange.status
        self._dialogue.take(exchange, event.stream_id, event.data, event.end_stream)
        if waiting and exchange.status:
            self.tally.verdict(read_ns - exchange.began_ns, exchange.ingress_us)
        if event.end_stream:
            del self.exchanges[event.stream_id]
            self.tally.answered(exchange.status, read_ns - exchange.began_ns)

    def fail(self, error: OSError) -> None:
        """The socket refused."""
        refused = isinstance(error, ConnectionRefusedError)
        self.lose(_REFUSED if refused else error.strerror or str(error))

    def lose(self, why: str) -> None:
        """The connection is over, and with it what was in flight on it."""
        if self.lost is None:
            self.lost = why
            self.tally.failed(LOST, len(self.exchanges))
            self.exchanges.clear()
