"""What has to hold of answers over HTTP/3, with the contract's literals, for several test files."""

import asyncio
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from daemon_process import DaemonProcess, run
from h3_client import Answer, h3_client
from raw_runtime import Puppet

from dataplane.runtime import Finish, Manifest, Taken, attach

IDS = [5, 6, 7]

# Of every answer, then of those that held a slot, then of those that are worth a second try.
COMMON = {"content-type", "x-request-id", "request-id", "x-queue-time", "x-ratelimit-limit",
          "x-ratelimit-remaining"}  # fmt: skip
HELD = {"x-slot", "server-timing"}
RETRY = {"retry-after", "retry-after-ms", "x-should-retry"}


@contextlib.contextmanager
def attached(
    daemon: DaemonProcess,
    tokenizer: Path | None = None,
    template: str | None = None,
    vocab_size: int = 1000,
) -> Iterator[Puppet]:
    """Attach a puppet of 4 slots, with what it knows of text; the daemon may end before it."""
    manifest = Manifest(
        model="puppet",
        slots=4,
        context=64,
        max_output=32,
        vocab_size=vocab_size,
        chat_template=template,
    )
    with attach(daemon.socket, manifest, tokenizer) as runtime:
        runtime.ready()
        daemon.wait_for_status("ok")
        if tokenizer is not None:
            run(_until_text(daemon))
        yield Puppet(runtime)


async def _until_text(daemon: DaemonProcess) -> None:
    """Wait until the daemon has read the tokeniser: until then it says 503 to text."""
    async with h3_client(daemon) as client:
        for _ in range(1000):
            if (await client.post_json({"prompt": ""}).answer()).status != 503:
                return
            await asyncio.sleep(0.01)
    raise AssertionError("the tokeniser never came")


async def take(runtime: Puppet, count: int = 1) -> list[Taken]:
    """Let the runtime take so many requests while this side goes on."""
    return await asyncio.to_thread(runtime.take, count)


def finish(taken: Taken, ids: list[int]) -> None:
    """Answer a request."""
    taken.emit(ids)
    taken.finish(Finish.STOP)


def check_common(answer: Answer, limit: int, remaining: int) -> dict[str, str]:
    """Hold an answer's fields to what every answer says."""
    fields = answer.fields
    assert fields["x-request-id"] == fields["request-id"]
    assert re.fullmatch(r"\d+\.\d{3}ms", fields["x-queue-time"])
    assert (fields["x-ratelimit-limit"], fields["x-ratelimit-remaining"]) == (
        str(limit),
        str(remaining),
    )
    return fields


def check_whole(answer: Answer, ids: list[int], prompt_tokens: int, reason: str) -> None:
    """Hold a 200 of any form to this content."""
    assert answer.status == 200, answer.body
    usage = {"prompt_tokens": prompt_tokens, "output_tokens": len(ids)}
    kind = answer.fields["content-type"]
    if kind == "application/octet-stream":
        assert answer.ids() == ids
        code = {"stop": 1, "length": 2, "deadline": 3}[reason]
        assert answer.trailer() == (code, prompt_tokens, len(ids))
        return
    if kind == "application/json":
        document = answer.json()
        assert list(document) == [
            "request_id", "slot", "token_ids", "text", "finish_reason", "usage", "timings_us",
        ]  # fmt: skip
        assert document["request_id"] == answer.fields["x-request-id"]
        assert str(document["slot"]) == answer.fields["x-slot"]
        assert (document["token_ids"], document["text"]) == (ids, None)
        end = {name: document[name] for name in ("finish_reason", "usage", "timings_us")}
    else:
        assert kind == "text/event-stream"
        *pieces, end, done = answer.events()
        assert done == "[DONE]"
        assert all(list(piece) == ["token_ids", "text"] for piece in pieces)
        assert [number for piece in pieces for number in piece["token_ids"]] == ids
        assert all(piece["text"] is None for piece in pieces)
    assert list(end) == ["finish_reason", "usage", "timings_us"]
    assert (end["finish_reason"], end["usage"]) == (reason, usage)
    times = end["timings_us"]
    assert list(times) == ["queue", "ingress", "pickup", "first_token", "total"]
    if ids:
        assert 0 <= times["pickup"] <= times["first_token"] <= times["total"]
    timing = f"queue;dur={times['queue'] / 1000:.3f}, ingress;dur={times['ingress'] / 1000:.3f}"
    assert answer.fields["server-timing"] == timing


def check_retry(answer: Answer, status: int, title: str, detail: str) -> None:
    """Hold an answer to say when another try is worth it."""
    assert answer.status == status
    document = answer.problem()
    assert document["title"] == title
    assert detail in document["detail"]
    milliseconds = int(answer.fields["retry-after-ms"])
    assert 1 <= milliseconds <= 10_000
    assert int(answer.fields["retry-after"]) == -(-milliseconds // 1000)
    assert answer.fields["x-should-retry"] == "true"
