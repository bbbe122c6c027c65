"""Two ends of a connection in memory, each aioquic alone or aioquic with the packet pump.

The clock moves only when nothing else is to do; the link may lose, double and reorder, as its seed
has it, and `drop` decides on top of that. No socket, no sleep, no thread.
"""

import heapq
import random
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    StreamDataReceived,
)
from aioquic.tls import Epoch

from dataplane import pump as events
from dataplane import quic as private
from dataplane.hand_over import HandOver
from dataplane.identity import load_identity
from dataplane.pump import NEVER, Pump, path_of
from dataplane.quic import ProbingConnection

ALPN = "echo"
CLIENT = path_of(("127.0.0.1", 50_000))
REBOUND = path_of(("127.0.0.1", 50_001))
SERVER = path_of(("127.0.0.2", 4433))
_STEPS_MAX = 200_000
_TICK = 1e-6


def configuration(state_dir: Path, is_client: bool, idle_timeout: float) -> QuicConfiguration:
    made = QuicConfiguration(
        is_client=is_client,
        alpn_protocols=[ALPN],
        idle_timeout=idle_timeout,
        verify_mode=ssl.CERT_NONE,
    )
    if not is_client:
        identity = load_identity(state_dir, "localhost")
        made.load_cert_chain(identity.cert, identity.key)
    return made


class End(Protocol):
    """One side. `got` is what came of each stream, `fins` the streams that ended."""

    quic: QuicConnection
    on_up: Callable[[], Any]
    up: bool
    lost: ConnectionTerminated | None
    got: dict[int, bytearray]
    fins: set[int]

    def receive(self, data: bytes, path: bytes, now: float) -> None: ...
    def act(self, now: float) -> list[tuple[bytes, bytes]]: ...
    def next_at(self) -> float | None: ...
    def open(self, data: bytes, fin: bool) -> int: ...
    def send(self, stream: int, data: bytes, fin: bool) -> None: ...


class Plain:
    """aioquic alone. `on_up` is called before anything is sent after the handshake."""

    def __init__(self, quic: QuicConnection) -> None:
        self.quic = quic
        self.on_up: Callable[[], Any] = lambda: None
        private.silence(quic)
        self.up = False
        self.lost: ConnectionTerminated | None = None
        self.got: dict[int, bytearray] = {}
        self.fins: set[int] = set()
        self._acted = False

    def receive(self, data: bytes, path: bytes, now: float) -> None:
        self.quic.receive_datagram(data, path, now)

    def act(self, now: float) -> list[tuple[bytes, bytes]]:
        """Let timers fire; what is to be sent."""
        if self._is_due(self.quic.get_timer(), now):
            self.quic.handle_timer(now)
        self._listen()
        return self.quic.datagrams_to_send(now)

    def _is_due(self, at: float | None, now: float) -> bool:
        """Whether a timer fires; not before the first act, since it counts from what was sent."""
        acted, self._acted = self._acted, True
        return acted and at is not None and at <= now

    def _listen(self) -> None:
        while (event := self.quic.next_event()) is not None:
            if isinstance(event, HandshakeCompleted):
                self.up = True
                self.on_up()
            elif isinstance(event, ConnectionTerminated):
                self.lost = event
            elif isinstance(event, StreamDataReceived):
                self.take(event.stream_id, event.data, event.end_stream)

    def take(self, stream: int, data: bytes, fin: bool) -> None:
        self.got.setdefault(stream, bytearray()).extend(data)
        if fin:
            self.fins.add(stream)

    def next_at(self) -> float | None:
        return self.quic.get_timer()

    def open(self, data: bytes, fin: bool) -> int:
        stream = self.quic.get_next_available_stream_id()
        self.quic.send_stream_data(stream, data, fin)
        return stream

    def send(self, stream: int, data: bytes, fin: bool) -> None:
        self.quic.send_stream_data(stream, data, fin)


class Pumped(Plain):
    """aioquic for the control plane, the pump for the rest.

    Attributes:
        closed: Streams that the pump said are over.
        taken: Kinds of all events so far.
        by_aioquic: What went out of aioquic's own since the pump has the connection.
    """

    def __init__(self, quic: QuicConnection) -> None:
        super().__init__(quic)
        self.pump = Pump()
        self.hand_over = HandOver(quic, self.pump, events.FRONT_EVENTS, 0)
        self.closed: set[int] = set()
        self.taken: list[int] = []
        self.by_aioquic: list[bytes] = []

    def receive(self, data: bytes, path: bytes, now: float) -> None:
        self.hand_over.receive(data, path, now, int(now * 1e9))

    def act(self, now: float) -> list[tuple[bytes, bytes]]:
        handle = self.hand_over.handle
        if handle:
            self.pump.on_timer(handle, int(now * 1e9))
        while found := self.pump.events():
            for event in found:
                self._event(event, now)
        if self._is_due(self.hand_over.get_timer(), now):
            self.hand_over.handle_timer(now)
        self._listen()
        out = self.hand_over.transmit(now)
        self.by_aioquic += [data for data, _ in out if handle]
        self._listen()
        while handle and (built := self.pump.build(handle, int(now * 1e9))) is not None:
            out.append(built)
        return out

    def _event(self, event: events.Event, now: float) -> None:
        self.taken.append(event.kind)
        if event.kind == events.DATA:
            self.take(event.stream, event.body, bool(event.flags))
        elif event.kind == events.CLOSED:
            self.closed.add(event.stream)
        elif event.kind in (events.CONTROL, events.DELIVERED, events.FAILED):
            self.hand_over.on_event(event, now)

    def next_at(self) -> float | None:
        times = [self.hand_over.get_timer()]
        if self.hand_over.handle:
            at = self.pump.timer(self.hand_over.handle)
            times.append(None if at == NEVER else at / 1e9)
        known = [at for at in times if at is not None]
        return min(known) if known else None

    def open(self, data: bytes, fin: bool) -> int:
        stream = self.pump.open(self.hand_over.handle)
        assert stream >= 0
        self.send(stream, data, fin)
        return stream

    def send(self, stream: int, data: bytes, fin: bool) -> None:
        assert self.pump.send(self.hand_over.handle, stream, data, fin)

    def check_clean(self) -> None:
        """Nothing of aioquic has a part in the 1-RTT packets."""
        quic = self.quic
        space = quic._spaces[Epoch.ONE_RTT]
        assert not space.sent_packets
        assert space.ack_at is None
        assert len(space.ack_queue) == 0
        assert space.ack_eliciting_in_flight == 0
        assert space.loss_time is None
        assert quic._loss.bytes_in_flight == 0
        assert not quic._streams


class Wire:
    """A link with an end on each side.

    Attributes:
        now: The clock, in seconds.
        drop: Says of each datagram (to the server?, its bytes) whether it is lost.
        sent: How many datagrams each side sent, by whether to the server.
        client_path: Where the client's datagrams come from.
    """

    def __init__(
        self,
        client: End,
        server: End,
        seed: int = 1,
        loss: float = 0.0,
        duplication: float = 0.0,
        jitter: float = 0.0,
        delay: float = 0.01,
    ) -> None:
        self.client, self.server = client, server
        self.now = 1000.0
        self.client_path = CLIENT
        self.drop: Callable[[bool, bytes], bool] = lambda to_server, data: False
        self.sent = {True: 0, False: 0}
        self.answered_to: list[bytes] = []
        self._loss, self._duplication, self._jitter, self._delay = (
            loss, duplication, jitter, delay,
        )  # fmt: skip
        self._random = random.Random(seed)
        self._carried: list[tuple[float, int, bool, bytes, bytes]] = []
        self._count = 0
        self._reached = False

    def _carry(self, data: bytes, to_server: bool) -> None:
        self.sent[to_server] += 1
        chance = self._random.random
        for _ in range(2 if chance() < self._duplication else 1):
            if chance() < self._loss or self.drop(to_server, data):
                continue
            at = self.now + self._delay + chance() * self._jitter
            self._count += 1
            path = self.client_path if to_server else SERVER
            heapq.heappush(self._carried, (at, self._count, to_server, path, data))

    def act(self) -> None:
        """Let both ends act, and carry what they send."""
        for data, _ in self.client.act(self.now):
            self._carry(data, True)
        if self._reached:
            for data, path in self.server.act(self.now):
                self.answered_to.append(path)
                self._carry(data, False)

    def _next_at(self) -> float | None:
        times = [self.client.next_at(), self.server.next_at() if self._reached else None]
        times += [self._carried[0][0]] if self._carried else []
        return min((at for at in times if at is not None), default=None)

    def step(self) -> None:
        """Move the clock to what is due next, and do it."""
        at = self._next_at()
        assert at is not None, "nothing will ever happen again"
        self.now = max(self.now + _TICK, at)
        while self._carried and self._carried[0][0] <= self.now:
            _, _, to_server, path, data = heapq.heappop(self._carried)
            self._reached = self._reached or to_server
            (self.server if to_server else self.client).receive(data, path, self.now)
        self.act()

    def until(self, condition: Callable[[], Any], within: float = 120.0) -> None:
        """Run until `condition` holds, at most so many seconds of this clock."""
        end = self.now + within
        self.act()
        for _ in range(_STEPS_MAX):
            if condition():
                return
            assert self.now <= end, f"it never came true within {within:g} s"
            self.step()
        raise AssertionError("it never came true")

    def comes_true(self, condition: Callable[[], Any], within: float) -> bool:
        """Run until `condition` holds, or the clock has moved so far."""
        end = self.now + within
        self.act()
        while not condition():
            at = self._next_at()
            if at is None or at > end:
                self.now = max(self.now, end)
                return False
            self.step()
        return True

    def run_for(self, seconds: float) -> None:
        """Run on until the clock has moved so far."""
        end = self.now + seconds
        self.act()
        while (at := self._next_at()) is not None and at <= end:
            self.step()
        self.now = max(self.now, end)


def join(state_dir: Path, kinds: str, idle_timeout: float = 3600.0, **link: Any) -> Wire:
    """Make a wire; `kinds` says with `pumped` and `plain` what client and server are."""
    of_client, of_server = kinds.split("-")
    makers: dict[str, Callable[[QuicConnection], Plain]] = {"pumped": Pumped, "plain": Plain}
    client = ProbingConnection(configuration=configuration(state_dir, True, idle_timeout))
    server = ProbingConnection(
        configuration=configuration(state_dir, False, idle_timeout),
        original_destination_connection_id=client.original_destination_connection_id,
    )
    wire = Wire(makers[of_client](client), makers[of_server](server), **link)
    client.connect(SERVER, wire.now)
    return wire


def connect(state_dir: Path, kinds: str, **options: Any) -> Wire:
    """`join`, and complete the handshake on both sides."""
    wire = join(state_dir, kinds, **options)
    wire.until(lambda: wire.client.up and wire.server.up)
    return wire
