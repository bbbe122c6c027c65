"""The loop of the TCP generators: one thread, one epoll, plain or TLS.

Why not an HTTP library: each costs more a request than the servers do, and what is measured would
be it. The rules that hold here: a time ends with the read that completes the answer; whatever
cannot be sent at once waits in order; when nothing comes for `STALL_S`, the run ends in words.
"""

import array
import contextlib
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from bench.clients import Outcome, WrongAnswerError
from dataplane.load.tally import Schedule

STALL_S = 15.0
_CONNECT_S = 10.0
_READ = 65_536
_SPIN_S = 0.0001
"""The last stretch before a request is due is not slept: waking takes about as long."""
_AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Wire(Protocol):
    """One connection's half of a protocol: `http1.Http1`, `http2.Http2`."""

    @property
    def opening(self) -> bytes: ...
    @property
    def alpn(self) -> str: ...
    @property
    def in_flight(self) -> int: ...
    def begin(self, began_ns: int) -> bytes: ...
    def receive(self, data: bytes) -> tuple[tuple[int, ...], bytes]: ...


class _Connection:
    """A socket and what waits to be sent on it."""

    __slots__ = ("roomy", "socket", "waiting", "wire")

    def __init__(self, sock: socket.socket, wire: Wire) -> None:
        self.socket = sock
        self.wire = wire
        self.waiting: deque[memoryview] = deque()
        self.roomy = False


class TcpLoad:
    """Connections to one server on 127.0.0.1.

    Args:
        port: The server's.
        wire: Makes each connection's half of the protocol.
        connections: How many.
        streams: How many requests may be in flight on each.
        ca: A CA file to verify TLS with; None: no TLS.
    """

    def __init__(
        self,
        port: int,
        wire: Callable[[], Wire],
        connections: int,
        streams: int,
        ca: str | None = None,
    ) -> None:
        self._port = port
        self._wire = wire
        self._count = connections
        self._streams = streams
        self._context = ssl.create_default_context(cafile=ca) if ca else None
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._roomy: deque[_Connection] = deque()
        self._times = array.array("q")

    def connect(self) -> None:
        """Open every connection and say what the protocol begins with."""
        for _ in range(self._count):
            wire = self._wire()
            sock = socket.create_connection(("127.0.0.1", self._port), _CONNECT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                self._context.set_alpn_protocols([wire.alpn])
                sock = self._context.wrap_socket(sock, server_hostname="localhost")
            sock.setblocking(False)
            connection = _Connection(sock, wire)
            self._connections[sock.fileno()] = connection
            self._epoll.register(sock, select.EPOLLIN)
            if wire.opening:
                self._send(connection, wire.opening)

    def close(self) -> None:
        """Close them."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.socket.close()
        self._connections.clear()
        self._epoll.close()

    def run(self, requests: int, rate: float | None = None) -> Outcome:
        """Send so many requests, as fast as they are answered or `rate` a second.

        Raises:
            WrongAnswerError: An answer is another one, none came for `STALL_S`, or the server
                closed.
        """
        self._times = times = array.array("q")
        self._roomy.clear()
        for connection in self._connections.values():
            connection.roomy = True
            self._roomy.append(connection)
        cpu, start = time.process_time(), time.monotonic_ns()
        moved = start
        schedule = Schedule(requests, rate, start)
        while len(times) < requests:
            self._issue(schedule)
            ready = self._wait(schedule)
            now = time.monotonic_ns()
            if ready or schedule.taken == len(times):
                moved = now
            elif now - moved > STALL_S * 1e9:
                raise WrongAnswerError(f"nothing was answered for {STALL_S:g} s")
            for descriptor, events in ready:
                self._serve(self._connections[descriptor], events)
        seconds = (time.monotonic_ns() - start) / 1e9
        return Outcome(np.array(times) / 1000, seconds, time.process_time() - cpu)

    def _issue(self, schedule: Schedule) -> None:
        """Begin what is due where there is room, a connection after the other."""
        roomy = self._roomy
        while roomy:
            began_ns = schedule.take(time.monotonic_ns())
            if began_ns is None:
                return
            connection = roomy.popleft()
            data = connection.wire.begin(began_ns)
            if data:
                self._send(connection, data)
            if connection.wire.in_flight < self._streams:
                roomy.append(connection)
            else:
                connection.roomy = False

    def _wait(self, schedule: Schedule) -> list[tuple[int, int]]:
        due_ns = schedule.next_ns() if self._roomy else None
        if due_ns is None:
            return self._epoll.poll(1.0)
        # epoll counts in milliseconds, select in microseconds.
        left = due_ns / 1e9 - time.monotonic() - _SPIN_S
        if left > 0:
            select.select([self._epoll.fileno()], [], [], min(left, 1.0))
        return self._epoll.poll(0)

    def _serve(self, connection: _Connection, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush(connection)
        if not events & ~select.EPOLLOUT:
            return
        sock, wire = connection.socket, connection.wire
        while True:
            try:
                data = sock.recv(_READ)
            except _AGAIN:
                break
            read_ns = time.monotonic_ns()
            if not data:
                raise WrongAnswerError("the server closed a connection")
            ended, more = wire.receive(data)
            for began_ns in ended:
                self._times.append(read_ns - began_ns)
            if more:
                self._send(connection, more)
            if not isinstance(sock, ssl.SSLSocket) or not sock.pending():
                break
        if not connection.roomy and wire.in_flight < self._streams:
            connection.roomy = True
            self._roomy.append(connection)

    def _send(self, connection: _Connection, data: bytes) -> None:
        waiting = connection.waiting
        if waiting:
            waiting.append(memoryview(data))
            return
        try:
            sent = connection.socket.send(data)
        except _AGAIN:
            sent = 0
        if sent < len(data):
            waiting.append(memoryview(data)[sent:])
            self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        """Send what waits, as far as the socket takes it, and have the rest come up again."""
        waiting = connection.waiting
        try:
            while waiting:
                rest = waiting[0]
                sent = connection.socket.send(rest)
                if sent < len(rest):
                    waiting[0] = rest[sent:]
                else:
                    waiting.popleft()
        except _AGAIN:
            pass
        mask = select.EPOLLIN | (select.EPOLLOUT if waiting else 0)
        self._epoll.modify(connection.socket, mask)
