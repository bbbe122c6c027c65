"""From a header to a published slot: claim, write, publish.

A claim is one compare-and-swap; it succeeds or the request is refused at once (design, decision 4).
Where a device has to do it, its answer is taken when it is there (`dataplane.asking`).
Bad input is answered with a `Refusal`, never raised. A request that gets one holds nothing any
more.

Sans-IO: bytes, the kernel's receive times and a monotonic `now` come in, calls on the front and the
slot table go out.
"""

import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dataplane import refusals
from dataplane.asking import Asking
from dataplane.deadlines import Deadlines
from dataplane.egress import Egress
from dataplane.errors import Refusal, ResetCode, Status
from dataplane.exchange import Asked, Exchange, Front, Peer
from dataplane.latency import MOST_US, Series
from dataplane.manifest import DEFAULT_PARTITION
from dataplane.prompt1 import Request
from dataplane.slots import BAD_TOKEN, FULL, OVERFLOW, PENDING, SHORT, UNANSWERED, Finish
from dataplane.stats import Stats, joint_hold_s
from dataplane.table import UNREAD, Answer, SlotTable

_QUEUE = int(Series.QUEUE)
_STOP = int(Finish.STOP)
_RETRY_MS_MAX = 10_000
_realtime_ns = time.time_ns


class Routes(Protocol):
    """Who admits a request: the only `Ingress` there is, or what a key says.

    Attributes:
        home: Keeps what is not known to be anybody's yet: headers that are not whole.
        sole: Admits every request, whatever its key; None where a key decides.
        keys: Who admits, by the SHA-256 of a key; None where none is asked for.
    """

    stats: Stats

    @property
    def home(self) -> "Ingress": ...
    @property
    def sole(self) -> "Ingress | None": ...
    @property
    def keys(self) -> "Mapping[bytes, Ingress] | None": ...
    def of(self, key: bytes | None) -> "Ingress | Refusal":
        """Return who admits the requests of this key, or why nobody does."""

    def of_whole(self, data: Any, at: int, size: int) -> "tuple[Ingress, Any] | None":
        """Return who admits a plain HTTP/3 request that came whole, and what was read of it.

        None where it is not plain, or nobody admits it: `of` says why.
        """


class Ingress:
    """Admission for one listener to one partition's slots.

    Attributes:
        name: The partition's.
        is_alone: Whether no other one serves the same connections.
        table: The slots, or None while no runtime is ready.
        why_unavailable: What a 503 says meanwhile.
        queue_us: From header complete to claim decided, of the last claim.
        given_id: The client's own identifier of the last request that `publish_whole` decided on.
        max_writing: Slots that one connection may hold in WRITING.
        asking: The requests whose claims a device has not answered.
        deadlines: What is waited for no longer than it may be.
        raw: Gives the `struct dp_raw_stats` of this partition's where the pump serves some.
        keys: None: as `Routes` it asks for no key.
    """

    keys = None

    def __init__(
        self,
        stats: Stats,
        body_timeout: float,
        max_writing: int | None = None,
        name: str = DEFAULT_PARTITION,
    ) -> None:
        self.name = name
        self.stats = stats
        self.egress = Egress(stats)
        self.asking = Asking(self)
        self.deadlines = Deadlines(self, body_timeout)
        self.table: SlotTable | None = None
        self.why_unavailable = "no runtime is attached"
        self.draining = False
        self.queue_us = 0
        self.given_id = b""
        self._configured_max_writing = max_writing
        self.max_writing = 0
        self.is_alone = True
        self.raw: Callable[[], Any] | None = None
        self._null = False
        self._exchanges: list[Exchange] = []
        self._next_id = secrets.randbits(63) or 1
        self._latency = stats.latency

    # As `Routes`.

    @property
    def home(self) -> "Ingress":
        """Headers of all requests are waited for here."""
        return self

    @property
    def sole(self) -> "Ingress | None":
        """Nobody else admits."""
        return self

    def of(self, key: bytes | None) -> "Ingress | Refusal":
        """Admit everybody."""
        return self

    def of_whole(self, data: Any, at: int, size: int) -> "tuple[Ingress, Any] | None":
        """Admit everybody, unread."""
        return self, UNREAD

    # The table comes and goes.

    def attach(self, table: SlotTable, null: bool = False) -> None:
        """Serve from these slots; with `null`, release each at publish and answer nothing."""
        self.table = table
        table.count_in(self._latency, null)
        self.egress.table = table
        self.egress.is_broken = False
        self._null = null
        self.max_writing = self._configured_max_writing or (table.region.slots + 1) // 2
        self._exchanges = [Exchange(slot, self) for slot in range(table.region.slots)]
        self.deadlines.attach(self._exchanges)

    def detach(self, why: str) -> None:
        """The runtime is gone: what it held ends, refused before its 200 and reset after it.

        What it finished before is whole, and goes out.
        """
        self.why_unavailable = why
        if self.table is None:
            return
        self.egress.look()
        self.end_all(refusals.lost(), ResetCode.RUNTIME_LOST)
        self.table = self.egress.table = None
        self._exchanges = self.deadlines.exchanges = []

    def end_all(self, refusal: Refusal, code: ResetCode) -> None:
        """End everything in flight: a refusal where no 200 has gone, a reset where one has."""
        self.asking.refuse_all(refusal)
        for exchange in self._exchanges:
            if exchange.live:
                self._let_go(exchange)
                self.stats.failed += 1
                if exchange.answered:
                    exchange.fail(code)
                else:
                    exchange.refuse(refusal)

    # Claim, write, publish.

    def claim(
        self, front: Front, connection: Peer, stream_id: int, request: Request, ready_ns: int
    ) -> Exchange | Refusal | Asked:
        """Decide on a header that was complete at `ready_ns`.

        Returns:
            The exchange, which holds a slot in WRITING, or why there is none; or that the device
            was asked, and `front.decided` is called once it answered.
        """
        table = self.table
        self.queue_us = 0
        if table is None:
            return Refusal(Status.UNAVAILABLE, self.why_unavailable, refusals.RETRY_MS)
        region = table.region
        if request.n_tokens > region.context or request.max_output > region.max_output:
            return refusals.out_of_bounds(request, region)
        if self.draining:
            return refusals.draining()
        if connection.writing >= self.max_writing:
            refusal = self._capped(connection)
            if refusal is not None:
                return refusal
        request_id = request.request_id or self._new_id()
        max_output = request.max_output or region.max_output
        slot = table.admit(request, request_id, max_output)
        if slot == PENDING:
            assert table.asks is not None
            return self.asking.add(
                Asked(
                    self, front, connection, stream_id, request, request_id, max_output, ready_ns,
                    table.asks.ticket,
                )
            )  # fmt: skip
        return self._decide(
            table, slot, front, connection, stream_id, request, request_id, max_output, ready_ns
        )

    def decide(self, asked: Asked, slot: int) -> Exchange | Refusal:
        """Go on where `claim` asked the device, which granted this slot or said a status."""
        table = self.table
        assert table is not None
        self.queue_us = 0
        connection, request = asked.connection, asked.request
        if slot >= 0:
            refusal = refusals.draining() if self.draining else self._capped(connection)
            if refusal is not None:
                table.let_go(slot, table.generation)
                return refusal
        outcome = self._decide(
            table, slot, asked.front, connection, asked.stream_id, request, asked.request_id,
            asked.max_output, asked.ready_ns,
        )  # fmt: skip
        if isinstance(outcome, Exchange):
            table.begin(slot, request, asked.request_id, asked.max_output)
        return outcome

    def _decide(
        self, table: SlotTable, slot: int, front: Front, connection: Peer, stream_id: int,
        request: Request, request_id: int, max_output: int, ready_ns: int,
    ) -> Exchange | Refusal:  # fmt: skip
        """A claim came out so: the slot, or a negative status."""
        queue_ns = _realtime_ns() - ready_ns
        if slot < 0:
            self.queue_us = self._latency.record_ns(_QUEUE, queue_ns)
            if slot == UNANSWERED:
                return refusals.stuck()
            return Refusal(Status.BUSY, refusals.BUSY, self.retry_after_ms())
        exchange = self._exchanges[slot]
        if exchange.live:
            self.egress.on_broken(f"slot {slot}: it was given out twice")
            return refusals.lost()
        exchange.front = front
        exchange.connection = connection
        exchange.stream_id = stream_id
        exchange.request_id = request_id
        exchange.generation = table.generation
        exchange.free_left = table.free_left
        exchange.n_tokens = request.n_tokens
        exchange.max_output = max_output
        exchange.deadline_ms = request.deadline_ms
        exchange.deadline_at = math.inf
        exchange.queue_us = min(queue_ns // 1000, MOST_US) if queue_ns > 0 else 0
        exchange.queue_ns = queue_ns
        exchange.started = self.stats.now
        exchange.live = exchange.writing = True
        exchange.answered = False
        exchange.sent = exchange.complete_ns = 0
        connection.writing += 1
        self.stats.claimed += 1
        return exchange

    def _capped(self, connection: Peer) -> Refusal | None:
        """Refuse one that holds as many slots in WRITING as it may, other partitions' apart."""
        held = connection.writing
        if held >= self.max_writing and not self.is_alone:
            held = sum(one.writing and one.connection is connection for one in self._exchanges)
            held += connection.writing_in_pump(self)
        if held < self.max_writing:
            return None
        return refusals.capped(held, self.retry_after_ms())

    def _new_id(self) -> int:
        request_id = self._next_id
        self._next_id = (request_id + 1) & (2**64 - 1) or 1
        return request_id

    def revise(self, exchange: Exchange, request: Request) -> Refusal | None:
        """State anew what a request asks for that was claimed before its body could be read."""
        table = self.table
        assert table is not None
        max_output = request.max_output or table.region.max_output
        region = table.region
        if request.n_tokens > region.context or request.max_output > region.max_output:
            return refusals.out_of_bounds(request, region)
        exchange.n_tokens = request.n_tokens
        exchange.max_output = max_output
        table.begin(exchange.slot, request, exchange.request_id, max_output)
        return None

    @property
    def slots(self) -> int:
        """Slots that a request is admitted to."""
        return self.table.count if self.table is not None else 0

    def free_slots(self) -> int:
        """Count the slots that are free now: what an answer that held none says is left."""
        return self.table.free() if self.table is not None else 0

    @property
    def context(self) -> int:
        """Tokens that a prompt may have; 0 without a runtime."""
        return self.table.region.context if self.table is not None else 0

    def write(self, exchange: Exchange, data: bytes, offset: int, length: int) -> Refusal | None:
        """Write `length` bytes of the body; a refusal means that the slot is free again."""
        assert self.table is not None
        status = self.table.write(exchange.slot, data, offset, length)
        if status < 0:
            return self._bad_body(exchange, status)
        return None

    def submit(
        self, exchange: Exchange, data: bytes, offset: int, length: int, complete_ns: int
    ) -> Refusal | None:
        """Write the last bytes of a request that ended at `complete_ns`, and publish it."""
        table = self.table
        assert table is not None
        slot = exchange.slot
        exchange.complete_ns = complete_ns
        published_ns = table.submit(slot, exchange.generation, data, offset, length)
        if published_ns < 0:
            return self._bad_body(exchange, published_ns)
        exchange.connection.writing -= 1
        exchange.writing = False
        exchange.published_ns = published_ns
        exchange.ingress_us = self._latency.record_pair_ns(
            _QUEUE, exchange.queue_ns, published_ns - complete_ns
        )
        if self._null:
            table.revoke(slot, exchange.generation)
        self.follow(exchange)
        return None

    def follow(self, exchange: Exchange) -> None:
        """Have the answer of a request that was just published sent as it comes."""
        exchange.pickup_us = exchange.first_us = exchange.total_us = -1
        if self._null:
            exchange.live = False
            self.stats.completed += 1
            exchange.front.answer(exchange, b"", _STOP)
            return
        assert self.table is not None
        self.table.watch(exchange)
        self.egress.unanswered.append(exchange)
        if exchange.deadline_ms:
            self.deadlines.set(exchange)

    def publish_whole(
        self, front: Front, connection: Peer, stream_id: int, data: Any, at: int, size: int,
        complete_ns: int, plain: Any = UNREAD,
    ) -> Exchange | Refusal | None:  # fmt: skip
        """Decide on an HTTP/3 request that came whole, as bytes [at, at + size) of `data`, of which
        `plain` may have been read already.

        The same as `claim` and `submit`, in one call on the table. What is more than a plain
        request and a free slot, or none, is left to those.

        Returns:
            The exchange, published, to be handed to `follow`; a refusal because no slot is free; or
            None, and nothing has happened.
        """
        table = self.table
        if table is None or self.draining or connection.writing >= self.max_writing:
            return None
        serve = table.serve_whole
        if serve is None:
            return None
        request_id = self._next_id
        (
            status, generation, queue_ns, published_ns, slot, free_left, queue_us, ingress_us,
            n_tokens, max_output, id_bytes,
        ) = serve(request_id, data, at, size, complete_ns, plain)  # fmt: skip
        if status:
            if status != FULL:
                return None
            self.given_id = table.given_id(id_bytes) if id_bytes else b""
            self.queue_us = self._latency.record_ns(_QUEUE, queue_ns)
            return Refusal(Status.BUSY, refusals.BUSY, self.retry_after_ms())
        self._next_id = (request_id + 1) & (2**64 - 1) or 1
        self.given_id = table.given_id(id_bytes) if id_bytes else b""
        if queue_ns < 0 or published_ns < complete_ns:
            self._latency.record_pair_ns(_QUEUE, queue_ns, published_ns - complete_ns)
        exchange = self._exchanges[slot]
        if exchange.live:
            self.egress.on_broken(f"slot {slot}: it was given out twice")
            return refusals.lost()
        exchange.front = front
        exchange.connection = connection
        exchange.stream_id = stream_id
        exchange.request_id = request_id
        exchange.generation = generation
        exchange.free_left = free_left
        exchange.n_tokens = n_tokens
        exchange.max_output = max_output
        exchange.deadline_ms = 0
        exchange.deadline_at = math.inf
        exchange.queue_us = queue_us
        exchange.queue_ns = queue_ns
        exchange.ingress_us = ingress_us
        exchange.started = self.stats.now
        exchange.complete_ns = complete_ns
        exchange.published_ns = published_ns
        exchange.live = True
        exchange.writing = exchange.answered = False
        exchange.sent = 0
        self.stats.claimed += 1
        return exchange

    def _bad_body(self, exchange: Exchange, status: int) -> Refusal:
        table = self.table
        assert table is not None
        if status == BAD_TOKEN:
            index, token = table.bad_token(exchange.slot)
            refusal = refusals.bad_token(index, token, table.region.vocab_size)
        elif status == OVERFLOW:
            refusal = refusals.too_long(exchange.n_tokens)
        elif status == SHORT:
            whole, partial = table.written(exchange.slot)
            refusal = refusals.too_short(whole, partial, exchange.n_tokens)
        else:
            self.egress.on_broken(f"slot {exchange.slot}: it left WRITING under its listener")
            refusal = refusals.lost()
        return self.give_up(exchange, refusal)

    def take_answers(self) -> None:
        """Go on with what a device has answered since the last pass."""
        table = self.table
        if table is not None and (asks := table.asks) is not None and asks.pending:
            self.asking.take_answers(table, asks)

    def answered(self, answer: Answer) -> None:
        """The device answered a revoke or a cancel."""
        exchange = self._exchanges[answer.slot]
        # Whoever left meanwhile let go of it.
        if exchange.live and exchange.generation == answer.generation:
            self.egress.answered(exchange, answer)

    # Ends before the answer's.

    def give_up(self, exchange: Exchange, refusal: Refusal) -> Refusal:
        """Free the slot of a request that is refused after its claim."""
        self._let_go(exchange)
        self.stats.failed += 1
        return refusal

    def leave(self, exchange: Exchange) -> None:
        """The client reset, stopped or closed: its slot goes back in this pass."""
        self._let_go(exchange)
        self.stats.cancelled += 1

    def _let_go(self, exchange: Exchange) -> None:
        if exchange.writing:
            exchange.connection.writing -= 1
            exchange.writing = False
            self._latency.record_ns(_QUEUE, exchange.queue_ns)
        table = self.table
        if table is not None:
            table.let_go(exchange.slot, exchange.generation)
            if exchange.watch >= 0:
                table.unwatch(exchange)
        self.egress.ended(exchange)

    def retry_after_ms(self) -> int:
        """Return when a slot may be free: the time that a request holds one, over their number."""
        raw = self.raw() if self.raw is not None else None
        held_s = joint_hold_s(self.egress.hold_s, self.egress.ended_count, raw)
        if not held_s or self.table is None:
            return refusals.RETRY_MS
        expected = held_s * 1000 / self.table.region.slots
        return max(1, min(_RETRY_MS_MAX, round(expected)))

    # Time.

    def next_deadline(self) -> float | None:
        """Return when `on_deadline` is due (monotonic seconds)."""
        due = self.deadlines.next_due()
        for other in (self.egress.next_due(), self.asking.next_due()):
            if other is not None and (due is None or other < due):
                due = other
        return due

    def on_deadline(self, now: float) -> None:
        """End what is due: bodies and headers that did not come, answers whose deadline passed,
        the wait for a device."""
        self.asking.on_deadline(now)
        self.deadlines.on_deadline(now)
