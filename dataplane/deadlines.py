"""What one `Ingress` waits for no longer than it may: headers, bodies, and answers with a deadline.

Sans-IO: what is due is ended when `on_deadline` is called.
"""

import math
from typing import TYPE_CHECKING

from dataplane import refusals
from dataplane.exchange import Exchange, Waiting

if TYPE_CHECKING:
    from dataplane.ingress import Ingress

_SWEEPS = 20  # within one body time-out: a late body waits at most a twentieth longer


class Deadlines:
    """The times by which the requests of one partition have to be through.

    Attributes:
        body_timeout: Seconds that a header or a body may take.
        exchanges: Those of the slots that there are, live or not.
    """

    def __init__(self, ingress: "Ingress", body_timeout: float) -> None:
        self._ingress = ingress
        self.body_timeout = body_timeout
        self.exchanges: list[Exchange] = []
        self._overdue_at: float | None = None  # no deadline passes before
        self._waiting: dict[Waiting, float] = {}
        self._sweep_at: float | None = None
        self._sweep_every = body_timeout / _SWEEPS

    def attach(self, exchanges: list[Exchange]) -> None:
        """Watch over these exchanges, none of which is live."""
        self._overdue_at = None
        self.exchanges = exchanges

    def expect_body(self, exchange: Exchange) -> None:
        """The body did not come with the header: it has until the time-out, or the deadline."""
        exchange.body_due = exchange.started + self.body_timeout
        if exchange.deadline_ms:
            self.set(exchange)
        if self._sweep_at is None:
            self._sweep_at = exchange.started + self._sweep_every

    def expect_header(self, waiting: Waiting) -> None:
        """A stream began without a whole header; `waiting.expire()` is called after too long."""
        now = self._ingress.stats.now
        self._waiting[waiting] = now + self.body_timeout
        if self._sweep_at is None:
            self._sweep_at = now + self._sweep_every

    def expect_no_header(self, waiting: Waiting) -> None:
        """The header is whole, or its stream is over."""
        self._waiting.pop(waiting, None)

    def set(self, exchange: Exchange) -> None:
        """Count the deadline from the arrival: the header was in the kernel for `queue_ns`."""
        arrived = exchange.started - max(0, exchange.queue_ns) / 1e9
        due = exchange.deadline_at = arrived + exchange.deadline_ms / 1000
        if self._overdue_at is None or due < self._overdue_at:
            self._overdue_at = due

    def next_due(self) -> float | None:
        """Return when `on_deadline` is due (monotonic seconds)."""
        due = self._overdue_at
        if self._sweep_at is not None and (due is None or self._sweep_at < due):
            return self._sweep_at
        return due

    def on_deadline(self, now: float) -> None:
        """End what is due."""
        if self._overdue_at is not None and self._overdue_at <= now:
            self._end_overdue(now)
        if self._sweep_at is not None and self._sweep_at <= now:
            self._sweep(now)

    def _end_overdue(self, now: float) -> None:
        """End what is overdue, and find what is due next.

        Looks at every slot rather than at a queue of deadlines, which would keep those of requests
        that ended long before.
        """
        next_due = math.inf
        for exchange in self.exchanges:
            if not exchange.live:
                continue
            if exchange.deadline_at <= now:
                exchange.deadline_at = math.inf
                self._expire(exchange)
            elif exchange.deadline_at < next_due:
                next_due = exchange.deadline_at
        self._overdue_at = next_due if next_due < math.inf else None

    def _sweep(self, now: float) -> None:
        """Look through all that is being written.

        Nearly every body comes in time, so none costs an entry in a queue of deadlines; while there
        are any, all are looked at so often that none waits much longer than it may.
        """
        for waiting in [waiting for waiting, due in self._waiting.items() if due <= now]:
            waiting.expire()
        left = bool(self._waiting)
        for exchange in self.exchanges:
            if exchange.writing:
                if exchange.body_due <= now:
                    self._expire(exchange)
                else:
                    left = True
        self._sweep_at = now + self._sweep_every if left else None

    def _expire(self, exchange: Exchange) -> None:
        ingress = self._ingress
        if exchange.writing:
            assert ingress.table is not None
            whole, _ = ingress.table.written(exchange.slot)
            exchange.refuse(ingress.give_up(exchange, refusals.late(whole, exchange.n_tokens)))
        else:
            ingress.egress.expire(exchange)
