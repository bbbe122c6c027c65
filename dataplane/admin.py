"""The admin port: HTTP/1.1 over TCP on h11, for probes, scrapers, dashboards and people.

Read-only, and in the packet process, so nobody who talks to it may hold up the packet loop. The
rules that follow:

- One request is answered a turn of the loop, and a long page goes out in pieces, one a turn.
- A client that takes no answer is not read from. One that is slow, with its request or with taking
  its answer, is cut off.
- So many clients at most: a new one takes the place of the one that was idle longest, so a probe
  always comes through.
- A body is never read: its request is answered and the connection closed.
- Whatever a client does ends its own connection and nothing else.
"""

import asyncio
import secrets
import socket
import time
from collections import deque
from email.utils import formatdate
from enum import Enum, auto
from functools import lru_cache

import h11

from dataplane.errors import Status
from dataplane.http_names import TITLES, VISIBLE_ID
from dataplane.pages import Page, Pages, problem
from dataplane.sockets import bind

MAX_CLIENTS = 64
REQUEST_WITHIN_S = 10.0
"""From a request's first byte, or the connection's beginning, to the header's end; and how long a
client may take nothing of its answer."""
IDLE_S = 120.0
"""Between two requests; scrapers keep their connection and ask every 15 to 60 s."""
HEADER_BYTES = 16 << 10

_TICK_S = 0.5
_PIECE = 128 << 10
_WRITE_BUFFER = 64 << 10
_TOO_LARGE = f"the request's header is over {HEADER_BYTES} bytes"


class Phase(Enum):
    """What a client is waited for with: each has its own deadline."""

    IDLE = auto()  # its next request
    REQUEST = auto()  # the rest of its request
    ANSWER = auto()  # taking its answer
    LINGER = auto()  # closing, after an answer that it may not have read yet


class AdminServer:
    """HTTP/1.1 on every address of a host.

    Args:
        pages: What is served.
        max_clients: Connections at a time.
        request_within: Seconds for a request's header, and for any progress with its answer.
        idle: Seconds between requests.

    Attributes:
        clients: Open connections; the one that did nothing longest comes first.
    """

    def __init__(
        self,
        pages: Pages,
        max_clients: int = MAX_CLIENTS,
        request_within: float = REQUEST_WITHIN_S,
        idle: float = IDLE_S,
    ) -> None:
        self.pages = pages
        self.within = {
            Phase.IDLE: idle,
            Phase.REQUEST: request_within,
            Phase.ANSWER: request_within,
            Phase.LINGER: request_within,
        }
        self._max_clients = max_clients
        self.clients: dict[Client, None] = {}
        self._servers: list[asyncio.Server] = []
        self._waiting: deque[Client] = deque()
        self._taking_turns = False
        self._tick_s = min(_TICK_S, request_within / 4)
        self._ticking: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; return the first address.

        Raises:
            UsageError: The port is taken, or the host does not resolve.
        """
        loop = asyncio.get_running_loop()
        sockets = bind("--admin", host, port, socket.SOCK_STREAM)
        address: tuple[str, int] = sockets[0].getsockname()[:2]
        for sock in sockets:
            self._servers.append(await loop.create_server(lambda: Client(self), sock=sock))
        self._tick()
        return address

    async def stop(self) -> None:
        """Stop listening, and cut every client off."""
        if self._ticking is not None:
            self._ticking.cancel()
        for server in self._servers:
            server.close()
        for client in list(self.clients):
            client.abort()
        await asyncio.sleep(0)  # The transports close their sockets in the loop's next turn.

    # What clients tell.

    def joined(self, client: "Client") -> None:
        """A connection began; another one may have to make room."""
        self.clients[client] = None
        if len(self.clients) > self._max_clients:
            done = (Phase.IDLE, Phase.LINGER)
            idle = (each for each in self.clients if each.phase in done)
            next(idle, next(iter(self.clients))).abort()

    def acted(self, client: "Client") -> None:
        """A client sent something, or took something."""
        if client in self.clients:
            del self.clients[client]
            self.clients[client] = None

    def left(self, client: "Client") -> None:
        self.clients.pop(client, None)

    def plan(self, client: "Client") -> None:
        """Give a client a turn: one client, so one page, for each turn of the loop."""
        self._waiting.append(client)
        if not self._taking_turns:
            self._taking_turns = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._waiting.popleft().go_on()
        self._taking_turns = bool(self._waiting)
        if self._taking_turns:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _tick(self) -> None:
        """Look for late clients, and at the slots: their ages are as exact as that."""
        self.pages.look()
        now = time.monotonic()
        for client in list(self.clients):
            client.check(now)
        self._ticking = asyncio.get_running_loop().call_later(self._tick_s, self._tick)


class Client(asyncio.Protocol):
    """One client's connection: bytes in, whole requests out of h11, pages back.

    It is read from while there is nothing to do for it: not while an answer is under way or waits
    for the client to take it. So nothing that a client sends piles up.
    """

    def __init__(self, server: AdminServer) -> None:
        self.phase = Phase.REQUEST
        self._server = server
        self._since = time.monotonic()
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADER_BYTES)
        self._rest = memoryview(b"")  # of the answer that is going out
        self._full = False
        self._planned = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        self._server.joined(self)

    def data_received(self, data: bytes) -> None:
        """Answer a request that is whole; what comes after the last answer is dropped."""
        self._server.acted(self)
        if self.phase is Phase.LINGER:
            return
        if self.phase is Phase.IDLE:
            self._enter(Phase.REQUEST)
        self._http.receive_data(data)
        self._plan()

    def eof_received(self) -> None:
        """The client has no more to ask. What it asked is answered: until then it is not read."""
        if self.phase is Phase.REQUEST:
            self._http.receive_data(b"")
            self._work()

    def pause_writing(self) -> None:
        """The client does not take its answer."""
        self._full = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """The client took something."""
        self._full = False
        self._server.acted(self)
        self._since = time.monotonic()
        self._plan()

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._rest = memoryview(b"")
        self._server.left(self)

    # Deadlines.

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._since = time.monotonic()

    def check(self, now: float) -> None:
        """Cut the client off if it is late."""
        within = self._server.within[self.phase]
        if now - self._since <= within:
            return
        if self.phase is Phase.REQUEST and self._http.trailing_data[0]:
            self._refuse(Status.TIMEOUT, f"the request was not complete within {within:g} s")
        else:
            self.abort()

    def abort(self) -> None:
        """End the connection; what was not sent is lost."""
        self._transport.abort()
        self._server.left(self)

    # A turn's work.

    def _plan(self) -> None:
        """Go on in a later turn of the loop, after the packets."""
        if not self._planned:
            self._planned = True
            self._transport.pause_reading()
            self._server.plan(self)

    def go_on(self) -> None:
        """Have a turn."""
        self._planned = False
        if self._transport.is_closing():
            return
        self._work()
        if not self._planned and not self._full:
            self._transport.resume_reading()

    def _work(self) -> None:
        """Answer a request, or send the next piece of an answer."""
        if self._planned or self._full:
            return
        if self.phase is Phase.REQUEST:
            self._next_request()
        elif self.phase is Phase.ANSWER:
            self._send_piece()

    def _next_request(self) -> None:
        try:
            event = self._http.next_event()
            if isinstance(event, h11.Request):
                self._answer(event)
            elif isinstance(event, h11.ConnectionClosed):
                self._transport.close()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == Status.FIELDS_TOO_LARGE:
                self._refuse(Status.FIELDS_TOO_LARGE, _TOO_LARGE)
            else:
                self._refuse(Status.BAD_REQUEST, f"the request is malformed: {error}")

    def _answer(self, request: h11.Request) -> None:
        request_id = _request_id(request)
        if _header_bytes(request) > HEADER_BYTES:
            self._refuse(Status.FIELDS_TOO_LARGE, _TOO_LARGE, request_id)
            return
        if request.http_version not in (b"1.1", b"1.0"):
            self._refuse(Status.BAD_REQUEST, "malformed: this port speaks HTTP/1.1", request_id)
            return
        # Without a body the end comes at once; with one there are data, or h11 waits for them.
        whole = isinstance(self._http.next_event(), h11.EndOfMessage)
        pages, target = self._server.pages, request.target.decode("ascii")
        head = request.method == b"HEAD"
        if head or request.method == b"GET" or not pages.has(target, probes=True):
            page = pages.get(target, probes=True, request_id=request_id)
            self._begin(page, request_id, head=head, close=not whole)
        else:
            detail = "this port is read-only: use GET or HEAD"
            page = problem(Status.METHOD_NOT_ALLOWED, detail, request_id)
            self._begin(page, request_id, ("allow", "GET, HEAD"), close=not whole)

    def _refuse(self, status: Status, detail: str, request_id: str | None = None) -> None:
        """Answer what is no whole request, and close."""
        request_id = request_id or secrets.token_hex(8)
        self._begin(problem(status, detail, request_id), request_id, close=True)

    def _begin(
        self,
        page: Page,
        request_id: str,
        *more: tuple[str, str],
        head: bool = False,
        close: bool = False,
    ) -> None:
        """Begin an answer: its header and the first piece of its body."""
        headers = [
            ("content-type", page.content_type),
            ("content-length", str(len(page.body))),
            ("date", _date(int(time.time()))),
            ("cache-control", "no-store"),
            ("x-request-id", request_id),
            ("request-id", request_id),
            *more,
        ]
        if close:
            headers.append(("connection", "close"))
        response = h11.Response(
            status_code=page.status, headers=headers, reason=TITLES[page.status]
        )
        data = self._http.send(response) or b""
        if not head:
            # h11 only counts it: with a content-length a body goes out as it is.
            self._http.send_with_data_passthrough(h11.Data(data=page.body))
            self._rest = memoryview(page.body)
        self._http.send(h11.EndOfMessage())
        self._enter(Phase.ANSWER)
        self._send_piece(data)

    def _send_piece(self, first: bytes = b"") -> None:
        piece, self._rest = self._rest[:_PIECE], self._rest[_PIECE:]
        self._transport.write(first + piece)
        if self._full:
            return  # resume_writing goes on.
        if self._rest:
            self._plan()
        else:
            self._end_answer()

    def _end_answer(self) -> None:
        """The answer is out: wait for the next request, take the one that is here, or close."""
        http = self._http
        if http.our_state is not h11.DONE or http.their_state is not h11.DONE:
            self._enter(Phase.LINGER)
            self._transport.write_eof()
            return
        http.start_next_cycle()
        if http.trailing_data[0]:
            self._enter(Phase.REQUEST)
            self._plan()
        else:
            self._enter(Phase.IDLE)


def _request_id(request: h11.Request) -> str:
    """Return the client's own identifier if it is a visible one, else a new one (contract 4)."""
    for name, value in request.headers:
        if name == b"x-request-id" and VISIBLE_ID.fullmatch(value):
            return value.decode("ascii")
    return secrets.token_hex(8)


def _header_bytes(request: h11.Request) -> int:
    """Count what h11 does not when a request comes in one piece."""
    return len(request.target) + sum(len(name) + len(value) for name, value in request.headers)


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
