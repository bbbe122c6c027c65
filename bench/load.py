"""A closed-loop load on one QUIC connection: so many requests in flight, each on its stream.

The same bytes go to every server that is compared, and what comes back is counted, not understood.
It runs on aioquic, so it
costs more than the server: measure the server's CPU with it, never its latency.
"""

import selectors
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    StreamDataReceived,
    StreamReset,
)

BATCH = 64
STALL_S = 10.0


@dataclass
class Outcome:
    """What a run of requests came to."""

    answered: int = 0
    failed: int = 0
    answer_bytes: int = 0
    seconds: float = 0.0


class Load:
    """One connection to a server.

    Args:
        address: (host, port), IPv4.
        alpn: The protocol to ask for.
        request: The bytes of every request.
    """

    def __init__(self, address: tuple[str, int], alpn: str, request: bytes) -> None:
        configuration = QuicConfiguration(
            is_client=True, alpn_protocols=[alpn], verify_mode=ssl.CERT_NONE, idle_timeout=30
        )
        self._quic = QuicConnection(configuration=configuration)
        self._request = request
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.connect(address)
        self._address = address
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._up = False
        self._answers: dict[int, int] = {}
        self._outcome = Outcome()

    def connect(self) -> None:
        """Complete the handshake."""
        self._quic.connect(self._address, time.monotonic())
        self._until(lambda: self._up)

    def run(
        self, requests: int, streams: int, progress: Callable[[int], None] = lambda done: None
    ) -> Outcome:
        """Send `requests` with at most `streams` of them in flight, and wait for every answer."""
        self._outcome = outcome = Outcome()
        sent = 0
        start = time.monotonic()

        def finished() -> bool:
            nonlocal sent
            done = outcome.answered + outcome.failed
            while sent < requests and sent - done < streams:
                self._send()
                sent += 1
            progress(done)
            return done == requests

        self._until(finished)
        outcome.seconds = time.monotonic() - start
        return outcome

    def close(self) -> None:
        """Close the connection and tell the server."""
        self._quic.close()
        self._transmit()
        self._selector.close()
        self._socket.close()

    def _send(self) -> None:
        stream_id = self._quic.get_next_available_stream_id()
        self._answers[stream_id] = 0
        self._quic.send_stream_data(stream_id, self._request, end_stream=True)

    def _until(self, finished: Callable[[], bool]) -> None:
        moved = time.monotonic()
        while not finished():
            self._transmit()
            now = time.monotonic()
            timer = self._quic.get_timer()
            if self._selector.select(max(0.0, (timer or now + 1) - now)):
                moved = now
                self._drain()
            if timer is not None and time.monotonic() >= timer:
                self._quic.handle_timer(time.monotonic())
            self._take_events()
            if now - moved > STALL_S:
                raise RuntimeError(f"nothing came from {self._address} for {STALL_S:.0f} s")

    def _transmit(self) -> None:
        for data, _ in self._quic.datagrams_to_send(time.monotonic()):
            self._socket.send(data)

    def _drain(self) -> None:
        now = time.monotonic()
        for _ in range(BATCH):
            try:
                data = self._socket.recv(2048)
            except BlockingIOError:
                return
            self._quic.receive_datagram(data, self._address, now)

    def _take_events(self) -> None:
        while (event := self._quic.next_event()) is not None:
            if isinstance(event, StreamDataReceived):
                self._answers[event.stream_id] += len(event.data)
                if event.end_stream:
                    self._outcome.answer_bytes += self._answers.pop(event.stream_id)
                    self._outcome.answered += 1
            elif isinstance(event, StreamReset):
                self._answers.pop(event.stream_id, None)
                self._outcome.failed += 1
            elif isinstance(event, HandshakeCompleted):
                self._up = True
            elif isinstance(event, ConnectionTerminated):
                raise RuntimeError(f"the connection ended: {event.reason_phrase}")
