"""Group B: an asyncio queue and a batching front end, `python -m bench.noqueue.queue_front`.

The usual server in one process: a handler puts its request in an `asyncio.Queue`, one task fills
the engine's free slots from it and runs the engine's step on a thread, and hands each step's tokens
to the handlers. Between two steps it takes as much as there is room for. `--limit N` bounds what
waits; beyond it the answer is 503.
"""

import argparse
import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from bench.noqueue.asgi import Generate, Job, serve
from bench.noqueue.engine import Costs, Engine, Work

_now_ns = time.monotonic_ns


class QueuedWork(Job):
    """A request that waits in the queue, and then runs."""

    def __init__(self, request: Generate) -> None:
        super().__init__(request)
        self.put_ns = 0
        self.got_ns = 0
        self.made: list[int] = []
        self.whole = False

    # What the engine calls, on its thread; the task waits for it meanwhile.

    def emit(self, token: int) -> None:
        self.made.append(token)

    def finish(self) -> None:
        self.whole = True

    def drop(self) -> None:
        pass


class QueueBackend:
    """The queue and the task that empties it."""

    def __init__(self, engine: Engine, limit: int | None) -> None:
        self._engine = engine
        self._limit = limit
        self._queue: asyncio.Queue[QueuedWork] = asyncio.Queue()
        self._running: list[QueuedWork] = []
        self._thread = ThreadPoolExecutor(1)
        self._task: asyncio.Task[None] | None = None

    def job(self, request: Generate) -> QueuedWork:
        return QueuedWork(request)

    async def start(self) -> None:
        self._task = asyncio.create_task(self._batch())

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        self._thread.shutdown(wait=False)

    async def submit(self, job: QueuedWork) -> bool:
        if self._limit is not None and self._queue.qsize() >= self._limit:
            return False
        job.put_ns = _now_ns()
        self._queue.put_nowait(job)
        return True

    async def cancel(self, job: QueuedWork) -> None:
        """Nothing to do: whoever looks at it next sees the mark."""

    async def _batch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._engine.sweep()
            self._running = [work for work in self._running if not work.cancelled]
            fresh = await self._next_ones()
            self._running += fresh
            await loop.run_in_executor(self._thread, self._step, fresh)
            self._deliver()

    async def _next_ones(self) -> list[QueuedWork]:
        """Take as many as there is room for; wait for the first one when nothing runs."""
        fresh: list[QueuedWork] = []
        while len(fresh) < self._engine.room:
            if self._queue.empty() and (fresh or self._engine.busy):
                break
            work = await self._queue.get()
            if not work.cancelled:
                work.got_ns = _now_ns()
                fresh.append(work)
        return fresh

    def _step(self, fresh: list[QueuedWork]) -> None:
        began_ns = _now_ns()
        for work in fresh:
            work.times_us["queue"] = (work.got_ns - work.put_ns) // 1000
            work.times_us["pickup"] = (began_ns - work.got_ns) // 1000
        works: list[Work] = list(fresh)
        self._engine.step(works)

    def _deliver(self) -> None:
        for work in self._running:
            made, work.made = work.made, []
            if made:
                work.outputs.put_nowait(made)
            if work.whole:
                work.outputs.put_nowait(None)
        self._running = [work for work in self._running if not work.whole]


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    serve(QueueBackend(Engine(Costs(slots=options.slots)), options.limit), options.vocab_size)


if __name__ == "__main__":
    main()
