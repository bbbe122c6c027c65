"""The load generator: many connections, many requests in flight, one loop of its own.

Closed loop (so many in flight at all times) or open loop (so many a second, whatever the server
does). Why not asyncio and the client library: they cost several times what a server does for the
request, and what is measured would be them. The rules that hold here:

- One thread, one epoll. What is read in one go is acted on connection by connection; each sends
  once for all that happened on it, with the time of now.
- With the packet pump, both protocols are the native generator's: once the handshakes are complete
  the pump's thread has the sockets and the requests, and this loop waits for the end and does what
  is left to the connections' control plane. What a caller makes of answers (a dialogue of its own)
  runs here, on connections whose packets are the pump's. `pump=False` runs on aioquic alone, and is
  what the pump is compared with.
- A request is counted once, whatever becomes of it; a run ends when all are.
- When nothing is answered for `stall_s`, the run ends in words instead of waiting.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

from aioquic.quic.configuration import QuicConfiguration

from dataplane._native import ffi, lib
from dataplane.client.transport import Hub, PumpTransport, Transport
from dataplane.errors import UnavailableError
from dataplane.kinds import Address, format_address
from dataplane.load.link import Link
from dataplane.load.native import H3, RAW, UNREACHABLE, NativeRun
from dataplane.load.sockets import connected, resolve
from dataplane.load.tally import LOST, Outcome, Schedule, Tally
from dataplane.load.timers import Timers
from dataplane.load.wire import Dialogue, H3Dialogue, RawDialogue
from dataplane.pump import DATAGRAM, FRONT_EVENTS, FRONT_LOAD, PATH_BYTES, Event
from dataplane.quic import ProbingConnection

STALL_S = 10.0
IDLE_TIMEOUT_S = 30.0
_KEEP_ALIVE_NS = 5_000_000_000
_TICK_S = 0.1
_HANDSHAKES = 16
"""How many at once: a server gives each a few seconds only, and they cost milliseconds."""
_SEND_AT_BYTES = 4096
"""Requests go out in pieces of about this size: the server begins with the first while the rest is
packed, and aioquic, which tries every waiting stream for every packet, has fewer to try."""
_SPIN_S = 0.0001
"""The last stretch before a request is due is not slept: waking takes about as long."""

_NATIVE: dict[type, int] = {RawDialogue: RAW, H3Dialogue: H3}
"""What the native generator speaks itself."""

Progress = Callable[[int], None]


def _ignore(ended: int) -> None:
    pass


class Server(NamedTuple):
    """Whom to load, and the CA to verify it with."""

    address: Address
    ca_pem: bytes


class Load:
    """Connections to one server, for any number of runs; a context manager that closes them.

    Args:
        server: Where.
        alpn: The protocol to ask for.
        dialogue: Makes each connection's half of it.
        connections: How many.
        stall_s: How long nothing may be answered.
        pump: Whether the packet pump does the packets; False: aioquic alone.
        busy_poll: Whether the pump's thread spins instead of sleeping.
        gso: Whether the pump's thread may send batches that the kernel cuts into datagrams.

    Attributes:
        native: Whether the requests are the native generator's.
    """

    def __init__(
        self,
        server: Server,
        alpn: str,
        dialogue: Callable[[], Dialogue],
        connections: int,
        stall_s: float = STALL_S,
        *,
        pump: bool = True,
        busy_poll: bool = False,
        gso: bool = True,
    ) -> None:
        self._server = server
        self._configuration = QuicConfiguration(
            is_client=True,
            alpn_protocols=[alpn],
            cadata=server.ca_pem,
            server_name=server.address[0],
            idle_timeout=IDLE_TIMEOUT_S,
        )
        self._dialogue = dialogue
        self._connections = connections
        self._stall_s = stall_s
        self._epoll = select.epoll()
        self._links: dict[int, Link] = {}  # by file descriptor; a lost one is not there
        self._hub = Hub() if pump else None
        self._busy_poll = busy_poll
        self._gso = gso
        # A dialogue that somebody derived from it makes something else of the answers.
        probe = dialogue()
        protocol = _NATIVE.get(type(probe))
        self.native = self._hub is not None and protocol is not None
        self._request = ffi.from_buffer("uint8_t[]", probe.request)
        if self._hub is not None and protocol is not None:
            native = self._hub.pump.native
            lib.dp_load_request(native, self._request, len(self._request), protocol)
        self._numbered: list[Link] = []  # by the number of their sockets in the pump
        self._told: dict[Link, None] = {}
        self._timers = Timers()
        self._touched: list[Link] = []
        self._tick_at = 0.0
        self._moved_ns = 0
        # The run's.
        self._roomy: deque[Link] = deque()
        self._streams = 0
        self._schedule = Schedule(0, None, 0)
        self._tally = Tally(0)
        self._progress: Progress = _ignore

    def __enter__(self) -> "Load":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close what is open and tell the server."""
        for link in self._links.values():
            link.close()
        if self._hub is not None and self._hub.threaded:
            self._hub.pump.flush()
            self._hub.pump.stop_thread()
        for link in {*self._links.values(), *self._numbered}:
            link.free()
            link.socket.close()
        self._links.clear()
        self._numbered.clear()
        self._epoll.close()

    # Connecting.

    def connect(self) -> None:
        """Complete every handshake.

        Raises:
            UnavailableError: One failed; the text says why.
        """
        family, peer = self._first()
        while len(self._links) < self._connections:
            wave = min(_HANDSHAKES, self._connections - len(self._links))
            self._handshake([self._open(family, peer) for _ in range(wave)], self._stall_s)
        if self._hub is not None and self.native:
            self._start_thread(self._hub)

    def _first(self) -> tuple[socket.AddressFamily, Any]:
        """Connect to the first of the host's addresses that takes it."""
        addresses = resolve(self._server.address)
        reasons = []
        for family, peer in addresses:
            try:
                self._handshake([self._open(family, peer)], self._stall_s / len(addresses))
                return family, peer
            except UnavailableError as error:
                reasons.append(f"{format_address(peer[:2])}: {error}")
        where = format_address(self._server.address)
        raise UnavailableError(f"no connection to {where} ({'; '.join(reasons)})")

    def _open(self, family: socket.AddressFamily, peer: Any) -> Link:
        sock = connected(family, peer)
        quic = ProbingConnection(configuration=self._configuration)
        transport: Transport
        if self._hub is None:
            transport = Transport(quic, peer)
        else:
            # Sockets are numbered as the pump will hear of them, so this one, if it comes to
            # nothing, must not keep its number.
            self._numbered = [link for link in self._numbered if link.lost is None]
            front = FRONT_LOAD if self.native else FRONT_EVENTS
            transport = PumpTransport(quic, peer, self._hub, front, len(self._numbered))
        link = Link(sock, transport, self._dialogue())
        if isinstance(transport, PumpTransport):
            self._numbered.append(link)
            transport.on_event = partial(self._told.setdefault, link)
        self._links[sock.fileno()] = link
        self._epoll.register(sock, select.EPOLLIN)
        self._touch(link)
        return link

    def _start_thread(self, hub: Hub) -> None:
        """Give the sockets to the pump's thread."""
        pump = hub.pump
        for number, link in enumerate(self._numbered):
            if link.lost is not None:
                raise UnavailableError(link.lost)
            self._epoll.unregister(link.socket)
            given = pump.listen(link.socket.fileno())
            assert given == number, (given, number)
        if not self._gso:
            lib.dp_pump_gso(pump.native, 0)
        self._epoll.register(pump.fd(), select.EPOLLIN)
        hub.threaded = True
        pump.start_thread(self._busy_poll)

    def _handshake(self, links: list[Link], within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while not all(link.up for link in links):
            self._turn()
            for link in links:
                if link.lost is not None:
                    raise UnavailableError(link.lost)
            if time.monotonic() > deadline:
                for link in links:
                    self._drop(link)
                raise UnavailableError(f"no answer within {within_s:g} s")

    # A run.

    def run(
        self,
        requests: int,
        streams: int,
        rate: float | None = None,
        progress: Progress = _ignore,
    ) -> Outcome:
        """Send so many requests and wait until each has ended.

        Args:
            requests: How many.
            streams: How many may be in flight on one connection.
            rate: Requests a second; None: as fast as they are answered.
            progress: Is told now and then how many have ended.

        Raises:
            UnavailableError: Nothing was answered for `stall_s`.
            ProtocolError: Something came that is no answer.
        """
        if self.native:
            return self._run_native(requests, streams, rate, progress)
        self._begin_run(requests, streams, rate, progress)
        tally, cpu, start = self._tally, time.process_time(), time.monotonic()
        while tally.ended < requests:
            self._issue()
            self._flush()
            if tally.ended < requests:
                self._turn()
                self._guard()
        seconds = time.monotonic() - start
        progress(tally.ended)
        return tally.outcome(seconds, time.process_time() - cpu)

    def _run_native(
        self, requests: int, streams: int, rate: float | None, progress: Progress
    ) -> Outcome:
        assert self._hub is not None
        run = NativeRun(self._hub.pump.native, requests, streams, rate, self._stall_s)
        self._tally = Tally(0)
        self._progress = progress
        cpu = time.process_time()
        run.begin()
        try:
            while not (at := run.progress()).finished:
                self._tally.ended = at.ended
                if at.stalled:
                    raise self._silence(at.begun - at.ended)
                self._turn()
        except BaseException:
            run.stop()
            raise
        progress(at.ended)
        return run.outcome(at, time.process_time() - cpu)

    def _begin_run(
        self, requests: int, streams: int, rate: float | None, progress: Progress
    ) -> None:
        self._tally = Tally(requests)
        self._moved_ns = time.monotonic_ns()
        self._schedule = Schedule(requests, rate, self._moved_ns)
        self._streams = streams
        self._progress = progress
        self._roomy.clear()
        for link in self._links.values():
            link.tally = self._tally
            link.roomy = False
            self._offer(link)
        self._count_unsendable()

    def _offer(self, link: Link) -> None:
        """Have a connection take part if there is room on it."""
        if not link.roomy and len(link.exchanges) < self._streams and link.usable:
            link.roomy = True
            self._roomy.append(link)

    def _issue(self) -> None:
        """Begin what is due where there is room, a connection after the other."""
        roomy, schedule = self._roomy, self._schedule
        while roomy:
            link = roomy[0]
            if not link.usable:
                link.roomy = False
                roomy.popleft()
                continue
            now_ns = time.monotonic_ns()
            began_ns = schedule.take(now_ns)
            if began_ns is None:
                return
            if schedule.taken - self._tally.ended == 1:
                self._moved_ns = now_ns  # Before it, there was nothing to wait for.
            self._touch(link)
            if link.begin(began_ns) >= _SEND_AT_BYTES:
                link.transmit(now_ns / 1e9)
            if len(link.exchanges) < self._streams:
                roomy.rotate(-1)
            else:
                link.roomy = False
                roomy.popleft()

    def _count_unsendable(self) -> None:
        """Without a connection that takes requests, those that have not begun are lost."""
        if not any(link.usable for link in self._links.values()):
            self._tally.failed(LOST, self._schedule.abandon())

    def _guard(self) -> None:
        waiting = self._schedule.taken - self._tally.ended
        silent_s = (time.monotonic_ns() - self._moved_ns) / 1e9
        if waiting and silent_s > self._stall_s:
            raise self._silence(waiting)

    def _silence(self, waiting: int) -> UnavailableError:
        return UnavailableError(
            f"{format_address(self._server.address)} answered nothing for {self._stall_s:g} s,"
            f" with {waiting} requests in flight"
        )

    # The loop.

    def _turn(self) -> None:
        """Wait for datagrams, a timer or a request that is due, and act on what came."""
        self._flush()
        ready = self._wait(time.monotonic())
        if self._hub is not None and self._hub.threaded:
            self._pull(self._hub)
        else:
            self._read(ready)
        now = time.monotonic()
        for link in self._timers.due(now):
            link.handle_timer(now)
            self._settle(link)
        if now >= self._tick_at:
            self._tick(now)

    def _read(self, ready: list[tuple[int, int]]) -> None:
        read = []
        for descriptor, _ in ready:
            link = self._links[descriptor]
            read.append((link, link.read(), time.monotonic_ns()))
        for link, datagrams, read_ns in read:
            link.receive(datagrams, read_ns)
            self._settle(link)
            self._issue()
            self._flush()

    def _pull(self, hub: Hub) -> None:
        """Act on what the pump's thread brought."""
        hub.pull(self._take_other)
        for link in self._told:
            link.take_events(time.monotonic_ns())
            link.see_closing()
            self._settle(link)
        self._told.clear()
        self._flush()

    def _take_other(self, event: Event) -> None:
        """A datagram that is no handed-over connection's, or word of a socket."""
        if event.kind == DATAGRAM:
            link = self._numbered[event.number]
            if link.lost is None:
                link.quic.receive(event.body[PATH_BYTES:], time.monotonic())
                self._told[link] = None
        elif event.kind == UNREACHABLE:
            link = self._numbered[event.number]
            link.fail(ConnectionRefusedError())
            self._told[link] = None

    def _wait(self, now: float) -> list[tuple[int, int]]:
        timeout = max(0.0, min(self._tick_at, self._timers.next_at()) - now)
        due_ns = self._schedule.next_ns() if self._roomy else None
        if due_ns is not None and due_ns / 1e9 - now < timeout:
            # epoll counts in milliseconds, select in microseconds.
            timeout = due_ns / 1e9 - now - _SPIN_S
            if timeout > 0:
                select.select([self._epoll.fileno()], [], [], timeout)
            timeout = 0.0
        return self._epoll.poll(timeout)

    def _settle(self, link: Link) -> None:
        """See what became of a connection that something happened on."""
        if link.moved:
            link.moved = False
            self._moved_ns = time.monotonic_ns()
        if link.lost is None:
            self._touch(link)
            self._offer(link)
        else:
            self._drop(link)

    def _drop(self, link: Link) -> None:
        descriptor = link.socket.fileno()
        if self._links.pop(descriptor, None) is None:
            return
        link.close()
        link.free()
        if self._hub is None or not self._hub.threaded:
            # The pump's thread has it otherwise, and would meet whatever gets its number next.
            self._epoll.unregister(descriptor)
            link.socket.close()
        self._count_unsendable()

    def _touch(self, link: Link) -> None:
        if not link.touched:
            link.touched = True
            self._touched.append(link)

    def _flush(self) -> None:
        if not self._touched:
            return
        for link in self._touched:
            link.touched = False
            if link.lost is None:
                due = link.transmit(time.monotonic())
                if due is not None:
                    self._timers.arm(link, due)
            if link.lost is not None:
                self._drop(link)
        self._touched.clear()
        if self._hub is not None and self._hub.threaded:
            self._hub.pump.flush()

    def _tick(self, now: float) -> None:
        self._tick_at = now + _TICK_S
        self._progress(self._tally.ended)
        now_ns = time.monotonic_ns()
        for link in self._links.values():
            quic = link.quic
            if isinstance(quic, PumpTransport) and self.native:
                link.heard_ns = max(link.heard_ns, quic.heard_ns)
            if now_ns - link.heard_ns > _KEEP_ALIVE_NS:
                link.heard_ns = now_ns
                link.ping()
                self._touch(link)
