"""The client's side of group A: `prompt/1` over a few QUIC connections.

On aioquic, without asyncio. A moment counts from when the datagram was read, not from when the
interpreter got round to it; what was begun in one turn of the loop is sent at its end.
"""

import contextlib
import select
import socket
import time
from pathlib import Path

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    StreamDataReceived,
    StreamReset,
)

from bench.noqueue.exchange import Exchange
from dataplane import quic as private
from dataplane.client.link import closing_words
from dataplane.client.wire import AnswerReader, reset_words
from dataplane.errors import DataplaneError, Status, UnavailableError
from dataplane.kinds import Address
from dataplane.prompt1 import ALPN

_DATAGRAM = 2048
_BUFFER = 1 << 20
_HANDSHAKE_S = 10.0
_IDLE_S = 60.0
_CANCELLED = 0


class _Connection:
    """One connection and its requests in flight, by stream."""

    def __init__(self, address: Address, configuration: QuicConfiguration) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self.socket.connect(address)
        self.socket.setblocking(False)
        self.quic = QuicConnection(configuration=configuration)
        private.silence(self.quic)
        self.address = address
        self.up = False
        self.lost: str | None = None
        self.in_flight: dict[int, tuple[Exchange, AnswerReader]] = {}
        self.quic.connect(address, time.monotonic())

    def transmit(self) -> None:
        """Send what is due; what the socket does not take, QUIC repeats."""
        with contextlib.suppress(BlockingIOError):
            for data, _ in self.quic.datagrams_to_send(time.monotonic()):
                self.socket.send(data)


class QuicWire:
    """Connections to one daemon.

    Args:
        address: Where, IPv4.
        ca: The file to verify it with.
        connections: How many, used in turn.
    """

    def __init__(self, address: Address, ca: Path, connections: int = 4) -> None:
        self.ended: list[Exchange] = []
        self._address = address
        self._configuration = QuicConfiguration(
            is_client=True,
            alpn_protocols=[ALPN],
            cadata=ca.read_bytes(),
            server_name=address[0],
            idle_timeout=_IDLE_S,
        )
        self._count = connections
        self._connections: list[_Connection] = []
        self._by_fd: dict[int, _Connection] = {}
        self._next = 0
        self._touched: set[_Connection] = set()

    def connect(self, epoll: select.epoll) -> None:
        """Complete every handshake.

        Raises:
            UnavailableError: One failed.
        """
        for _ in range(self._count):
            connection = _Connection(self._address, self._configuration)
            self._connections.append(connection)
            self._by_fd[connection.socket.fileno()] = connection
            epoll.register(connection.socket, select.EPOLLIN)
            self._touched.add(connection)
        until = time.monotonic() + _HANDSHAKE_S
        while not all(connection.up for connection in self._connections):
            self.flush()
            for descriptor, _ in epoll.poll(0.02):
                self.readable(descriptor)
            self.on_timer()
            lost = next((one.lost for one in self._connections if one.lost is not None), None)
            if lost is not None or time.monotonic() > until:
                raise UnavailableError(lost or "no handshake within 10 s")
        self.flush()

    def send(self, exchange: Exchange) -> None:
        """Hand a request to the next connection."""
        connection = self._connections[self._next]
        self._next = (self._next + 1) % len(self._connections)
        if connection.lost is not None:
            exchange.break_off(connection.lost, time.monotonic_ns())
            self.ended.append(exchange)
            return
        stream_id = connection.quic.get_next_available_stream_id()
        connection.in_flight[stream_id] = (exchange, AnswerReader())
        connection.quic.send_stream_data(stream_id, exchange.payload, end_stream=True)
        self._touched.add(connection)

    def give_up(self, exchange: Exchange) -> None:
        """Leave: STOP_SENDING and RESET_STREAM."""
        for connection in self._connections:
            for stream_id, (other, _) in connection.in_flight.items():
                if other is exchange:
                    del connection.in_flight[stream_id]
                    self._abandon(connection, stream_id)
                    return

    def _abandon(self, connection: _Connection, stream_id: int) -> None:
        # One that waits for the peer to allow more streams cannot be reset before it is sent.
        if private.is_blocked(connection.quic, stream_id) is False:
            connection.quic.stop_stream(stream_id, _CANCELLED)
            connection.quic.reset_stream(stream_id, _CANCELLED)
            self._touched.add(connection)

    def readable(self, descriptor: int) -> None:
        """Take what came on a socket."""
        connection = self._by_fd[descriptor]
        datagrams = []
        try:
            while True:
                datagrams.append(connection.socket.recv(_DATAGRAM))
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(connection, str(error))
        read_ns = time.monotonic_ns()
        for data in datagrams:
            connection.quic.receive_datagram(data, connection.address, read_ns / 1e9)
        self._take_events(connection, read_ns)

    def _take_events(self, connection: _Connection, read_ns: int) -> None:
        self._touched.add(connection)
        while (event := connection.quic.next_event()) is not None:
            if isinstance(event, StreamDataReceived):
                self._take_data(connection, event, read_ns)
            elif isinstance(event, StreamReset):
                found = connection.in_flight.pop(event.stream_id, None)
                if found is not None:
                    found[0].break_off(reset_words(event.error_code), read_ns)
                    self.ended.append(found[0])
            elif isinstance(event, HandshakeCompleted):
                connection.up = True
            elif isinstance(event, ConnectionTerminated):
                self._lose(connection, closing_words(event, connection.up))

    def _take_data(self, connection: _Connection, event: StreamDataReceived, read_ns: int) -> None:
        found = connection.in_flight.get(event.stream_id)
        if found is None:
            return
        exchange, reader = found
        try:
            tokens = len(reader.feed(event.data, event.end_stream))
        except DataplaneError as error:
            del connection.in_flight[event.stream_id]
            exchange.break_off(str(error), read_ns)
            self.ended.append(exchange)
            return
        verdict = reader.verdict
        if verdict is not None and not exchange.verdict_ns:
            exchange.decide(verdict.status, read_ns)
            exchange.retry_after_ms = verdict.retry_after_ms
            exchange.says_us["queue"] = verdict.queue_us
            if verdict.status == Status.OK:
                exchange.says_us["ingress"] = verdict.ingress_us
        exchange.take(tokens, read_ns)
        if event.end_stream:
            del connection.in_flight[event.stream_id]
            exchange.reason = reader.reason
            exchange.complete(read_ns)
            self.ended.append(exchange)

    def _lose(self, connection: _Connection, why: str) -> None:
        if connection.lost is None:
            connection.lost = why
            now_ns = time.monotonic_ns()
            for exchange, _ in connection.in_flight.values():
                exchange.break_off(why, now_ns)
                self.ended.append(exchange)
            connection.in_flight.clear()

    def flush(self) -> None:
        """Send what is due."""
        for connection in self._touched:
            if connection.lost is None:
                try:
                    connection.transmit()
                except OSError as error:
                    self._lose(connection, str(error))
        self._touched.clear()

    def due_ns(self) -> int | None:
        """Return when the next of the connections' timers is due."""
        timers = [one.quic.get_timer() for one in self._connections if one.lost is None]
        return min((round(timer * 1e9) for timer in timers if timer is not None), default=None)

    def on_timer(self) -> None:
        """Let the timers fire that are due."""
        now = time.monotonic()
        for connection in self._connections:
            timer = connection.quic.get_timer()
            if connection.lost is None and timer is not None and timer <= now:
                connection.quic.handle_timer(now)
                self._take_events(connection, time.monotonic_ns())

    def close(self) -> None:
        """Close every connection and tell the daemon."""
        for connection in self._connections:
            if connection.lost is None:
                connection.quic.close()
                with contextlib.suppress(OSError):
                    connection.transmit()
            connection.socket.close()
        self._connections.clear()
        self._by_fd.clear()
