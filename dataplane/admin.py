"""The admin port: HTTP/1.1 over TCP on h11, for probes, dashboards and people.

Read-only. `Pages` says what each path answers, whatever carries it; `AdminServer` is the TCP side.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import h11
import msgspec

from dataplane._native import lib
from dataplane.attach import AttachServer
from dataplane.errors import Status
from dataplane.latency import WINDOWS_S, Series
from dataplane.slots import State, unpack_word
from dataplane.sockets import bind
from dataplane.stats import Stats

REQUEST_WITHIN_S = 10.0
_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"


class Page(NamedTuple):
    """An answer to a GET."""

    status: int
    content_type: str
    body: bytes


def _json(value: Any, status: int = 200) -> Page:
    return Page(status, _JSON, msgspec.json.encode(value))


def _text(text: str, status: int = 200) -> Page:
    return Page(status, _TEXT, text.encode())


class Pages:
    """What the read-only paths answer.

    Args:
        probes: Whether `/livez` and `/readyz` are there (on the admin port only).
    """

    def __init__(
        self, stats: Stats, attachments: AttachServer | None, status: Callable[[], str]
    ) -> None:
        self._stats = stats
        self._attachments = attachments
        self._status = status
        self._ages: list[tuple[int, float]] = []
        self._paths: dict[str, Callable[[dict[str, list[str]]], Page]] = {
            "/health": self._health,
            "/slots": lambda query: _json({"slots": self._slots()}),
            "/props": lambda query: self._props(),
            "/tokenizer.json": lambda query: self._tokenizer(),
        }
        self._probes = {"/livez": lambda query: _text("ok\n"), "/readyz": self._ready}

    def get(self, target: str, probes: bool) -> Page:
        """Answer a GET; `target` is a path with its query."""
        parts = urlsplit(target)
        page = self._paths.get(parts.path)
        if page is None and probes:
            page = self._probes.get(parts.path)
        if page is None:
            return _text("no such path\n", Status.NOT_FOUND)
        return page(parse_qs(parts.query, keep_blank_values=True))

    def _ready(self, query: dict[str, list[str]]) -> Page:
        status = self._status()
        alive = self._attachments is None or self._attachments.is_responsive()
        if status == "ok" and not alive:
            status = "the runtime does not answer"
        return _text(status + "\n", 200 if status == "ok" else Status.UNAVAILABLE)

    def _health(self, query: dict[str, list[str]]) -> Page:
        if "latency99" not in query:
            return _json(self._stats.health(self._status()))
        window = query.get("window", ["60"])[-1]
        if window not in {str(seconds) for seconds in WINDOWS_S}:
            return _text("window must be 10, 60 or 300\n", Status.BAD_REQUEST)
        if query.get("format", ["json"])[-1] != "hdr":
            return _json(self._stats.latency.snapshot(int(window)))
        name = query.get("series", ["ingress"])[-1]
        if name.upper() not in Series.__members__:
            known = ", ".join(series.name.lower() for series in Series)
            return _text(f"series must be one of {known}\n", Status.BAD_REQUEST)
        return Page(200, _TEXT, self._stats.latency.encoded(Series[name.upper()], int(window)))

    def _slots(self) -> list[dict[str, Any]]:
        current = self._attachments.current if self._attachments else None
        if current is None:
            return []
        region, now = current.region, time.monotonic()
        if len(self._ages) != region.slots:
            self._ages = [(0, now)] * region.slots
        rows = []
        for slot in range(region.slots):
            word = region.native.states[slot]
            if self._ages[slot][0] != word:
                self._ages[slot] = (word, now)
            state, _, generation = unpack_word(word)
            known = state < lib.DP_STATES
            rows.append(
                {
                    "slot": slot,
                    "partition": current.manifest.partition,
                    "state": State(state).name if known else "UNKNOWN",
                    "generation": generation,
                    "age_ms": round((now - self._ages[slot][1]) * 1000),
                }
            )
        return rows

    def _props(self) -> Page:
        current = self._attachments.current if self._attachments else None
        if current is None:
            return _text("no runtime is attached\n", Status.UNAVAILABLE)
        return Page(200, _JSON, msgspec.json.encode(current.manifest))

    def _tokenizer(self) -> Page:
        current = self._attachments.current if self._attachments else None
        if current is None or current.tokenizer is None:
            return _text("the runtime has no tokeniser\n", Status.NOT_FOUND)
        return Page(200, _JSON, current.tokenizer)


class AdminServer:
    """HTTP/1.1 on every address of a host."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._servers: list[asyncio.Server] = []

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; return the first address.

        Raises:
            UsageError: The port is taken, or the host does not resolve.
        """
        sockets = bind("--admin", host, port, socket.SOCK_STREAM)
        for sock in sockets:
            self._servers.append(await asyncio.start_server(self._serve, sock=sock))
        address = sockets[0].getsockname()
        return address[0], address[1]

    async def stop(self) -> None:
        for server in self._servers:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        try:
            while True:
                async with asyncio.timeout(REQUEST_WITHIN_S):
                    request = await _next_request(connection, reader)
                if request is None:
                    return
                await self._answer(connection, request, writer)
                if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                    return
                connection.start_next_cycle()
        except (h11.ProtocolError, TimeoutError, ConnectionError):
            return
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, TimeoutError):
                await writer.wait_closed()

    async def _answer(
        self, connection: h11.Connection, request: h11.Request, writer: asyncio.StreamWriter
    ) -> None:
        headers: list[tuple[str, str]] = []
        if request.method in (b"GET", b"HEAD"):
            page = self._pages.get(request.target.decode("ascii", "replace"), probes=True)
        else:
            page = _text("this port is read-only\n", Status.METHOD_NOT_ALLOWED)
            headers.append(("allow", "GET, HEAD"))
        headers += [("content-type", page.content_type), ("content-length", str(len(page.body)))]
        data = connection.send(h11.Response(status_code=int(page.status), headers=headers)) or b""
        if request.method != b"HEAD":
            data += connection.send(h11.Data(data=page.body)) or b""
        data += connection.send(h11.EndOfMessage()) or b""
        writer.write(data)
        await writer.drain()


async def _next_request(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> h11.Request | None:
    """Read one request to its end; None when the client is gone."""
    request = None
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(65536))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.EndOfMessage):
            return request
        elif isinstance(event, h11.ConnectionClosed):
            return None
