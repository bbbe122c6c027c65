"""A daemon that does what a test tells it: aioquic's server, and `prompt/1` through the codec."""

import asyncio
import contextlib
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from aioquic.asyncio.protocol import QuicConnectionProtocol
from aioquic.asyncio.server import serve
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import QuicEvent, StopSendingReceived, StreamDataReceived, StreamReset

from dataplane.identity import load_identity
from dataplane.prompt1 import ALPN, NO_SLOT, Request, encode_end, encode_verdict, parse_request

QUEUE_US = 41
INGRESS_US = 63


def verdict(status: int = 200, slot: int = 3, request_id: int = 42, retry_ms: int = 0) -> bytes:
    ingress = INGRESS_US if status == 200 else 0
    return encode_verdict(status, slot, request_id, QUEUE_US, ingress, retry_ms, 1)


def words(ids: Iterable[int]) -> bytes:
    return b"".join(struct.pack("<I", number) for number in ids)


def whole_answer(ids: list[int], reason: int = 1, prompt_tokens: int = 5) -> bytes:
    return verdict() + words(ids) + encode_end(reason, prompt_tokens, len(ids))


def refusal(status: int, reason: str) -> bytes:
    return verdict(status, NO_SLOT) + reason.encode()


class Stream:
    """One request as the fake daemon sees it."""

    def __init__(self, protocol: QuicConnectionProtocol, number: int) -> None:
        self._protocol = protocol
        self.number = number
        self.data = bytearray()
        self.complete = asyncio.Event()
        self.stopped = asyncio.Event()  # STOP_SENDING came
        self.was_reset = asyncio.Event()  # RESET_STREAM came

    @property
    def request(self) -> Request:
        request = parse_request(self.data, True)
        assert isinstance(request, Request), request
        return request

    @property
    def ids(self) -> list[int]:
        request = self.request
        code = {2: "H", 4: "I"}[request.width]
        body = bytes(self.data[request.header_bytes :])
        return list(struct.unpack(f"<{request.n_tokens}{code}", body))

    def send(self, data: bytes, fin: bool = False) -> None:
        """Send at once, in a datagram of its own."""
        self._protocol._quic.send_stream_data(self.number, data, fin)
        self._protocol.transmit()

    def reset(self, code: int) -> None:
        self._protocol._quic.reset_stream(self.number, code)
        self._protocol.transmit()

    def close_connection(self, code: int = 0, reason: str = "") -> None:
        self._protocol.close(code, reason)


Behaviour = Callable[[Stream], Awaitable[None]]


class FakeDaemon:
    """Where it listens, and what came."""

    def __init__(self, ca: Path) -> None:
        self.ca = ca
        self.port = 0
        self.streams: list[Stream] = []
        self.connections: list[QuicConnectionProtocol] = []
        self.server: Any = None
        self.vanished = False
        self._arrived = asyncio.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def arrive(self, stream: Stream) -> None:
        self.streams.append(stream)
        self._arrived.set()

    async def wait_for_streams(self, count: int) -> None:
        while len(self.streams) < count:
            self._arrived.clear()
            await self._arrived.wait()

    def vanish(self) -> None:
        """Stop without a word, as a killed process does."""
        for connection in self.connections:
            if connection._timer is not None:
                connection._timer.cancel()
        self.server._transport.abort()
        self.vanished = True


@contextlib.asynccontextmanager
async def fake_daemon(
    directory: Path,
    behave: Behaviour,
    *,
    at_once: bool = False,
    alpn: str = ALPN,
    idle_timeout: float = 30.0,
) -> AsyncIterator[FakeDaemon]:
    """Listen on 127.0.0.1; `behave` runs for each request once it is complete, or `at_once`."""
    identity = load_identity(directory / "identity", "localhost")
    assert identity.ca is not None
    daemon = FakeDaemon(identity.ca)
    tasks: set[asyncio.Task[None]] = set()

    async def run(stream: Stream) -> None:
        if not at_once:
            await stream.complete.wait()
        await behave(stream)

    class Connection(QuicConnectionProtocol):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.streams: dict[int, Stream] = {}
            daemon.connections.append(self)

        def quic_event_received(self, event: QuicEvent) -> None:
            if isinstance(event, StreamDataReceived):
                stream = self.streams.get(event.stream_id)
                if stream is None:
                    stream = self.streams[event.stream_id] = Stream(self, event.stream_id)
                    daemon.arrive(stream)
                    tasks.add(asyncio.get_running_loop().create_task(run(stream)))
                stream.data += event.data
                if event.end_stream:
                    stream.complete.set()
            elif isinstance(event, StopSendingReceived) and event.stream_id in self.streams:
                self.streams[event.stream_id].stopped.set()
            elif isinstance(event, StreamReset) and event.stream_id in self.streams:
                self.streams[event.stream_id].was_reset.set()

    configuration = QuicConfiguration(
        is_client=False, alpn_protocols=[alpn], idle_timeout=idle_timeout
    )
    configuration.load_cert_chain(identity.cert, identity.key)
    daemon.server = await serve(
        "127.0.0.1", 0, configuration=configuration, create_protocol=Connection
    )
    daemon.port = daemon.server._transport.get_extra_info("sockname")[1]
    try:
        yield daemon
    finally:
        if not daemon.vanished:
            daemon.server.close()
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


@contextlib.contextmanager
def fake_daemon_thread(directory: Path, behave: Behaviour) -> Iterator[FakeDaemon]:
    """`fake_daemon` on a thread of its own, for a client that blocks this one."""
    ready = threading.Event()
    started: list[tuple[FakeDaemon, asyncio.AbstractEventLoop, asyncio.Event]] = []
    failed: list[Exception] = []

    async def run() -> None:
        end = asyncio.Event()
        async with fake_daemon(directory, behave) as daemon:
            started.append((daemon, asyncio.get_running_loop(), end))
            ready.set()
            await end.wait()

    def run_thread() -> None:
        try:
            asyncio.run(run())
        except Exception as error:
            failed.append(error)
        ready.set()

    thread = threading.Thread(target=run_thread)
    thread.start()
    ready.wait(10)
    try:
        yield started[0][0]
    finally:
        if started:
            _, loop, end = started[0]
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end.set)
        thread.join(10)
    if failed:
        raise failed[0]
