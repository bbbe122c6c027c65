"""A bad link between a client and a daemon, over real sockets: a UDP proxy in a thread.

It loses, doubles, reorders and damages datagrams as its seed has it, changes the port that it sends
from, goes silent, and lets a test look at each datagram and add some of its own.
"""

import contextlib
import heapq
import os
import random
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_BUFFER = 4 << 20
_LONGEST = 65535


class Link(NamedTuple):
    """What happens to each datagram; probabilities from 0 to 1, times in seconds."""

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    corruption: float = 0.0
    delay: float = 0.0
    setback: float = 0.01  # of a reordered one


AWFUL = Link(loss=0.3, duplication=0.1, reordering=0.1, corruption=0.05)
"""What issue and contract ask to be survived: 30% loss, and everything else."""
PATIENT = ("--handshake-timeout=120", "--body-timeout=300", "--idle-timeout=300")
"""For a daemon behind a link that takes its time."""


def _udp() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        made.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return made


class _Flow:
    """A client, and the socket that speaks for it."""

    def __init__(self, client: Any, server: Any) -> None:
        self.client = client
        self.socket = _udp()
        self.socket.connect(server)


class LossyProxy:
    """The proxy, which listens on `port`.

    Attributes:
        link: May be replaced at any time.
        on_datagram: Called in the proxy's thread with (to the server?, datagram) before anything
            happens to it: what goes in its place, each on its way as if it had come.
        silent: Whether nothing gets through.
        carried: How many datagrams went each way, by whether to the server.
    """

    def __init__(self, server_port: int, link: Link, seed: int) -> None:
        self.link = link
        self.on_datagram: Callable[[bool, bytes], list[bytes]] = lambda to_server, data: [data]
        self.silent = False
        self.carried = {True: 0, False: 0}
        self._server = ("127.0.0.1", server_port)
        self._listening = _udp()
        self._listening.bind(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._random = random.Random(seed)
        self._flows: dict[Any, _Flow] = {}
        self._old: list[socket.socket] = []
        self._late: list[tuple[float, int, bool, _Flow, bytes]] = []
        self._count = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._rebinds = threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def rebind(self) -> None:
        """From now on the server hears every client from another port, as after a NAT forgot it."""
        self._rebinds.set()
        os.eventfd_write(self._wake, 1)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ends = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for flow in self._flows.values():
            flow.socket.close()
        for old in self._old:
            old.close()
        self._listening.close()
        self._selector.close()
        os.close(self._wake)

    # The thread.

    def _run(self) -> None:
        while not self._ends:
            wait = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._listening:
                    self._drain(self._listening, None)
                elif key.fd == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    self._drain(key.fileobj, key.data)  # type: ignore[arg-type]
            if self._rebinds.is_set():
                self._rebinds.clear()
                self._move()
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, to_server, flow, data = heapq.heappop(self._late)
                self._send(to_server, flow, data)

    def _move(self) -> None:
        """What still comes to the old port is lost."""
        for flow in self._flows.values():
            self._selector.unregister(flow.socket)
            self._old.append(flow.socket)
            flow.socket = _udp()
            flow.socket.connect(self._server)
            self._selector.register(flow.socket, selectors.EVENT_READ, flow)

    def _drain(self, sock: socket.socket, flow: _Flow | None) -> None:
        for _ in range(64):
            try:
                data, address = sock.recvfrom(_LONGEST)
            except OSError:
                return
            if flow is not None:
                self._carry(False, flow, data)
                continue
            known = self._flows.get(address)
            if known is None:
                known = self._flows[address] = _Flow(address, self._server)
                self._selector.register(known.socket, selectors.EVENT_READ, known)
            self._carry(True, known, data)

    def _carry(self, to_server: bool, flow: _Flow, data: bytes) -> None:
        if self.silent:
            return
        link, chance = self.link, self._random.random
        for one in self.on_datagram(to_server, data):
            for _ in range(2 if chance() < link.duplication else 1):
                if chance() < link.loss:
                    continue
                part = self._damaged(one) if chance() < link.corruption else one
                late = link.delay
                if chance() < link.reordering:
                    late += link.setback * chance()
                if late:
                    self._count += 1
                    at = time.monotonic() + late
                    heapq.heappush(self._late, (at, self._count, to_server, flow, part))
                else:
                    self._send(to_server, flow, part)

    def _damaged(self, data: bytes) -> bytes:
        at = self._random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]

    def _send(self, to_server: bool, flow: _Flow, data: bytes) -> None:
        self.carried[to_server] += 1
        with contextlib.suppress(OSError):
            if to_server:
                flow.socket.send(data)
            else:
                self._listening.sendto(data, flow.client)


@contextlib.contextmanager
def lossy_proxy(server_port: int, link: Link = Link(), seed: int = 1) -> Iterator[LossyProxy]:  # noqa: B008
    """Stand before a daemon until the end of the block."""
    proxy = LossyProxy(server_port, link, seed)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()
