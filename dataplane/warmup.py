"""Run every part of a request's way once before the daemon says that it is ready.

The interpreter specialises code that it has run a few times, libraries set themselves up at first
use, memory is touched for
the first time: without this the first client would pay for it. A client and a listener talk in
memory here, over slots of their own; nothing is left of them, and no real runtime or counter sees
any of it.
"""

import ssl
import struct
import time
from collections.abc import Callable, Mapping

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import HandshakeCompleted, StreamDataReceived

from dataplane._native import ffi, lib
from dataplane.connection import StreamFront
from dataplane.http3 import Http3, data_frame_header
from dataplane.http_names import ALPN, BINARY, GENERATE
from dataplane.ingress import Ingress
from dataplane.listener import Listener
from dataplane.manifest import Manifest
from dataplane.prompt1 import Request, encode_request
from dataplane.quic import silence
from dataplane.region import create_region
from dataplane.slots import Finish
from dataplane.stats import Stats
from dataplane.table import HostTable

# More often than the interpreter wants to see code before it specialises it.
REQUESTS = 40
_TOKENS = 128
_SLOTS = 2
_TURNS_MAX = 50
_PATH = b"in memory"

Fronts = Callable[[Ingress], Mapping[str, StreamFront]]


class _Wire:
    """What the listener sends, until the client takes it."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def queue(self, data: bytes, path: bytes) -> None:
        self.sent.append(data)


class _Warmer:
    """A client and a listener in one process, joined without sockets."""

    def __init__(self, listener: Listener, table: HostTable, alpn: str) -> None:
        self._listener = listener
        self._table = table
        self._wire = _Wire()
        configuration = QuicConfiguration(alpn_protocols=[alpn], verify_mode=ssl.CERT_NONE)
        self.client = QuicConnection(configuration=configuration)
        silence(self.client)
        self.client.connect(_PATH, time.monotonic())
        self._generation = ffi.new("uint64_t *")
        self._output = ffi.new("int32_t[]", [1, 2])
        self.up = False
        self.answered = 0

    def turn(self) -> None:
        """Carry what each side has to say, and play the runtime in between."""
        now = time.monotonic()
        for data, _ in self.client.datagrams_to_send(now):
            self._listener.deliver(self._wire, data, _PATH, now, time.time_ns())
        self._listener.finish_pass()
        self._play_runtime()
        self._listener.finish_pass()
        sent, self._wire.sent = self._wire.sent, []
        for data in sent:
            self.client.receive_datagram(data, _PATH, time.monotonic())
        while (event := self.client.next_event()) is not None:
            if isinstance(event, HandshakeCompleted):
                self.up = True
            elif isinstance(event, StreamDataReceived) and event.end_stream:
                self.answered += 1

    def _play_runtime(self) -> None:
        region, generation = self._table.region.native, self._generation
        for slot in range(_SLOTS):
            if lib.dp_take(region, slot, generation) >= 0:
                lib.dp_emit(region, slot, generation[0], self._output, 1)
                lib.dp_finish(region, slot, generation[0], int(Finish.STOP))

    def until(self, done: Callable[[], bool]) -> None:
        """Turn until something has happened, or long enough; warming is no promise."""
        for _ in range(_TURNS_MAX):
            if done():
                return
            self.turn()


def _raw_request() -> bytes:
    return encode_request(Request(_TOKENS)) + _ids()


def _h3_request() -> bytes:
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":authority", b"localhost"),
        (b":path", GENERATE),
        (b"content-type", BINARY),
        (b"content-length", b"%d" % len(_ids())),
    ]
    head = Http3(is_client=True).encode_headers(0, fields)
    return head + data_frame_header(len(_ids())) + _ids()


def _ids() -> bytes:
    return struct.pack(f"<{_TOKENS}I", *range(_TOKENS))


def warm_up(transport: QuicConfiguration, fronts: Fronts) -> None:
    """Serve some requests of each protocol to a client in memory; on the running event loop."""
    manifest = Manifest(
        model="warm-up", slots=_SLOTS, context=_TOKENS, max_output=8, vocab_size=_TOKENS
    )
    region = create_region(manifest, 1, listeners=1)
    region.close_fd()
    table = HostTable(region)
    ingress = Ingress(Stats(), body_timeout=60.0)
    ingress.attach(table)
    listener = Listener(transport, [ingress], dict(fronts(ingress)), 8, 60.0)
    listener.start([])
    try:
        for alpn in listener.fronts:
            request = _h3_request() if alpn == ALPN else _raw_request()
            warmer = _Warmer(listener, table, alpn)
            warmer.until(lambda warmer=warmer: warmer.up)  # type: ignore[misc]
            for number in range(REQUESTS):
                stream_id = warmer.client.get_next_available_stream_id()
                warmer.client.send_stream_data(stream_id, request, end_stream=True)
                warmer.until(
                    lambda warmer=warmer, number=number: warmer.answered > number  # type: ignore[misc]
                )
    finally:
        ingress.detach("the warm-up is over")
        listener.close_all(0, "")
        listener.stop()
