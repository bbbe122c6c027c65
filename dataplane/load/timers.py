"""When each connection of a load is to be looked at next, though nothing came on it."""

import heapq
from collections.abc import Iterator

from dataplane.load.link import Link


class Timers:
    """One timer a connection, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Link]] = []
        self._count = 0

    def arm(self, link: Link, due: float) -> None:
        """Set a timer; one that only moved later is looked at again when it fires."""
        armed = link.timer_at
        if armed is None or due < armed:
            link.timer_at = due
            self._count += 1
            heapq.heappush(self._heap, (due, self._count, link))

    def next_at(self) -> float:
        """When the next one may fire; infinite without any."""
        return self._heap[0][0] if self._heap else float("inf")

    def due(self, now: float) -> Iterator[Link]:
        """The connections whose timers are due, each to be dealt with before the next is asked."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            at, _, link = heapq.heappop(heap)
            if link.timer_at != at or link.lost is not None:
                continue
            link.timer_at = None
            due = link.quic.timer()
            if due is not None and due > now:
                self.arm(link, due)
            elif due is not None:
                yield link
