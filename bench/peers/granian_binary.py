"""Granian's own interface, RSGI, with ids in binary; HTTP/1.1 or HTTP/2 as it is started."""

import asyncio
from typing import Any

from bench import work
from bench.peers import TOKEN_DELAY_S, TOKENS

_HEADERS = [("content-type", "application/octet-stream")]


async def app(scope: Any, protocol: Any) -> None:
    """Answer a request with a verdict or with the first ids, one piece each."""
    count = work.admit_binary(await protocol())
    if count and scope.path == work.STREAM_PATH:
        pieces = [work.binary_body([token]) for token in work.admitted(TOKENS).tolist()]
        transport = protocol.response_stream(200, _HEADERS)
        for piece in pieces:
            await asyncio.sleep(TOKEN_DELAY_S)
            await transport.send_bytes(piece)
        return
    protocol.response_bytes(200 if count else 400, _HEADERS, work.binary_verdict(count))
