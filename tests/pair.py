"""Both ends of a connection in memory, under a clock that moves only when nothing else is to do.

The daemon's end is the real thing from the connection inwards: front, ingress, egress and slot
table on a real region. The client's end is aioquic. Between them lies a link that may lose, double,
reorder and delay what it carries; what it does hangs on its seed alone. No socket, no sleep.
"""

import heapq
import random
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    StopSendingReceived,
    StreamDataReceived,
    StreamReset,
)

from dataplane._native import ffi, lib
from dataplane.connection import Connection, StreamFront
from dataplane.fronts.prompt1 import Prompt1
from dataplane.identity import load_identity
from dataplane.ingress import Ingress
from dataplane.manifest import Manifest
from dataplane.prompt1 import (
    ALPN,
    Request,
    Trailer,
    Verdict,
    decode_trailer,
    decode_verdict,
    encode_request,
)
from dataplane.region import create_region
from dataplane.slots import State
from dataplane.stats import Stats
from dataplane.table import HostTable

_CLIENT_PATH, _SERVER_PATH = b"client", b"server"
_END_MARK = b"\xff\xff\xff\xff"
_VERDICT_BYTES, _TRAILER_BYTES = 32, 16
_STEPS_MAX = 100_000
_TICK = 1e-6
_IDLE_TIMEOUT_S = 3600.0


class Link(NamedTuple):
    """What a link does to each datagram; probabilities from 0 to 1, times in seconds."""

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    delay: float = 0.005
    setback: float = 0.05  # of a reordered one


@dataclass
class Answer:
    """What the client has of one stream."""

    data: bytearray = field(default_factory=bytearray)
    fin: bool = False
    reset: int | None = None
    stopped: int | None = None

    @property
    def over(self) -> bool:
        return self.fin or self.reset is not None

    @property
    def verdict(self) -> Verdict:
        return decode_verdict(bytes(self.data[:_VERDICT_BYTES]))

    @property
    def reason(self) -> str:
        return self.data[_VERDICT_BYTES:].decode()

    @property
    def ids(self) -> list[int]:
        """The output ids of a 200, up to its end mark."""
        words = list(struct.iter_unpack("<I", self.data[_VERDICT_BYTES:]))
        ids = [word for (word,) in words]
        return ids[: ids.index(0xFFFFFFFF)] if 0xFFFFFFFF in ids else ids

    @property
    def trailer(self) -> Trailer:
        assert self.fin
        assert self.data[-_TRAILER_BYTES - 4 : -_TRAILER_BYTES] == _END_MARK
        return decode_trailer(bytes(self.data[-_TRAILER_BYTES:]))


class Job:
    """A request that the engine took."""

    def __init__(self, native: Any, slot: int, generation: int) -> None:
        request = native.requests[slot]
        self._handle = (native, slot, generation)
        self.slot = slot
        self.request_id: int = request.request_id
        self.max_output: int = request.max_output
        self.prompt: list[int] = list(lib.dp_prompt(native, slot)[0 : request.n_tokens])

    def emit(self, ids: Sequence[int]) -> None:
        assert lib.dp_emit(*self._handle, ffi.new("int32_t[]", list(ids)), len(ids)) == 0

    def finish(self, reason: int = 1) -> int:
        """Give the slot back: the state that it has then."""
        return int(lib.dp_finish(*self._handle, reason))

    @property
    def cancelled(self) -> bool:
        return bool(lib.dp_is_cancelled(*self._handle))


class Pair:
    """A daemon's connection and a client's.

    Attributes:
        now: The clock, in seconds.
        server, client: The two ends.
        answers: What the client got, by stream.
        sends: Every stream write of the daemon: (stream, data, fin).
        engine: Called in each pass of the daemon between what came in and what goes out.
        received_ns: Gives the kernel's receive time of a datagram.
        lost: Why the client's connection ended, or None.
    """

    def __init__(
        self,
        state_dir: Path,
        link: Link | None = None,
        seed: int = 1,
        body_timeout: float = 5.0,
        max_writing: int | None = None,
        front: Callable[[Ingress], StreamFront] = Prompt1,
        **geometry: Any,
    ) -> None:
        self.now = time.monotonic()
        self.stats = Stats()
        self.ingress = Ingress(self.stats, body_timeout, max_writing)
        sizes: dict[str, Any] = {
            "slots": 4,
            "context": 4096,
            "max_output": 64,
            "vocab_size": 100_000,
        }
        self.region = create_region(Manifest(model="pair", **{**sizes, **geometry}), 1, 1)
        self.table = self.make_table()
        self.ingress.attach(self.table)
        self.fronts = {ALPN: front(self.ingress)}
        self.answers: dict[int, Answer] = {}
        self.sends: list[tuple[int, bytes, bool]] = []
        self.engine: Callable[[], None] = lambda: None
        self.received_ns: Callable[[], int] = time.time_ns
        self.established = False
        self.lost: str | None = None
        self.cids: set[bytes] = set()
        self._link = link or Link()
        self._random = random.Random(seed)
        self._carried: list[tuple[float, int, bool, bytes]] = []
        self._count = 0
        self._server_timer: float | None = None
        self._reached = False
        self._connect(state_dir)

    def make_table(self) -> HostTable:
        """Return the table that the daemon serves from."""
        return HostTable(self.region)

    # The two ends.

    def _connect(self, state_dir: Path) -> None:
        identity = load_identity(state_dir, "localhost")
        of_server = QuicConfiguration(
            is_client=False, alpn_protocols=[ALPN], idle_timeout=_IDLE_TIMEOUT_S
        )
        of_server.load_cert_chain(identity.cert, identity.key)
        of_client = QuicConfiguration(
            is_client=True,
            alpn_protocols=[ALPN],
            idle_timeout=_IDLE_TIMEOUT_S,
            verify_mode=ssl.CERT_NONE,
        )
        self.client = QuicConnection(configuration=of_client)
        self.client.connect(_SERVER_PATH, self.now)
        quic = QuicConnection(
            configuration=of_server,
            original_destination_connection_id=self.client.original_destination_connection_id,
        )
        self.server = Connection(quic, self, None)
        send = quic.send_stream_data

        def count_and_send(stream_id: int, data: bytes, end_stream: bool = False) -> None:
            self.sends.append((stream_id, data, end_stream))
            send(stream_id, data, end_stream)

        quic.send_stream_data = count_and_send  # type: ignore[method-assign]

    # What the daemon's connection asks of its listener.

    def cid_issued(self, connection: Connection, cid: bytes) -> None:
        self.cids.add(cid)

    def cid_retired(self, connection: Connection, cid: bytes) -> None:
        self.cids.discard(cid)

    def touched(self, connection: Connection) -> None:
        connection.dirty = True

    # The link.

    def _carry(self, data: bytes, to_server: bool) -> None:
        link, chance = self._link, self._random.random
        for _ in range(2 if chance() < link.duplication else 1):
            if chance() < link.loss:
                continue
            at = self.now + link.delay
            if chance() < link.reordering:
                at += link.setback * chance()
            self._count += 1
            heapq.heappush(self._carried, (at, self._count, to_server, data))

    def _due(self) -> list[tuple[bool, bytes]]:
        found = []
        while self._carried and self._carried[0][0] <= self.now:
            found.append(heapq.heappop(self._carried)[2:])
        return found

    # Passes.

    def serve(self, datagrams: Sequence[bytes] = ()) -> None:
        """One pass of the daemon, as its listener makes it."""
        self.stats.begin_pass(self.now)
        for data in datagrams:
            self.server.receive(data, _CLIENT_PATH, self.now, self.received_ns())
        if self._server_timer is not None and self._server_timer <= self.now:
            self.server.handle_timer(self.now)
        self.ingress.on_deadline(self.now)
        self.engine()
        self.ingress.take_answers()
        self.ingress.egress.flush()
        self.server.dirty = False
        self._reached = self._reached or bool(datagrams)
        if not self._reached:
            return  # A listener has no connection before its first datagram.
        self._server_timer = self.server.transmit(
            self.now, lambda data, path: self._carry(data, to_server=False)
        )

    def transmit(self) -> None:
        """Let the client send what it has."""
        for data, _ in self.client.datagrams_to_send(self.now):
            self._carry(data, to_server=True)

    def _client_pass(self, datagrams: Sequence[bytes]) -> None:
        for data in datagrams:
            self.client.receive_datagram(data, _SERVER_PATH, self.now)
        timer = self.client.get_timer()
        if timer is not None and timer <= self.now:
            self.client.handle_timer(self.now)
        while (event := self.client.next_event()) is not None:
            self._client_event(event)
        self.transmit()

    def _client_event(self, event: Any) -> None:
        if isinstance(event, HandshakeCompleted):
            self.established = True
        elif isinstance(event, ConnectionTerminated):
            self.lost = event.reason_phrase
        elif isinstance(event, (StreamDataReceived, StreamReset, StopSendingReceived)):
            answer = self.answers.setdefault(event.stream_id, Answer())
            if isinstance(event, StreamDataReceived):
                answer.data += event.data
                answer.fin = answer.fin or event.end_stream
            elif isinstance(event, StreamReset):
                answer.reset = event.error_code
            else:
                answer.stopped = event.error_code

    # The clock.

    def _next_time(self) -> float | None:
        times = [self._server_timer, self.client.get_timer(), self.ingress.next_deadline()]
        times += [self._carried[0][0]] if self._carried else []
        known = [at for at in times if at is not None]
        return min(known) if known else None

    def step(self) -> None:
        """Move the clock to the next thing that is due, and do what is."""
        at = self._next_time()
        assert at is not None, "nothing will ever happen again"
        # A timer that fires at its very moment may round to a little before it, again and again.
        self.now = max(self.now, at + _TICK)
        due = self._due()
        self.serve([data for to_server, data in due if to_server])
        self._client_pass([data for to_server, data in due if not to_server])

    def run_until(self, condition: Callable[[], Any], within: float = 60.0) -> None:
        """Run until `condition` holds, for at most so many seconds of this clock."""
        deadline = self.now + within
        self.transmit()
        for _ in range(_STEPS_MAX):
            if condition():
                return
            assert self.lost is None, f"the connection was lost: {self.lost}"
            assert self.now <= deadline, f"it never came true within {within:g} s"
            self.step()
        raise AssertionError("it never came true")

    def run_for(self, seconds: float) -> None:
        """Run on until the clock has moved so far."""
        end = self.now + seconds
        self.transmit()
        while (at := self._next_time()) is not None and at <= end:
            self.step()
        self.now = end

    def deliver(self) -> None:
        """Let the client send, and the daemon take that in one pass, and no more."""
        self.transmit()
        self.now += self._link.delay
        due = self._due()
        self.serve([data for to_server, data in due if to_server])
        self._client_pass([data for to_server, data in due if not to_server])

    def connect(self) -> None:
        """Complete the handshake on both sides."""
        self.run_until(lambda: self.established and self.server.established)
        self.run_for(1.0)

    # Requests.

    def open(self, data: bytes, fin: bool) -> int:
        """Open a stream with these bytes; they go out with the next pass."""
        stream_id = self.client.get_next_available_stream_id()
        self.answers[stream_id] = Answer()
        self.client.send_stream_data(stream_id, data, fin)
        return stream_id

    def ask(self, ids: Sequence[int], **fields: Any) -> int:
        """Send a whole request; its stream."""
        return self.open(request_bytes(ids, **fields), True)

    def answer(self, stream_id: int, within: float = 60.0) -> Answer:
        """Run until a stream's answer is over, and return it; the engine has rung before."""
        answer = self.answers[stream_id]
        self.serve()
        self.run_until(lambda: answer.over, within)
        return answer

    # The engine.

    def take(self) -> list[Job]:
        """Take every READY slot."""
        native, jobs = self.region.native, []
        generation = ffi.new("uint64_t *")
        for slot in range(self.region.slots):
            if lib.dp_take(native, slot, generation) >= 0:
                jobs.append(Job(native, slot, generation[0]))
        return jobs

    def states(self) -> list[str]:
        """The slots' states."""
        words = self.region.native.states[0 : self.region.slots]
        return [State(word & 0xFF).name for word in words]

    def held(self) -> list[str]:
        """The states of the slots that are not FREE."""
        return [state for state in self.states() if state != "FREE"]

    def check_at_rest(self) -> None:
        """Hold the daemon to keeping nothing of all that was."""
        self.run_for(2.0 + self.ingress.deadlines.body_timeout / 10)
        assert self.held() == []
        assert self.stats.in_flight == 0
        assert self.server.writing == 0
        assert self.server.streams == {}
        assert self.ingress.next_deadline() is None


def request_bytes(ids: Sequence[int], declared: int | None = None, **fields: Any) -> bytes:
    """Return a request's header and ids; `declared` is how many ids the header announces."""
    count = len(ids) if declared is None else declared
    return encode_request(Request(n_tokens=count, **fields)) + struct.pack(f"<{len(ids)}I", *ids)


def echo(pair: Pair) -> Callable[[], None]:
    """Return an engine that gives every prompt back at once, as far as it may."""

    def step() -> None:
        for job in pair.take():
            job.emit(job.prompt[: job.max_output])
            job.finish()

    return step
