"""Connections that come and go leave nothing; a stop does not cut off what is being read."""

import asyncio
import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import StartDaemon
from daemon_process import run
from memory_listener import network

from dataplane.client import connect
from dataplane.connection import Connection
from dataplane.prompt1 import Request, encode_request

GOOD = encode_request(Request(1)) + b"\1\0\0\0"


def test_a_connection_that_is_over_is_freed_without_the_collector(tmp_path: Path) -> None:
    """A full collection is rare; until it came, each connection would keep its 50 KB."""

    async def scene() -> None:
        with network(tmp_path) as net:
            ends: list[weakref.ref[object]] = []
            for _ in range(5):
                client = await net.client().connect()
                await asyncio.sleep(0)
                heavy = client.server.quic
                ends += [weakref.ref(heavy.tls), weakref.ref(heavy._loss)]
                del heavy
                half = client.send(GOOD[:20], fin=False)
                assert half == 0
                client.quic.close()
                client.turn()
            await net.until_empty()
            assert [end() for end in ends] == [None] * 10
            assert net.held() == []

    gc.collect()
    gc.disable()
    try:
        run(scene())
    finally:
        gc.enable()


def test_whoever_still_knows_a_connection_that_is_over_may_call_it(tmp_path: Path) -> None:
    async def scene() -> None:
        with network(tmp_path) as net:
            client = await net.client().connect()
            server: Connection = client.server
            client.quic.close()
            client.turn()
            await net.until_empty()
            calls: list[Callable[[], object]] = [
                lambda: server.send(0, b"late", True),
                lambda: server.reset(0, 1),
                lambda: server.stop(0, 1),
                lambda: server.close(0, "late"),
                lambda: server.abandon(1, "late"),
                server.overfull,
                lambda: server.has_unread(0.0),
                net.listener.finish_pass,
            ]
            for call in calls:
                call()
            assert not net.listener.connections

    run(scene())


@pytest.mark.parametrize("tokens", [2000, 20_000])
def test_a_stop_waits_for_what_is_still_being_read(daemon: StartDaemon, tokens: int) -> None:
    """The slot is free once the answer's tail is copied; the answer is over when it is read."""
    process = daemon("--runtime=echo", "--slots=2", "--context=32768", "--max-output=32768")

    async def session() -> None:
        async with connect(process.address, process.ca) as client:
            answer = await client.submit(list(range(tokens)))
            await answer.opened()
            process.send(15)
            result = await answer.result()
            assert result.token_ids == list(range(tokens))

    run(session())
    assert process.wait_for_exit() == 0
