"""A client that does not read its answers costs its own connection only, and only so much.

The client here grants no credit beyond its first window, while it acknowledges and pings as it
should: to the transport it is in the best of health.
"""

import asyncio
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import HandshakeCompleted, QuicEvent, StreamReset
from conftest import StartDaemon
from daemon_process import WITHIN_S, DaemonProcess, run

from dataplane.client import connect
from dataplane.errors import ResetCode
from dataplane.prompt1 import ALPN, Request, encode_request

WINDOW = 2048
PING_S = 0.2


class Miser:
    """A QUIC client that lets `WINDOW` bytes of each answer come and no more."""

    def __init__(self, port: int) -> None:
        configuration = QuicConfiguration(
            alpn_protocols=[ALPN], verify_mode=ssl.CERT_NONE, max_stream_data=WINDOW
        )
        self.quic = QuicConnection(configuration=configuration)
        for name in ("_write_stream_limits", "_write_connection_limits"):
            setattr(self.quic, name, MethodType(lambda *ignored, **also: None, self.quic))
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.connect(("127.0.0.1", port))
        self.address = ("127.0.0.1", port)
        self.quic.connect(self.address, time.monotonic())

    def events(self) -> Iterator[QuicEvent]:
        """Run the connection, with pings, until the caller has seen enough."""
        deadline = time.monotonic() + WITHIN_S
        pinged = 0.0
        while (now := time.monotonic()) < deadline:
            if now - pinged > PING_S:
                self.quic.send_ping(0)
                pinged = now
            for data, _ in self.quic.datagrams_to_send(now):
                self.socket.send(data)
            self.socket.settimeout(0.02)
            try:
                data = self.socket.recv(2048)
            except TimeoutError:
                if (timer := self.quic.get_timer()) and timer <= time.monotonic():
                    self.quic.handle_timer(time.monotonic())
                continue
            self.quic.receive_datagram(data, self.address, time.monotonic())
            while (event := self.quic.next_event()) is not None:
                yield event
        raise AssertionError("what was waited for did not come")

    def ask(self, tokens: int) -> int:
        """Send a whole request; its stream."""
        stream_id = self.quic.get_next_available_stream_id()
        body = struct.pack(f"<{tokens}I", *([1] * tokens))
        self.quic.send_stream_data(stream_id, encode_request(Request(tokens)) + body, True)
        return stream_id


@contextmanager
def miser(daemon: DaemonProcess) -> Iterator[Miser]:
    client = Miser(daemon.port)
    try:
        next(event for event in client.events() if isinstance(event, HandshakeCompleted))
        yield client
    finally:
        client.socket.close()


def check_that_others_are_served(daemon: DaemonProcess) -> None:
    async def session() -> None:
        async with connect(daemon.address, daemon.ca) as client:
            assert (await (await client.submit([1, 2])).result()).token_ids == [1, 2]

    run(session())


def test_an_answer_that_nobody_takes_is_reset_and_its_slot_is_long_free(
    daemon: StartDaemon,
) -> None:
    process = daemon("--runtime=echo", "--slots=2", "--context=8192", "--max-output=8192",
                     "--idle-timeout=1", "--drain-timeout=0.1")  # fmt: skip
    with miser(process) as client:
        stream_id = client.ask(8192)
        running = client.events()
        while process.health()["completed"] == 0:
            client.quic.send_ping(1)
            next(running)
        process.wait_idle()
        check_that_others_are_served(process)
        reset = next(event for event in running if isinstance(event, StreamReset))
        assert (reset.stream_id, reset.error_code) == (stream_id, ResetCode.SLOW_READER)
        # The connection itself lives on.
        small = client.ask(4)
        assert any(getattr(event, "stream_id", None) == small for event in running)


def test_what_waits_for_one_reader_is_bounded(daemon: StartDaemon) -> None:
    process = daemon("--runtime=echo", "--slots=16", "--context=131072", "--max-output=131072",
                     "--max-writing=16", "--drain-timeout=0.1")  # fmt: skip
    with miser(process) as client:
        for _ in range(14):  # 7 MB of answers
            client.ask(131072)
        reset = next(event for event in client.events() if isinstance(event, StreamReset))
        assert reset.error_code == ResetCode.SLOW_READER
        process.wait_idle()  # what was held for this reader too
        check_that_others_are_served(process)


def test_a_reader_that_reads_gets_all_of_more_than_may_wait(daemon: StartDaemon) -> None:
    """Much is ready at once here, and what there is no room for waits in its slots."""
    tokens, answers = 131_072, 16  # 8 MB
    process = daemon(f"--slots={answers}", f"--max-writing={answers}", "--runtime=echo",
                     f"--context={tokens}", f"--max-output={tokens}")  # fmt: skip
    prompt = list(range(40_000)) + [7] * (tokens - 40_000)

    async def session() -> None:
        async with connect(process.address, process.ca) as client:

            async def ask() -> bool:
                return (await (await client.submit(prompt)).result()).token_ids == prompt

            assert all(await asyncio.gather(*(ask() for _ in range(answers))))

    run(session(), within=60)
    process.wait_idle()
