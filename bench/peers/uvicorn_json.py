"""A bare ASGI application, JSON by orjson: the least that an ASGI server can be asked to do."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from bench import work
from bench.peers import TOKEN_DELAY_S, TOKENS

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


async def read_body(receive: Receive) -> bytes:
    """Return a request's whole body."""
    message = await receive()
    if not message.get("more_body"):
        body: bytes = message.get("body", b"")
        return body
    parts = [message["body"]]
    while message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
    return b"".join(parts)


async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Answer a request with a verdict or with the first ids, one event each."""
    if scope["type"] != "http":
        return
    count = work.admit(orjson.loads(await read_body(receive))["token_ids"])
    if count and scope["path"] == work.STREAM_PATH:
        await stream(send)
        return
    answer = orjson.dumps({"status": 200 if count else 400, "prompt_tokens": count})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(answer))]
    status = 200 if count else 400
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


async def stream(send: Send) -> None:
    """Send the first ids, one event each."""
    headers = [(b"content-type", b"text/event-stream")]
    ids = work.admitted(TOKENS).tolist()
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for token in ids:
        await asyncio.sleep(TOKEN_DELAY_S)
        await send({"type": "http.response.body", "body": work.event(token), "more_body": True})
    await send({"type": "http.response.body", "body": work.DONE_EVENT})
