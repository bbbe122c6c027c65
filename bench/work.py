"""The work that every system of the comparison does: the prompts, the check, the verdicts.

Ids go into an int32 buffer that is there beforehand (a slot's, in the daemon; one array here), are
checked against the vocabulary, and a verdict is answered. No model runs. Peers read their requests
as their own users would; the words on the wire are the shortest that say the same.
"""

import json
import random
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

VOCAB = 49_152
CONTEXT = 131_072
PATH = "/v1/generate"
STREAM_PATH = "/v1/stream"
DELAY_VARIABLE = "BENCH_TOKEN_DELAY_S"
"""How long the peers' stand-in for a model takes for each token of `STREAM_PATH`."""

BINARY = "application/octet-stream"
JSON = "application/json"
_VERDICT = struct.Struct("<4sHHQIIII")

_slot = np.zeros(CONTEXT, np.int32)
_slot_unsigned = _slot.view(np.uint32)
"""The same memory, in which one comparison finds negative ids too."""


def admit(ids: Sequence[int] | npt.NDArray[np.uint32]) -> int:
    """Write the ids where a model would read them; how many, or 0 when one is no token."""
    count = len(ids)
    try:
        _slot[:count] = ids
    except (OverflowError, ValueError):
        return 0
    return count if _slot_unsigned[:count].max(initial=0) < VOCAB else 0


def admit_binary(body: bytes) -> int:
    """The same for little-endian 32-bit ids."""
    return admit(np.frombuffer(body, "<u4"))


def admitted(count: int) -> npt.NDArray[np.int32]:
    """Return the ids in the buffer."""
    return _slot[:count]


def binary_verdict(count: int) -> bytes:
    """Return a verdict of 32 bytes, as long as the daemon's."""
    return _VERDICT.pack(b"DPV1", 200 if count else 400, 0, 1, 0, 0, 0, count)


def prompt(count: int) -> list[int]:
    """Return a prompt, the same in each run."""
    chosen = random.Random(count)
    return [chosen.randrange(VOCAB) for _ in range(count)]


def binary_body(ids: Sequence[int]) -> bytes:
    """Return ids as they are sent in binary."""
    return struct.pack(f"<{len(ids)}I", *ids)


def json_body(ids: Sequence[int]) -> bytes:
    """Return a request's JSON, without needless blanks."""
    return json.dumps({"token_ids": list(ids)}, separators=(",", ":")).encode("ascii")


def json_verdict(count: int) -> bytes:
    """Return the verdict's JSON."""
    return b'{"status":200,"prompt_tokens":%d}' % count


def event(token: int) -> bytes:
    """Return one token of a JSON stream, as a server-sent event."""
    return b'data: {"token_ids":[%d]}\n\n' % token


DONE_EVENT = b"data: [DONE]\n\n"


def streamed(ids: Sequence[int], encoding: str) -> bytes:
    """Return all that a stream of these ids holds."""
    if encoding == "binary":
        return binary_body(ids)
    return b"".join(event(token) for token in ids) + DONE_EVENT
