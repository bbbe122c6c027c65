"""The admin port under clients that are slow, greedy or many: nobody else waits for them."""

import asyncio
import contextlib
import hashlib
import os
import socket

import pytest
from admin_site import ALIVE, HOUR, OnePage, Site, serving
from daemon_process import run, until

from dataplane.admin import AdminServer, Client, Phase

REQUEST = b"GET /page HTTP/1.1\r\nhost: a\r\n\r\n"

# Who is slow, and who is many.


def test_a_slow_request_is_408_however_it_trickles() -> None:
    async def main() -> None:
        async with serving(request_within=0.2, idle=HOUR) as site:
            peer = await site.connect()
            sent = 0

            async def trickle() -> None:
                nonlocal sent
                while True:
                    peer.send(b"x: y\r\n")
                    sent += 1
                    await asyncio.sleep(0.01)

            peer.send(ALIVE[:-2])
            task = asyncio.create_task(trickle())
            answer = await peer.answer()
            task.cancel()
            assert answer.status == 408
            assert "0.2 s" in answer.problem["detail"]
            assert sent > 2

    run(main())


def test_a_client_that_asks_nothing_is_closed() -> None:
    async def main() -> None:
        async with serving(request_within=0.1, idle=HOUR) as site:
            assert await (await site.connect()).closed()

    run(main())


def test_an_idle_client_is_closed_later() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with serving(request_within=0.1, idle=0.4) as site:
            peer = await site.connect()
            await peer.ask("/livez")
            start = loop.time()
            assert await peer.closed()
            assert loop.time() - start >= 0.39

    run(main())


def test_a_client_that_takes_no_answer_is_cut_off_and_holds_nobody_up() -> None:
    async def main() -> None:
        async with serving(OnePage(lambda: bytes(64 << 20)), request_within=0.3) as site:
            greedy = await site.connect(receive_buffer=4096)
            greedy.writer.transport.pause_reading()  # type: ignore[attr-defined]
            greedy.send(REQUEST)
            other = await site.connect()
            assert (await other.ask("/livez")).status == 200
            await until("the greedy one is cut off", lambda: len(site.server.clients) == 1)
            assert (await other.ask("/livez")).status == 200

    run(main())


def test_a_long_page_goes_out_in_pieces_and_whole() -> None:
    body = os.urandom(1 << 20) * 32

    async def main() -> None:
        async with serving(OnePage(lambda: body)) as site:
            reading, asking = await site.connect(), await site.connect()
            reading.send(REQUEST + ALIVE)
            whole = asyncio.create_task(reading.answer())
            meanwhile = 0
            while not whole.done():
                assert (await asking.ask("/livez")).status == 200
                meanwhile += 1
            assert meanwhile > 10
            answer = await whole
            assert hashlib.sha256(answer.body).digest() == hashlib.sha256(body).digest()
            assert (await reading.answer()).body == b"ok\n"

    run(main())


class Recorder(asyncio.Transport):
    """A transport that takes everything and notes how much."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += len(data)

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


def test_a_piece_is_sent_a_turn() -> None:
    """So that packets get their turns while a long page goes out."""

    async def main() -> None:
        body = bytes(1 << 20)
        transport = Recorder()
        client = Client(AdminServer(OnePage(lambda: body)))
        client.connection_made(transport)
        client.data_received(REQUEST)
        assert transport.written == 0  # It waits for its turn.
        await asyncio.sleep(0)
        turns, written = 0, 0
        while transport.written > written:
            assert transport.written - written <= (128 << 10) + 400
            turns, written = turns + 1, transport.written
            await asyncio.sleep(0)
        assert (turns, written > len(body)) == (8, True)

    run(main())


def test_many_clients_share_the_turns() -> None:
    """Sixty that ask at once must not keep packets waiting for sixty pages."""

    async def main() -> None:
        server = AdminServer(OnePage(lambda: b"page"))
        transports = [Recorder() for _ in range(60)]
        for transport in transports:
            client = Client(server)
            client.connection_made(transport)
            client.data_received(REQUEST)
        for turn in range(1, 61):
            await asyncio.sleep(0)
            assert sum(transport.written > 0 for transport in transports) == turn

    run(main())


@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_a_client_sends_does_not_pile_up(one_by_one: bool) -> None:
    """Requests without end, and no answer taken: it is not read from, so its sending blocks."""
    answered = asyncio.Event()

    def page() -> bytes:
        answered.set()
        return bytes(60_000)

    async def fill(sock: socket.socket, site: Site) -> None:
        """Send a request only when the one before was answered, until an answer gets stuck."""
        loop = asyncio.get_running_loop()
        (client,) = site.server.clients
        for _ in range(10_000):
            answered.clear()
            await loop.sock_sendall(sock, REQUEST)
            await answered.wait()
            if client.phase is Phase.ANSWER:
                return
        raise AssertionError("every answer found room")

    async def flood(sock: socket.socket) -> int:
        """Send until it blocks for half a second; how many bytes went out."""
        loop = asyncio.get_running_loop()
        requests = memoryview(REQUEST * 100_000)
        sent = 0
        writable = asyncio.Event()
        loop.add_writer(sock, writable.set)
        with contextlib.suppress(TimeoutError):
            while sent < 256 << 20:
                writable.clear()
                await asyncio.wait_for(writable.wait(), 0.5)
                sent += sock.send(requests[sent % len(REQUEST) :])
        loop.remove_writer(sock)
        return sent

    async def main() -> None:
        async with serving(OnePage(page), request_within=HOUR) as site:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", site.port))
                await until("it is there", lambda: site.server.clients)
                if one_by_one:
                    await fill(sock, site)
                assert 0 < await flood(sock) < 64 << 20

    run(main())


def test_a_new_client_takes_the_place_of_the_longest_idle() -> None:
    async def main() -> None:
        async with serving(max_clients=3, idle=HOUR) as site:
            peers = [await site.connect() for _ in range(3)]
            for peer in (*peers, peers[0]):
                assert (await peer.ask("/livez")).status == 200
            new = await site.connect()
            assert (await new.ask("/livez")).status == 200
            assert await peers[1].closed()
            for peer in (peers[0], peers[2], new):
                assert (await peer.ask("/livez")).status == 200

    run(main())


def test_an_idle_client_goes_before_a_busy_one() -> None:
    async def main() -> None:
        async with serving(max_clients=2, idle=HOUR) as site:
            busy = await site.connect()
            busy.send(ALIVE[:-1])
            await until("it is there", lambda: len(site.server.clients) == 1)
            idle = await site.connect()
            await idle.ask("/livez")
            assert (await (await site.connect()).ask("/livez")).status == 200
            assert await idle.closed()
            busy.send(ALIVE[-1:])
            assert (await busy.answer()).status == 200

    run(main())


def test_a_probe_comes_through_a_crowd_that_never_finishes() -> None:
    async def main() -> None:
        async with serving(max_clients=8, request_within=HOUR) as site:
            crowd = [await site.connect() for _ in range(40)]
            for peer in crowd:
                peer.send(b"GET /")
            assert (await (await site.connect()).ask("/livez")).status == 200
            await until("the cap holds", lambda: len(site.server.clients) <= 8)

    run(main())
