"""From the exchanges of a run to figures, without a socket or a clock.

The rules that hold here:

- A quantile q of n times is the ceil(q * n)-th smallest: a time that was measured.
- Times count from when a request was due, except where a bound is put on the server: that counts
  from when it was sent, before which no server can have seen it.
- A client's bound uses nothing that the server says. It knows the engine's costs, since the engine
  is scripted: whoever has a first token was taken at least a prefill and a step before. That is the
  upper bound of the wait, and holds always. For the lower one it takes off the prefills of those
  that joined the same step, whose first tokens came with its own, and the way there and back as it
  was at rest (p99): it holds where a token is not delayed by more than that.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from bench.noqueue.engine import Costs
from bench.noqueue.exchange import End, Exchange

_MS = 1e6
_CURVE = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1.0)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the quantile of sorted times."""
    # In floating point a product may be more than the whole number that it is, by its last bit.
    return ordered[max(1, math.ceil(round(q * len(ordered), 6))) - 1]


def spread(times: Iterable[float]) -> dict[str, float | None]:
    """Return p50, p99, their difference and the maximum; None where there is no time."""
    ordered = sorted(times)
    if not ordered:
        return dict.fromkeys(("p50", "p99", "p99_minus_p50", "max"))
    p50, p99 = quantile(ordered, 0.5), quantile(ordered, 0.99)
    values = {"p50": p50, "p99": p99, "p99_minus_p50": p99 - p50, "max": ordered[-1]}
    return {name: round(value, 3) for name, value in values.items()}


def curve(times: Iterable[float]) -> list[tuple[float, float]]:
    """Return quantiles to draw."""
    ordered = sorted(times)
    return [(q, round(quantile(ordered, q), 3)) for q in _CURVE] if ordered else []


def first_tokens_ms(exchanges: Iterable[Exchange]) -> list[float]:
    """Return the times to the first token, of those that got one."""
    return [(one.first_ns - one.due_ns) / _MS for one in exchanges if one.first_ns]


def verdicts_ms(exchanges: Iterable[Exchange], end: End | None = None) -> list[float]:
    """Return the times to the server's decision, of those that ended so; None: of all."""
    return [
        (one.verdict_ns - one.due_ns) / _MS
        for one in exchanges
        if one.verdict_ns and (end is None or one.end is end)
    ]


def ends(exchanges: Sequence[Exchange]) -> dict[str, Any]:
    """Count what became of the requests, with the reasons of those that got no answer."""
    counts = Counter(one.end for one in exchanges)
    reasons = Counter(one.reason for one in exchanges if one.reason and one.end is not End.ANSWERED)
    return {
        "requests": len(exchanges),
        "attempts": sum(one.attempts for one in exchanges),
        **{str(end): counts[end] for end in End},
        "reasons": dict(reasons.most_common(5)),
    }


class Wait:
    """What the client can say of how long requests waited to be taken by the engine.

    Attributes:
        lower_ns, upper_ns: Bounds for each, in the order of `exchanges`.
        exchanges: Those with a first token, sent once.
    """

    def __init__(
        self, exchanges: Iterable[Exchange], costs: Costs, prompt: int, path_ns: int
    ) -> None:
        self.exchanges = [one for one in exchanges if one.first_ns and one.attempts == 1]
        self.upper_ns: list[int] = []
        self.lower_ns: list[int] = []
        least_ns = costs.first_token_ns(prompt)
        for one, others in zip(self.exchanges, joined(self.exchanges, costs), strict=True):
            upper_ns = max(0, one.first_ns - one.sent_ns - least_ns)
            self.upper_ns.append(upper_ns)
            self.lower_ns.append(max(0, upper_ns - costs.prefill_ns(prompt) * others - path_ns))

    def described(self) -> dict[str, Any]:
        """Return both bounds in ms."""
        return {
            "lower_ms": spread(ns / _MS for ns in self.lower_ns),
            "upper_ms": spread(ns / _MS for ns in self.upper_ns),
        }

    def unsaid_ms(self, names: Sequence[str]) -> dict[str, float | None]:
        """Return by how much the lower bound is above all that the server says of each wait."""
        return spread(
            max(0.0, lower_ns / _MS - sum(one.says_us.get(name, 0) for name in names) / 1e3)
            for one, lower_ns in zip(self.exchanges, self.lower_ns, strict=True)
        )


def joined(exchanges: Sequence[Exchange], costs: Costs) -> list[int]:
    """Return for each how many others joined the engine in the step that it did.

    First tokens of one step leave together, those of two are a step apart: half a step tells.
    """
    first = sorted(one.first_ns for one in exchanges)
    half_ns = costs.step_ns // 2
    return [
        min(
            costs.slots - 1,
            bisect_right(first, one.first_ns + half_ns)
            - bisect_left(first, one.first_ns - half_ns)
            - 1,
        )
        for one in exchanges
    ]


def says(exchanges: Iterable[Exchange], name: str) -> dict[str, float | None]:
    """Return what the server said under a name, in µs, of the requests that it said it of."""
    return spread(float(one.says_us[name]) for one in exchanges if name in one.says_us)


def goodput(exchanges: Iterable[Exchange], target_ms: float) -> int:
    """Count the whole answers whose first token came within the target."""
    return sum(
        one.end is End.ANSWERED and (one.first_ns - one.due_ns) / _MS <= target_ms
        for one in exchanges
    )
