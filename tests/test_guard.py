"""Strangers, crowds and garbage: what they cost, and that others are served meanwhile."""

import os
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionIdRetired
from aioquic.quic.packet import QuicErrorCode
from conftest import StartDaemon
from daemon_process import DaemonProcess, run, until
from memory_listener import Client, Network, network
from pair import request_bytes

from dataplane import quic as private
from dataplane.client import connect
from dataplane.errors import DataplaneError, UnavailableError
from dataplane.fronts.prompt1 import Prompt1

Scene = Callable[[Network], Awaitable[None]]
HALF = request_bytes([1, 2], declared=3)
REFUSED = QuicErrorCode.CONNECTION_REFUSED


@pytest.fixture(params=[False, True], ids=["aioquic", "pump"])
def play(state_dir: Path, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Play a scene on a network of its own, on each engine; its slots are free at the end."""

    def start(scene: Scene, **options: Any) -> None:
        async def main() -> None:
            with network(state_dir, pump=request.param, **options) as made:
                await scene(made)

        run(main())

    return start


async def check_served(client: Client) -> None:
    """A request on this connection gets a slot."""
    stream = client.send(HALF, False)
    await client.until("it has a slot", lambda: client.server.writing == 1)
    client.quic.reset_stream(stream, 0)
    await client.until("it has none", lambda: client.server.writing == 0)


# ---------------------------------------------------------------- crowds


def test_one_connection_too_many_is_refused_at_once(play: Callable[..., None]) -> None:
    async def scene(net: Network) -> None:
        first = [await net.client().connect() for _ in range(3)]
        kept = set(net.listener.connections)
        late = net.client()
        late.turn()
        late.turn()  # One there and one back.
        await late.until("its closing period is over", lambda: late.ended)
        assert late.ended is not None
        assert (late.ended.error_code, late.ended.reason_phrase) == (
            REFUSED,
            "too many connections",
        )
        assert net.listener.connections == kept
        for client in first:
            await check_served(client)
        first[0].quic.close()
        await first[0].until("it has left", lambda: len(net.listener.connections) < 3)
        await check_served(await net.client().connect())

    play(scene, max_connections=3)


def test_half_open_connections_end_in_time(play: Callable[..., None]) -> None:
    """A flood of first packets whose senders never answer."""

    async def scene(net: Network) -> None:
        good = await net.client().connect()
        for _ in range(200):
            stranger = net.client()
            net.deliver(stranger.datagrams(), stranger.path)
        assert len(net.listener.connections) == 201
        await check_served(good)
        await good.until("they are gone", lambda: len(net.listener.connections) == 1)
        assert set(net.listener._by_cid.values()) == {good.server}
        assert not net.listener._half_open
        assert good.ended is None
        await check_served(good)

    start = time.monotonic()
    play(scene, handshake_timeout=1.0)
    assert time.monotonic() - start > 1.0


def test_a_late_handshake_is_told(play: Callable[..., None]) -> None:
    async def scene(net: Network) -> None:
        slow = net.client()
        net.deliver(slow.datagrams(), slow.path)
        await net.until_empty()
        await slow.until("it is told", lambda: slow.ended)
        assert slow.ended is not None
        assert (slow.ended.error_code, slow.ended.reason_phrase) == (
            REFUSED,
            "the handshake took too long",
        )

    play(scene, handshake_timeout=0.3)


def test_a_client_that_vanished_loses_its_slot(play: Callable[..., None]) -> None:
    async def scene(net: Network) -> None:
        client = await net.client().connect()
        client.send(HALF, False)
        assert net.held() == ["WRITING"]
        start = time.monotonic()
        await until("its slot is free", lambda: not net.held())  # It says nothing more.
        assert 0.4 < time.monotonic() - start < 5.0
        assert net.listener.connections == set()

    play(scene, idle_timeout=0.5)


class CountingDict(dict[bytes, Any]):
    """Counts the entries that are looked at, one by one or in a sweep."""

    looks = 0

    def __getitem__(self, key: bytes) -> Any:
        self.looks += 1
        return super().__getitem__(key)

    def get(self, key: bytes, default: Any = None) -> Any:
        self.looks += 1
        return super().get(key, default)

    def pop(self, key: bytes, *default: Any) -> Any:
        self.looks += 1
        return super().pop(key, *default)

    def __iter__(self) -> Iterator[bytes]:
        self.looks += len(self)
        return super().__iter__()

    def items(self) -> Any:
        self.looks += len(self)
        return super().items()

    def values(self) -> Any:
        self.looks += len(self)
        return super().values()


def closing(state_dir: Path, count: int) -> tuple[int, float]:
    """Close so many connections at once; return the looks at the routing table and the time."""
    result = (0, 0.0)

    async def main() -> None:
        nonlocal result
        with network(state_dir) as net:
            routes = net.listener._by_cid = CountingDict()
            stranger = net.client()
            (initial, *_) = stranger.datagrams()
            for _ in range(count):
                # Each has a connection ID of its own, and none can be decrypted.
                data = initial[:6] + os.urandom(8) + initial[14:]
                net.listener.deliver(net.wire, data, b"x", time.monotonic(), 0)
            assert len(net.listener.connections) == count
            assert len(routes) == 2 * count
            routes.looks = 0
            start = time.process_time()
            net.listener.close_all(0, "")
            await net.until_empty()
            result = routes.looks, time.process_time() - start

    run(main())
    return result


def test_closing_many_costs_each_what_it_costs_one(state_dir: Path) -> None:
    few, many = closing(state_dir, 100), closing(state_dir, 800)
    assert few[0] <= 4 * 100
    assert many[0] <= 4 * 800
    assert many[1] < 8 * 4 * max(few[1], 0.001), "eight times as many took far longer than that"


# ---------------------------------------------------------------- mistakes of our own


class Faulty(Prompt1):
    """Fails at a connection's second stream, after its claim."""

    def stream_data(
        self, connection: Any, stream_id: int, data: bytes, fin: bool, at_ns: int
    ) -> None:
        super().stream_data(connection, stream_id, data, fin, at_ns)
        if stream_id == 4:
            raise RuntimeError("a mistake in the front")


def test_an_exception_ends_one_connection_only(play: Callable[..., None]) -> None:
    async def scene(net: Network) -> None:
        bad, good = await net.client().connect(), await net.client().connect()
        good.send(HALF, False)
        bad.send(HALF, False)
        assert net.held() == ["WRITING", "WRITING"]
        bad.send(HALF, False)  # Its second stream is number 4.
        assert net.held() == ["WRITING"]
        await bad.until("it is told", lambda: bad.ended)
        assert bad.ended is not None
        assert bad.ended.error_code == QuicErrorCode.INTERNAL_ERROR
        assert len(net.listener.connections) == 1
        good.quic.send_stream_data(0, b"\3\0\0\0", True)
        await good.until("its request is whole", lambda: net.held() == ["READY"])
        good.quic.close()
        await good.until("it has left", lambda: not net.listener.connections)

    play(scene, front=Faulty)


def test_a_connection_id_that_nobody_knows_harms_nobody(play: Callable[..., None]) -> None:
    async def scene(net: Network) -> None:
        one, other = await net.client().connect(), await net.client().connect()
        routes = dict(net.listener._by_cid)
        theirs = next(iter(other.server.cids))
        for cid in (b"", b"unknown!", b"x" * 20, theirs):
            net.listener.cid_retired(one.server, cid)
        assert net.listener._by_cid == routes
        one.server.quic._events.append(ConnectionIdRetired(connection_id=b"unknown!"))
        await check_served(one)
        await check_served(other)

    play(scene)


def test_routes_end_with_their_connection(play: Callable[..., None]) -> None:
    async def scene(net: Network) -> None:
        client = await net.client().connect()
        server = client.server
        client.quic.change_connection_id()
        await check_served(client)
        assert all(net.listener._by_cid[cid] is server for cid in server.cids)
        assert set(net.listener._by_cid) == server.cids
        client.quic.close()
        client.turn()
        await net.until_empty()

    play(scene)


# ---------------------------------------------------------------- garbage


def long_header(version: int, size: int, cid: bytes = b"12345678", kind: int = 0xC0) -> bytes:
    """A packet that looks like a client's first one, with noise for contents."""
    head = bytes([kind]) + version.to_bytes(4, "big") + bytes([len(cid)]) + cid + b"\x04abcd\x00"
    rest = size - len(head) - 2
    return head + (0x4000 | rest).to_bytes(2, "big") + os.urandom(rest)


def garbage(seed: int) -> Iterator[bytes]:
    """Datagrams of every sort that is no QUIC, or nearly is."""
    choose = random.Random(seed)
    for size in range(60):
        yield choose.randbytes(size)
    for _ in range(300):
        data = bytearray(choose.randbytes(choose.randint(1, 1500)))
        data[0] = choose.choice([0, 0x40, 0x7F, 0x80, 0xC0, 0xD0, 0xE0, 0xF0, 0xFF])
        if choose.random() < 0.7 and len(data) > 6:
            data[1:5] = choose.choice([b"\0\0\0\1", b"\0\0\0\0", b"\x6b\x33\x43\xcf"])
            data[5] = choose.choice([0, 8, 20, 21, 255])
        yield bytes(data)


def test_garbage_changes_nothing(play: Callable[..., None]) -> None:
    async def scene(net: Network) -> None:
        client = await net.client().connect()
        client.send(HALF, False)
        own = client.quic._peer_cid.cid
        for data in garbage(1):
            net.deliver([data] if len(data) > 8 else [], b"stranger")
            net.deliver([b"\x40" + own + data], b"stranger")  # to a connection that is there
        assert set(net.listener.connections) == {client.server}
        assert net.held() == ["WRITING"]
        await check_served_beside(client)

    play(scene)


async def check_served_beside(client: Client) -> None:
    """The connection is alive: a broken request on it is answered."""
    stream = client.send(b"GET / HTTP/1.1\r\n\r\n" + bytes(40), True)
    answer = await client.answer(stream)
    assert answer[:4] == b"DPV1"


def test_first_packets_that_cannot_be_read_leave_no_connection(play: Callable[..., None]) -> None:
    async def scene(net: Network) -> None:
        for _ in range(50):
            net.deliver([long_header(1, 1200, os.urandom(8))], b"stranger")
            assert net.listener.connections == set()
            assert net.listener._by_cid == {}
        assert net.wire.take(b"stranger") == []

    play(scene)


def test_a_small_datagram_is_no_beginning(play: Callable[..., None]) -> None:
    async def scene(net: Network) -> None:
        stranger = net.client()
        whole, *_ = stranger.datagrams()
        net.deliver([whole[:1199]], b"stranger")
        assert net.listener.connections == set()
        net.deliver([whole], b"stranger")
        assert len(net.listener.connections) == 1

    play(scene)


def test_a_first_packets_connection_id_has_eight_bytes(play: Callable[..., None]) -> None:
    """RFC 9000 section 7.2: shorter ones can be guessed, and would meet each other's."""

    async def scene(net: Network) -> None:
        client = net.client()
        client.quic._peer_cid.cid = client.quic.original_destination_connection_id[:4]
        assert client.quic._peer_cid.cid is not None
        initial = client.datagrams()
        net.deliver(initial, client.path)
        assert net.listener.connections == set()

    play(scene)


@pytest.mark.parametrize("kind", [0xC0, 0xD0, 0xE0])
def test_an_unknown_version_is_answered_only_if_it_could_be_a_beginning(
    play: Callable[..., None], kind: int
) -> None:
    async def scene(net: Network) -> None:
        for size in (60, 1199):
            net.deliver([long_header(0x1A2A3A4A, size, kind=kind)], b"stranger")
            assert net.wire.take(b"stranger") == []
        net.deliver([long_header(0x1A2A3A4A, 1200, kind=kind)], b"stranger")
        (answer,) = net.wire.take(b"stranger")
        assert answer[0] & 0x80
        assert answer[1:5] == bytes(4)  # version negotiation
        assert answer[5:23] == b"\x04abcd" + b"\x0812345678" + b"\0\0\0\1"
        assert len(answer) < 100
        net.deliver([answer, long_header(0, 1200)], b"stranger")
        assert net.wire.take(b"stranger") == []  # No answer to a negotiation.
        assert net.listener.connections == set()

    play(scene)


def test_a_real_daemon_survives_garbage(bare_daemon: DaemonProcess) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.connect(("127.0.0.1", bare_daemon.port))
        stranger.settimeout(5)
        for data in [*garbage(2), bytes(1201), os.urandom(2048), os.urandom(9000)]:
            stranger.send(data)
        stranger.send(long_header(0x1A2A3A4A, 1200, b"the last"))
        while b"the last" not in stranger.recv(2048):
            pass
    assert bare_daemon.health()["in_flight"] == 0
    assert "Traceback" not in bare_daemon.stderr


# ---------------------------------------------------------------- a real daemon


def test_a_full_daemon_says_so_quickly(daemon: StartDaemon) -> None:
    process = daemon("--runtime=echo", "--slots=2", "--max-connections=2")

    async def main() -> None:
        async with (
            connect(process.address, process.ca) as first,
            connect(process.address, process.ca) as second,
        ):
            start = time.monotonic()
            with pytest.raises(UnavailableError, match="too many connections"):
                async with connect(process.address, process.ca):
                    pass
            assert time.monotonic() - start < 2.0
            for client in (first, second):
                assert (await (await client.submit([5])).result()).token_ids == [5]

    run(main())


# ---------------------------------------------------------------- aioquic's private names


def test_this_aioquic_has_what_is_leant_on() -> None:
    private.check()


@pytest.mark.parametrize("name", ["_events", "_close_event", "_streams"])
def test_a_private_name_that_is_gone_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(QuicConnection):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            delattr(self, name)

    monkeypatch.setattr(private, "QuicConnection", Changed)
    with pytest.raises(DataplaneError, match=f"lacks {name}: install 1.7.2"):
        private.check()
