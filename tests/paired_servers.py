"""A daemon's connection in memory, from the packets inwards, on regions of its own.

`Server` is the reference (aioquic and Python), `Pumped` the packet pump. The client makes the
handshake with aioquic; from then on a `Hand` speaks for it. A puppet takes what is ready and
answers as it is told. No socket, no thread, no sleep.
"""

import ssl
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import HandshakeCompleted
from hand import Hand

from dataplane import pump as events
from dataplane import quic as private
from dataplane._native import ffi, lib
from dataplane.connection import Connection, StreamFront
from dataplane.fronts.prompt1 import Prompt1
from dataplane.identity import load_identity
from dataplane.ingress import Ingress, Routes
from dataplane.manifest import Manifest
from dataplane.prompt1 import ALPN, API_KEY_MAX
from dataplane.pump import path_of
from dataplane.pump_engine import LISTENERS, PumpEngine
from dataplane.pumped import PumpedConnection
from dataplane.region import Region, create_region
from dataplane.slots import State
from dataplane.stats import Counts, Stats
from dataplane.table import HostTable
from dataplane.tenants import KeyedRoutes

CLIENT = path_of(("127.0.0.1", 50_000))
SERVER = path_of(("127.0.0.2", 4433))
SLOTS, CONTEXT, MAX_OUTPUT, VOCAB = 4, 2048, 64, 50_000
BODY_TIMEOUT = 5.0
PARTITIONS = ("a", "b")
KEYS = {b"alpha": "a", b"x" * API_KEY_MAX: "a", b"beta": "b"}
_IDLE_TIMEOUT_S = 100_000.0
# The kernel's clock is ahead, so that no time that passes here counts as waiting there: deadlines
# hang on the tests' clock alone, and whatever would be measured is counted as having gone back.
_AHEAD_NS = 3600 * 10**9


class Job:
    """A request that the puppet took."""

    def __init__(self, partition: int, native: Any, slot: int, generation: int) -> None:
        self.partition = partition
        self._handle = (native, slot, generation)
        self._request = native.requests[slot]
        self.number = int(self._request.request_id)
        self.slot = slot
        self.over = False
        self.prompt = bytes(ffi.buffer(lib.dp_prompt(native, slot), self._request.n_tokens * 4))

    def record(self, ids: Callable[[int], object]) -> tuple[object, ...]:
        """Everything that the listener wrote, without its time."""
        request = self._request
        return (
            self.partition, self.slot, ids(self.number), request.n_tokens, request.max_output,
            request.top_k, request.seed, request.temperature, request.top_p, self.prompt,
        )  # fmt: skip

    @property
    def cancelled(self) -> bool:
        return bool(lib.dp_is_cancelled(*self._handle))

    @property
    def room(self) -> int:
        native, slot, generation = self._handle
        word = native.progress[slot]
        shift = lib.DP_GENERATION_SHIFT
        emitted = word & ((1 << shift) - 1) if word >> shift == generation else 0
        return int(self._request.max_output - emitted)

    def emit(self, ids: Sequence[int]) -> int:
        return int(lib.dp_emit(*self._handle, ffi.new("int32_t[]", list(ids)), len(ids)))

    def finish(self, reason: int) -> int:
        self.over = True
        return int(lib.dp_finish(*self._handle, reason))


class _Engine(PumpEngine):
    """The pump without a thread or sockets; raw requests are its own."""

    def start_in_memory(self, listener: Any) -> None:
        self._keys = listener.routes.keys
        self._serve(listener)


class Server:
    """A daemon's connection on regions of its own, and the client's end.

    Args:
        keyed: Whether there are two partitions, and a request's key (`KEYS`) says whose it is.

    Attributes:
        lazy: Whether Python hears of the pump's events only at the end of a pass.
        regions: Of each partition.
    """

    pumped = False

    def __init__(
        self,
        state_dir: Path,
        now: float,
        max_writing: int,
        lazy: bool = False,
        keyed: bool = False,
    ) -> None:
        self.now = now
        self.lazy = lazy
        self.stats = Stats()
        names = PARTITIONS if keyed else PARTITIONS[:1]
        self.ingresses = tuple(Ingress(self.stats, BODY_TIMEOUT, max_writing, of) for of in names)
        self.routes: Routes = self.ingresses[0]
        if keyed:
            tenants = {sha256(key).digest(): name for key, name in KEYS.items()}
            by_name = dict(zip(names, self.ingresses, strict=True))
            self.routes = KeyedRoutes(by_name, tenants)
        self.fronts: dict[str, StreamFront] = {ALPN: Prompt1(self.routes)}
        self.engine: _Engine | None = None
        if self.pumped:
            self.engine = _Engine()
            self.engine.start_in_memory(self)
        self.regions: list[Region] = []
        self._attachments = 0
        for ingress in self.ingresses:
            self.regions.append(self.attach(ingress))
        self._client, self.connection = self._ends(state_dir)
        self.timer: float | None = None
        self.out: list[bytes] = []
        self.taken: list[Job] = []
        self._handshake()
        self.hand = Hand(self._client)

    # The runtimes.

    @property
    def region(self) -> Region:
        """That of the only partition."""
        (only,) = self.regions
        return only

    def attach(self, ingress: Ingress) -> Region:
        """Serve a partition from a new region; the second one's slots have room for more."""
        of = self.ingresses.index(ingress)
        manifest = Manifest(
            model="twin", slots=SLOTS, context=CONTEXT + 10 * of, max_output=MAX_OUTPUT + of,
            vocab_size=VOCAB + 1000 * of,
        )  # fmt: skip
        self._attachments += 1
        region = create_region(manifest, self._attachments, listeners=LISTENERS)
        ingress.attach(HostTable(region))
        if self.engine is not None:
            self.engine.attach(ingress, region, False)
        return region

    def lose(self, partition: int) -> None:
        """A partition's runtime is gone, and what its puppet had with it."""
        ingress = self.ingresses[partition]
        if self.engine is not None:
            self.engine.detach(ingress)
        ingress.detach("the runtime is gone")
        for job in self.taken:
            job.over = job.over or job.partition == partition

    def regain(self, partition: int) -> None:
        """Another runtime attached there."""
        self.regions[partition] = self.attach(self.ingresses[partition])

    # The two ends, and the listener's part.

    def _ends(self, state_dir: Path) -> tuple[QuicConnection, Connection]:
        identity = load_identity(state_dir, "localhost")
        of_server = QuicConfiguration(
            is_client=False, alpn_protocols=[ALPN], idle_timeout=_IDLE_TIMEOUT_S
        )
        of_server.load_cert_chain(identity.cert, identity.key)
        of_client = QuicConfiguration(
            is_client=True, alpn_protocols=[ALPN], idle_timeout=_IDLE_TIMEOUT_S,
            verify_mode=ssl.CERT_NONE,
        )  # fmt: skip
        client = QuicConnection(configuration=of_client)
        private.silence(client)
        client.connect(SERVER, self.now)
        quic = QuicConnection(
            configuration=of_server,
            original_destination_connection_id=client.original_destination_connection_id,
        )
        if self.engine is not None:
            sender = SimpleNamespace(queue=self._queue, number=0)
            return client, PumpedConnection(quic, self, sender, self.engine, 0)
        return client, Connection(quic, self, None)

    def cid_issued(self, connection: Connection, cid: bytes) -> None: ...
    def cid_retired(self, connection: Connection, cid: bytes) -> None: ...
    def touched(self, connection: Connection) -> None: ...

    def _queue(self, data: bytes, path: bytes) -> None:
        self.out.append(data)

    def _handshake(self) -> None:
        client, done = self._client, False
        for _ in range(50):
            self.serve([data for data, _ in client.datagrams_to_send(self.now)])
            out, self.out = self.out, []
            for data in out:
                client.receive_datagram(data, SERVER, self.now)
            while (event := client.next_event()) is not None:
                done = done or isinstance(event, HandshakeCompleted)
            if done and client._handshake_confirmed and self.connection.established and not out:
                return
            self.now += 0.05
        raise AssertionError("no handshake")

    # Passes.

    def serve(
        self, datagrams: Sequence[bytes] = (), puppet: Callable[[], object] | None = None
    ) -> None:
        """One pass, as the listener makes it; what is to be sent is in `out` then."""
        self.stats.begin_pass(self.now)
        for data in datagrams:
            self.connection.receive(data, CLIENT, self.now, time.time_ns() + _AHEAD_NS)
            if not self.lazy:
                self._dispatch()
        self._fire()
        self._dispatch()
        for ingress in self.ingresses:
            ingress.on_deadline(self.now)
        if puppet is not None:
            puppet()
        for ingress in self.ingresses:
            ingress.egress.flush()
        self.timer = self.connection.transmit(self.now, self._queue)
        self._build()

    def _dispatch(self) -> None: ...
    def _build(self) -> None: ...

    def _fire(self) -> None:
        if self.timer is not None and self.timer <= self.now:
            self.connection.handle_timer(self.now)

    def next_at(self) -> float | None:
        times = [self.timer, *(ingress.next_deadline() for ingress in self.ingresses)]
        return min((at for at in times if at is not None), default=None)

    # What is compared.

    def states(self) -> list[str]:
        words = [word for region in self.regions for word in region.native.states[0:SLOTS]]
        return [State(word & 0xFF).name for word in words]

    def counts(self) -> Counts:
        return self.stats.counts()

    def writing(self) -> int:
        """Slots that the connection holds in WRITING."""
        return self.connection.writing

    def close(self) -> None: ...

    def take(self) -> list[Job]:
        """Take every READY slot; `taken` has all that ever were."""
        generation = ffi.new("uint64_t *")
        fresh = [
            Job(partition, region.native, slot, generation[0])
            for partition, region in enumerate(self.regions)
            for slot in range(SLOTS)
            if lib.dp_take(region.native, slot, generation) >= 0
        ]
        self.taken += fresh
        return fresh


class Pumped(Server):
    """With the packet pump."""

    pumped = True

    def _dispatch(self) -> None:
        assert self.engine is not None
        while self.engine.dispatch(self.now):
            pass

    def _fire(self) -> None:
        assert self.engine is not None
        handle = self._handle()
        if handle:
            self.engine.pump.on_timer(handle, int(self.now * 1e9))
            self._dispatch()
        super()._fire()

    def _handle(self) -> int:
        assert isinstance(self.connection, PumpedConnection)
        return self.connection.hand_over.handle

    def _build(self) -> None:
        assert self.engine is not None
        pump, now = self.engine.pump, int(self.now * 1e9)
        handle = self._handle()
        while handle and (built := pump.build(handle, now)) is not None:
            self.out.append(built[0])
        self._dispatch()

    def writing(self) -> int:
        assert self.engine is not None
        assert isinstance(self.connection, PumpedConnection)
        return self.connection._own + self.engine.writing(self._handle())

    def close(self) -> None:
        assert self.engine is not None
        for ingress in self.ingresses:
            self.engine.detach(ingress)

    def conn_stats(self) -> Any:
        """`struct dp_conn_stats`."""
        assert self.engine is not None
        return self.engine.pump.conn_stats(self._handle())

    def allocations(self) -> int:
        """Calls of the system's allocator so far."""
        assert self.engine is not None
        return int(self.engine.pump.loop_stats().allocations)

    def next_at(self) -> float | None:
        assert self.engine is not None
        times = [super().next_at()]
        at = self.engine.pump.timer(self._handle())
        times.append(None if at == events.NEVER else at / 1e9)
        return min((at for at in times if at is not None), default=None)
