"""Datagram batches over real sockets on the loopback, IPv4 and IPv6."""

import contextlib
import errno
import select
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from dataplane._native import ffi, lib

BATCH = 64
DATAGRAM = 2048


def family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def udp_socket(host: str) -> socket.socket:
    one = socket.socket(family(host), socket.SOCK_DGRAM)
    one.settimeout(5)
    one.bind((host, 0))
    return one


class Received(NamedTuple):
    data: bytes
    length: int
    received_ns: int
    path: bytes


class Batches:
    """A bound socket and its batches."""

    def __init__(self, bind: str) -> None:
        self.socket = udp_socket(bind)
        self.socket.setblocking(False)
        # Room for a few full batches, whatever the system's default.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.native = ffi.gc(lib.dp_udp_new(self.socket.fileno()), lib.dp_udp_free)
        assert lib.dp_udp_prepare(self.native) == 0
        self.port: int = self.socket.getsockname()[1]

    def receive(self) -> list[Received]:
        """One batch; waits for its first datagram."""
        assert select.select([self.socket], [], [], 5)[0], "nothing came"
        n = lib.dp_udp_receive(self.native)
        assert n > 0
        return [self._datagram(i) for i in range(n)]

    def _datagram(self, index: int) -> Received:
        datagram = lib.dp_udp_datagram(self.native, index)
        return Received(
            bytes(ffi.buffer(datagram.data, min(datagram.length, DATAGRAM))),
            datagram.length,
            datagram.received_ns,
            bytes(ffi.buffer(ffi.addressof(datagram, "path"))),
        )

    def send(self, data: bytes, path: bytes) -> int:
        status: int = lib.dp_udp_queue(self.native, data, len(data), path)
        return status

    def flush(self) -> int:
        dropped: int = lib.dp_udp_flush(self.native)
        return dropped


@contextlib.contextmanager
def batches(bind: str) -> Iterator[Batches]:
    one = Batches(bind)
    with contextlib.closing(one.socket):
        yield one


def need(host: str) -> None:
    """Skip where the machine has no such address."""
    try:
        udp_socket(host).close()
    except OSError as error:
        pytest.skip(f"no {host} here: {error}")


@pytest.fixture(params=["127.0.0.1", "::1"])
def host(request: pytest.FixtureRequest) -> str:
    need(request.param)
    return str(request.param)


def connected(host: str, port: int) -> socket.socket:
    """Return a client that hears its peer's address alone."""
    client = udp_socket(host)
    client.connect((host, port))
    return client


def test_numbers() -> None:
    assert (lib.DP_UDP_BATCH, lib.DP_UDP_DATAGRAM) == (BATCH, DATAGRAM)
    assert ffi.sizeof("struct dp_path") == 44


# Receive.


def test_a_datagram_comes_with_the_kernels_time(host: str) -> None:
    with batches(host) as server, connected(host, server.port) as client:
        for i in range(5):
            before = time.time_ns()
            client.send(b"hello %d" % i)
            (datagram,) = server.receive()
            assert datagram.data == b"hello %d" % i
            assert datagram.length == 7
            assert before <= datagram.received_ns <= time.time_ns()


def test_more_datagrams_than_a_batch_holds_come_in_order(host: str) -> None:
    bodies = [b"%d" % i * (1 + i % 9) for i in range(3 * BATCH + 5)]
    with batches(host) as server, connected(host, server.port) as client:
        for body in bodies:
            client.send(body)
        got: list[Received] = []
        sizes = []
        while len(got) < len(bodies):
            batch = server.receive()
            sizes.append(len(batch))
            got += batch
        assert [datagram.data for datagram in got] == bodies
        assert max(sizes) == BATCH
        stamps = [datagram.received_ns for datagram in got]
        assert stamps == sorted(stamps)
        assert lib.dp_udp_receive(server.native) == 0


@pytest.mark.parametrize("size", [0, 1, DATAGRAM - 1, DATAGRAM])
def test_a_datagram_that_fits_is_whole(host: str, size: int) -> None:
    with batches(host) as server, connected(host, server.port) as client:
        client.send(b"x" * size)
        (datagram,) = server.receive()
        assert (datagram.length, datagram.data) == (size, b"x" * size)


@pytest.mark.parametrize("size", [DATAGRAM + 1, 3 * DATAGRAM])
def test_a_datagram_that_does_not_fit_says_so_and_spares_the_next(host: str, size: int) -> None:
    with batches(host) as server, connected(host, server.port) as client:
        for body in (b"before", b"x" * size, b"after"):
            client.send(body)
        got: list[Received] = []
        while len(got) < 3:
            got += server.receive()
        assert [datagram.length for datagram in got] == [6, DATAGRAM + 1, 5]
        assert [datagram.data for datagram in got] == [b"before", b"x" * DATAGRAM, b"after"]


def test_a_socket_that_is_none_is_an_error() -> None:
    with batches("127.0.0.1") as server:
        server.socket.close()
        assert lib.dp_udp_receive(server.native) == -errno.EBADF
        assert lib.dp_udp_prepare(server.native) == -errno.EBADF


# Paths.


def test_equal_peers_have_equal_paths(host: str) -> None:
    with (
        batches(host) as server,
        connected(host, server.port) as one,
        connected(host, server.port) as other,
    ):
        paths = []
        for client in (one, other, one, other):
            client.send(b"?")
            paths.append(server.receive()[0].path)
        assert paths[0] == paths[2] != paths[1] == paths[3]


def test_a_path_holds_both_ends(host: str) -> None:
    with batches(host) as server, connected(host, server.port) as client:
        client.send(b"?")
        server.receive()
        path = lib.dp_udp_datagram(server.native, 0).path
        address = socket.inet_pton(family(host), host).ljust(16, b"\0")
        assert path.family == family(host)
        assert socket.ntohs(path.peer_port) == client.getsockname()[1]
        assert bytes(ffi.buffer(path.peer)) == bytes(ffi.buffer(path.local)) == address


def test_the_local_address_is_part_of_the_path() -> None:
    with batches("0.0.0.0") as server, udp_socket("127.0.0.1") as client:
        paths = []
        for to in ("127.0.0.1", "127.0.0.2"):
            client.sendto(b"?", (to, server.port))
            paths.append(server.receive()[0].path)
        assert paths[0] != paths[1]


# Send.


@pytest.mark.parametrize(
    ("bind", "to"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.2"), ("::1", "::1"), ("::", "::1")],
)
def test_an_answer_leaves_from_the_address_that_was_asked(bind: str, to: str) -> None:
    need(to)
    with batches(bind) as server, connected(to, server.port) as client:
        client.send(b"ping")
        (datagram,) = server.receive()
        assert server.send(b"pong", datagram.path) == 0
        assert server.flush() == 0
        assert client.recv(100) == b"pong"
        assert client.getpeername()[:2] == (to, server.port)


def test_an_ipv4_client_of_an_ipv6_socket_is_answered_from_its_address() -> None:
    need("::1")
    with batches("::") as server, connected("127.0.0.2", server.port) as client:
        client.send(b"ping")
        assert server.send(b"pong", server.receive()[0].path) == 0
        assert server.flush() == 0
        assert client.recv(100) == b"pong"


def test_a_path_without_a_local_address_lets_the_kernel_choose(host: str) -> None:
    with batches(host) as server, udp_socket(host) as client:
        path = ffi.new("struct dp_path *")
        path.family = family(host)
        path.peer_port = socket.htons(client.getsockname()[1])
        address = socket.inet_pton(family(host), host)
        path.peer[0 : len(address)] = list(address)
        assert server.send(b"hello", bytes(ffi.buffer(path))) == 0
        assert server.flush() == 0
        assert client.recvfrom(100)[1][:2] == (host, server.port)


def asked(server: Batches, client: socket.socket) -> bytes:
    """Return the path to a client."""
    client.send(b"?")
    return server.receive()[0].path


def test_a_full_batch_goes_out_by_itself(host: str) -> None:
    with batches(host) as server, connected(host, server.port) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        path = asked(server, client)
        bodies = [b"%d" % i for i in range(2 * BATCH + 3)]
        for body in bodies:
            assert server.send(body, path) == 0
        assert [client.recv(100) for _ in range(2 * BATCH)] == bodies[: 2 * BATCH]
        assert server.flush() == 0
        assert [client.recv(100) for _ in range(3)] == bodies[2 * BATCH :]
        assert server.flush() == 0


def test_a_datagram_that_is_too_long_is_not_queued(host: str) -> None:
    with batches(host) as server, connected(host, server.port) as client:
        path = asked(server, client)
        assert server.send(bytes(DATAGRAM + 1), path) == -errno.EMSGSIZE
        assert server.send(bytes(DATAGRAM), path) == 0
        assert server.flush() == 0
        assert client.recv(2 * DATAGRAM) == bytes(DATAGRAM)


def nowhere(path: bytes) -> bytes:
    """Return the path with a port that the kernel refuses."""
    lost: Any = ffi.new("struct dp_path *")
    ffi.memmove(lost, path, len(path))
    lost.peer_port = 0
    return bytes(ffi.buffer(lost))


def test_what_the_kernel_refuses_is_counted_and_spares_the_others(host: str) -> None:
    with batches(host) as server, connected(host, server.port) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        path = asked(server, client)
        for i in range(BATCH + 6):
            assert server.send(b"%d" % i, nowhere(path) if i % 10 == 5 else path) == 0
        assert server.flush() == 7
        expected = [b"%d" % i for i in range(BATCH + 6) if i % 10 != 5]
        assert [client.recv(100) for _ in expected] == expected
        assert server.flush() == 0
