"""The bundled engine at work: on doubles, on a real batcher, or behind a daemon.

`FRANCE` asks the small model for the capital of France, and `PARIS` is its answer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from daemon_process import DaemonProcess

from dataplane.client import Answer, connect
from dataplane.runtime import Finish
from dataplane.runtime.smollm2 import Engine

FRANCE = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
PARIS = [504, 3575, 282, 4649, 314, 7042, 30]


class Request:
    """A taken request whose prompt lies in an array of its own."""

    def __init__(self, slot: int, prompt: Sequence[int], max_output: int = 8, **rest: Any) -> None:
        self.slot = slot
        self.tokens = np.array(prompt, np.int32)
        self.address = int(self.tokens.ctypes.data)
        self.max_output = max_output
        self.temperature = float(rest.get("temperature", 0.0))
        self.top_p = float(rest.get("top_p", 0.0))
        self.top_k = int(rest.get("top_k", 0))
        self.seed = int(rest.get("seed", 0))
        self.out: list[int] = []
        self.reason: Finish | None = None
        self.is_cancelled = False
        self.is_over = False

    @property
    def cancelled(self) -> bool:
        return self.is_cancelled

    def emit(self, ids: Sequence[int]) -> bool:
        if self.is_over:
            return False
        assert self.reason is None, "an id after finish"
        self.out += ids
        assert len(self.out) <= self.max_output
        return True

    def finish(self, reason: Finish) -> bool:
        assert self.reason is None, "finished twice"
        self.reason = reason
        return True


class Attachment:
    """Gives out what is put into `waiting`, and counts."""

    def __init__(self, *waiting: Request) -> None:
        self.waiting = list(waiting)
        self.timeouts: list[float] = []
        self.steps = 0

    def take(self, timeout: float) -> list[Request]:
        self.timeouts.append(timeout)
        taken, self.waiting = self.waiting, []
        return taken

    def step(self) -> None:
        self.steps += 1


class Batcher:
    """Notes every call; a slot's answer is 100, 101, ... unless told otherwise."""

    def __init__(self, slots: int = 4, chunk: int = 32) -> None:
        self.slots, self.chunk = slots, chunk
        self.log: list[tuple[Any, ...]] = []
        self.next = [100] * slots
        self.fails: set[int] = set()
        self.order: list[int] = []  # the sequence at each index of the batch that ran last

    def begin(self, seq: int, *how: float) -> None:
        self.log.append(("begin", seq, *how))
        self.next[seq] = 100

    def prefill_chunk(self, seq: int, token_address: int, start: int, n: int, last: bool) -> int:
        self.log.append(("chunk", seq, token_address, start, n, last))
        self.order = [seq] * n
        return -1 if seq in self.fails else 0

    def decode(self, seqs: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> int:
        self.log.append(("decode", list(seqs), list(tokens), list(positions)))
        self.order = list(seqs)
        return -1 if self.fails.intersection(seqs) else 0

    def sample(self, seq: int, index: int) -> int:
        assert self.order[index] == seq, "logits of another sequence"
        self.next[seq] += 1
        return self.next[seq] - 1

    def rewind(self, seq: int, position: int) -> None:
        self.log.append(("rewind", seq, position))

    def forget(self, seq: int) -> None:
        self.log.append(("forget", seq))

    def complaint(self) -> str:
        return "the double's reason"

    def called(self, verb: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.log if call[0] == verb]


class Bench:
    """An engine on doubles, or on a real batcher."""

    def __init__(self, *requests: Request, batcher: Any = None, stop_ids: Any = (2,)) -> None:
        self.attachment = Attachment(*requests)
        self.batcher = batcher or Batcher()
        self.said: list[str] = []
        self.engine = Engine(self.attachment, self.batcher, stop_ids, self.said.append)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.engine.turn()

    def until_done(self, *requests: Request) -> None:
        for _ in range(1000):
            if all(request.reason is not None for request in requests):
                return
            self.engine.turn()
        raise AssertionError("a request never ends")


async def ask(daemon: DaemonProcess) -> list[list[int]]:
    """Ask a daemon's model `FRANCE` twice at once, then again: its ids."""

    async def ids(answer: Answer) -> list[int]:
        return [token async for part in answer for token in part]

    async with connect(daemon.address, daemon.ca) as client:
        answers = [await client.submit(FRANCE, max_output=count) for count in (12, 3)]
        first = [await ids(answer) for answer in answers]
        return [*first, await ids(await client.submit(FRANCE, max_output=16))]
