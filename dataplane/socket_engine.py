"""A listener's packets on aioquic alone: `--no-pump`, and the reference that the pump is tested
against. Sockets are read in batches, and each datagram goes to its connection in Python.
"""

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

from aioquic.quic.connection import QuicConnection

from dataplane._native import ffi, lib
from dataplane.connection import CID_BYTES, Connection
from dataplane.errors import ResetCode
from dataplane.ingress import Ingress
from dataplane.region import Region

if TYPE_CHECKING:
    from dataplane.listener import Listener

_BATCH: int = lib.DP_UDP_BATCH
_DATAGRAM: int = lib.DP_UDP_DATAGRAM
_monotonic = time.monotonic


class Socket:
    """A UDP socket with its native batches."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.udp = ffi.gc(lib.dp_udp_new(sock.fileno()), lib.dp_udp_free)
        failed = lib.dp_udp_prepare(self.udp)
        if failed:
            raise OSError(-failed, "the socket cannot give receive times")
        self.datagrams = [lib.dp_udp_datagram(self.udp, i) for i in range(lib.DP_UDP_BATCH)]
        self.data = [ffi.buffer(d.data) for d in self.datagrams]
        self.paths = [ffi.buffer(ffi.addressof(d, "path")) for d in self.datagrams]

    def queue(self, data: bytes, path: bytes) -> None:
        """Add a datagram to the batch that `flush` sends."""
        lib.dp_udp_queue(self.udp, data, len(data), path)

    def flush(self) -> int:
        """Send the batch; how many datagrams the kernel did not take."""
        return int(lib.dp_udp_flush(self.udp))

    def warm_up(self) -> None:
        """Receive a datagram of our own: the kernel's first stamp after enabling is the read's."""
        try:
            self.socket.sendto(b"\0", self.socket.getsockname())
        except OSError:
            return  # A wildcard address on a host without that family; the first stamp may be late.
        for _ in range(1000):
            if lib.dp_udp_receive(self.udp):
                return


class SocketEngine:
    """The reference: aioquic does every packet, and Python every request."""

    def __init__(self) -> None:
        self._sockets: list[Socket] = []
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, listener: "Listener", sockets: list[socket.socket]) -> None:
        """Serve these sockets on the running loop."""
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        for sock in sockets:
            native = Socket(sock)
            native.warm_up()
            self._sockets.append(native)
            self._loop.add_reader(sock.fileno(), self._readable, native)

    def stop(self) -> None:
        """Leave the sockets."""
        for native in self._sockets:
            assert self._loop is not None
            self._loop.remove_reader(native.socket.fileno())

    def flush(self) -> int:
        """Send what is queued; how many datagrams the kernel did not take."""
        return sum(native.flush() for native in self._sockets)

    def connection(self, listener: "Listener", quic: QuicConnection, sender: Any) -> Connection:
        """Make the connection of a first datagram that came by `sender`."""
        return Connection(quic, listener, sender)

    def _readable(self, native: Socket) -> None:
        """Drain up to a batch: what arrives while the first datagrams are worked on belongs to the
        same pass, since answering costs most per pass."""
        listener = self._listener
        assert listener is not None
        now = _monotonic()
        listener.begin_pass(now)
        drained = 0
        while drained < _BATCH:
            count = lib.dp_udp_receive(native.udp)
            if count <= 0:
                break
            self._receive(listener, native, count, now)
            drained += count
        listener.end_pass()

    @staticmethod
    def _receive(listener: "Listener", native: Socket, count: int, now: float) -> None:
        datagrams, buffers, paths = native.datagrams, native.data, native.paths
        for i in range(count):
            datagram = datagrams[i]
            length = datagram.length
            if CID_BYTES < length <= _DATAGRAM:
                at_ns = datagram.received_ns or time.time_ns()
                listener.deliver(native, buffers[i][:length], paths[i][:], now, at_ns)

    def attach(self, ingress: Ingress, region: Region, null: bool) -> None: ...
    def detach(self, ingress: Ingress) -> None: ...
    def drain(self) -> None: ...
    def end_all(self, code: ResetCode) -> None: ...
