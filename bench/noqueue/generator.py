"""The generator: sends requests when they are due, and notes what came when.

One thread, one epoll, the same loop for every system; what differs is the wire. The rules that hold
here: a request is sent when it is due, whatever became of those before (an open loop); it ends
once, as an answer, a refusal, a client that gave up, or a break; a run ends by itself, at the
latest when the patience of its last client does.
"""

import gc
import heapq
import select
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from bench.noqueue.exchange import End, Exchange
from dataplane.errors import Status

_SPIN_NS = 100_000
"""The last stretch before a request is due is not slept: waking takes about as long."""
_LONGEST_S = 0.1
_LEAD_NS = 2_000_000
_ANSWER_WITHIN_S = 60.0
"""How long an answer may take once its first token is there."""
_RETRY_MS = 100
"""For a refusal that says nothing of when to try again."""


class Wire(Protocol):
    """Connections to one system. `ended` is what ended since the generator last looked."""

    ended: list[Exchange]

    def connect(self, epoll: select.epoll) -> None: ...
    def send(self, exchange: Exchange) -> None: ...
    def give_up(self, exchange: Exchange) -> None: ...
    def readable(self, descriptor: int) -> None: ...
    def flush(self) -> None: ...
    def due_ns(self) -> int | None: ...
    def on_timer(self) -> None: ...
    def close(self) -> None: ...


class Client(NamedTuple):
    """How the clients of a run behave."""

    payload: bytes
    expected: int
    """Tokens of a whole answer."""
    patience_s: float
    """How long the first token may take before the client leaves."""
    retries: bool = False
    """Whether one that is refused tries again when the refusal says, within its patience."""


class Run(NamedTuple):
    """What a run came to."""

    exchanges: list[Exchange]
    start_ns: int
    seconds: float
    cpu_s: float
    """What the generator took itself."""

    @property
    def late_ns(self) -> list[int]:
        """How long after it was due each request was first sent."""
        return [one.sent_ns - one.due_ns for one in self.exchanges if one.attempts == 1]


Hook = Callable[[], None]
Stop = Callable[[Exchange], bool]


class Generator:
    """Runs on one wire; a context manager that connects and closes."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._epoll = select.epoll()
        self._agenda: list[tuple[int, int, Callable[[], None]]] = []
        self._entries = 0
        self._unsent: Iterator[Exchange] = iter(())
        self._all_sent = True
        self._open: set[Exchange] = set()
        self._sent: list[Exchange] = []
        self._client = Client(b"", 0, 0.0)
        self._stop: Stop | None = None

    def __enter__(self) -> "Generator":
        try:
            self._wire.connect(self._epoll)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._wire.close()
        self._epoll.close()

    def run(
        self,
        offsets_ns: Iterable[int],
        client: Client,
        hooks: Iterable[tuple[int, Hook]] = (),
        stop: Stop | None = None,
    ) -> Run:
        """Send a request at each of these moments, and wait until all have ended.

        Args:
            offsets_ns: When each is due, from the start on, in order.
            client: What each asks for and how it waits.
            hooks: What to call at which moment, besides, as long as the run goes on.
            stop: Is shown each request that ended; once it is true, no more are sent.
        """
        self._client, self._stop = client, stop
        self._sent = []
        self._agenda = []
        self._all_sent = False
        start_ns = time.monotonic_ns() + _LEAD_NS
        self._unsent = (
            Exchange(number, client.payload, client.expected, start_ns + offset)
            for number, offset in enumerate(offsets_ns)
        )
        for offset, hook in hooks:
            self._at(start_ns + offset, hook)
        cpu_s = time.process_time()
        with _no_collections():
            self._schedule_next()
            while self._open or not self._all_sent:
                self._turn()
        seconds = (time.monotonic_ns() - start_ns) / 1e9
        return Run(self._sent, start_ns, seconds, time.process_time() - cpu_s)

    # What is to be done when.

    def _at(self, moment_ns: int, action: Callable[[], None]) -> None:
        self._entries += 1
        heapq.heappush(self._agenda, (moment_ns, self._entries, action))

    def _schedule_next(self) -> None:
        exchange = next(self._unsent, None)
        if exchange is None:
            self._all_sent = True
        else:
            self._at(exchange.due_ns, lambda: self._begin(exchange))

    def _begin(self, exchange: Exchange) -> None:
        if self._all_sent:
            return
        self._sent.append(exchange)
        self._open.add(exchange)
        self._send(exchange)
        patience_ns = round(self._client.patience_s * 1e9)
        self._at(exchange.due_ns + patience_ns, lambda: self._lose_patience(exchange))
        self._schedule_next()

    def _send(self, exchange: Exchange) -> None:
        if exchange in self._open:
            exchange.begin(time.monotonic_ns())
            self._wire.send(exchange)

    def _lose_patience(self, exchange: Exchange) -> None:
        if exchange not in self._open:
            return None
        if exchange.first_ns:
            at_ns = exchange.first_ns + round(_ANSWER_WITHIN_S * 1e9)
            if at_ns > time.monotonic_ns():
                return self._at(at_ns, lambda: self._lose_patience(exchange))
        self._wire.give_up(exchange)
        exchange.end = End.GAVE_UP
        exchange.end_ns = time.monotonic_ns()
        return self._ended(exchange)

    def _ended(self, exchange: Exchange) -> None:
        if exchange not in self._open:
            return None
        refused = exchange.end is End.REFUSED and exchange.status == Status.BUSY
        if refused and self._client.retries:
            wait_ns = (exchange.retry_after_ms or _RETRY_MS) * 1_000_000
            return self._at(exchange.end_ns + wait_ns, lambda: self._send(exchange))
        self._open.discard(exchange)
        if self._stop is not None and self._stop(exchange):
            self._all_sent = True
        return None

    # The loop.

    def _turn(self) -> None:
        wire, agenda = self._wire, self._agenda
        now_ns = time.monotonic_ns()
        while agenda and agenda[0][0] <= now_ns:
            heapq.heappop(agenda)[2]()
        wire.flush()
        self._settle()
        due_ns = agenda[0][0] if agenda else None
        timer_ns = wire.due_ns()
        for descriptor, _ in self._wait(due_ns, timer_ns):
            wire.readable(descriptor)
            self._settle()
        if timer_ns is not None and timer_ns <= time.monotonic_ns():
            wire.on_timer()
            self._settle()

    def _settle(self) -> None:
        ended, self._wire.ended = self._wire.ended, []
        for exchange in ended:
            self._ended(exchange)

    def _wait(self, due_ns: int | None, timer_ns: int | None) -> list[tuple[int, int]]:
        now_ns = time.monotonic_ns()
        timeout_s = _LONGEST_S
        if due_ns is not None:
            timeout_s = min(timeout_s, (due_ns - _SPIN_NS - now_ns) / 1e9)
        if timer_ns is not None:
            timeout_s = min(timeout_s, (timer_ns - now_ns) / 1e9)
        if timeout_s > 0:
            # epoll counts in milliseconds, select in microseconds.
            select.select([self._epoll.fileno()], [], [], timeout_s)
        return self._epoll.poll(0)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep the garbage collector from pausing what measures."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
