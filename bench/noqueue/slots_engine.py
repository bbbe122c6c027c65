"""Group A's engine, attached to a daemon: `python -m bench.noqueue.slots_engine`.

The engine's slots are the daemon's. What it takes was admitted by a claim on one of them, so there
is always room; a prompt is read where it lies, and a cancelled request gives its slot back between
two steps.
"""

import argparse

import numpy.typing as npt
from numpy import int32

from bench.noqueue.engine import Costs, Engine
from dataplane.errors import DetachedError
from dataplane.runtime import Finish, Manifest, Runtime, Taken, attach

IDLE_S = 0.25
"""Longest time between two steps; below the manifest's `max_step_ms`."""


class SlotWork:
    """A taken request, as the engine sees it."""

    __slots__ = ("_taken", "max_output", "temperature", "tokens")

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        self.tokens: npt.NDArray[int32] = taken.tokens
        self.max_output = taken.max_output
        self.temperature = taken.temperature

    @property
    def cancelled(self) -> bool:
        return self._taken.cancelled

    def emit(self, token: int) -> None:
        self._taken.emit([token])

    def finish(self) -> None:
        self._taken.finish(Finish.LENGTH)

    def drop(self) -> None:
        self._taken.finish(Finish.STOP)


def run(runtime: Runtime, engine: Engine) -> None:
    """Serve until the daemon is gone."""
    while True:
        engine.sweep()
        try:
            taken = runtime.take(0 if engine.busy else IDLE_S)
        except DetachedError:
            return
        engine.step([SlotWork(one) for one in taken])
        runtime.step()


def main() -> None:
    """Attach, say what the region takes, serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--max-output", type=int, required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    options = parser.parse_args()
    manifest = Manifest(
        model="scripted",
        slots=options.slots,
        context=options.context,
        max_output=options.max_output,
        vocab_size=options.vocab_size,
    )
    with attach(options.socket, manifest) as runtime:
        runtime.ready()
        print(f"ready region_bytes={runtime.region.bytes}", flush=True)
        run(runtime, Engine(Costs(slots=options.slots)))


if __name__ == "__main__":
    main()
