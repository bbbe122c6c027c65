"""Both engines in memory, under one clock, told the same: what differs is a mistake in one of them.

A `Server` is a daemon's connection from the packets inwards, on a region of its own: the reference
(aioquic and Python) or the packet pump. Its client makes the handshake with aioquic; from then on a
`Hand` writes and reads single packets, so that a script decides what lies in which. A puppet takes
what is ready and answers as the script says. No socket, no thread, no sleep.
"""

import random
import re
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import HandshakeCompleted
from aioquic.tls import Epoch

from dataplane import pump as events
from dataplane import quic as private
from dataplane._native import ffi, lib
from dataplane.connection import Connection, StreamFront
from dataplane.fronts.prompt1 import Prompt1
from dataplane.identity import load_identity
from dataplane.ingress import Ingress
from dataplane.manifest import Manifest
from dataplane.prompt1 import ALPN
from dataplane.pump import path_of
from dataplane.pump_engine import LISTENERS, PumpEngine
from dataplane.pumped import PumpedConnection
from dataplane.region import create_region
from dataplane.slots import State
from dataplane.stats import Counts, Stats
from dataplane.table import HostTable

CLIENT = path_of(("127.0.0.1", 50_000))
SERVER = path_of(("127.0.0.2", 4433))
SLOTS, CONTEXT, MAX_OUTPUT, VOCAB = 4, 2048, 64, 50_000
BODY_TIMEOUT = 5.0
PACKET_ROOM = 1100
_IDLE_TIMEOUT_S = 100_000.0
_ID = slice(8, 16)
_VERDICT_BYTES = 32
_QUOTED = re.compile(rb"begins with [0-9a-f]+")
# The kernel's clock is ahead, so that no time that passes here counts as waiting there: deadlines
# hang on the tests' clock alone, and whatever would be measured is counted as having gone back.
_AHEAD_NS = 3600 * 10**9
_TICK = 1e-6
_STEPS_MAX = 10_000

# ---------------------------------------------------------------- frames


class Frame(NamedTuple):
    """What a client says in a packet: `kind` is stream, reset or stop."""

    kind: str
    stream: int
    offset: int = 0  # of a reset: the final size
    data: bytes = b""
    fin: bool = False
    code: int = 0

    def encode(self) -> bytes:
        buf = Buffer(capacity=len(self.data) + 64)
        if self.kind == "stream":
            buf.push_uint_var(0x0E | self.fin)
            for number in (self.stream, self.offset, len(self.data)):
                buf.push_uint_var(number)
            buf.push_bytes(self.data)
        elif self.kind == "reset":
            for number in (0x04, self.stream, self.code, self.offset):
                buf.push_uint_var(number)
        else:
            for number in (0x05, self.stream, self.code):
                buf.push_uint_var(number)
        return buf.data


# How many numbers follow each of the frames whose meaning is not looked at.
_PLAIN = {0x00: 0, 0x01: 0, 0x10: 1, 0x11: 2, 0x12: 1, 0x13: 1, 0x14: 1, 0x15: 2, 0x16: 1,
          0x17: 1, 0x19: 1, 0x1E: 0}  # fmt: skip
_ACK, _RESET, _STOP, _CRYPTO, _STREAM, _MAX_STREAMS, _NEW_CID, _CLOSE = (
    0x02, 0x04, 0x05, 0x06, 0x08, 0x12, 0x18, 0x1C,
)  # fmt: skip


class Got:
    """What the client has of one stream."""

    def __init__(self) -> None:
        self.parts: dict[int, bytes] = {}
        self.size: int | None = None
        self.reset: int | None = None
        self.stopped: int | None = None
        self.stopped_in = 0  # which pass

    def take(self, offset: int, data: bytes, fin: bool) -> None:
        before = self.parts.get(offset, b"")
        self.parts[offset] = max(before, data, key=len)
        if fin:
            assert self.size in (None, offset + len(data))
            self.size = offset + len(data)

    @property
    def data(self) -> bytes:
        """What came in order."""
        data = bytearray()
        for offset in sorted(self.parts):
            part = self.parts[offset]
            if offset > len(data):
                break
            again = data[offset : offset + len(part)]
            assert part.startswith(bytes(again)) or again == part, "repeated bytes differ"
            data[offset : offset + len(part)] = part
        return bytes(data)

    @property
    def whole(self) -> bool:
        return self.size is not None and len(self.data) == self.size

    @property
    def over(self) -> bool:
        return self.whole or self.reset is not None

    def meaning(self, ids: Callable[[int], object]) -> tuple[Any, ...]:
        """What it says, without times; `ids` makes a request id comparable."""
        data = b"" if self.reset is not None else self.data
        verdict: tuple[Any, ...] = ()
        if len(data) >= _VERDICT_BYTES:
            magic, status, slot, number, _, _, retry, free = struct.unpack_from("<4sHHQIIII", data)
            # A refusal says what is free when its words are made: with the pump, at a pass's end.
            verdict = (magic, status, slot, ids(number), retry, free if status == 200 else None)
        return (
            verdict, data[_VERDICT_BYTES:], self.whole and self.reset is None, self.reset,
        )  # fmt: skip


class Hand:
    """A client that writes its packets by hand, with the keys of a handshake that aioquic made."""

    def __init__(self, quic: QuicConnection) -> None:
        self._pair = quic._cryptos[Epoch.ONE_RTT]
        self._cid = quic._peer_cid.cid
        self._cid_bytes = len(quic.host_cid)
        self._next = quic._packet_number + 10
        self._expected = 0
        self.streams_allowed = quic._remote_max_streams_bidi
        self.acked: set[int] = set()
        self.got: dict[int, Got] = {}
        self.closed: int | None = None
        self.passes = 0

    def packet(self, payload: bytes) -> bytes:
        number = self._next
        self._next += 1
        phase = self._pair.key_phase << 2
        header = bytes([0x43 | phase]) + self._cid + (number & 0xFFFFFFFF).to_bytes(4, "big")
        sealed: bytes = self._pair.encrypt_packet(header, payload.ljust(4, b"\0"), number)
        return sealed

    def of(self, stream: int) -> Got:
        return self.got.setdefault(stream, Got())

    def receive(self, data: bytes) -> bool:
        """Take a datagram; whether it has to be acknowledged."""
        if data[0] & 0x80:
            return False
        _, payload, number = self._pair.decrypt_packet(data, 1 + self._cid_bytes, self._expected)
        self._expected = max(self._expected, number + 1)
        self.acked.add(number)
        return self._frames(Buffer(data=payload))

    def _frames(self, buf: Buffer) -> bool:
        elicits = False
        while not buf.eof():
            kind = buf.pull_uint_var()
            elicits = elicits or kind not in (0x00, 0x02, 0x03, 0x1C, 0x1D)
            if kind & ~7 == _STREAM:
                self._stream(kind, buf)
            elif kind & ~1 == _ACK:
                self._ack(kind, buf)
            elif kind == _RESET:
                stream, code, _ = (buf.pull_uint_var() for _ in range(3))
                self.of(stream).reset = code
            elif kind == _STOP:
                stream, code = (buf.pull_uint_var() for _ in range(2))
                got = self.of(stream)
                got.stopped, got.stopped_in = code, self.passes
            elif kind == _CRYPTO:
                buf.pull_uint_var()
                buf.pull_bytes(buf.pull_uint_var())
            elif kind == _MAX_STREAMS:
                self.streams_allowed = max(self.streams_allowed, buf.pull_uint_var())
            elif kind == _NEW_CID:
                buf.pull_uint_var()
                buf.pull_uint_var()
                buf.pull_bytes(buf.pull_uint8() + 16)
            elif kind & ~1 == _CLOSE:
                self.closed = buf.pull_uint_var()
                return False
            else:
                for _ in range(_PLAIN[kind]):
                    buf.pull_uint_var()
        return elicits

    def _stream(self, kind: int, buf: Buffer) -> None:
        stream = buf.pull_uint_var()
        offset = buf.pull_uint_var() if kind & 4 else 0
        length = buf.pull_uint_var() if kind & 2 else buf.capacity - buf.tell()
        self.of(stream).take(offset, buf.pull_bytes(length), bool(kind & 1))

    @staticmethod
    def _ack(kind: int, buf: Buffer) -> None:
        buf.pull_uint_var()
        buf.pull_uint_var()
        for _ in range(buf.pull_uint_var() * 2 + 1):
            buf.pull_uint_var()
        for _ in range(3 if kind & 1 else 0):
            buf.pull_uint_var()

    def acknowledgement(self) -> bytes:
        """An ACK frame of the newest ranges that came."""
        ranges: list[list[int]] = []
        for number in sorted(self.acked, reverse=True):
            if ranges and ranges[-1][0] == number + 1:
                ranges[-1][0] = number
            elif len(ranges) < 32:
                ranges.append([number, number])
            else:
                break
        buf = Buffer(capacity=1024)
        (first, last), *rest = ranges
        for value in (_ACK, last, 0, len(rest), last - first):
            buf.push_uint_var(value)
        for low, high in rest:
            buf.push_uint_var(first - high - 2)
            buf.push_uint_var(high - low)
            first = low
        return buf.data


# ---------------------------------------------------------------- the server


class Job:
    """A request that the puppet took."""

    def __init__(self, native: Any, slot: int, generation: int) -> None:
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
            self.slot, ids(self.number), request.n_tokens, request.max_output, request.top_k,
            request.seed, request.temperature, request.top_p, self.prompt,
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
        self._listener = listener
        listener.stats.raw = lambda: lib.dp_raw_stats(self.pump.native)


class Server:
    """A daemon's connection on a region of its own, and the client's end.

    Attributes:
        lazy: Whether Python hears of the pump's events only at the end of a pass.
    """

    pumped = False

    def __init__(self, state_dir: Path, now: float, max_writing: int, lazy: bool = False) -> None:
        self.now = now
        self.lazy = lazy
        self.stats = Stats()
        self.ingress = Ingress(self.stats, BODY_TIMEOUT, max_writing)
        self.fronts: dict[str, StreamFront] = {ALPN: Prompt1(self.ingress)}
        manifest = Manifest(
            model="twin", slots=SLOTS, context=CONTEXT, max_output=MAX_OUTPUT, vocab_size=VOCAB
        )
        self.region = create_region(manifest, 1, listeners=LISTENERS)
        self.engine: _Engine | None = None
        if self.pumped:
            self.engine = _Engine()
            self.engine.start_in_memory(self)
        self.ingress.attach(HostTable(self.region))
        if self.engine is not None:
            self.engine.attach(self.region, max_writing, BODY_TIMEOUT, False)
        self._client, self.connection = self._ends(state_dir)
        self.timer: float | None = None
        self.out: list[bytes] = []
        self.taken: list[Job] = []
        self._handshake()
        self.hand = Hand(self._client)

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
        self.ingress.on_deadline(self.now)
        if puppet is not None:
            puppet()
        self.ingress.egress.flush()
        self.timer = self.connection.transmit(self.now, self._queue)
        self._build()

    def _dispatch(self) -> None: ...
    def _build(self) -> None: ...

    def _fire(self) -> None:
        if self.timer is not None and self.timer <= self.now:
            self.connection.handle_timer(self.now)

    def next_at(self) -> float | None:
        times = [self.timer, self.ingress.next_deadline()]
        return min((at for at in times if at is not None), default=None)

    # What is compared.

    def states(self) -> list[str]:
        return [State(word & 0xFF).name for word in self.region.native.states[0:SLOTS]]

    def counts(self) -> Counts:
        return self.stats.counts()

    def writing(self) -> int:
        """Slots that the connection holds in WRITING."""
        return self.connection.writing

    def close(self) -> None: ...

    def take(self) -> list[Job]:
        """Take every READY slot; `taken` has all that ever were."""
        native, generation = self.region.native, ffi.new("uint64_t *")
        fresh = [
            Job(native, slot, generation[0])
            for slot in range(SLOTS)
            if lib.dp_take(native, slot, generation) >= 0
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
        self.engine.detach()

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


# ---------------------------------------------------------------- both


def _without_moment(got: tuple[Any, ...]) -> tuple[Any, ...]:
    """What an answer means, however much had come when it was made: without the bytes quoted."""
    verdict, rest, *others = got
    return verdict, _QUOTED.sub(b"begins with ...", rest), *others


class Twins:
    """The two engines, and the clock.

    Args:
        seed: Decides which of the servers' packets are lost, `loss` how many.
        lazy: See `Server`.
        max_writing: Slots that the connection may hold in WRITING. It is Python that tells of a
            cap: with the pump the rest of the packet may have come by then, and be over.
    """

    def __init__(
        self,
        state_dir: Path,
        seed: int = 1,
        loss: float = 0.0,
        lazy: bool = False,
        max_writing: int = SLOTS + 1,
    ) -> None:
        start = 1000.0
        self.servers: tuple[Server, Server] = (
            Server(state_dir, start, max_writing, lazy),
            Pumped(state_dir, start, max_writing, lazy),
        )
        self.now = max(server.now for server in self.servers)
        self.loss = loss
        self.ids: set[int] = set()
        self.said: dict[int, list[tuple[float, str]]] = {}
        self.ends: dict[int, int] = {}
        self.passes = 0
        self._gave_up: dict[int, set[int]] = {}  # codes with which the client stopped a stream
        self._over: dict[int, int] = {}  # in which pass the client's end of a stream came
        self._chances = [random.Random(f"{seed} {i}") for i in range(2)]
        self.next_stream = 0
        self.next_uni = 2
        self.run_for(1.0)

    def close(self) -> None:
        """Detach the regions before anything is freed."""
        for server in self.servers:
            server.close()

    def open(self) -> int:
        stream = self.next_stream
        self.next_stream += 4
        return stream

    def has_room(self, streams: int) -> bool:
        """Whether both allow so many streams more."""
        last = self.next_stream // 4 + streams
        return all(last <= server.hand.streams_allowed for server in self.servers)

    def _id(self, number: int) -> object:
        return number if number in self.ids or not number else "chosen"

    # Passes.

    def _exchange(
        self, index: int, payloads: Sequence[bytes], order: Sequence[int], puppet: Any
    ) -> None:
        """Deliver packets to one of the servers, and what it answers to its client."""
        server, chance = self.servers[index], self._chances[index].random
        server.now = self.now
        server.hand.passes = self.passes
        packets = [server.hand.packet(payload) for payload in payloads]
        server.serve([packets[at] for at in order], lambda: puppet(server) if puppet else None)
        self._answer(index, chance)

    def _answer(self, index: int, chance: Callable[[], float]) -> None:
        server = self.servers[index]
        for _ in range(100):
            out, server.out = server.out, []
            came = [data for data in out if self.loss == 0.0 or chance() >= self.loss]
            if [data for data in came if server.hand.receive(data)]:
                server.serve([server.hand.packet(server.hand.acknowledgement())])
                continue
            server.serve()  # what a pass leaves to the next
            if not server.out:
                return
        raise AssertionError("they answer each other for ever")

    def deliver(
        self,
        packets: Sequence[Sequence[Frame]],
        order: Sequence[int] | None = None,
        puppet: Callable[[Server], object] | None = None,
    ) -> None:
        """One pass of each with these packets, in this order (some perhaps twice or never)."""
        payloads = [b"".join(frame.encode() for frame in packet) for packet in packets]
        which = list(range(len(packets))) if order is None else order
        self.passes += 1
        for at in which:
            for frame in packets[at]:
                self._note(frame)
        for index in range(2):
            self._exchange(index, payloads, which, puppet)
        self.check()

    def run_for(self, seconds: float) -> None:
        """Let the clock run, and each do what is due."""
        end = self.now + seconds
        for index, server in enumerate(self.servers):
            for _ in range(_STEPS_MAX):
                at = server.next_at()
                if at is None or at > end:
                    break
                server.now = max(server.now + _TICK, at)
                server.serve()
                self._answer(index, self._chances[index].random)
            else:
                raise AssertionError("a timer fires without end")
            server.now = end
            server.serve()
            self._answer(index, self._chances[index].random)
        self.now = end
        self.check()

    def _note(self, frame: Frame) -> None:
        stops = frame.offset + len(frame.data)
        text = f"{frame.kind} {frame.offset}-{stops}" + " fin" * frame.fin
        self.said.setdefault(frame.stream, []).append((round(self.now, 3), text))
        self.ends[frame.stream] = max(self.ends.get(frame.stream, 0), stops)
        if frame.kind == "stop":
            self._gave_up.setdefault(frame.stream, set()).add(frame.code)
        if frame.kind == "reset" or frame.fin:
            self._over.setdefault(frame.stream, self.passes)

    def is_over(self, stream: int) -> bool:
        """Whether the client's half of a stream is over."""
        return stream in self._over

    # The comparison.

    def _recent(self) -> str:
        last = list(self.said.items())[-8:]
        states = " against ".join(str(server.states()) for server in self.servers)
        return "\n".join([f"{states} after", *(f"{stream}: {said}" for stream, said in last)])

    def check(self) -> None:
        """Both have the same in their slots and gave the puppet the same."""
        one, other = self.servers
        assert one.states() == other.states(), self._recent()
        assert [job.record(self._id) for job in one.taken] == [
            job.record(self._id) for job in other.taken
        ], self._recent()
        assert [job.cancelled for job in one.taken] == [job.cancelled for job in other.taken]
        assert (one.hand.closed, other.hand.closed) == (None, None)

    def check_answers(self, streams: Sequence[int]) -> None:
        """Both answered these streams alike."""
        for stream in streams:
            one, other = (server.hand.of(stream).meaning(self._id) for server in self.servers)
            one, other = _without_moment(one), _without_moment(other)
            codes = self._gave_up.get(stream)
            if (
                codes
                and one[-1] != other[-1]
                and (other[-1] is None or (self.loss and one[-1] is None))
            ):
                continue  # of the one the answer was on its way (aioquic paces), or lost
            if codes and {one[-1], other[-1]} <= {0, *codes}:
                # It broke off and stopped in one packet: which is answered, nobody says.
                one, other = one[:-1], other[:-1]
            said = f"stream {stream}, {self.said.get(stream)}"
            if one[0] and other[0] and abs(one[0][4] - other[0][4]) <= 1 + one[0][4] // 100:
                # Times of their own clocks, rounded: when to come again may be a little off.
                other = (other[0][:4] + one[0][4:5] + other[0][5:], *other[1:])
            assert one == other, f"{said}: {one} != {other}"
            self._check_stops(stream, said)

    def _check_stops(self, stream: int, said: str) -> None:
        """A STOP_SENDING may be left out where the client's end comes in the pass that asks for it:
        the pump leaves it out, aioquic does not."""
        one, other = (server.hand.of(stream) for server in self.servers)
        if one.stopped == other.stopped:
            return
        over = self._over.get(stream)
        assert over is not None, f"{said}: stopped {one.stopped} and {other.stopped}"
        assert one.stopped is not None, f"{said}: stopped by the pump alone"
        assert other.stopped is None
        assert over <= one.stopped_in or self.loss, f"{said}: not stopped by the pump"

    def check_counts(self) -> None:
        one, other = (server.counts() for server in self.servers)
        assert one._replace(datagrams_dropped=0) == other._replace(datagrams_dropped=0)

    def forget(self, streams: Sequence[int]) -> None:
        """Drop what was compared."""
        for server in self.servers:
            for stream in streams:
                server.hand.got.pop(stream, None)
                self.said.pop(stream, None)
            server.taken = [job for job in server.taken if not job.over]
