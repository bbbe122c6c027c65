"""Group C's HTTP process, `python -m bench.noqueue.zmq_front`: uvicorn, SSE, ZMQ to the engine.

As vLLM is built: the HTTP process checks and encodes a request (msgpack) and pushes it over a Unix
socket to the engine's process; one task takes what each step made and hands it to the handlers. The
queue lies between the two processes, where neither counts it. What the server says of a request's
wait is what its engine says.
"""

import argparse
import asyncio
import contextlib
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from bench.noqueue.asgi import Generate, Job, serve
from bench.noqueue.zmq_wire import INPUT, OUTPUT, Abort, Add, Outputs


class RemoteJob(Job):
    """A request that the engine's process has."""

    def __init__(self, request: Generate, number: int) -> None:
        super().__init__(request)
        self.number = number


class ZmqBackend:
    """Both sockets, and the task that reads the engine's."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._jobs: dict[int, RemoteJob] = {}
        self._count = 0
        self._encode = msgspec.msgpack.Encoder().encode
        self._task: asyncio.Task[None] | None = None

    def job(self, request: Generate) -> RemoteJob:
        self._count += 1
        return RemoteJob(request, self._count)

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._input.bind(f"ipc://{self._directory / INPUT}")
        self._output = self._context.socket(zmq.PULL)
        self._output.bind(f"ipc://{self._directory / OUTPUT}")
        self._task = asyncio.create_task(self._dispatch())

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)

    async def submit(self, job: RemoteJob) -> bool:
        self._jobs[job.number] = job
        add = Add(job.number, job.tokens, job.max_output, job.temperature)
        await self._input.send(self._encode(add))
        return True

    async def cancel(self, job: RemoteJob) -> None:
        if self._jobs.pop(job.number, None) is not None:
            await self._input.send(self._encode(Abort(job.number)))

    async def _dispatch(self) -> None:
        decode = msgspec.msgpack.Decoder(Outputs).decode
        while True:
            for output in decode(await self._output.recv()).outputs:
                job = self._jobs.get(output.number)
                if job is None:
                    continue
                job.times_us.update(output.times_us)
                job.outputs.put_nowait([output.token])
                if output.whole:
                    del self._jobs[output.number]
                    job.outputs.put_nowait(None)


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    options = parser.parse_args()
    serve(ZmqBackend(options.directory), options.vocab_size)


if __name__ == "__main__":
    main()
