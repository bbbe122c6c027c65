"""How often a prompt's byte is written in user space between the socket and the slot.

Counted, not claimed: every place that writes stream bytes is wrapped, a whole request is sent
through a real connection, and the bytes written are divided by the prompt's. The kernel's own copy
into the batch's buffer comes before the first of these. What each step is stands beside its name in
`Copies`; the numbers are held so that a copy that creeps in is seen.
"""

import ssl
import struct
import time
from collections import Counter
from typing import Any

import aioquic._crypto
import aioquic.quic.connection
import pytest
from aioquic._buffer import Buffer
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import HandshakeCompleted
from aioquic.quic.stream import QuicStreamReceiver

from dataplane.fronts import generate, parameters, session
from dataplane.fronts.generate import Generate
from dataplane.fronts.prompt1 import Prompt1
from dataplane.http3 import Http3, data_frame_header
from dataplane.identity import load_identity
from dataplane.ingress import Ingress
from dataplane.listener import Listener
from dataplane.manifest import Manifest
from dataplane.prompt1 import Request, encode_request
from dataplane.region import create_region
from dataplane.stats import Stats
from dataplane.table import HostTable, Served

# Few enough that a first congestion window holds the body, also as JSON.
TOKENS = 1536
VOCAB = 50_000
PATH = b"here"


class Copies:
    """Bytes written, by step.

    datagram: the listener's bytes object, out of the batch's buffer
    packet: aioquic's Buffer over the datagram
    sealed: the slice that is handed to the AEAD
    plain: the AEAD's output
    payload: aioquic's Buffer over the plaintext
    frame: the STREAM frame's data
    hold: the receiver's buffer of data out of order
    release: the two writes that take it out again
    gather: a JSON body's collection
    pack: a JSON body's ids, as a list's array and as its bytes
    slot: the writer
    """

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.inside = False  # whether the datagram's own Buffer has been made

    def add(self, step: str, count: int) -> None:
        self.bytes[step] += count

    def times(self, size: int) -> dict[str, int]:
        """Return how often each of `size` bytes was written, as whole numbers."""
        rounded = {step: round(count / size) for step, count in self.bytes.items()}
        return {step: count for step, count in sorted(rounded.items()) if count}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Wrap every place that writes, for as long as the test runs."""
    counted = Copies()
    _count_in_aioquic(monkeypatch, counted)
    _count_in_table(monkeypatch, counted)
    return counted


def _count_in_aioquic(monkeypatch: pytest.MonkeyPatch, counted: Copies) -> None:
    class CountingBuffer:
        """aioquic's Buffer, which cannot be inherited from."""

        def __init__(self, capacity: int = 0, data: bytes | None = None) -> None:
            if data is None:
                self._buffer = Buffer(capacity=capacity)
                return
            counted.add("payload" if counted.inside else "packet", len(data))
            counted.inside = True
            self._buffer = Buffer(data=data)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._buffer, name)

        def pull_bytes(self, length: int) -> bytes:
            counted.add("frame", length)
            return self._buffer.pull_bytes(length)

    class Held(bytearray):
        def __setitem__(self, key: Any, value: Any) -> None:
            counted.add("hold", len(value))
            super().__setitem__(key, value)

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            counted.add("release", 2 * len(found))
            return found

    decrypt, start = aioquic._crypto.AEAD.decrypt, QuicStreamReceiver.__init__

    def counting_decrypt(self: Any, data: bytes, *rest: Any) -> bytes:
        plain: bytes = decrypt(self, data, *rest)
        counted.add("sealed", len(data))
        counted.add("plain", len(plain))
        return plain

    def counting_start(self: QuicStreamReceiver, *rest: Any, **named: Any) -> None:
        start(self, *rest, **named)
        self._buffer = Held()

    monkeypatch.setattr(aioquic.quic.connection, "Buffer", CountingBuffer)
    monkeypatch.setattr(aioquic._crypto.AEAD, "decrypt", counting_decrypt)
    monkeypatch.setattr(QuicStreamReceiver, "__init__", counting_start)


def _count_in_table(monkeypatch: pytest.MonkeyPatch, counted: Copies) -> None:
    provide = HostTable.count_in

    def counting_provide(self: HostTable, *rest: Any) -> None:
        provide(self, *rest)
        serve = self.serve_whole
        assert serve is not None

        def counting_serve(*arguments: Any) -> Served:
            served = serve(*arguments)
            status, tokens = served[0], served[8]
            if status == 0:
                counted.add("slot", 4 * tokens)
            return served

        self.serve_whole = counting_serve

    monkeypatch.setattr(HostTable, "count_in", counting_provide)
    for name in ("write", "submit"):
        monkeypatch.setattr(HostTable, name, _counting_slot(getattr(HostTable, name), counted))


def _counting_slot(method: Any, counted: Copies) -> Any:
    def counting(self: HostTable, *arguments: Any) -> int:
        counted.add("slot", arguments[-1])
        return method(self, *arguments)  # type: ignore[no-any-return]

    return counting


class Wire:
    """The listener's socket: what it sends is kept."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def queue(self, data: bytes, path: bytes) -> None:
        self.sent.append(data)


class Rig:
    """A client and a listener joined in memory."""

    def __init__(self, tmp_path: Any, alpn: str) -> None:
        identity = load_identity(tmp_path, "localhost")
        transport = QuicConfiguration(is_client=False, alpn_protocols=[alpn])
        transport.load_cert_chain(identity.cert, identity.key)
        manifest = Manifest(model="null", slots=2, context=TOKENS, max_output=8, vocab_size=VOCAB)
        ingress = Ingress(Stats(), 60.0, 2)
        ingress.attach(HostTable(create_region(manifest, 1, 1)), null=True)
        front: Any = Generate(ingress, None) if alpn == "h3" else Prompt1(ingress)  # type: ignore[arg-type]
        self.stats = ingress.stats
        self.listener = Listener(transport, [ingress], {alpn: front}, 4, 60.0)
        self.wire = Wire()
        client = QuicConfiguration(alpn_protocols=[alpn], verify_mode=ssl.CERT_NONE)
        self.client = QuicConnection(configuration=client)
        self.client.connect(PATH, time.monotonic())

    def deliver(self, datagrams: list[bytes]) -> None:
        """Hand datagrams to the listener, and what it says to the client."""
        now = time.monotonic()
        for data in datagrams:
            self.listener.deliver(self.wire, data, PATH, now, time.time_ns())
        for connection in self.listener.connections:
            connection.transmit(time.monotonic(), self.wire.queue)
            connection.dirty = False
        self.listener._dirty.clear()
        sent, self.wire.sent = self.wire.sent, []
        for data in sent:
            self.client.receive_datagram(data, PATH, time.monotonic())

    def outgoing(self) -> list[bytes]:
        """Return all that the client has to send, without waiting for its pacing."""
        found: list[bytes] = []
        now = time.monotonic()
        while datagrams := self.client.datagrams_to_send(now):
            found += [data for data, _ in datagrams]
            now += 0.05
        return found

    def shake_hands(self) -> None:
        up = False
        for _ in range(20):
            self.deliver(self.outgoing())
            while (event := self.client.next_event()) is not None:
                up = up or isinstance(event, HandshakeCompleted)
        assert up


def send(rig: Rig, copies: Copies, request: bytes, in_order: bool) -> None:
    """Send one request and count what its datagrams cost."""
    rig.shake_hands()
    copies.bytes.clear()
    rig.client.send_stream_data(rig.client.get_next_available_stream_id(), request, True)
    for _ in range(20):
        datagrams = rig.outgoing()
        for data in datagrams if in_order else reversed(datagrams):
            copies.inside = False
            # What the listener does with each entry of its batch.
            copies.add("datagram", len(data))
            rig.listener.deliver(rig.wire, data, PATH, time.monotonic(), time.time_ns())
        rig.deliver([])
    assert dict(rig.stats.answers) == {200: 1}


IDS = struct.pack(f"<{TOKENS}I", *(i % VOCAB for i in range(TOKENS)))
TRANSPORT = {"datagram": 1, "packet": 1, "sealed": 1, "plain": 1, "payload": 1, "frame": 1}
OUT_OF_ORDER = {"hold": 1, "release": 2}


def h3_request(content_type: bytes, body: bytes) -> bytes:
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":authority", b"localhost"),
        (b":path", b"/v1/generate"),
        (b"content-type", content_type),
        (b"accept", b"application/octet-stream"),
        (b"content-length", b"%d" % len(body)),
    ]
    head = Http3(is_client=True).encode_headers(0, fields)
    return head + data_frame_header(len(body)) + body


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("alpn", ["prompt/1", "h3"])
def test_a_binary_prompt_is_written_once_beyond_the_transport(
    copies: Copies, tmp_path: Any, alpn: str, in_order: bool
) -> None:
    request = (
        h3_request(b"application/octet-stream", IDS)
        if alpn == "h3"
        else encode_request(Request(TOKENS)) + IDS
    )
    send(Rig(tmp_path, alpn), copies, request, in_order)
    expected = {**TRANSPORT, "slot": 1}
    if not in_order:
        # The datagrams were turned round, so all but the first in the stream had to be held.
        expected |= OUT_OF_ORDER
    assert copies.times(len(IDS)) == dict(sorted(expected.items()))


@pytest.mark.parametrize("in_order", [True, False])
def test_a_json_prompt_is_gathered_and_packed_besides(
    copies: Copies, tmp_path: Any, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body's characters are gathered once; its ids are written as an array and as bytes."""
    read, pack = parameters.read_json, parameters.pack_ids
    packed: Counter[str] = Counter()

    def counting_read(data: bytes | bytearray) -> Any:
        copies.add("gather", len(data))
        return read(data)

    def counting_pack(ids: list[int]) -> Any:
        packed["array"] += 4 * len(ids)
        found = pack(ids)
        packed["bytes"] += len(found)
        return found

    monkeypatch.setattr(session, "read_json", counting_read)
    monkeypatch.setattr(generate, "pack_ids", counting_pack)
    numbers = ",".join(str(10_000 + i % 40_000) for i in range(TOKENS))
    body = f'{{"token_ids":[{numbers}]}}'.encode()
    send(Rig(tmp_path, "h3"), copies, h3_request(b"application/json", body), in_order)
    slot = copies.bytes.pop("slot")
    expected = {**TRANSPORT, "gather": 1}
    if not in_order:
        expected |= OUT_OF_ORDER
    assert copies.times(len(body)) == dict(sorted(expected.items()))
    assert slot == len(IDS)
    assert packed == {"array": len(IDS), "bytes": len(IDS)}
