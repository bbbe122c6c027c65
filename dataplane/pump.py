"""The packet pump from Python: established connections by handle, and what it tells of them.

A thin layer over `native/pump/pump.h`, `loop.h` and `raw.h`, which say what each call means. One
pump serves a listener (a thread of its own does the packets) or a client's process (sans-IO:
datagrams are put in and taken out here). Times are nanoseconds of CLOCK_MONOTONIC, except an
event's `at_ns`, which is the kernel's receive time.
"""

import ipaddress
import socket
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from dataplane._native import ffi, lib

PATH_BYTES: int = ffi.sizeof("struct dp_path")
DATAGRAM_BYTES: int = lib.DP_UDP_DATAGRAM
NEVER = 2**63 - 1
"""What `timer` says when nothing is due."""

DATAGRAM: int = lib.DP_EVENT_DATAGRAM
CONTROL: int = lib.DP_EVENT_CONTROL
DELIVERED: int = lib.DP_EVENT_DELIVERED
FAILED: int = lib.DP_EVENT_FAILED
DATA: int = lib.DP_EVENT_DATA
RESET: int = lib.DP_EVENT_RESET
STOPPED: int = lib.DP_EVENT_STOPPED
CLOSED: int = lib.DP_EVENT_CLOSED
REFUSED: int = lib.DP_EVENT_REFUSED
BROKEN: int = lib.DP_EVENT_BROKEN
STUCK: int = lib.DP_EVENT_STUCK

FRONT_EVENTS: int = lib.DP_FRONT_EVENTS
FRONT_RAW: int = lib.DP_FRONT_RAW
FRONT_QUIET: int = lib.DP_FRONT_QUIET
FRONT_LOAD: int = lib.DP_FRONT_LOAD

TAKEN = 0
"""`inject` took the packet (enum dp_taken_as); every other answer is a packet without effect."""

# One take: what the events of a busy pass need, so that few events of data are cut.
TAKE_BYTES: int = lib.DP_EVENT_TAKE
EVENT = struct.Struct("<IHHQQQqQ")
EVENT_BYTES: int = lib.DP_EVENT_BYTES
# Host byte order for what the kernel has so, network order for the port.
_PATH_HEAD = struct.Struct("=H2sI")
_PATH_TAIL = struct.Struct("=I")
_pack_sending = struct.Struct("=QQII").pack
# Beyond it a copy costs more than a call.
_LATER_MAX = 16 << 10
_PROGRESS_MAX = 4096
_new_tuple = tuple.__new__


class Event(NamedTuple):
    """Something that happened; which fields mean what, `enum dp_event_kind` says."""

    kind: int
    flags: int
    connection: int
    stream: int
    number: int
    at_ns: int
    body: bytes


class Refused(NamedTuple):
    """Why the raw front gave a request up (`struct dp_refused`)."""

    request_id: int
    why: int
    a: int
    b: int
    n_tokens: int
    queue_us: int
    partition: int


_REFUSED = struct.Struct("<QIIIIII")


def parse_refused(body: bytes) -> Refused:
    """Read the body of a REFUSED event."""
    return Refused(*_REFUSED.unpack_from(body))


def path_of(address: tuple[Any, ...]) -> bytes:
    """Return the 44 bytes of a path to a socket address, whose own end the kernel chooses."""
    host, port = str(address[0]).split("%", 1)[0], int(address[1])
    peer = ipaddress.ip_address(host)
    family = socket.AF_INET if peer.version == 4 else socket.AF_INET6
    scope = address[3] if len(address) > 3 else 0
    head = _PATH_HEAD.pack(family, port.to_bytes(2, "big"), 0)
    return head + peer.packed.ljust(16, b"\0") + bytes(16) + _PATH_TAIL.pack(scope)


class Pump:
    """A pump and its connections.

    Attributes:
        native: The C handle (`struct dp_pump *`).
    """

    def __init__(self) -> None:
        native = lib.dp_pump_new()
        if native == ffi.NULL:
            raise MemoryError("no memory for the packet pump")
        self.native = ffi.gc(native, lib.dp_pump_free)
        self._taken = ffi.new("uint8_t[]", TAKE_BYTES)
        self._view = memoryview(ffi.buffer(self._taken))
        self._built = ffi.new("uint8_t[]", DATAGRAM_BYTES)
        self._built_view = ffi.buffer(self._built)
        self._path = ffi.new("uint8_t[]", PATH_BYTES)
        self._path_view = ffi.buffer(self._path)
        self._streams = ffi.new("uint64_t[]", _PROGRESS_MAX)
        self._acked = ffi.new("uint64_t[]", _PROGRESS_MAX)
        self._stats = ffi.new("struct dp_conn_stats *")
        self._later: list[bytes] = []

    # Events.

    def fd(self) -> int:
        """Return the eventfd that is readable while there are events."""
        return int(lib.dp_pump_fd(self.native))

    def events(self) -> list[Event]:
        """Take what happened, a buffer's worth; nothing is left once it returns none."""
        used: int = lib.dp_pump_take(self.native, self._taken, TAKE_BYTES)
        view, found, at = self._view, [], 0
        while at < used:
            size, kind, flags, connection, stream, number, at_ns, _ = EVENT.unpack_from(view, at)
            at += EVENT_BYTES
            body = view[at : at + size].tobytes() if size else b""
            at += (size + 7) & ~7
            found.append(_new_tuple(Event, (kind, flags, connection, stream, number, at_ns, body)))
        return found

    def take(self, buffer: Any, room: int) -> int:
        """Take what happened as C writes it, for a caller that has no time for `Event`s."""
        return int(lib.dp_pump_take(self.native, buffer, room))

    # Connections.

    def adopt(self, facts: Mapping[str, Any], path: bytes, front: int, sock: int, now: int) -> int:
        """Take a connection over; `facts` are the fields of `struct dp_hand_over` but the path.

        Returns:
            Its handle, or 0 when it cannot be.
        """
        native = ffi.new("struct dp_hand_over *")
        for name, value in facts.items():
            if isinstance(value, bytes):
                field = ffi.buffer(getattr(native, name))
                field[: len(value)] = value  # too long a value is refused
            else:
                setattr(native, name, value)
        ffi.memmove(ffi.addressof(native, "path"), path, PATH_BYTES)
        handle = int(lib.dp_pump_adopt(self.native, native, front, sock, now))
        ffi.buffer(native)[:] = bytes(ffi.sizeof("struct dp_hand_over"))  # the secrets
        return handle

    def forget(self, connection: int) -> None:
        if self._later:
            self._send_now()
        lib.dp_pump_forget(self.native, connection)

    def route(self, cid: bytes, connection: int) -> None:
        """Route 1-RTT packets with this connection ID to a connection, 0: to Python again."""
        if lib.dp_pump_route(self.native, cid, len(cid), connection):
            raise MemoryError("no memory for a route")

    def inject(self, connection: int, data: bytes, path: bytes, now: int, at_ns: int) -> int:
        """Hand over a datagram that begins with a 1-RTT packet; `enum dp_taken_as`."""
        return int(lib.dp_pump_inject(self.native, connection, data, len(data), path, now, at_ns))

    # The control plane's.

    def control(
        self, connection: int, frames: bytes, token: int, elicits: bool, path: bytes | None = None
    ) -> bool:
        """Send frames of the control plane; False when they cannot be."""
        if self._later:
            self._send_now()
        return not lib.dp_pump_control(
            self.native, connection, frames, len(frames), token, elicits, path or ffi.NULL
        )

    def set_path(self, connection: int, path: bytes, validated: bool, is_new: bool) -> None:
        lib.dp_pump_set_path(self.native, connection, path, validated, is_new)

    def set_peer_cid(self, connection: int, cid: bytes) -> None:
        lib.dp_pump_set_peer_cid(self.native, connection, cid, len(cid))

    def close(self, connection: int, frames: bytes) -> None:
        """Send CONNECTION_CLOSE and nothing more; without frames, be quiet (draining)."""
        if self._later:
            self._send_now()
        lib.dp_pump_close(self.native, connection, frames, len(frames))

    def ping(self, connection: int) -> None:
        lib.dp_pump_ping(self.native, connection)

    def update_keys_every(self, connection: int, packets: int) -> None:
        lib.dp_pump_update_keys_every(self.native, connection, packets)

    def last_received(self, connection: int) -> int:
        """Return when a packet was last taken, 0 for never."""
        return int(lib.dp_pump_last_received(self.native, connection))

    def conn_stats(self, connection: int) -> Any | None:
        """Return `struct dp_conn_stats`, good until the next call; None: no such connection."""
        found = lib.dp_pump_conn_stats(self.native, connection, self._stats)
        return self._stats if found else None

    # Streams.

    def send_later(self, connection: int, stream: int, data: bytes, fin: bool) -> None:
        """Append to a stream with the next call that needs to find it there, at the latest `flush`.

        One call for all of a pass; what cannot be sent is left out.
        """
        if len(data) > _LATER_MAX:
            self.send(connection, stream, data, fin)
            return
        later = self._later
        later.append(_pack_sending(connection, stream, len(data), fin))
        later.append(data)

    def _send_now(self) -> None:
        data = b"".join(self._later)
        self._later.clear()
        lib.dp_pump_send_many(self.native, data, len(data))

    def send(self, connection: int, stream: int, data: bytes, fin: bool) -> bool:
        """Append to a stream; False when it is reset, ended or not there."""
        if self._later:
            self._send_now()
        return not lib.dp_pump_send(self.native, connection, stream, data, len(data), fin)

    def open(self, connection: int, uni: bool = False) -> int:
        """Open a stream: its number, or -1."""
        return int(lib.dp_pump_open(self.native, connection, uni))

    def reset(self, connection: int, stream: int, code: int) -> None:
        if self._later:
            self._send_now()
        lib.dp_pump_reset(self.native, connection, stream, code)

    def stop(self, connection: int, stream: int, code: int) -> None:
        if self._later:
            self._send_now()
        lib.dp_pump_stop(self.native, connection, stream, code)

    def is_waiting(self, connection: int, stream: int) -> bool | None:
        """Whether a stream waits for the peer to allow more streams; None: no such stream."""
        if self._later:
            self._send_now()
        answer = lib.dp_pump_is_waiting(self.native, connection, stream)
        return None if answer < 0 else bool(answer)

    def unacked(self, connection: int) -> int:
        """Return the bytes that wait for acknowledgement, sent or not."""
        if self._later:
            self._send_now()
        return int(lib.dp_pump_unacked(self.native, connection))

    def progress(self, connection: int) -> dict[int, int]:
        """Return up to where each stream that has such bytes is acknowledged."""
        if self._later:
            self._send_now()
        count = lib.dp_pump_progress(
            self.native, connection, self._streams, self._acked, _PROGRESS_MAX
        )
        streams, acked = ffi.unpack(self._streams, count), ffi.unpack(self._acked, count)
        return dict(zip(streams, acked, strict=True))

    # Out, without a thread.

    def build(self, connection: int, now: int) -> tuple[bytes, bytes] | None:
        """Return the next datagram and its path; None: nothing may leave now."""
        if self._later:
            self._send_now()
        size = lib.dp_pump_build(self.native, connection, now, self._built, self._path)
        return (self._built_view[:size], self._path_view[:]) if size else None

    def timer(self, connection: int) -> int:
        """Return when `on_timer` is due, `NEVER` for not at all."""
        return int(lib.dp_pump_timer(self.native, connection))

    def on_timer(self, connection: int, now: int) -> None:
        lib.dp_pump_on_timer(self.native, connection, now)

    # The raw front.

    def set_keys(self, partitions: Mapping[bytes, int]) -> None:
        """Serve who has a key with one of these SHA-256 from the slots of its partition."""
        failed = lib.dp_raw_set_keys(
            self.native, b"".join(partitions), list(partitions.values()), len(partitions)
        )
        if failed:
            raise MemoryError("no memory for the API keys")

    # The thread.

    def listen(self, fd: int) -> int:
        """Serve a socket too: its number.

        Raises:
            OSError: The kernel cannot give what it takes.
        """
        number = int(lib.dp_pump_listen(self.native, fd))
        if number < 0:
            raise OSError(-number, "the socket cannot give receive times")
        return number

    def start_thread(self, busy_poll: bool = False) -> None:
        failed = lib.dp_pump_start(self.native, busy_poll)
        if failed:
            raise OSError(failed, "the packet loop's thread cannot be started")

    def stop_thread(self) -> None:
        """End the thread; sockets stay open."""
        if self._later:
            self._send_now()
        lib.dp_pump_halt(self.native)

    def thread(self) -> int:
        """Return the kernel's number of the thread."""
        return int(lib.dp_pump_thread(self.native))

    def queue(self, sock: int, data: bytes, path: bytes) -> None:
        """Send one datagram, at the next `flush` at the latest."""
        lib.dp_pump_queue(self.native, sock, data, len(data), path)

    def flush(self) -> None:
        """Have all that is due sent."""
        if self._later:
            self._send_now()
        lib.dp_pump_flush(self.native)

    def loop_stats(self) -> Any:
        """Return `struct dp_loop_stats`."""
        return lib.dp_pump_loop_stats(self.native)
