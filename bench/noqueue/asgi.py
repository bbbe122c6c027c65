"""The HTTP side of groups B and C: one bare ASGI application on uvicorn, JSON in, SSE out.

Bare ASGI and msgspec, since a framework would only make these groups slower. The rules that hold
here, as in servers of this kind: a request is parsed and its ids are checked against the vocabulary
before anything else; the status line goes out when the request has been accepted, which says
nothing of a slot; whoever disconnects is cancelled. The last event says what the server knows of
the request's times.
"""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import uvicorn

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_HEAD = b"data: "
_TAIL = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_GRACE_S = 1
_encode = msgspec.json.encode


class Generate(msgspec.Struct):
    """The request's body."""

    token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0


_decoder = msgspec.json.Decoder(Generate)


class Job:
    """A request under way. `outputs` ends with None; `times_us` is what the server says of it."""

    def __init__(self, request: Generate) -> None:
        self.tokens = request.token_ids
        self.max_output = request.max_tokens
        self.temperature = request.temperature
        self.cancelled = False
        self.outputs: asyncio.Queue[list[int] | None] = asyncio.Queue()
        self.times_us: dict[str, int] = {}


J = TypeVar("J", bound=Job)


class Backend(Protocol[J]):
    """What stands between the application and the engine; `J` is its kind of job."""

    def job(self, request: Generate) -> J: ...

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    async def submit(self, job: J) -> bool:
        """Take a request on; False when too many wait already."""

    async def cancel(self, job: J) -> None:
        """Nobody waits for it any more."""


class App(Generic[J]):
    """`POST /generate`."""

    def __init__(self, backend: Backend[J], vocab_size: int) -> None:
        self._backend = backend
        self._vocab_size = vocab_size

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self._backend.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._backend.stop()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["path"] != "/generate":
            return await _refuse(send, 404, "no such path")
        request = self._parse(await _body(receive))
        if isinstance(request, str):
            return await _refuse(send, 400, request)
        job = self._backend.job(request)
        if not await self._backend.submit(job):
            return await _refuse(send, 503, "too many requests wait")
        return await self._stream(job, receive, send)

    def _parse(self, body: bytes) -> Generate | str:
        try:
            request = _decoder.decode(body)
        except msgspec.DecodeError as error:
            return str(error)
        ids = request.token_ids
        if not ids or request.max_tokens < 1:
            return "there is nothing to do"
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            return "an id is outside the vocabulary"
        return request

    async def _stream(self, job: J, receive: Receive, send: Send) -> None:
        leaving = asyncio.create_task(self._leave(job, receive))
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while (ids := await job.outputs.get()) is not None:
                event = _HEAD + _encode({"token_ids": ids}) + _TAIL
                await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            leaving.cancel()
        if not job.cancelled:
            last = {"finish_reason": "length", "timings_us": job.times_us}
            event = _HEAD + _encode(last) + _TAIL + _DONE
            await send({"type": "http.response.body", "body": event})

    async def _leave(self, job: J, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        job.cancelled = True
        job.outputs.put_nowait(None)
        await self._backend.cancel(job)


async def _body(receive: Receive) -> bytes:
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


async def _refuse(send: Send, status: int, reason: str) -> None:
    body = _encode({"error": reason})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve(backend: Backend[J], vocab_size: int) -> None:
    """Print the port and serve until SIGTERM: one worker, no access log."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)  # So that whoever knows the port can connect.
    config = uvicorn.Config(
        App(backend, vocab_size),
        log_level="warning",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=_GRACE_S,
    )
    print(f"ready port={listener.getsockname()[1]}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
