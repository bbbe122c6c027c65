"""Granian's own interface, RSGI, with JSON by orjson; HTTP/1.1 or HTTP/2 as it is started."""

import asyncio
from typing import Any

import orjson

from bench import work
from bench.peers import TOKEN_DELAY_S, TOKENS

_HEADERS = [("content-type", "application/json")]
_STREAM_HEADERS = [("content-type", "text/event-stream")]


async def app(scope: Any, protocol: Any) -> None:
    """Answer a request with a verdict or with the first ids, one event each."""
    count = work.admit(orjson.loads(await protocol())["token_ids"])
    if count and scope.path == work.STREAM_PATH:
        ids = work.admitted(TOKENS).tolist()
        transport = protocol.response_stream(200, _STREAM_HEADERS)
        for token in ids:
            await asyncio.sleep(TOKEN_DELAY_S)
            await transport.send_bytes(work.event(token))
        await transport.send_bytes(work.DONE_EVENT)
        return
    answer = orjson.dumps({"status": 200 if count else 400, "prompt_tokens": count})
    protocol.response_bytes(200 if count else 400, _HEADERS, answer)
