"""A listener without sockets, and clients in memory that talk to it, each from a path of its own.

It lives on the running event loop, whose clock its timers follow.
"""

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    StreamDataReceived,
)
from daemon_process import POLL_S, WITHIN_S, until

from dataplane.connection import Connection, StreamFront
from dataplane.fronts.prompt1 import Prompt1
from dataplane.identity import load_identity
from dataplane.ingress import Ingress
from dataplane.listener import Listener
from dataplane.manifest import Manifest
from dataplane.prompt1 import ALPN
from dataplane.pump import FRONT_EVENTS, NEVER, path_of
from dataplane.pump_engine import PumpEngine
from dataplane.region import create_region
from dataplane.slots import State
from dataplane.stats import Stats
from dataplane.table import HostTable


class MemoryPump(PumpEngine):
    """The packet pump without a thread or sockets; every stream is the Python front's."""

    def start(self, listener: Listener, sockets: list[Any]) -> None:
        self._listener = listener

    def stop(self) -> None: ...

    def front_of(self, alpn: str) -> int:
        return FRONT_EVENTS

    def flush(self) -> int:
        """Send all that is due, to where each connection's first datagram came from."""
        now = int(time.monotonic() * 1e9)
        for handle, connection in list(self._by_handle.items()):
            due = self.pump.timer(handle)
            if due != NEVER and due <= now:
                self.pump.on_timer(handle, now)
            while (built := self.pump.build(handle, now)) is not None:
                connection.socket.queue(*built)
        return 0


class Wire:
    """Where the listener's datagrams go: to the client of their path."""

    number = 0

    def __init__(self) -> None:
        self.sent: dict[bytes, list[bytes]] = {}

    def queue(self, data: bytes, path: bytes) -> None:
        self.sent.setdefault(path, []).append(data)

    def take(self, path: bytes) -> list[bytes]:
        """Remove and return what was sent to a path."""
        return self.sent.pop(path, [])


class Client:
    """An aioquic client that talks to a `Network`'s listener."""

    def __init__(self, network: "Network", path: bytes) -> None:
        self.network = network
        self.path = path
        configuration = QuicConfiguration(alpn_protocols=[ALPN], verify_mode=ssl.CERT_NONE)
        self.quic = QuicConnection(configuration=configuration)
        self.quic.connect(path, time.monotonic())
        self.up = False
        self.ended: ConnectionTerminated | None = None
        self.data: dict[int, bytes] = {}
        self.fins: set[int] = set()

    def datagrams(self) -> list[bytes]:
        """What it wants to send now."""
        return [data for data, _ in self.quic.datagrams_to_send(time.monotonic())]

    def turn(self) -> None:
        """Carry what each side has to say to the other."""
        self.network.deliver(self.datagrams(), self.path)
        for data in self.network.wire.take(self.path):
            self.quic.receive_datagram(data, self.path, time.monotonic())
        while (event := self.quic.next_event()) is not None:
            if isinstance(event, HandshakeCompleted):
                self.up = True
            elif isinstance(event, ConnectionTerminated):
                self.ended = event
            elif isinstance(event, StreamDataReceived):
                self.data[event.stream_id] = self.data.get(event.stream_id, b"") + event.data
                if event.end_stream:
                    self.fins.add(event.stream_id)

    async def until(self, what: str, condition: Callable[[], Any]) -> None:
        """Take turns until `condition` holds."""
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, f"it never came true: {what}"
            timer = self.quic.get_timer()
            if timer is not None and timer <= time.monotonic():
                self.quic.handle_timer(time.monotonic())
            self.turn()
            await asyncio.sleep(POLL_S / 10)

    async def connect(self) -> "Client":
        await self.until("the handshake is complete", lambda: self.up and self.server.established)
        return self

    @property
    def server(self) -> Connection:
        """The listener's end of this connection."""
        return self.network.listener._by_cid[self.quic._peer_cid.cid]

    def send(self, data: bytes, fin: bool) -> int:
        """Open a stream with these bytes; its number."""
        stream_id = self.quic.get_next_available_stream_id()
        self.quic.send_stream_data(stream_id, data, fin)
        self.turn()
        return stream_id

    async def answer(self, stream_id: int) -> bytes:
        await self.until("the answer is over", lambda: stream_id in self.fins)
        return self.data[stream_id]


class Network:
    """A listener with four slots, and whoever talks to it."""

    def __init__(
        self,
        state_dir: Path,
        max_connections: int = 4096,
        handshake_timeout: float = 60.0,
        idle_timeout: float = 60.0,
        front: Callable[[Ingress], StreamFront] = Prompt1,
        pump: bool = False,
    ) -> None:
        identity = load_identity(state_dir, "localhost")
        configuration = QuicConfiguration(
            is_client=False, alpn_protocols=[ALPN], idle_timeout=idle_timeout
        )
        configuration.load_cert_chain(identity.cert, identity.key)
        self.stats = Stats()
        self.ingress = Ingress(self.stats, body_timeout=60.0)
        manifest = Manifest(model="m", slots=4, context=64, max_output=16, vocab_size=50_000)
        self.region = create_region(manifest, 1, listeners=1)
        self.ingress.attach(HostTable(self.region))
        self.engine = MemoryPump() if pump else None
        self.listener = Listener(
            configuration, [self.ingress], {ALPN: front(self.ingress)}, max_connections,
            handshake_timeout, self.engine,
        )  # fmt: skip
        self.wire = Wire()
        self._count = 0

    def client(self) -> Client:
        """A client that has said nothing yet."""
        self._count += 1
        return Client(self, path_of(("127.0.0.1", 10_000 + self._count)))

    def deliver(self, datagrams: list[bytes], path: bytes) -> None:
        """One pass with these datagrams."""
        for data in datagrams:
            self.listener.deliver(self.wire, data, path, time.monotonic(), time.time_ns())
            if self.engine is not None:
                self.engine.dispatch(time.monotonic())
        self.listener.finish_pass()

    def held(self) -> list[str]:
        """The states of the slots that are not FREE."""
        words = self.region.native.states[0:4]
        return [State(word & 0xFF).name for word in words if word & 0xFF]

    async def until_empty(self) -> None:
        """Wait until no connection is left, not even in its closing period, and no trace of one."""
        await until("no connection is left", lambda: not self.listener.connections)
        assert self.listener._by_cid == {}

    def check_nothing_held(self) -> None:
        """No slot is held, and no connection that is left could hold one."""
        assert self.held() == []
        assert self.stats.in_flight == 0
        assert all(connection.gone for connection in self.listener.connections)
        routed = set(self.listener._by_cid.values())
        assert routed == self.listener.connections


@contextlib.contextmanager
def network(state_dir: Path, **options: Any) -> Iterator[Network]:
    """Make a network on the running loop; nothing is held once its connections are closed."""
    made = Network(state_dir, **options)
    made.listener.start([])
    try:
        yield made
        made.listener.close_all(0, "the test is over")
        made.check_nothing_held()
    finally:
        made.listener.stop()
