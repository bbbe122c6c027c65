"""A small real model on the CPU, behind the daemon: one loop that serves all slots in turn.

Why a loop of small steps: one thread computes, so whatever is being computed keeps everybody else
waiting. The rules that hold here:

- Slot s is sequence s of the batcher. Prompts are read where they lie; nothing keeps them after
  the last chunk. A request ends only after the batcher's `forget`, which returns once nothing reads
  its prompt: its slot is another's from then on.
- A turn of the loop takes what is new, drops what is cancelled, runs one chunk of one prompt and
  then one step of every answer. Prompts take turns chunk by chunk. So no answer waits for more
  than one chunk, and a cancelled slot is free again after at most one turn.
- A stop id is neither emitted nor counted.
- What fails in one slot ends that slot's request; the others go on.
- Ready is said only once everything is allocated, has run, and has given the right answer.
"""

import os
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from dataplane import model
from dataplane.manifest import DEFAULT_PARTITION
from dataplane.runtime import DetachedError, Finish, Manifest, attach
from dataplane.runtime.llama import EngineError, LlamaBatcher

CHUNK = 32
"""Most prompt ids that run in one go: 0.2 to 0.5 s on one core."""

MAX_STEP_MS = 10_000
"""A turn is one chunk and one step: 0.6 s at 8 slots on an idle core. The rest is for busy ones."""

# Below the heartbeat's 500 ms, so that an idle loop's pulse is as lively as a busy one's.
_IDLE_S = 0.25
_ID_BYTES = 4

# A chat that asks for the capital of France, and as much of the answer as makes the next id
# certain: it leads by 5.5 in logits, which no processor's rounding comes near.
_KNOWN_CHAT = (1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198)
_KNOWN_PROMPT = (*_KNOWN_CHAT, 504, 3575, 282, 4649, 314)
_KNOWN_NEXT = 7042


class Request(Protocol):
    """What the loop needs of a taken request (`dataplane.runtime.Taken`)."""

    slot: int
    tokens: npt.NDArray[np.int32]
    address: int
    max_output: int
    temperature: float
    top_p: float
    top_k: int
    seed: int

    @property
    def cancelled(self) -> bool: ...
    def emit(self, ids: Sequence[int], /) -> bool: ...
    def finish(self, reason: Finish, /) -> bool: ...


class Attachment(Protocol):
    """What the loop needs of an attachment (`dataplane.runtime.Runtime`)."""

    def take(self, timeout: float, /) -> Sequence[Request]: ...
    def step(self) -> None: ...


class Batcher(Protocol):
    """What the loop needs of an engine (`dataplane.runtime.llama.LlamaBatcher`)."""

    slots: int
    chunk: int

    def begin(self, seq: int, temperature: float, top_p: float, top_k: int, seed: int) -> None: ...
    def prefill_chunk(
        self, seq: int, token_address: int, start: int, n: int, last: bool
    ) -> int: ...
    def decode(
        self, seqs: Sequence[int], tokens: Sequence[int], positions: Sequence[int]
    ) -> int: ...
    def sample(self, seq: int, index: int) -> int: ...
    def rewind(self, seq: int, position: int) -> None: ...
    def forget(self, seq: int) -> None: ...
    def complaint(self) -> str: ...


class _Job:
    """A request on its way: how far it has come."""

    __slots__ = ("left", "length", "position", "request", "slot", "token")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.slot = request.slot
        self.length = int(request.tokens.size)
        self.left = request.max_output
        self.position = 0  # ids that the sequence holds, prompt and answer
        self.token = -1  # emitted last, and not yet in the sequence


class Engine:
    """The loop's state: prompts that wait for their next chunk, and answers that grow."""

    def __init__(
        self,
        attachment: Attachment,
        batcher: Batcher,
        stop_ids: Collection[int],
        say: Callable[[str], None],
    ) -> None:
        self._attachment = attachment
        self._batcher = batcher
        self._stop_ids = frozenset(stop_ids)
        self._say = say
        self._prefilling: deque[_Job] = deque()
        self._decoding: list[_Job] = []

    def turn(self) -> None:
        """One turn. Waits for a request only when there is nothing else to do."""
        busy = self._prefilling or self._decoding
        for request in self._attachment.take(0 if busy else _IDLE_S):
            self._start(request)
        self._drop_cancelled()
        self._run_chunk()
        self._run_step()
        self._attachment.step()

    def _start(self, request: Request) -> None:
        if not request.tokens.size or not request.max_output:
            self._say(f"slot {request.slot}: a request without a prompt or without room to answer")
            request.finish(Finish.ERROR)
            return
        self._batcher.begin(
            request.slot, request.temperature, request.top_p, request.top_k, request.seed
        )
        self._prefilling.append(_Job(request))

    def _drop_cancelled(self) -> None:
        cancelled = {job for job in (*self._prefilling, *self._decoding) if job.request.cancelled}
        if not cancelled:
            return
        for job in cancelled:
            self._end(job, Finish.STOP)
        self._prefilling = deque(job for job in self._prefilling if job not in cancelled)
        self._decoding = [job for job in self._decoding if job not in cancelled]

    def _run_chunk(self) -> None:
        if not self._prefilling:
            return
        job = self._prefilling.popleft()
        count = min(self._batcher.chunk, job.length - job.position)
        last = job.position + count == job.length
        address = job.request.address + job.position * _ID_BYTES
        code = self._batcher.prefill_chunk(job.slot, address, job.position, count, last)
        if code:
            self._fail(job, code)
            return
        job.position += count
        if not last:
            self._prefilling.append(job)
        elif self._answer(job, count - 1):
            self._decoding.append(job)

    def _run_step(self) -> None:
        jobs = self._decoding
        if not jobs:
            return
        code = self._batcher.decode(
            [job.slot for job in jobs], [job.token for job in jobs], [job.position for job in jobs]
        )
        if code:
            self._decoding = [job for job in jobs if self._step_alone(job)]
            return
        for job in jobs:
            job.position += 1
        self._decoding = [job for index, job in enumerate(jobs) if self._answer(job, index)]

    def _step_alone(self, job: _Job) -> bool:
        """A step that failed for all is tried one by one: it ends those that fail by themselves."""
        self._batcher.rewind(job.slot, job.position)
        code = self._batcher.decode([job.slot], [job.token], [job.position])
        if code:
            self._fail(job, code)
            return False
        job.position += 1
        return self._answer(job, 0)

    def _answer(self, job: _Job, index: int) -> bool:
        """Sample the next id and give it out; whether the answer goes on after it."""
        token = self._batcher.sample(job.slot, index)
        if token in self._stop_ids:
            self._end(job, Finish.STOP)
            return False
        if not job.request.emit([token]):
            self._end(job, Finish.STOP)  # it is over already: only the sequence is left to empty
            return False
        job.token = token
        job.left -= 1
        if not job.left:
            self._end(job, Finish.LENGTH)
        return job.left > 0

    def _fail(self, job: _Job, code: int) -> None:
        self._say(f"slot {job.slot}: llama.cpp answers {code}: {self._batcher.complaint()}")
        self._end(job, Finish.ERROR)

    def _end(self, job: _Job, reason: Finish) -> None:
        self._batcher.forget(job.slot)
        job.request.finish(reason)


def warm_up(batcher: Batcher) -> None:
    """Run a prompt and a step of every slot, and check that the model says what it should."""
    prompt = np.array(_KNOWN_PROMPT, np.int32)
    every = range(batcher.slots)
    batcher.begin(0, 0.0, 0.0, 0, 0)
    code = batcher.prefill_chunk(0, prompt.ctypes.data, 0, prompt.size, True)
    if code:
        raise EngineError(f"the first prompt fails with {code}: {batcher.complaint()}")
    found = batcher.sample(0, prompt.size - 1)
    if found != _KNOWN_NEXT:
        raise EngineError(
            f"the model's next id is {found} where {_KNOWN_NEXT} is known to be right; "
            "`dataplane model install` fetches the build that is known"
        )
    batcher.forget(0)
    code = batcher.decode(every, [_KNOWN_NEXT] * batcher.slots, [0] * batcher.slots)
    if code:
        raise EngineError(f"the first step fails with {code}: {batcher.complaint()}")
    for slot in every:
        batcher.forget(slot)


def run(
    attachment: Attachment,
    batcher: Batcher,
    stop_ids: Collection[int],
    say: Callable[[str], None],
) -> NoReturn:
    """Serve until the attachment ends, which raises `DetachedError`."""
    engine = Engine(attachment, batcher, stop_ids, say)
    while True:
        engine.turn()


def main(
    socket_path: str | os.PathLike[str],
    slots: int,
    context: int,
    max_output: int,
    say: Callable[[str], None],
    *,
    cache_dir: Path,
    partition: str = DEFAULT_PARTITION,
) -> int:
    """Load the model, attach, and serve until the daemon is gone; the exit status.

    Args:
        socket_path: The daemon's `--socket`.
        slots: How many requests run at once.
        context: The longest prompt, in ids.
        max_output: The longest answer, in ids.
        say: Takes one line of progress.
        cache_dir: Where the tokenizer.json is kept that is built once from the model.
        partition: Which of the daemon's it serves.
    """
    files = model.locate()
    tokenizer = model.tokenizer_json(files.gguf, cache_dir)
    manifest = Manifest(
        model=model.NAME,
        partition=partition,
        slots=slots,
        context=context,
        max_output=max_output,
        vocab_size=model.VOCAB_SIZE,
        stop_ids=model.STOP_IDS,
        chat_template=model.CHAT_TEMPLATE,
        max_step_ms=MAX_STEP_MS,
    )
    say(f"loading {model.NAME} for {slots} slots of {context} + {max_output} ids")
    with LlamaBatcher(files, slots, context + max_output, CHUNK) as batcher:
        warm_up(batcher)
        with attach(socket_path, manifest, tokenizer=tokenizer) as runtime:
            runtime.ready()
            say(f"{model.NAME} is ready")
            try:
                run(runtime, batcher, model.STOP_IDS, say)
            except DetachedError as error:
                say(f"{model.NAME} stops: {error}")
    return 0
