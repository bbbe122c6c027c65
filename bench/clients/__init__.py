"""Load generators that are no bottleneck: TCP in lean Python, QUIC by `dataplane.load`.

All of them run the same way (closed loop, or open loop at a rate), count a request at its whole
answer, and refuse answers that are not the ones asked for, so that no system looks fast by being
wrong. Requests are bytes that were built before the first one is sent.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class WrongAnswerError(Exception):
    """A server answered something else than the verdict or the ids that it was asked for."""


class Outcome(NamedTuple):
    """A finished run: every request was answered as it should be.

    `times_us` are from sending (open loop: from when it was due) to the whole answer,
    `verdicts_us` to its verdict, where a protocol has one before the answer's end.
    """

    times_us: npt.NDArray[np.float64]
    seconds: float
    cpu_s: float
    verdicts_us: npt.NDArray[np.float64] | None = None

    @property
    def requests(self) -> int:
        return len(self.times_us)


class Generator(Protocol):
    """Connections to one server."""

    def connect(self) -> None:
        """Open all of them."""
        ...

    def run(self, requests: int, rate: float | None = None) -> Outcome:
        """Send so many requests, as fast as they are answered or `rate` a second."""
        ...

    def close(self) -> None:
        """Close them."""
        ...
