"""An admin server and its clients in one event loop, so that nothing waits for luck."""

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from daemon_process import until

from dataplane.admin import AdminServer
from dataplane.pages import Page, Pages, Resident
from dataplane.stats import Stats

ALIVE = b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n"
HOUR = 3600.0


class Answer(NamedTuple):
    """One HTTP/1.1 response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> dict[str, Any]:
        """The problem document that it is."""
        assert self.headers["content-type"] == "application/problem+json"
        document: dict[str, Any] = json.loads(self.body)
        assert document["type"] == "about:blank"
        assert document["status"] == self.status
        assert document["title"]
        assert document["request_id"] == self.headers["x-request-id"]
        return document


class Peer:
    """A client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, head: bool = False) -> Answer:
        """Read one response, as long as its header says."""
        lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("ascii").split("\r\n")
        version, status, reason = lines[0].split(" ", 2)
        assert (version, bool(reason)) == ("HTTP/1.1", True)
        fields = [line.split(": ", 1) for line in lines[1:-2]]
        headers = {name.lower(): value for name, value in fields}
        assert len(headers) == len(fields), "a field stands twice"
        length = 0 if head else int(headers["content-length"])
        return Answer(int(status), headers, await self.reader.readexactly(length))

    async def ask(self, target: str, method: str = "GET", fields: str = "") -> Answer:
        self.send(f"{method} {target} HTTP/1.1\r\nhost: a\r\n{fields}\r\n".encode())
        return await self.answer(head=method == "HEAD")

    async def closed(self) -> bool:
        """Wait until the server ended the connection; whether it did so without a word."""
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:
            return True


class Site:
    """A server, and the clients that a test makes."""

    def __init__(self, server: AdminServer, port: int, stack: contextlib.AsyncExitStack) -> None:
        self.server = server
        self.port = port
        self._stack = stack

    async def connect(self, receive_buffer: int = 0) -> Peer:
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
        self._stack.callback(writer.close)
        return Peer(reader, writer)


class OnePage(Pages):
    """Pages with one more, `/page`, whose body the test chooses."""

    def __init__(self, body: Callable[[], bytes]) -> None:
        super().__init__(Stats(), {"default": Resident()}, lambda: "ok")
        self._body = body

    def has(self, target: str, probes: bool) -> bool:
        return target == "/page" or super().has(target, probes)

    def get(
        self, target: str, probes: bool, request_id: str | None = None,
        partition: str | None = None,
    ) -> Page:  # fmt: skip
        if target == "/page":
            return Page(200, "text/plain", self._body())
        return super().get(target, probes, request_id, partition)


@contextlib.asynccontextmanager
async def serving(pages: Pages | None = None, **limits: Any) -> AsyncIterator[Site]:
    """Serve until the block ends; then nothing may be left."""
    before = len(os.listdir("/proc/self/fd"))
    server = AdminServer(pages or Pages(Stats(), {"default": Resident()}, lambda: "ok"), **limits)
    _, port = await server.start("127.0.0.1", 0)
    async with contextlib.AsyncExitStack() as stack:
        yield Site(server, port, stack)
        await server.stop()
    await until("every socket is closed", lambda: len(os.listdir("/proc/self/fd")) == before)
