"""A listener's packets through the pump: a thread in C has the sockets, Python has what it leaves.

The thread serves `prompt/1` whole, apart from refusals in words, and carries HTTP/3's streams. To
Python come datagrams of handshakes and strangers, frames of the control plane, and stream events;
each pass ends with what Python has to say, on all connections at once. Where a key decides whose
slots a request gets, the thread knows the keys as well.
"""

import asyncio
import socket
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from aioquic.quic.connection import QuicConnection

from dataplane import prompt1, pump, refusals
from dataplane._native import ffi, lib
from dataplane.cores import give_core
from dataplane.device_table import ANSWER_MS, DeviceTable
from dataplane.errors import Refusal, ResetCode
from dataplane.ingress import Ingress
from dataplane.pump import PATH_BYTES, Event, Pump, Refused
from dataplane.pumped import PumpedConnection
from dataplane.region import Region

if TYPE_CHECKING:
    from dataplane.connection import Connection
    from dataplane.listener import Listener

OWNER = 2
"""The raw front's number among a region's listeners; Python's own is 1."""
LISTENERS = 2
_CATCH_UP_MAX = 64  # buffers of events; others that flood in meanwhile are not waited for
_EVENT_BYTES, _DATA = pump.EVENT_BYTES, pump.DATA
_SLOW_READER = int(ResetCode.SLOW_READER)


class _Socket:
    """Where a connection's datagrams go: a socket of the pump's, by its number."""

    def __init__(self, native: Pump, number: int) -> None:
        self._pump = native
        self.number = number

    def queue(self, data: bytes, path: bytes) -> None:
        self._pump.queue(self.number, data, path)


class PumpEngine:
    """What a `Listener` runs on (`dataplane.listener.Engine`).

    Args:
        keys: Who admits, by the SHA-256 of an API key; None where none is asked for.

    Attributes:
        pump: The packet pump.
    """

    def __init__(
        self, busy_poll: bool = False, keys: Mapping[bytes, Ingress] | None = None
    ) -> None:
        self.pump = Pump()
        self._busy_poll = busy_poll
        self._keys = keys
        self._ingresses: tuple[Ingress, ...] = ()
        self._listener: Listener | None = None
        self._sockets: list[_Socket] = []
        self._by_handle: dict[int, PumpedConnection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._vocab_sizes: dict[int, int] = {}  # by partition, where raw requests are served
        self._taken = ffi.new("uint8_t[]", pump.TAKE_BYTES)
        self._view = memoryview(ffi.buffer(self._taken))
        self._dispatching = False

    # Start and stop.

    def start(self, listener: "Listener", sockets: list[socket.socket]) -> None:
        """Serve these sockets on the running loop."""
        native = self.pump
        self._loop = asyncio.get_running_loop()
        self._serve(listener)
        listener.stats.loop = native.loop_stats
        for sock in sockets:
            self._sockets.append(_Socket(native, native.listen(sock.fileno())))
        native.start_thread(self._busy_poll)
        if self._busy_poll:
            give_core(native.thread())
        self._loop.add_reader(native.fd(), self._readable)

    def _serve(self, listener: "Listener") -> None:
        """Let the raw front know the partitions, and who may have which."""
        native = self.pump.native
        self._listener = listener
        self._ingresses = listener.ingresses
        listener.stats.raw = lambda: lib.dp_raw_stats(native)
        for number, ingress in enumerate(self._ingresses):
            ingress.raw = partial(lib.dp_raw_partition_stats, native, number)
        if self._keys is not None:
            numbers = {ingress: number for number, ingress in enumerate(self._ingresses)}
            self.pump.set_keys({digest: numbers[of] for digest, of in self._keys.items()})

    def stop(self) -> None:
        """Leave the sockets, which are not closed."""
        if self._loop is not None:
            self._loop.remove_reader(self.pump.fd())
            self._loop = None
        self.pump.stop_thread()

    # The pass.

    def _readable(self) -> None:
        assert self._listener is not None
        now = time.monotonic()
        self._listener.begin_pass(now)
        self.dispatch(now)
        self._listener.end_pass()

    def dispatch(self, now: float) -> bool:
        """Act on what the pump has to tell; False when that was nothing."""
        if self._dispatching:
            # What one event led to has to be seen to before the next: the buffer is in use.
            events = self.pump.events()
            for event in events:
                self._act(event, now)
            return bool(events)
        self._dispatching = True
        try:
            return self._dispatch_all(now)
        finally:
            self._dispatching = False

    def _dispatch_all(self, now: float) -> bool:
        """Go through a buffer of events; most are whole requests."""
        taken, view, find = self._taken, self._view, self._by_handle.get
        unpack, new = pump.EVENT.unpack_from, tuple.__new__
        used = self.pump.take(taken, pump.TAKE_BYTES)
        at = 0
        while at < used:
            size, kind, flags, handle, stream, number, at_ns, _ = unpack(view, at)
            begin = at + _EVENT_BYTES
            at = begin + (size + 7 & ~7)
            connection = find(handle)
            if (
                kind == _DATA
                and flags
                and connection is not None
                and connection.whole is not None
                and not connection.unended
                and not connection.stopped
            ):
                try:
                    if connection.whole(stream, taken, begin, size, at_ns):
                        continue
                except Exception as error:
                    connection.broken(error)
                    continue
            body = view[begin : begin + size].tobytes() if size else b""
            self._act(new(Event, (kind, flags, handle, stream, number, at_ns, body)), now)
        return used > 0

    def _act(self, event: Event, now: float) -> None:
        listener = self._listener
        assert listener is not None
        connection = self._by_handle.get(event.connection)
        if connection is not None:
            connection.take(event, now)
        elif event.kind == pump.DATAGRAM:
            path, data = event.body[:PATH_BYTES], event.body[PATH_BYTES:]
            at_ns = event.at_ns or time.time_ns()
            listener.deliver(self._sockets[event.number], data, path, now, at_ns)
        elif event.kind == pump.BROKEN:
            broken = self._ingresses[event.number]
            broken.egress.on_broken(event.body.decode("utf-8", "replace"))
        elif event.kind == pump.STUCK:
            table = self._ingresses[event.number].table
            if isinstance(table, DeviceTable):
                table.give_up()

    def flush(self) -> int:
        """Have all sent; what the kernel did not take, the pump counts itself."""
        self.pump.flush()
        return 0

    # Connections (`dataplane.pumped.Pumps`).

    def connection(self, listener: "Listener", quic: QuicConnection, sender: Any) -> "Connection":
        """Make the connection of a first datagram that came by `sender`."""
        return PumpedConnection(quic, listener, sender, self, sender.number)

    def front_of(self, alpn: str) -> int:
        """Who reads the streams of a connection with this ALPN."""
        return pump.FRONT_RAW if alpn == prompt1.ALPN else pump.FRONT_QUIET

    def adopted(self, connection: PumpedConnection) -> None:
        self._by_handle[connection.hand_over.handle] = connection

    def left(self, handle: int) -> None:
        self._by_handle.pop(handle, None)

    def break_off(self, handle: int, stream_id: int) -> bool:
        """Break off an answer of the raw front's that nobody reads; False: it is not its."""
        return bool(lib.dp_raw_unread(self.pump.native, handle, stream_id, _SLOW_READER))

    def writing(self, handle: int, ingress: Ingress | None = None) -> int:
        """Count a connection's slots in WRITING through the raw front, in one partition or all."""
        native = self.pump.native
        if ingress is None:
            return int(lib.dp_raw_writing(native, handle))
        return int(lib.dp_raw_writing_in(native, handle, self._ingresses.index(ingress)))

    def admitter(self, refused: Refused) -> Ingress | None:
        """Return who would have admitted a request that the raw front gave up, if that is known."""
        if refused.why == lib.DP_WHY_HEADER_LATE:
            return None
        return self._ingresses[refused.partition]

    def refusal(self, refused: Refused) -> Refusal:
        """Return in words why the raw front gave a request up."""
        why, a, b = refused.why, refused.a, refused.b
        if why == lib.DP_WHY_BAD_TOKEN:
            return refusals.bad_token(a, b, self._vocab_sizes[refused.partition])
        if why == lib.DP_WHY_OVERFLOW:
            return refusals.too_long(refused.n_tokens)
        if why == lib.DP_WHY_SHORT:
            return refusals.too_short(a, b, refused.n_tokens)
        if why == lib.DP_WHY_LATE:
            return refusals.late(a, refused.n_tokens)
        if why == lib.DP_WHY_HEADER_LATE:
            return refusals.header_late(a)
        if why == lib.DP_WHY_STUCK:
            return refusals.stuck()
        ends = self._ingresses[refused.partition].draining
        return refusals.draining() if ends else refusals.lost()

    # The raw front's slots.

    def attach(self, ingress: Ingress, region: Region, null: bool) -> None:
        """Serve a partition's raw requests from these slots."""
        number = self._ingresses.index(ingress)
        config = ffi.new("struct dp_raw_config *")
        config.partition = number
        config.owner = OWNER
        config.first, config.count = 0, region.slots
        config.max_writing = ingress.max_writing
        config.null = null
        config.body_timeout = int(ingress.deadlines.body_timeout * 1e9)
        config.answer_timeout = ANSWER_MS * 1_000_000
        self._vocab_sizes[number] = region.vocab_size
        if lib.dp_raw_attach(self.pump.native, region.native, config, refusals.BUSY.encode()):
            raise MemoryError("no memory for the raw front")
        ingress.stats.latency.add(lib.dp_raw_latency(self.pump.native))

    def detach(self, ingress: Ingress) -> None:
        """A partition's runtime is gone; nothing of its region is touched any more."""
        number = self._ingresses.index(ingress)
        lib.dp_raw_detach(self.pump.native, number, int(ResetCode.RUNTIME_LOST))
        self._catch_up()

    def drain(self) -> None:
        """Take no more raw requests."""
        lib.dp_raw_drain(self.pump.native)

    def end_all(self, code: ResetCode) -> None:
        """End the raw requests that are in flight."""
        lib.dp_raw_end_all(self.pump.native, int(code))
        self._catch_up()

    def _catch_up(self) -> None:
        """Refuse in words what was just given up, before anything else happens."""
        for _ in range(_CATCH_UP_MAX):
            if not self.dispatch(time.monotonic()):
                return
