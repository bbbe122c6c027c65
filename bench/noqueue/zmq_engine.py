"""Group C's engine process, `python -m bench.noqueue.zmq_engine`.

As in vLLM: between two steps it drains its input socket into the list of those that wait, stamps
them as queued, fills the free slots from it, stamps those as scheduled, and runs one step. Its
queue time is scheduled minus queued, which is how vLLM defines it; what arrived during a step lay
in the socket until then, and no figure of the engine's has that in it.
"""

import argparse
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq

from bench.noqueue.engine import Costs, Engine
from bench.noqueue.zmq_wire import INPUT, OUTPUT, Abort, Add, Output, Outputs

_IDLE_MS = 250
_now_ns = time.monotonic_ns


class RemoteWork:
    """A request from the HTTP process."""

    def __init__(self, add: Add, made: list[Output]) -> None:
        self.tokens = add.tokens
        self.max_output = add.max_output
        self.temperature = add.temperature
        self.cancelled = False
        self.queued_ns = _now_ns()
        self.times_us: dict[str, int] = {}
        self._number = add.number
        self._made = made

    def emit(self, token: int) -> None:
        times_us, self.times_us = self.times_us, {}
        self._made.append(Output(self._number, token, False, times_us))

    def finish(self) -> None:
        self._made[-1].whole = True

    def drop(self) -> None:
        pass


class EngineProcess:
    """The sockets around the engine."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self._engine = engine
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._input = context.socket(zmq.PULL)
        self._input.connect(f"ipc://{directory / INPUT}")
        self._output = context.socket(zmq.PUSH)
        self._output.connect(f"ipc://{directory / OUTPUT}")
        self._decode = msgspec.msgpack.Decoder(Add | Abort).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._works: dict[int, RemoteWork] = {}
        self._waiting: deque[RemoteWork] = deque()
        self._made: list[Output] = []

    def run(self) -> None:
        """Serve until the process is ended."""
        engine = self._engine
        while True:
            if not engine.busy and not self._waiting:
                self._input.poll(_IDLE_MS)
            self._drain()
            engine.sweep()
            engine.step(self._schedule())
            self._send()

    def _drain(self) -> None:
        while True:
            try:
                message = self._decode(self._input.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            if isinstance(message, Add):
                work = self._works[message.number] = RemoteWork(message, self._made)
                self._waiting.append(work)
            else:
                aborted = self._works.pop(message.number, None)
                if aborted is not None:
                    aborted.cancelled = True

    def _schedule(self) -> list[RemoteWork]:
        fresh: list[RemoteWork] = []
        now_ns = _now_ns()
        while self._waiting and len(fresh) < self._engine.room:
            work = self._waiting.popleft()
            if not work.cancelled:
                work.times_us = {"queue": (now_ns - work.queued_ns) // 1000}
                fresh.append(work)
        return fresh

    def _send(self) -> None:
        if self._made:
            for output in self._made:
                if output.whole:
                    self._works.pop(output.number, None)
            self._output.send(self._encode(Outputs(self._made)))
            self._made.clear()


def main() -> None:
    """Connect, say so, serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--slots", type=int, required=True)
    options = parser.parse_args()
    process = EngineProcess(Engine(Costs(slots=options.slots)), options.directory)
    print("ready", flush=True)
    process.run()


if __name__ == "__main__":
    main()
