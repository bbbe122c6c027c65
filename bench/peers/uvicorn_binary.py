"""A bare ASGI application, ids in binary: nothing is parsed. On uvicorn here."""

import asyncio
from typing import Any

from bench import work
from bench.peers import TOKEN_DELAY_S, TOKENS
from bench.peers.uvicorn_json import Receive, Send, read_body

_HEADERS = [(b"content-type", b"application/octet-stream")]


async def app(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Answer a request with a verdict or with the first ids, one piece each."""
    if scope["type"] != "http":
        return
    count = work.admit_binary(await read_body(receive))
    if count and scope["path"] == work.STREAM_PATH:
        await stream(send)
        return
    answer = work.binary_verdict(count)
    headers = [*_HEADERS, (b"content-length", b"%d" % len(answer))]
    status = 200 if count else 400
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


async def stream(send: Send) -> None:
    """Send the first ids, one piece each."""
    pieces = [work.binary_body([token]) for token in work.admitted(TOKENS).tolist()]
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    for piece in pieces:
        await asyncio.sleep(TOKEN_DELAY_S)
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
