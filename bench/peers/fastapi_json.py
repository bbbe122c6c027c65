"""FastAPI on uvicorn: a pydantic model for the request, a dict or a `StreamingResponse` back."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from bench import work
from bench.peers import TOKEN_DELAY_S, TOKENS

app = FastAPI()


class Prompt(BaseModel):
    """The request's body."""

    token_ids: list[int]


@app.post(work.PATH)
async def generate(prompt: Prompt) -> dict[str, int]:
    """Answer with a verdict."""
    count = work.admit(prompt.token_ids)
    if not count:
        raise HTTPException(400, "an id is outside the vocabulary")
    return {"status": 200, "prompt_tokens": count}


@app.post(work.STREAM_PATH)
async def stream(prompt: Prompt) -> StreamingResponse:
    """Answer with the first ids, one event each."""
    count = work.admit(prompt.token_ids)
    if not count:
        raise HTTPException(400, "an id is outside the vocabulary")
    ids = work.admitted(TOKENS).tolist()

    async def events() -> AsyncIterator[bytes]:
        for token in ids:
            await asyncio.sleep(TOKEN_DELAY_S)
            yield work.event(token)
        yield work.DONE_EVENT

    return StreamingResponse(events(), media_type="text/event-stream")
