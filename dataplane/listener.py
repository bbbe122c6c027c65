"""The sockets, and the pass of the packet loop.

A pass: drain a batch of datagrams, route each by its connection ID, let its connection act on it;
then send the output that the runtime made meanwhile; then ask each connection that has something to
send once, and hand it all to the kernel. Nothing here waits for anything but the socket, the
runtime's eventfd and the next timer.

What is below that, an *engine* does: `dataplane.socket_engine` has aioquic do every packet, and is
the reference; `dataplane.pump_engine` has the packet pump do those of established connections.
"""

import asyncio
import heapq
import logging
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import (
    QuicErrorCode,
    QuicHeader,
    QuicPacketType,
    encode_quic_version_negotiation,
    pull_quic_header,
)

from dataplane.connection import CID_BYTES, Connection, StreamFront
from dataplane.errors import ResetCode
from dataplane.ingress import Ingress
from dataplane.quic import ProbingConnection, encode_refusal, reset_token
from dataplane.region import Region
from dataplane.socket_engine import SocketEngine

_log = logging.getLogger("dataplane.listener")

_SMALLEST_INITIAL = 1200
_HOUSEKEEPING_S = 1.0
# Of stateless resets (RFC 9000 section 10.3): the shortest there is, one that looks like any short
# packet, and how many a second, since each answers a stranger.
_RESET_MIN = 21
_RESET_LIKELY = 42
_RESETS_A_SECOND = 100
_monotonic = time.monotonic


class Sender(Protocol):
    """Where a connection's datagrams go."""

    def queue(self, data: bytes, path: bytes) -> None: ...


class Engine(Protocol):
    """What a listener runs on: sockets, connections, and the raw front's slots if it has one."""

    def start(self, listener: "Listener", sockets: list[socket.socket]) -> None: ...
    def stop(self) -> None: ...
    def flush(self) -> int: ...
    def connection(self, listener: "Listener", quic: QuicConnection, sender: Any) -> Connection: ...
    def attach(self, ingress: Ingress, region: Region, null: bool) -> None: ...
    def detach(self, ingress: Ingress) -> None: ...
    def drain(self) -> None: ...
    def end_all(self, code: ResetCode) -> None: ...


class WakingSelector(selectors.EpollSelector):
    """The event loop's selector, which takes the sleeper's half of the wake-up pair (contract 1).

    Before it blocks it says so and looks once more; whoever appends output then rings the eventfd
    only while it sleeps.
    """

    listener: "Listener | None" = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        listener = self.listener
        if listener is None or (timeout is not None and timeout <= 0):
            return super().select(timeout)
        if not listener.about_to_sleep():
            timeout = 0
        try:
            return super().select(timeout)
        finally:
            listener.woke()


class Listener:
    """The QUIC side of a daemon.

    Attributes:
        ingresses: Of each partition.
        fronts: By ALPN.
        connections: Every connection, half-open ones too.
    """

    def __init__(
        self,
        configuration: QuicConfiguration,
        ingresses: Sequence[Ingress],
        fronts: dict[str, StreamFront],
        max_connections: int,
        handshake_timeout: float,
        engine: Engine | None = None,
    ) -> None:
        self.engine: Engine = engine or SocketEngine()
        self.fronts = fronts
        self.ingresses = tuple(ingresses)
        self.stats = self.ingresses[0].stats
        self.connections: set[Connection] = set()
        self.draining = False
        self.started = False
        self._configuration = configuration
        self._max_connections = max_connections
        self._handshake_timeout = handshake_timeout
        self._by_cid: dict[bytes, Connection] = {}
        self._dirty: list[Connection] = []
        self._half_open: deque[tuple[float, Connection]] = deque()
        self._timers: list[tuple[float, int, Connection]] = []
        self._timer_count = 0
        self._sockets: list[socket.socket] = []
        self._resets_left = _RESETS_A_SECOND
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._housekeeper: asyncio.TimerHandle | None = None
        self._outputs: dict[Ingress, int] = {}

    # Start and stop.

    def start(self, sockets: list[socket.socket]) -> None:
        """Serve these sockets on the running loop."""
        self._loop = asyncio.get_running_loop()
        self.started = True
        self._sockets = sockets
        self.engine.start(self, sockets)
        self._housekeep()

    def stop(self) -> None:
        """Leave the sockets; connections that are open are not told."""
        self.engine.stop()
        for sock in self._sockets:
            sock.close()
        for timer in (self._alarm, self._housekeeper):
            if timer:
                timer.cancel()

    def watch_output(self, ingress: Ingress, fd: int) -> None:
        """Follow the eventfd that the runtime behind these slots rings."""
        assert self._loop is not None
        self._outputs[ingress] = fd
        self._loop.add_reader(fd, self._rung, ingress)

    def unwatch_output(self, ingress: Ingress) -> None:
        fd = self._outputs.pop(ingress, -1)
        if fd >= 0 and self._loop is not None:
            self._loop.remove_reader(fd)

    def drain(self) -> None:
        """Take no new connections and tell the peers of open ones."""
        self.draining = True
        self.engine.drain()
        for connection in self.connections:
            if connection.established and not connection.gone and connection.front:
                connection.front.drain(connection)
        self.finish_pass()

    def has_unread(self) -> bool:
        """Whether bytes of answers wait for a peer to acknowledge them."""
        now = _monotonic()
        return any(connection.has_unread(now) for connection in self.connections)

    def close_all(self, code: int, reason: str) -> None:
        """Close every connection and send that."""
        for connection in list(self.connections):
            front = connection.front
            connection.close(front.NO_ERROR if front and not code else code, reason)
        self.finish_pass()

    # The pass.

    def begin_pass(self, now: float) -> None:
        """Set the time that this pass counts with."""
        self.stats.begin_pass(now)

    def deliver(self, native: Sender, data: bytes, path: bytes, now: float, at_ns: int) -> None:
        """Hand one datagram, of more than `CID_BYTES` bytes, to its connection."""
        if data[0] & 0x80:
            connection = self._route_long(native, data, path, now)
        else:
            connection = self._by_cid.get(data[1 : 1 + CID_BYTES])
            if connection is None:
                self._reset(native, data, path)
        if connection is not None:
            connection.receive(data, path, now, at_ns)
            if not connection.dirty:
                connection.dirty = True
                self._dirty.append(connection)

    def _rung(self, ingress: Ingress) -> None:
        table = ingress.table
        if table is not None:
            table.drain()
        self.finish_pass()

    def finish_pass(self) -> None:
        """Send what came out of the runtime and of timers."""
        self.begin_pass(_monotonic())
        self.end_pass()

    def end_pass(self) -> None:
        """Send what this pass led to."""
        for ingress in self.ingresses:
            ingress.take_answers()
            ingress.egress.flush()
        # The pass may have taken longer than an acknowledgement may wait (RFC 9000 section 13.2.1):
        # with the time of now it rides along, with that of the pass's start it costs a packet.
        now = _monotonic()
        # Transmitting may touch a connection again (an event that it raised), so the list can grow.
        for connection in self._dirty:
            connection.dirty = False
            due = connection.transmit(now, connection.socket.queue)
            if connection.ended:
                self._forget(connection)
            elif due is not None:
                self._set_timer(connection, due)
        self._dirty.clear()
        self.stats.datagrams_dropped += self.engine.flush()
        self._set_alarm()

    # Sleep and wake.

    def about_to_sleep(self) -> bool:
        """The loop is about to block; False when output came that nobody rang for."""
        for ingress in self.ingresses:
            if ingress.table is not None and not ingress.table.sleep():
                assert self._loop is not None
                self._loop.call_soon(self.finish_pass)
                return False
        return True

    def woke(self) -> None:
        for ingress in self.ingresses:
            if ingress.table is not None:
                ingress.table.wake()

    # Routing.

    def _route_long(
        self, native: Sender, data: bytes, path: bytes, now: float
    ) -> Connection | None:
        try:
            header = pull_quic_header(Buffer(data=data), host_cid_length=CID_BYTES)
        except ValueError:
            return None
        if header.packet_type == QuicPacketType.VERSION_NEGOTIATION:
            return None
        if header.version not in self._configuration.supported_versions:
            # Only to a datagram that could open a connection (RFC 9000 section 6.1).
            if len(data) >= _SMALLEST_INITIAL:
                native.queue(
                    encode_quic_version_negotiation(
                        source_cid=header.destination_cid,
                        destination_cid=header.source_cid,
                        supported_versions=self._configuration.supported_versions,
                    ),
                    path,
                )
            return None
        connection = self._by_cid.get(header.destination_cid)
        if connection is None and header.packet_type == QuicPacketType.INITIAL:
            # RFC 9000 sections 14.1 and 7.2: what is shorter cannot open a connection.
            if len(data) < _SMALLEST_INITIAL or len(header.destination_cid) < CID_BYTES:
                return None
            return self._accept(native, header, path, now)
        return connection

    def _accept(
        self, native: Sender, header: QuicHeader, path: bytes, now: float
    ) -> Connection | None:
        full = len(self.connections) >= self._max_connections and self._is_full()
        if full or self.draining:
            reason = "too many connections" if full else "shutting down"
            assert header.version is not None
            native.queue(
                encode_refusal(header.version, header.destination_cid, header.source_cid, reason),
                path,
            )
            return None
        quic = ProbingConnection(
            configuration=self._configuration,
            original_destination_connection_id=header.destination_cid,
        )
        connection = self.engine.connection(self, quic, native)
        self.connections.add(connection)
        self.stats.connections = len(self.connections)
        self.cid_issued(connection, header.destination_cid)
        self.cid_issued(connection, quic.host_cid)
        self._half_open.append((now + self._handshake_timeout, connection))
        return connection

    def _reset(self, native: Sender, data: bytes, path: bytes) -> None:
        """Tell the sender of a packet that nobody knows that its connection is gone.

        Each answer is shorter than what it answers, so that two ends that know nothing of each
        other fall silent, and it looks like a packet (RFC 9000 section 10.3).
        """
        size = min(len(data) - 1, _RESET_LIKELY)
        if size < _RESET_MIN or not data[0] & 0x40 or not self._resets_left:
            return
        self._resets_left -= 1
        token = reset_token(data[1 : 1 + CID_BYTES])
        noise = bytearray(secrets.token_bytes(size - len(token)))
        noise[0] = noise[0] & 0x3F | 0x40
        native.queue(bytes(noise) + token, path)

    def _is_full(self) -> bool:
        """Whether as many connections as may be are alive; those that close are bounded apart."""
        closing = sum(connection.gone for connection in self.connections)
        return (
            len(self.connections) - closing >= self._max_connections
            or closing >= self._max_connections
        )

    def cid_issued(self, connection: Connection, cid: bytes) -> None:
        connection.cids.add(cid)
        self._by_cid[cid] = connection

    def cid_retired(self, connection: Connection, cid: bytes) -> None:
        if cid in connection.cids:
            connection.cids.discard(cid)
            self._by_cid.pop(cid, None)

    def touched(self, connection: Connection) -> None:
        if not connection.dirty:
            connection.dirty = True
            self._dirty.append(connection)

    def _forget(self, connection: Connection) -> None:
        """Drop every trace; costs what this connection's own identifiers cost."""
        if connection not in self.connections:
            return
        self.connections.discard(connection)
        self.stats.connections = len(self.connections)
        for cid in connection.cids:
            self._by_cid.pop(cid, None)
        connection.cids.clear()
        connection.timer_at = None
        connection.dismantle()

    # Time.

    def _housekeep(self) -> None:
        """About once a second: break off what nobody reads."""
        assert self._loop is not None
        self._housekeeper = self._loop.call_later(_HOUSEKEEPING_S, self._housekeep)
        now = _monotonic()
        self._resets_left = _RESETS_A_SECOND
        patience = self._configuration.idle_timeout
        broke_off = False
        for connection in list(self.connections):
            for stream_id in connection.stalled(now, patience):
                connection.break_off(stream_id)
                broke_off = True
        if broke_off:
            self.finish_pass()

    def _set_timer(self, connection: Connection, due: float) -> None:
        """Arm a connection's timer; one that only moved later is looked at again when it fires."""
        armed = connection.timer_at
        if armed is None or due < armed:
            connection.timer_at = due
            self._timer_count += 1
            heapq.heappush(self._timers, (due, self._timer_count, connection))

    def _next_due(self) -> float | None:
        due = None
        for ingress in self.ingresses:
            deadline = ingress.next_deadline()
            if deadline is not None and (due is None or deadline < due):
                due = deadline
        if self._timers and (due is None or self._timers[0][0] < due):
            due = self._timers[0][0]
        if self._half_open and (due is None or self._half_open[0][0] < due):
            due = self._half_open[0][0]
        return due

    def _set_alarm(self) -> None:
        due = self._next_due()
        if due is None:
            return
        alarm = self._alarm
        if alarm is not None:
            if alarm.when() <= due:
                return
            alarm.cancel()
        assert self._loop is not None
        self._alarm = self._loop.call_at(due, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        now = _monotonic()
        self.begin_pass(now)
        while self._timers and self._timers[0][0] <= now:
            when, _, connection = heapq.heappop(self._timers)
            if connection.timer_at != when:
                continue  # An earlier entry took its place, or the connection is gone.
            connection.timer_at = None
            due = connection.get_timer()
            if due is not None and due > now:
                self._set_timer(connection, due)
                continue
            connection.handle_timer(now)
            self.touched(connection)
        self._end_slow_handshakes(now)
        for ingress in self.ingresses:
            ingress.on_deadline(now)
        self.finish_pass()

    def _end_slow_handshakes(self, now: float) -> None:
        half_open = self._half_open
        while half_open and (
            half_open[0][0] <= now or half_open[0][1].established or half_open[0][1].ended
        ):
            _, connection = half_open.popleft()
            if not connection.established and not connection.ended:
                connection.abandon(QuicErrorCode.CONNECTION_REFUSED, "the handshake took too long")
