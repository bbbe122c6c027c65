"""The daemon's counters: plain integers, written by the packet loop and read by the pages."""

import os
import time
from collections import Counter
from typing import Any

from dataplane.latency import Latency

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Stats:
    """What happened since the start.

    Attributes:
        now: Monotonic seconds as of this pass of the packet loop.
        answers: Answers by status; a 200 counts when it is written.
        claimed, completed, cancelled, failed: Slots claimed; answers that ended whole, by the
        client's leaving, by an error.
        hold_s: Smoothed time that a request holds its slot, in seconds, for retry-after.
    """

    def __init__(self) -> None:
        self.started = self.now = time.monotonic()
        self.latency = Latency()
        self.answers: Counter[int] = Counter()
        self.claimed = 0
        self.completed = 0
        self.cancelled = 0
        self.failed = 0
        self.hold_s = 0.0

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot now: each one claimed ends in one of the other three."""
        return self.claimed - self.completed - self.cancelled - self.failed

    def begin_pass(self, now: float) -> None:
        """Set the time that this pass counts with."""
        self.now = now
        self.latency.now_s = int(now)

    def health(self, status: str) -> dict[str, Any]:
        """Return `/health` (contract 5)."""
        return {
            "status": status,
            "uptime_s": round(time.monotonic() - self.started, 3),
            "cpu_s": round(time.process_time(), 6),
            "rss_bytes": rss_bytes(),
            "requests": {str(status): count for status, count in sorted(self.answers.items())},
            "in_flight": self.in_flight,
            "claimed": self.claimed,
            "completed": self.completed,
            "cancelled": self.cancelled,
            "failed": self.failed,
        }


def rss_bytes() -> int:
    """Return this process's resident memory, the shared region included."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * _PAGE
