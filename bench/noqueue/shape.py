"""What is asked of every system: the requests, when each is due, and how long a client waits.

The rules that hold here: every system gets the same requests at the same moments, since the gaps
come from a seed; the moments are fixed before the run, whatever a server does (an open loop), and
each time counts from them (coordinated omission). The quick form divides the answer's length and
the gaps by one number: the slots are as full, and a step is as long, as in the full one.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from bench.noqueue.engine import Costs
from bench.results import Form

VOCAB_SIZE = 32_000
_COMPRESSED = 8
_GAPS_MS = (50.0, 500.0)
_MAX_OUTPUT = 256
SEED = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """The requests of a run.

    Attributes:
        prompt: Tokens of each prompt.
        max_output: Tokens of each answer.
        temperature: Sent, and ignored by the scripted engine.
        gaps_ms: Bounds of the gap between two requests, uniform.
        requests: How many.
        patience_s: How long a client waits for the first token.
    """

    max_output: int
    gaps_ms: tuple[float, float]
    requests: int
    patience_s: float = 60.0
    prompt: int = 128
    temperature: float = 0.3

    @property
    def rate(self) -> float:
        """Requests a second that are offered."""
        return 2000.0 / sum(self.gaps_ms)

    def ids(self) -> list[int]:
        """Return the prompt."""
        return [(index * 7919 + 11) % VOCAB_SIZE for index in range(self.prompt)]

    def capacity(self, costs: Costs) -> float:
        """Return how many such requests a second the slots can serve."""
        return costs.capacity(self.prompt, self.max_output)

    def described(self) -> dict[str, Any]:
        """Return it for a result."""
        return asdict(self) | {"seed": SEED}


def shape_of(form: Form) -> Shape:
    """Return the published method's requests: whole, or compressed."""
    if form is Form.FULL:
        return Shape(_MAX_OUTPUT, _GAPS_MS, 10_000)
    low, high = _GAPS_MS
    return Shape(_MAX_OUTPUT // _COMPRESSED, (low / _COMPRESSED, high / _COMPRESSED), 300)


def moments(rate: float, spread: tuple[float, float], seed: int = SEED) -> Iterator[int]:
    """Return when each request is due, in ns from the start, without end.

    Args:
        rate: Requests a second, in the mean.
        spread: Bounds of a gap, in any unit: their ratio is the shape.
        seed: The same one gives the same moments.
    """
    chance = random.Random(seed)
    scale = 2e9 / rate / sum(spread)
    at = 0.0
    while True:
        at += chance.uniform(*spread) * scale
        yield round(at)
