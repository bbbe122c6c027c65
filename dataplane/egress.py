"""From a published slot to the stream: what the runtime appends is copied out and sent on.

Nothing that lies in the region is trusted: each word is loaded once (by `dp_poll`, into memory of
this process), checked, and that value used. A runtime that breaks the rules is dropped with its
region. The tail of a finished answer is copied and the slot released at once, so a slow reader
costs its own connection only: while more waits for a connection than may, output stays in the slot,
a finished answer's for a short while.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from dataplane.errors import ResetCode
from dataplane.exchange import Exchange
from dataplane.latency import Series
from dataplane.slots import PENDING, Finish, State
from dataplane.stats import Stats
from dataplane.table import Answer, SlotTable

_READY, _RUNNING, _DONE, _FREE = (
    int(State.READY), int(State.RUNNING), int(State.DONE), int(State.FREE),
)  # fmt: skip
_DEADLINE = int(Finish.DEADLINE)
_ERROR = int(Finish.ERROR)
_FINISHES = frozenset((int(Finish.STOP), int(Finish.LENGTH), _ERROR))
_PICKUP, _FIRST, _TOTAL = int(Series.PICKUP), int(Series.FIRST_TOKEN), int(Series.TOTAL)
_NOT_YET, _CLOCK_WENT_BACK = -1, -2  # what is negative is not told
_HOLD_WEIGHT = 0.05  # of the newest request in the smoothed time that a slot is held
_realtime_ns = time.time_ns

HOLD_S = 2.0
"""How long the slot of a finished answer is kept for a connection that does not drain: several
round trips and losses on a bad path, so whoever reads at all gets there."""


class Egress:
    """Answers of one listener.

    Attributes:
        unanswered: Published in this pass; their 200 goes out at its end, with output that is
        there.
        on_broken: Called with the rule that the runtime broke.
        is_broken: Whether it broke one; nothing of it is looked at any more.
        hold_s: Smoothed time that a request holds its slot, in seconds, for retry-after, and of how
            many requests that is (`ended_count`).
    """

    def __init__(self, stats: Stats) -> None:
        self.stats = stats
        self.table: SlotTable | None = None
        self.unanswered: list[Exchange] = []
        self.hold_s = 0.0
        self.ended_count = 0
        self.is_broken = False
        self.on_broken: Callable[[str], None] = lambda why: None
        self._held: dict[Exchange, float] = {}  # until when; inf: until the runtime is done
        self._latency = stats.latency

    def flush(self) -> None:
        """Send what came out since the last pass, and every 200 that is due."""
        if self.table is None:
            self.unanswered.clear()
            return
        self.look()
        if self.unanswered and not self.is_broken:
            for exchange in self.unanswered:
                if exchange.watch >= 0 and not exchange.answered:
                    exchange.answer(b"", 0)
            self.unanswered.clear()

    def look(self) -> None:
        """Send what came out since the last pass."""
        table = self.table
        if table is None or self.is_broken:
            return
        changed = table.poll()
        if self._held:
            changed = [exchange for exchange in changed if exchange not in self._held]
            self._resume(table)
        for exchange in changed:
            # An earlier one of this poll may have ended the attachment, or this exchange.
            if self.table is table and exchange.watch >= 0 and not self.is_broken:
                self._advance(table, exchange, table.entry(exchange))

    def next_due(self) -> float | None:
        """Return when a held slot is not held any longer (monotonic seconds)."""
        if not self._held:
            return None
        due = min(self._held.values())
        return due if due < math.inf else None

    def _advance(self, table: SlotTable, exchange: Exchange, entry: Any) -> None:
        state, count, seen = entry.state, entry.count, entry.seen
        rule = self._broken_rule(exchange, state, count, seen)
        if rule:
            self._break_rule(exchange, rule)
            return
        if exchange.connection.overfull():
            self._hold(exchange, entry)
            return
        now_ns = _realtime_ns()
        ids = self._take_output(table, exchange, seen, count, now_ns)
        if ids is None:
            return
        entry.seen = count
        if state != _DONE:
            exchange.sent = count
            exchange.answer(ids, 0)
            return
        finish = table.request(exchange.slot).finish_reason
        if finish not in _FINISHES:
            self._break_rule(exchange, f"finish reason {finish}")
            return
        exchange.sent = count
        if finish == _ERROR and not exchange.answered:
            # A reset would take an unsent 200 with it: that goes out now, and the next pass finds
            # the slot DONE once more.
            exchange.answer(ids, 0)
            return
        status = table.release(exchange.slot, exchange.generation)
        if status < 0:
            self._break_rule(exchange, f"it left DONE under its listener (status {status})")
            return
        self._complete(table, exchange, ids, finish, now_ns)

    def _break_rule(self, exchange: Exchange, rule: str) -> None:
        self.is_broken = True
        self.on_broken(f"slot {exchange.slot}: {rule}")

    def _take_output(
        self, table: SlotTable, exchange: Exchange, seen: int, count: int, now_ns: int
    ) -> bytes | None:
        """Copy the new ids out, note the first sign of the runtime; None: it broke a rule."""
        ids: bytes | None = b""
        if count > seen:
            ids = table.output(exchange.slot, seen, count)
            if ids is None:
                _, token = table.bad_token(exchange.slot)
                self._break_rule(exchange, f"output id {token} is outside the vocabulary")
                return None
        if exchange.pickup_us == _NOT_YET:
            self._picked_up(table, exchange, count, now_ns)
        return ids

    # A reader that is behind.

    def _hold(self, exchange: Exchange, entry: Any) -> None:
        """Leave the output in the slot until its connection has room."""
        state = entry.paused = entry.state
        self._held[exchange] = self.stats.now + HOLD_S if state == _DONE else math.inf

    def _resume(self, table: SlotTable) -> None:
        """Go on with what is held, the longest held first, and give up on what is overdue.

        Whether a connection drained is asked once a pass: those that another one's output takes the
        room from are held for another while, since their reader reads.
        """
        drained: dict[Any, bool] = {}
        for exchange, until in list(self._held.items()):
            if exchange not in self._held or self.table is not table or self.is_broken:
                continue  # An earlier one ended it.
            connection = exchange.connection
            if connection not in drained:
                drained[connection] = not connection.overfull()
            entry = table.entry(exchange)
            if drained[connection]:
                del self._held[exchange]
                entry.paused = 0
                self._advance(table, exchange, entry)
            elif entry.state != entry.paused:
                self._advance(table, exchange, entry)
            elif until <= self.stats.now:
                self._break_off(table, exchange)

    @staticmethod
    def _broken_rule(exchange: Exchange, state: int, count: int, seen: int) -> str | None:
        if state not in (_READY, _RUNNING, _DONE):
            return "the state word left this listener's hands"
        if count > exchange.max_output:
            return f"{count} output ids, {exchange.max_output} allowed"
        if count < seen:
            return f"the output count went back from {seen} to {count}"
        return None

    def _picked_up(self, table: SlotTable, exchange: Exchange, count: int, now_ns: int) -> None:
        """The first sign of the runtime: its taken time, and the first token's if there is one."""
        taken_ns = table.request(exchange.slot).taken_ns
        exchange.pickup_us = self._measure(_PICKUP, taken_ns - exchange.published_ns)
        if count:
            exchange.first_us = self._measure(_FIRST, now_ns - exchange.complete_ns)

    def _measure(self, series: int, difference_ns: int) -> int:
        """Count a difference; in µs, or `_CLOCK_WENT_BACK`."""
        microseconds = self._latency.record_ns(series, difference_ns)
        return microseconds if difference_ns >= 0 else _CLOCK_WENT_BACK

    def _complete(
        self, table: SlotTable, exchange: Exchange, ids: bytes, finish: int, now_ns: int
    ) -> None:
        """The slot is back; the rest of the answer goes out."""
        if exchange.watch >= 0:
            table.unwatch(exchange)
        exchange.total_us = self._measure(_TOTAL, now_ns - exchange.complete_ns)
        self.ended(exchange)
        if finish == _ERROR:
            self.stats.failed += 1
            exchange.fail(ResetCode.RUNTIME_ERROR)
        else:
            self.stats.completed += 1
            exchange.answer(ids, finish)

    def _break_off(self, table: SlotTable, exchange: Exchange) -> None:
        table.let_go(exchange.slot, exchange.generation)
        table.unwatch(exchange)
        self.stats.failed += 1
        self.ended(exchange)
        exchange.fail(ResetCode.SLOW_READER)

    def expire(self, exchange: Exchange) -> None:
        """The deadline of a published request: what is out is sent, the rest is not waited for.

        In READY the slot is revoked. In RUNNING what is out is copied before the cancel, since
        after it the slot is the runtime's alone. If either finds that the runtime moved on, its
        result counts.
        """
        table = self.table
        assert table is not None
        status = table.revoke(exchange.slot, exchange.generation)
        if status == PENDING:
            self._stand_by(table, exchange)
        elif status == _FREE:
            self._complete(table, exchange, b"", _DEADLINE, _realtime_ns())
        else:
            self._cancel(table, exchange)

    def _cancel(self, table: SlotTable, exchange: Exchange) -> None:
        table.poll()
        entry = table.entry(exchange)
        seen, count = entry.seen, entry.count
        rule = self._broken_rule(exchange, entry.state, count, seen)
        if rule:
            self._break_rule(exchange, rule)
            return
        if entry.state == _DONE:
            return  # The next flush finds it.
        if exchange.connection.overfull():
            self._break_off(table, exchange)
            return
        now_ns = _realtime_ns()
        ids = b""
        if count:
            found = self._take_output(table, exchange, seen, count, now_ns)
            if found is None:
                return
            ids = found
        status = table.cancel(exchange.slot, exchange.generation)
        if status >= 0:
            exchange.sent = count
            self._complete(table, exchange, ids, _DEADLINE, now_ns)
        elif status == PENDING:
            exchange.sent = count
            self._stand_by(table, exchange)
            if ids:
                exchange.answer(ids, 0)

    def _stand_by(self, table: SlotTable, exchange: Exchange) -> None:
        """The device was asked: until it answers, the slot may be the runtime's alone, so it is
        not watched."""
        self._held.pop(exchange, None)
        table.unwatch(exchange)

    def answered(self, exchange: Exchange, answer: Answer) -> None:
        """The device answered what `expire` asked for; a negative status: the runtime moved on."""
        table = self.table
        assert table is not None
        if answer.status >= 0:
            self._complete(table, exchange, b"", _DEADLINE, _realtime_ns())
            return
        table.watch(exchange)
        entry = table.entry(exchange)
        entry.seen = entry.count = exchange.sent
        if not exchange.answered:
            self.unanswered.append(exchange)
        if answer.is_revoke:
            self._cancel(table, exchange)

    def ended(self, exchange: Exchange) -> None:
        """The request holds no slot any more."""
        exchange.live = False
        if self._held:
            self._held.pop(exchange, None)
        held = self.stats.now - exchange.started
        self.hold_s += (held - self.hold_s) * (_HOLD_WEIGHT if self.hold_s else 1.0)
        self.ended_count += 1
