"""The client's side of groups B and C: HTTP/1.1 over TCP, an answer as server-sent events.

`ResponseReader` is sans-IO: an answer may be split anywhere. A connection has one request at a time
and is used again once its answer is whole; so many stand open before the run, and when all are in
use another one is opened, whose handshake is part of that request's time, as it would be for a
user.
"""

import select
import socket
import time
from collections.abc import Callable

import msgspec

from bench.noqueue.exchange import Exchange
from dataplane.kinds import Address

_READ = 1 << 16
_CONNECT_S = 5.0
_HEAD_END = b"\r\n\r\n"
_EVENT_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"


class BadAnswerError(Exception):
    """What came is no HTTP answer."""


class ResponseReader:
    """One answer as it comes in.

    Attributes:
        status: 0 before the status line is there.
        fields: Header fields, names in lower case.
        whole: Whether the answer is complete.
        body: What came that is no event stream.
    """

    def __init__(self) -> None:
        self.status = 0
        self.fields: dict[str, str] = {}
        self.whole = False
        self.body = b""
        self._data = b""
        self._left = 0  # of a chunk, or of the whole body
        self._chunked = False
        self._events = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes; return the events that became whole, without `data: `.

        Raises:
            BadAnswerError: They are no answer.
        """
        self._data += data
        try:
            if not self.status and not self._read_head():
                return []
            self._read_body()
        except (ValueError, IndexError) as error:
            raise BadAnswerError(f"this is no HTTP answer: {self._data[:60]!r}") from error
        if not self.fields.get("content-type", "").startswith("text/event-stream"):
            self.body, self._events = self.body + self._events, b""
            return []
        *events, self._events = self._events.split(_EVENT_END)
        return [event[len(_DATA) :] for event in events if event.startswith(_DATA)]

    def _read_head(self) -> bool:
        head, separator, rest = self._data.partition(_HEAD_END)
        if not separator:
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        for line in lines:
            name, _, value = line.partition(":")
            self.fields[name.lower()] = value.strip()
        self._chunked = self.fields.get("transfer-encoding") == "chunked"
        if not self._chunked:
            self._left = int(self.fields.get("content-length", "0"))
        self.status = int(first.split(" ")[1])
        self._data = rest
        return True

    def _read_body(self) -> None:
        if not self._chunked:
            self._events += self._data[: self._left]
            self._left -= len(self._data)
            self._data = b""
            self.whole = self._left <= 0
            return
        while not self.whole:
            line, separator, rest = self._data.partition(b"\r\n")
            if not separator:
                return
            size = int(line, 16)
            if len(rest) < size + 2:
                return
            self._events += rest[:size]
            self._data = rest[size + 2 :]
            self.whole = size == 0


class _Last(msgspec.Struct):
    """What this side reads of an event."""

    token_ids: list[int] = []
    timings_us: dict[str, int] = {}


_decode_event = msgspec.json.Decoder(_Last).decode


def read_event(exchange: Exchange, event: bytes, read_ns: int) -> None:
    """Count the tokens of an event of groups B and C."""
    if event != _DONE:
        last = _decode_event(event)
        exchange.take(len(last.token_ids), read_ns)
        exchange.says_us.update(last.timings_us)


EventReader = Callable[[Exchange, bytes, int], None]


def encode_post(path: str, body: bytes) -> bytes:
    """Return a whole request."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Connection:
    __slots__ = ("exchange", "reader", "socket")

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.exchange: Exchange | None = None
        self.reader = ResponseReader()


class HttpWire:
    """Connections to one server.

    Args:
        address: Where.
        read: Makes sense of an event.
        connections: How many stand open before the first request.
    """

    def __init__(
        self, address: Address, read: EventReader = read_event, connections: int = 32
    ) -> None:
        self.ended: list[Exchange] = []
        self._address = address
        self._read = read
        self._connections = connections
        self._epoll: select.epoll | None = None
        self._by_fd: dict[int, _Connection] = {}
        self._idle: list[_Connection] = []

    def connect(self, epoll: select.epoll) -> None:
        """Open the connections."""
        self._epoll = epoll
        self._idle = [self._open() for _ in range(self._connections)]

    def _open(self) -> _Connection:
        assert self._epoll is not None
        sock = socket.create_connection(self._address, _CONNECT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        connection = self._by_fd[sock.fileno()] = _Connection(sock)
        self._epoll.register(sock, select.EPOLLIN)
        return connection

    def send(self, exchange: Exchange) -> None:
        """Send a request."""
        try:
            connection = self._idle.pop() if self._idle else self._open()
            connection.exchange = exchange
            connection.reader = ResponseReader()
            # A few hundred bytes always fit the buffer of a connection that has none in it.
            connection.socket.send(exchange.payload)
        except OSError as error:
            exchange.break_off(str(error), time.monotonic_ns())
            self.ended.append(exchange)

    def give_up(self, exchange: Exchange) -> None:
        """Leave: close the connection, as HTTP/1.1 clients do."""
        for connection in self._by_fd.values():
            if connection.exchange is exchange:
                return self._close(connection)
        return None

    def readable(self, descriptor: int) -> None:
        """Take what came on a socket."""
        connection = self._by_fd.get(descriptor)
        if connection is None:
            return
        try:
            data = connection.socket.recv(_READ)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(connection, str(error))
            return
        read_ns = time.monotonic_ns()
        if not data:
            self._break(connection, "the server closed the connection")
            return
        try:
            self._take(connection, data, read_ns)
        except (BadAnswerError, msgspec.DecodeError) as error:
            self._break(connection, str(error))

    def _take(self, connection: _Connection, data: bytes, read_ns: int) -> None:
        exchange, reader = connection.exchange, connection.reader
        if exchange is None:
            raise BadAnswerError("an answer came that nobody asked for")
        events = reader.feed(data)
        if reader.status:
            exchange.decide(reader.status, read_ns)
        for event in events:
            self._read(exchange, event, read_ns)
        if reader.whole:
            if reader.status != 200:
                exchange.reason = reader.body.decode(errors="replace")
                exchange.retry_after_ms = 1000 * int(reader.fields.get("retry-after", "0"))
            exchange.complete(read_ns)
            self.ended.append(exchange)
            connection.exchange = None
            self._idle.append(connection)

    def _break(self, connection: _Connection, why: str) -> None:
        exchange = connection.exchange
        if exchange is not None:
            exchange.break_off(why, time.monotonic_ns())
            self.ended.append(exchange)
        else:
            self._idle.remove(connection)
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        assert self._epoll is not None
        del self._by_fd[connection.socket.fileno()]
        self._epoll.unregister(connection.socket)
        connection.socket.close()

    def flush(self) -> None:
        """Nothing waits here."""

    def due_ns(self) -> int | None:
        """There is no timer."""
        return None

    def on_timer(self) -> None:
        """There is no timer."""

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._by_fd.values()):
            self._close(connection)
        self._idle.clear()
