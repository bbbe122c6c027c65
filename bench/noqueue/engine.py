"""The scripted engine: one model-shaped load, the same code behind every front end compared here.

Why scripted: a real model's times vary by more than what is compared, which is how a request comes
to the engine and how its first token comes back. The rules that hold here:

- It is a step loop with continuous batching: a step costs a prefill for each prompt that joins it
  (so much a token) and one decode step over all that run, and each that runs gets one token at its
  end. Whoever arrives during a step waits for the next one, whatever the front end.
- The time of a step is slept, so it costs no core and is the same for everyone; what a front end
  does between two steps comes on top.
- It has so many slots and no queue. Who gets a slot is for the driver to say.
- The answer is always `max_output` tokens; the temperature comes along and changes nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Costs:
    """What the engine's work takes."""

    slots: int = 8
    prefill_us: float = 20.0
    """For each token of a prompt."""
    step_ms: float = 5.0
    """For one token of all that run."""

    def prefill_ns(self, prompt: int) -> int:
        """Return what a prompt adds to the step that it joins."""
        return round(self.prefill_us * 1e3 * prompt)

    @property
    def step_ns(self) -> int:
        """Return what a step takes that no prompt joins."""
        return round(self.step_ms * 1e6)

    def first_token_ns(self, prompt: int) -> int:
        """Return the least time from being taken to the first token."""
        return self.prefill_ns(prompt) + self.step_ns

    def capacity(self, prompt: int, output: int) -> float:
        """Return how many requests a second the slots can serve, all of them always taken.

        A request takes its prefill, and `output` steps that it shares with all other slots.
        """
        return 1e9 / (self.prefill_ns(prompt) + output * self.step_ns / self.slots)


class Ids(Protocol):
    """A list, or an array that lies in a region."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Work(Protocol):
    """One request as the engine sees it; each front end has its own."""

    @property
    def tokens(self) -> Ids: ...
    @property
    def max_output(self) -> int: ...
    @property
    def temperature(self) -> float: ...
    @property
    def cancelled(self) -> bool: ...

    def emit(self, token: int) -> None:
        """Take the next token of the answer."""

    def finish(self) -> None:
        """The answer is whole."""

    def drop(self) -> None:
        """It was cancelled, and its slot is free again."""


def sleep_until(deadline_ns: int) -> None:
    """Sleep until a moment of the monotonic clock."""
    while (left := deadline_ns - time.monotonic_ns()) > 0:
        time.sleep(left / 1e9)


class _Running:
    __slots__ = ("made", "work")

    def __init__(self, work: Work) -> None:
        self.work = work
        self.made = 0


class Engine:
    """The slots and the step.

    Args:
        costs: What the work takes.
        clock: Monotonic nanoseconds.
        wait: Waits until a moment of that clock.
    """

    def __init__(
        self,
        costs: Costs,
        clock: Callable[[], int] = time.monotonic_ns,
        wait: Callable[[int], None] = sleep_until,
    ) -> None:
        self.costs = costs
        self.steps = 0
        self._clock = clock
        self._wait = wait
        self._running: list[_Running] = []

    @property
    def busy(self) -> bool:
        """Whether anything runs."""
        return bool(self._running)

    @property
    def room(self) -> int:
        """Slots that are free."""
        return self.costs.slots - len(self._running)

    def sweep(self) -> None:
        """Drop what was cancelled: between two steps, as engines do."""
        still = []
        for running in self._running:
            if running.work.cancelled:  # Asked once: it may come true at any moment.
                running.work.drop()
            else:
                still.append(running)
        self._running = still

    def step(self, fresh: Sequence[Work]) -> None:
        """Take these in, spend the time of one step, and hand out its tokens."""
        if len(fresh) > self.room:
            raise ValueError(f"{len(fresh)} requests for {self.room} free slots")
        began = self._clock()
        self._running += map(_Running, fresh)
        if not self._running:
            return
        prefill = sum(self.costs.prefill_ns(len(work.tokens)) for work in fresh)
        self._wait(began + prefill + self.costs.step_ns)
        self.steps += 1
        self._running = [running for running in self._running if self._advance(running)]

    @staticmethod
    def _advance(running: _Running) -> bool:
        """Hand out one token; False once the answer is whole."""
        work = running.work
        work.emit(int(work.tokens[running.made % len(work.tokens)]))
        running.made += 1
        if running.made < work.max_output:
            return True
        work.finish()
        return False
