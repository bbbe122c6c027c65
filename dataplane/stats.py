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
        connections: QUIC connections that are open, half-open ones too.
        datagrams_dropped: Datagrams that the kernel did not take when they were sent.
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
        self.connections = 0
        self.datagrams_dropped = 0
        self.hold_s = 0.0

    @property
    def in_flight(self) -> int:
        """Requests that hold a slot now: each one claimed ends in one of the other three."""
        return self.claimed - self.completed - self.cancelled - self.failed

    def begin_pass(self, now: float) -> None:
        """Set the time that this pass counts with."""
        self.now = now
        self.latency.now_s = int(now)

    def uptime_s(self) -> float:
        """Return seconds since the start."""
        return time.monotonic() - self.started

    def health(self, status: str) -> dict[str, Any]:
        """Return `/health` (contract 5)."""
        return {
            "status": status,
            "uptime_s": round(self.uptime_s(), 3),
            "cpu_s": round(cpu_s(), 6),
            "rss_bytes": rss_bytes(),
            "requests": {str(status): count for status, count in sorted(self.answers.items())},
            "in_flight": self.in_flight,
            "claimed": self.claimed,
            "completed": self.completed,
            "cancelled": self.cancelled,
            "failed": self.failed,
        }


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
