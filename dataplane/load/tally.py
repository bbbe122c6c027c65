"""The sums of a load, without a socket or a clock: when requests are due, and what they came to.

The rules that hold here: a request is counted once, at its end, under its status or under `reset`
or `lost`; times go into arrays that were there before the first request; a quantile q of n times is
the ceil(q * n)-th smallest, a time that was measured and not one between two.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESET = "reset"
LOST = "lost"
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}

Times = npt.NDArray[np.int64]


class Schedule:
    """When each of so many requests begins.

    Without a rate (a closed loop) as soon as there is room for it. With one (an open loop) each has
    its moment from the start on, and its time counts from that moment however late it begins: what
    a slow server makes wait shows in its times (coordinated omission).
    """

    def __init__(self, requests: int, rate: float | None, start_ns: int) -> None:
        self.taken = 0
        self._requests = requests
        self._rate = rate
        self._start_ns = start_ns

    def _due_ns(self, rate: float) -> int:
        # From the number and not from the request before, so that no rounding adds up.
        return self._start_ns + round(self.taken * 1e9 / rate)

    def take(self, now_ns: int) -> int | None:
        """Take the next request if it is due; the moment that its time counts from."""
        if self.taken == self._requests:
            return None
        began_ns = now_ns if self._rate is None else self._due_ns(self._rate)
        if began_ns > now_ns:
            return None
        self.taken += 1
        return began_ns

    def abandon(self) -> int:
        """Begin no more; how many will not be."""
        left = self._requests - self.taken
        self.taken = self._requests
        return left

    def next_ns(self) -> int | None:
        """When the next request is due; None when nothing has to be waited for."""
        if self._rate is None or self.taken == self._requests:
            return None
        return self._due_ns(self._rate)


class Tally:
    """What the requests of one run came to."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self.ended = 0
        self._answers: Counter[int] = Counter()
        self._failures: Counter[str] = Counter()
        self._verdicts: Times = np.zeros(requests, np.int64)
        self._totals: Times = np.zeros(requests, np.int64)
        self._ingress: Times = np.zeros(requests, np.int64)
        self._verdict_count = self._total_count = self._ingress_count = 0

    def verdict(self, took_ns: int, ingress_us: int) -> None:
        """A request's verdict came; `ingress_us` is the server's own figure, -1 for none."""
        self._verdicts[self._verdict_count] = took_ns
        self._verdict_count += 1
        if ingress_us >= 0:
            self._ingress[self._ingress_count] = ingress_us
            self._ingress_count += 1

    def answered(self, status: int, took_ns: int) -> None:
        """A request's answer is whole."""
        self._totals[self._total_count] = took_ns
        self._total_count += 1
        self.ended += 1
        self._answers[status] += 1

    def failed(self, kind: str, count: int = 1) -> None:
        """So many requests ended without a whole answer."""
        if count:
            self.ended += count
            self._failures[kind] += count

    def outcome(self, seconds: float, cpu_s: float) -> "Outcome":
        """Close the sums; `seconds` and `cpu_s` are the run's."""
        statuses = {str(code): count for code, count in sorted(self._answers.items())}
        return Outcome(
            self.requests,
            statuses | dict(sorted(self._failures.items())),
            self._verdicts[: self._verdict_count] / 1000,
            self._totals[: self._total_count] / 1000,
            self._ingress[: self._ingress_count].astype(np.float64),
            seconds,
            cpu_s,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run.

    Attributes:
        by_status: How many ended with which status, `reset` (the server broke the answer off) or
            `lost` (the connection went).
        verdicts_us: The time to each verdict, refusals too.
        totals_us: The time to each whole answer, refusals too.
        ingress_us: What the server stated with each 200.
        seconds: From the first request's beginning to the last one's end.
        cpu_s: What this process spent meanwhile.
    """

    requests: int
    by_status: dict[str, int]
    verdicts_us: npt.NDArray[np.float64]
    totals_us: npt.NDArray[np.float64]
    ingress_us: npt.NDArray[np.float64]
    seconds: float
    cpu_s: float

    @property
    def broken(self) -> int:
        """Requests that were not answered."""
        return self.by_status.get(RESET, 0) + self.by_status.get(LOST, 0)

    @property
    def rate(self) -> float:
        """Answers a second, refusals too."""
        return (self.requests - self.broken) / self.seconds


def quantiles(times: npt.NDArray[np.float64]) -> dict[str, int | None]:
    """Return p50 to p999 and the maximum, rounded to whole numbers; None where there is none."""
    ordered = np.sort(times)
    count = len(ordered)
    if not count:
        return dict.fromkeys((*QUANTILES, "max"))
    ranks = {name: math.ceil(quantile * count) for name, quantile in QUANTILES.items()}
    return {name: round(ordered[rank - 1]) for name, rank in (*ranks.items(), ("max", count))}
