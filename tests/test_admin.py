"""The admin port over TCP: requests, their answers, and what is no request."""

import asyncio
import http.client
import logging
import socket
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
from admin_site import ALIVE, OnePage, Peer, serving
from daemon_process import run, until

from dataplane.admin import AdminServer
from dataplane.errors import UsageError
from dataplane.pages import Pages, Resident
from dataplane.stats import Stats

# Requests and their answers.


def test_many_requests_come_over_one_connection() -> None:
    async def ask(port: int) -> None:
        def requests() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            for method, target, status in [
                ("GET", "/livez", 200), ("HEAD", "/health", 200), ("GET", "/nothing", 404),
                ("POST", "/health", 405), ("GET", "/health", 200), ("GET", "/metrics", 200),
            ]:  # fmt: skip
                connection.request(method, target)
                used.add(connection.sock.getsockname())
                with connection.getresponse() as response:
                    assert response.status == status
                    response.read()
            connection.close()

        used: set[Any] = set()
        await asyncio.to_thread(requests)
        assert len(used) == 1

    async def main() -> None:
        async with serving() as site:
            await ask(site.port)

    run(main())


def test_an_answer_carries_what_is_expected_of_it() -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            answer = await peer.ask("/livez")
            assert (answer.status, answer.body) == (200, b"ok\n")
            headers = answer.headers
            assert headers["content-type"] == "text/plain; charset=utf-8"
            assert headers["cache-control"] == "no-store"
            assert "connection" not in headers
            assert parsedate_to_datetime(headers["date"]).year >= 2024
            assert headers["x-request-id"] == headers["request-id"]
            assert len(bytes.fromhex(headers["x-request-id"])) == 8
            again = await peer.ask("/livez")
            assert again.headers["x-request-id"] != headers["x-request-id"]

    run(main())


@pytest.mark.parametrize("mine", ["a", "trace-42/~", "x" * 64])
def test_a_clients_request_id_comes_back(mine: str) -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            answer = await peer.ask("/nothing", fields=f"X-Request-Id: {mine}\r\n")
            assert answer.headers["request-id"] == answer.problem["request_id"] == mine

    run(main())


@pytest.mark.parametrize("theirs", ["", "x" * 65, "two words", "gr\xf6\xdfe"])
def test_a_request_id_that_is_none_is_replaced(theirs: str) -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            peer.send(b"GET /livez HTTP/1.1\r\nhost: a\r\n")
            peer.send(f"x-request-id: {theirs}\r\n\r\n".encode("latin-1"))
            given = (await peer.answer()).headers["x-request-id"]
            assert len(bytes.fromhex(given)) == 8

    run(main())


def test_head_is_get_without_the_body() -> None:
    async def main() -> None:
        async with serving(OnePage(lambda: b"12345")) as site:
            peer = await site.connect()
            for target in ("/page", "/nothing"):
                whole = await peer.ask(target)
                head = await peer.ask(target, method="HEAD")
                assert (head.status, head.body) == (whole.status, b"")
                assert head.headers.keys() == whole.headers.keys()
                assert head.headers["content-length"] == str(len(whole.body))

    run(main())


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get"])
def test_another_method_is_405_and_the_connection_stays(method: str) -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            answer = await peer.ask("/health", method=method)
            assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
            assert "read-only" in answer.problem["detail"]
            assert (await peer.ask("/nothing", method=method)).problem["status"] == 404
            assert (await peer.ask("/livez")).status == 200

    run(main())


@pytest.mark.parametrize("step", [1, 2, 7, 100])
def test_requests_may_come_in_pieces(step: int) -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            data = ALIVE + b"HEAD /livez HTTP/1.1\r\nhost: a\r\n\r\n" + ALIVE
            for start in range(0, len(data), step):
                peer.send(data[start : start + step])
                await peer.writer.drain()
                await asyncio.sleep(0)
            assert (await peer.answer()).body == b"ok\n"
            assert (await peer.answer(head=True)).status == 200
            assert (await peer.answer()).body == b"ok\n"

    run(main())


def test_pipelined_requests_are_answered_in_order() -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            ids = [f"request-{number}" for number in range(500)]
            request = "GET /livez HTTP/1.1\r\nhost: a\r\nx-request-id: {}\r\n\r\n"
            peer.send("".join(request.format(each) for each in ids).encode())
            answers = [await peer.answer() for _ in ids]
            assert [answer.headers["request-id"] for answer in answers] == ids

    run(main())


def test_one_request_is_answered_a_turn() -> None:
    """So that packets get their turns, however much somebody sends here."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        turn = 0
        turns: list[int] = []

        def tick() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(tick)

        def page() -> bytes:
            turns.append(turn)
            return b""

        async with serving(OnePage(page)) as site:
            peer = await site.connect()
            tick()
            peer.send(b"GET /page HTTP/1.1\r\nhost: a\r\n\r\n" * 100)
            for _ in range(100):
                await peer.answer()
        assert len(set(turns)) == len(turns) == 100

    run(main())


def test_http_1_0_is_answered_and_closed() -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            peer.send(b"GET /livez HTTP/1.0\r\n\r\n")
            answer = await peer.answer()
            assert (answer.body, answer.headers["connection"]) == (b"ok\n", "close")
            assert await peer.closed()

    run(main())


def test_connection_close_is_obeyed() -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            answer = await peer.ask("/livez", fields="connection: close\r\n")
            assert answer.headers["connection"] == "close"
            assert await peer.closed()

    run(main())


def test_a_half_closed_client_gets_all_its_answers() -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            peer.send(ALIVE * 20)
            peer.writer.write_eof()
            for _ in range(20):
                assert (await peer.answer()).status == 200
            assert await peer.closed()

    run(main())


def test_a_client_that_says_nothing_may_leave() -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            peer.writer.write_eof()
            assert await peer.closed()

    run(main())


# What is none.

MALFORMED = {
    "no version": b"GET /livez\r\n\r\n",
    "no host": b"GET /livez HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /livez HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "a space before the colon": b"GET /livez HTTP/1.1\r\nhost : a\r\n\r\n",
    "a NUL": b"GET /livez HTTP/1.1\r\nhost: a\0\r\n\r\n",
    "a space in the target": b"GET /li vez HTTP/1.1\r\nhost: a\r\n\r\n",
    "a negative length": b"GET /livez HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
    "two lengths": b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
    "an odd encoding": b"GET / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n",
    "a bad chunk": b"GET / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nx\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": bytes.fromhex("16030100f8010000f40303") + bytes(200),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed_is_400_and_closed(data: bytes) -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            peer.send(ALIVE + data + ALIVE)
            assert (await peer.answer()).status == 200
            answer = await peer.answer()
            assert (answer.status, answer.headers["connection"]) == (400, "close")
            assert "malformed" in answer.problem["detail"]
            assert await peer.closed()

    run(main())


def test_a_request_that_ends_in_its_middle_is_400() -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            peer.send(ALIVE[:-1])
            peer.writer.write_eof()
            assert (await peer.answer()).status == 400
            assert await peer.closed()

    run(main())


@pytest.mark.parametrize(
    "data",
    [
        b"GET /livez HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 16384 + b"\r\n\r\n",
        b"GET /" + b"y" * 16384 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 10_000,
        b"y" * 100_000,
    ],
    ids=["field", "target", "fields", "line"],
)
@pytest.mark.parametrize("step", [1000, 1 << 20])
def test_a_header_over_16_kib_is_431_and_closed(data: bytes, step: int) -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            for start in range(0, len(data), step):
                peer.send(data[start : start + step])
                await asyncio.sleep(0)
            answer = await peer.answer()
            assert answer.status == 431
            assert "16384 bytes" in answer.problem["detail"]
            assert await peer.closed()

    run(main())


def test_a_header_of_15_kib_is_taken() -> None:
    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            assert (await peer.ask("/livez", fields="x: " + "y" * 15_360 + "\r\n")).status == 200

    run(main())


@pytest.mark.parametrize(("method", "status"), [("POST", 405), ("GET", 200)])
@pytest.mark.parametrize(
    "framing", ["content-length: 1000000", "transfer-encoding: chunked"], ids=["length", "chunked"]
)
def test_a_body_is_not_read(method: str, status: int, framing: str) -> None:
    """The answer comes while the body is still being sent, and is not lost by its coming."""

    async def main() -> None:
        async with serving() as site:
            peer = await site.connect()
            answer = await peer.ask("/health", method=method, fields=f"{framing}\r\n")
            assert (answer.status, answer.headers["connection"]) == (status, "close")
            peer.send(b"x" * 1_000_000)
            assert await peer.closed()

    run(main())


def test_a_page_that_fails_costs_its_own_answer(caplog: pytest.LogCaptureFixture) -> None:
    def status() -> str:
        raise RuntimeError("broken")

    async def main() -> None:
        async with serving(Pages(Stats(), {"default": Resident()}, status)) as site:
            peer = await site.connect()
            assert (await peer.ask("/health")).problem["status"] == 500
            assert (await peer.ask("/livez")).status == 200

    with caplog.at_level(logging.ERROR):
        run(main())
    assert "RuntimeError: broken" in caplog.text


# Start and stop.


def test_every_address_of_a_host_is_served_on_one_port() -> None:
    async def main() -> None:
        server = AdminServer(Pages(Stats(), {"default": Resident()}, lambda: "ok"))
        _, port = await server.start("localhost", 0)
        hosts = {str(address[4][0]) for address in socket.getaddrinfo("localhost", port)}
        for host in hosts:
            reader, writer = await asyncio.open_connection(host, port)
            assert (await Peer(reader, writer).ask("/livez")).status == 200
            writer.close()
        await server.stop()

    run(main())


def test_stop_frees_the_port_and_ends_what_is_open() -> None:
    async def main() -> None:
        async with serving() as site:
            idle, asking = await site.connect(), await site.connect()
            await idle.ask("/livez")
            asking.send(ALIVE[:-1])
            await until("both are there", lambda: len(site.server.clients) == 2)
            await site.server.stop()
            assert await idle.closed()
            assert await asking.closed()
            again = AdminServer(site.server.pages)
            assert await again.start("127.0.0.1", site.port) == ("127.0.0.1", site.port)
            await again.stop()

    run(main())


def test_a_port_that_is_taken_is_said() -> None:
    async def main() -> None:
        async with serving() as site:
            with pytest.raises(UsageError, match="--admin"):
                await AdminServer(site.server.pages).start("127.0.0.1", site.port)

    run(main())


def test_ages_are_followed_while_nobody_asks() -> None:
    async def main() -> None:
        looks = 0

        class Followed(Pages):
            def look(self) -> None:
                nonlocal looks
                looks += 1

        pages = Followed(Stats(), {"default": Resident()}, lambda: "ok")
        async with serving(pages, request_within=0.04):
            await until("it looked again", lambda: looks >= 3)

    run(main())
