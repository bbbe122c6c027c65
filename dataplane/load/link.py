"""One connection of a load: a socket, aioquic without asyncio, and the requests in flight on it.

Datagrams are read in one go and acted on afterwards, so that a time is that of the reading and not
of the turn that the interpreter had for it. Whatever ends a connection (a close, a time-out, a
refused datagram) counts its requests as lost; nothing is raised for it.
"""

import contextlib
import socket
import time
from typing import Any

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    StreamDataReceived,
    StreamReset,
)

from dataplane import quic as private
from dataplane.client.link import closing_words
from dataplane.errors import UnavailableError
from dataplane.load.tally import LOST, RESET, Tally
from dataplane.load.wire import Dialogue, Exchange

BATCH = 64
_DATAGRAM = 2048
_BUFFER = 1 << 20
_REFUSED = "nobody listens there"


class Link:
    """A connection.

    Attributes:
        up: Whether the handshake is complete.
        lost: Why it is over, or None.
        moved: Whether something came that the caller waits for; the caller clears it.
        heard_ns: When a datagram last came.
        tally: Where the requests of this run are counted.
        exchanges: Requests in flight, by stream.
        roomy, touched, timer_at: The loop's own marks.
    """

    # fmt: off
    __slots__ = (
        "_begun_bytes", "_dialogue", "_events", "_peer", "exchanges", "heard_ns", "lost", "moved",
        "quic", "roomy", "socket", "tally", "timer_at", "touched", "up",
    )
    # fmt: on

    def __init__(
        self,
        family: socket.AddressFamily,
        peer: Any,
        configuration: QuicConfiguration,
        dialogue: Dialogue,
    ) -> None:
        self.exchanges: dict[int, Exchange] = {}
        self.up = self.moved = self.roomy = self.touched = False
        self.lost: str | None = None
        self._begun_bytes = 0
        self.tally = Tally(0)
        self.timer_at: float | None = None
        self._dialogue = dialogue
        self._peer = peer
        try:
            self.socket = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise UnavailableError(f"a socket cannot be had: {error.strerror}") from error
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            self.socket.connect(peer)
        except OSError as error:
            self.socket.close()
            raise UnavailableError(error.strerror or str(error)) from error
        self.quic = QuicConnection(configuration=configuration)
        private.silence(self.quic)
        self._events = private.events_of(self.quic)
        self.heard_ns = time.monotonic_ns()
        self.quic.connect(peer, self.heard_ns / 1e9)

    @property
    def usable(self) -> bool:
        """Whether it takes new requests."""
        return self.up and self.lost is None and self._dialogue.taking

    # Out.

    def begin(self, began_ns: int) -> int:
        """Hand a request to the transport; the bytes of requests since it last sent."""
        quic = self.quic
        stream_id = quic.get_next_available_stream_id()
        self.exchanges[stream_id] = Exchange(began_ns)
        request = self._dialogue.request
        quic.send_stream_data(stream_id, request, end_stream=True)
        self._begun_bytes += len(request)
        return self._begun_bytes

    def transmit(self, now: float) -> float | None:
        """Send what is due; return when the connection's timer is."""
        self._begun_bytes = 0
        send = self.socket.send
        try:
            for data, _ in self.quic.datagrams_to_send(now):
                send(data)
        except BlockingIOError:
            pass  # The rest of the batch is dropped; QUIC repeats it.
        except OSError as error:
            self._lose(_words(error))
            return None
        return self.quic.get_timer()

    def ping(self) -> None:
        """Keep an idle connection from timing out."""
        self.quic.send_ping(0)

    def close(self) -> None:
        """Tell the server, if it is still there, and give the socket back."""
        if self.lost is None:
            self.quic.close(error_code=self._dialogue.close_code)
            with contextlib.suppress(OSError):
                for data, _ in self.quic.datagrams_to_send(time.monotonic()):
                    self.socket.send(data)
            self.lost = "closed"
        self.socket.close()

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
            self._lose(_words(error))
        return received

    def receive(self, datagrams: list[bytes], read_ns: int) -> None:
        """Act on datagrams that were read at `read_ns`."""
        now = read_ns / 1e9
        self.heard_ns = read_ns
        receive, events = self.quic.receive_datagram, self._events
        for data in datagrams:
            receive(data, self._peer, now)
            if events:
                self._take_events(read_ns)
        if self.lost is None and private.is_closing(self.quic):
            # The event comes when the closing period is over (RFC 9000 section 10.2), for which a
            # socket that goes away need not wait.
            self.handle_timer(self.quic.get_timer() or now)

    def handle_timer(self, now: float) -> None:
        """Let the connection's timer fire."""
        self.quic.handle_timer(now)
        self._take_events(time.monotonic_ns())

    def _take_events(self, read_ns: int) -> None:
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
                first = self.quic.get_next_available_stream_id(is_unidirectional=True)
                for stream_id, data in self._dialogue.opening(first):
                    self.quic.send_stream_data(stream_id, data)
            elif kind is ConnectionTerminated:
                self._lose(closing_words(event, self.up))

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

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            self.tally.failed(LOST, len(self.exchanges))
            self.exchanges.clear()


def _words(error: OSError) -> str:
    return _REFUSED if isinstance(error, ConnectionRefusedError) else error.strerror or str(error)
