"""The daemon's counters: plain integers, written by the packet loop and read by the pages.

With the packet pump some requests are counted in C: what the pages show is the sum, made here.
"""

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from dataplane.errors import Status
from dataplane.latency import Latency

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Counts(NamedTuple):
    """Everything that was counted, by Python and by the pump."""

    answers: dict[int, int]
    claimed: int
    completed: int
    cancelled: int
    failed: int
    in_flight: int
    negative: int
    datagrams_dropped: int


class Stats:
    """What happened since the start, of which Python's own part is in the attributes.

    Attributes:
        now: Monotonic seconds as of this pass of the packet loop.
        raw, loop: Give `struct dp_raw_stats` and `struct dp_loop_stats` where there is a pump.
        answers: Answers by status; a 200 counts when it is written.
        claimed, completed, cancelled, failed: Slots claimed; answers that ended whole, by the
        client's leaving, by an error.
        connections: QUIC connections that are open, half-open ones too.
        datagrams_dropped: Datagrams that the kernel did not take when they were sent.
    """

    def __init__(self) -> None:
        self.started = self.now = time.monotonic()
        self.latency = Latency()
        self.raw: Callable[[], Any] | None = None
        self.loop: Callable[[], Any] | None = None
        self.answers: Counter[int] = Counter()
        self.claimed = 0
        self.completed = 0
        self.cancelled = 0
        self.failed = 0
        self.connections = 0
        self.datagrams_dropped = 0

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot now, the pump's too."""
        return self.counts().in_flight

    def counts(self) -> Counts:
        """Add it all up."""
        claimed, completed = self.claimed, self.completed
        cancelled, failed = self.cancelled, self.failed
        negative, dropped = self.latency.negative, self.datagrams_dropped
        answers = dict(self.answers)
        if self.raw is not None:
            raw = self.raw()
            claimed, completed = claimed + raw.claimed, completed + raw.completed
            cancelled, failed = cancelled + raw.cancelled, failed + raw.failed
            negative += raw.negative
            for status, count in ((Status.OK, raw.ok), (Status.BUSY, raw.busy)):
                if count:
                    answers[int(status)] = answers.get(int(status), 0) + count
        if self.loop is not None:
            dropped += self.loop().dropped_out
        # Each one claimed ends in one of the other three.
        in_flight = claimed - completed - cancelled - failed
        return Counts(answers, claimed, completed, cancelled, failed, in_flight, negative, dropped)

    def begin_pass(self, now: float) -> None:
        """Set the time that this pass counts with."""
        self.now = now
        self.latency.now_s = int(now)

    def uptime_s(self) -> float:
        """Return seconds since the start."""
        return time.monotonic() - self.started

    def health(self, status: str) -> dict[str, Any]:
        """Return `/health` (contract 5)."""
        counts = self.counts()
        return {
            "status": status,
            "uptime_s": round(self.uptime_s(), 3),
            "cpu_s": round(cpu_s(), 6),
            "rss_bytes": rss_bytes(),
            "requests": {str(status): count for status, count in sorted(counts.answers.items())},
            "in_flight": counts.in_flight,
            "claimed": counts.claimed,
            "completed": counts.completed,
            "cancelled": counts.cancelled,
            "failed": counts.failed,
        }


def joint_hold_s(own_s: float, own_count: int, raw: Any | None) -> float:
    """Return the smoothed time that a request holds its slot, whoever served it, in seconds.

    Args:
        own_s, own_count: That of the requests which Python served, and their number.
        raw: `struct dp_raw_stats` of the same slots, if the pump serves them too.
    """
    if raw is None or not raw.hold_s:
        return own_s
    if not own_s:
        return float(raw.hold_s)
    share = raw.claimed / (raw.claimed + own_count)
    return float(share * raw.hold_s + (1 - share) * own_s)


def cpu_s() -> float:
    """Return the CPU time of the daemon in seconds, the runtime's excluded."""
    return time.process_time()


def rss_bytes() -> int:
    """Return this process's resident memory, the shared region included."""
    statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(statm, 256).split()[1]) * _PAGE
    finally:
        os.close(statm)
