"""From a published slot to the stream: what the runtime appends is copied out and sent on.

Nothing that lies in the region is trusted: each word is loaded once (by `dp_poll`, into memory of
this process), checked, and that value used. A runtime that breaks the rules is dropped with its
region. The tail of a finished answer is copied and the slot released at once, so a slow reader
costs its own connection only.
"""

import time
from collections.abc import Callable
from typing import Any

from dataplane.errors import ResetCode
from dataplane.exchange import Exchange
from dataplane.latency import Series
from dataplane.slots import Finish, State
from dataplane.stats import Stats
from dataplane.table import HostTable

_READY, _RUNNING, _DONE, _FREE = (
    int(State.READY), int(State.RUNNING), int(State.DONE), int(State.FREE),
)  # fmt: skip
_DEADLINE = int(Finish.DEADLINE)
_ERROR = int(Finish.ERROR)
_FINISHES = frozenset((int(Finish.STOP), int(Finish.LENGTH), _ERROR))
_PICKUP, _FIRST, _TOTAL = int(Series.PICKUP), int(Series.FIRST_TOKEN), int(Series.TOTAL)
_HOLD_WEIGHT = 0.05  # of the newest request in the smoothed time that a slot is held
_realtime_ns = time.time_ns


class Egress:
    """Answers of one listener.

    Attributes:
        unanswered: Published in this pass; their 200 goes out at its end, with output that is
        there.
        on_broken: Called with the rule that the runtime broke.
    """

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        self.table: HostTable | None = None
        self.unanswered: list[Exchange] = []
        self.on_broken: Callable[[str], None] = lambda why: None
        self._latency = stats.latency

    def flush(self) -> None:
        """Send what came out since the last pass, and every 200 that is due."""
        table = self.table
        if table is None:
            self.unanswered.clear()
            return
        for exchange in table.poll():
            # An earlier one of this poll may have ended the attachment, or this exchange.
            if self.table is table and exchange.watch >= 0:
                self._advance(table, exchange, table.entry(exchange))
        if self.unanswered:
            for exchange in self.unanswered:
                if exchange.watch >= 0 and not exchange.answered:
                    _answer(exchange, b"", 0)
            self.unanswered.clear()

    def _advance(self, table: HostTable, exchange: Exchange, entry: Any) -> None:
        state, count, seen = entry.state, entry.count, entry.seen
        rule = self._broken_rule(exchange, state, count, seen)
        if rule:
            self.on_broken(f"slot {exchange.slot}: {rule}")
            return
        now_ns = _realtime_ns()
        if exchange.pickup_us < 0:
            self._picked_up(table, exchange, now_ns)
        ids = table.output(exchange.slot, seen, count) if count > seen else b""
        exchange.sent = entry.seen = count
        if state != _DONE:
            _answer(exchange, ids, 0)
            if exchange.connection.overfull():
                self._break_off(table, exchange)
            return
        finish = table.request(exchange.slot).finish_reason
        if finish not in _FINISHES:
            self.on_broken(f"slot {exchange.slot}: finish reason {finish}")
            return
        table.release(exchange.slot, exchange.generation)
        self._complete(table, exchange, ids, finish, now_ns)

    @staticmethod
    def _broken_rule(exchange: Exchange, state: int, count: int, seen: int) -> str | None:
        if state not in (_READY, _RUNNING, _DONE):
            return "the state word left this listener's hands"
        if count > exchange.max_output:
            return f"{count} output ids, {exchange.max_output} allowed"
        if count < seen:
            return f"the output count went back from {seen} to {count}"
        return None

    def _picked_up(self, table: HostTable, exchange: Exchange, now_ns: int) -> None:
        """The first sign of the runtime: its taken time, and the first token's."""
        taken_ns = table.request(exchange.slot).taken_ns
        exchange.pickup_us = self._latency.record_ns(_PICKUP, taken_ns - exchange.published_ns)
        exchange.first_us = self._latency.record_ns(_FIRST, now_ns - exchange.complete_ns)

    def _complete(
        self, table: HostTable, exchange: Exchange, ids: bytes, finish: int, now_ns: int
    ) -> None:
        """The slot is back; the rest of the answer goes out."""
        table.unwatch(exchange)
        exchange.total_us = self._latency.record_ns(_TOTAL, now_ns - exchange.complete_ns)
        self.ended(exchange)
        if finish == _ERROR:
            self.stats.failed += 1
            _fail(exchange, ResetCode.RUNTIME_ERROR)
        elif exchange.connection.overfull():
            self.stats.failed += 1
            _fail(exchange, ResetCode.SLOW_READER)
        else:
            self.stats.completed += 1
            _answer(exchange, ids, finish)

    def _break_off(self, table: HostTable, exchange: Exchange) -> None:
        table.let_go(exchange.slot, exchange.generation)
        table.unwatch(exchange)
        self.stats.failed += 1
        self.ended(exchange)
        _fail(exchange, ResetCode.SLOW_READER)

    def expire(self, exchange: Exchange) -> None:
        """The deadline of a published request: what is out is sent, the rest is not waited for.

        In READY the slot is revoked. In RUNNING what is out is copied before the cancel, since
        after it the slot is the runtime's alone. If either finds that the runtime moved on, its
        result counts.
        """
        table = self.table
        assert table is not None
        if table.revoke(exchange.slot, exchange.generation) == _FREE:
            self._complete(table, exchange, b"", _DEADLINE, _realtime_ns())
            return
        table.poll()
        entry = table.entry(exchange)
        seen, count = entry.seen, entry.count
        rule = self._broken_rule(exchange, entry.state, count, seen)
        if rule:
            self.on_broken(f"slot {exchange.slot}: {rule}")
            return
        ids = table.output(exchange.slot, seen, count)
        if table.cancel(exchange.slot, exchange.generation) >= 0:
            exchange.sent = count
            self._complete(table, exchange, ids, _DEADLINE, _realtime_ns())

    def ended(self, exchange: Exchange) -> None:
        """The request holds no slot any more."""
        exchange.live = False
        stats = self.stats
        held = stats.now - exchange.started
        stats.hold_s += (held - stats.hold_s) * (_HOLD_WEIGHT if stats.hold_s else 1.0)


def _answer(exchange: Exchange, ids: bytes, finish: int) -> None:
    """Have the front answer; what raises there ends that connection, not this pass."""
    try:
        exchange.front.answer(exchange, ids, finish)
    except Exception as error:
        exchange.connection.broken(error)


def _fail(exchange: Exchange, code: ResetCode) -> None:
    try:
        exchange.front.fail(exchange, code)
    except Exception as error:
        exchange.connection.broken(error)
