"""Claims of HTTP/3 that wait for a device: however one comes in pieces, the outcome is as on a
table that answers at once. The admission kernel is as it is, and runs when the test has it tick."""

import json
import shutil
import struct
from collections.abc import Callable
from typing import Any

import gpu_programs
import pytest
from host_gpu import HostDevice, Library
from http3_recorder import Answer, Quiet, Recorder

from dataplane.device_table import AskingTable
from dataplane.exchange import Asked
from dataplane.fronts.generate import Generate
from dataplane.fronts.session import Session
from dataplane.http3 import Http3, data_frame_header
from dataplane.ingress import Ingress
from dataplane.manifest import Manifest
from dataplane.prompt1 import Request
from dataplane.region import Region, create_region
from dataplane.slots import State
from dataplane.stats import Stats
from dataplane.table import HostTable

VOCAB, SLOTS, CONTEXT = 1000, 4, 64

pytestmark = pytest.mark.skipif(
    shutil.which(gpu_programs.cxx()) is None, reason="no C++ compiler here"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(gpu_programs.build_library(tmp_path_factory.mktemp("gpu")))


class Leaving(Recorder):
    """A connection that its front hears of when it is closed."""

    def close(self, code: int, reason: str) -> None:
        super().close(code, reason)
        self.extra.front.left(self)


class H3:
    """An HTTP/3 front over a table, and a request that comes in pieces."""

    def __init__(self, make_table: Callable[[Region], HostTable], name: str) -> None:
        manifest = Manifest(
            model="m", slots=SLOTS, context=CONTEXT, max_output=16, vocab_size=VOCAB, table=name
        )
        self.stats = Stats()
        self.ingress = Ingress(self.stats, 5.0, SLOTS)
        self.region = create_region(manifest, 1, 1)
        self.table = make_table(self.region)
        self.ingress.attach(self.table)
        pages: Any = Quiet()
        self.front = Generate(self.ingress, pages)
        self.connection = Leaving()
        self.session = self.connection.extra = Session(self.front, self.connection)

    def give(self, data: bytes, fin: bool) -> None:
        front: Any = self.front
        front.stream_data(self.connection, 0, data, fin, 1_000_000_000)

    def settle(self) -> None:
        """Take the device's answers, when bytes of another stream have just come."""
        self.session.at_ns, self.session.fin = 5, not self.session.fin
        self.ingress.take_answers()

    def outcome(self) -> tuple[Any, ...]:
        """What was told and what is held, but what differs each time."""
        told: list[Any] = []
        for kind, *rest in self.connection.told:
            if kind == "send":
                answer = Answer(rest[0])
                problem = json.loads(answer.body)
                problem.pop("request_id")
                told.append((kind, problem, rest[1]))
            else:
                told.append((kind, *rest))
        held = []
        for exchange in self.ingress._exchanges:
            if exchange.live:
                request = self.table.request(exchange.slot)
                ids = self.region.prompt(exchange.slot, request.n_tokens).tolist()
                ids = [] if exchange.writing else ids
                held.append((request.n_tokens, request.max_output, request.top_k, ids,
                             exchange.writing, exchange.complete_ns))  # fmt: skip
                self.ingress.leave(exchange)
        self.connection.streams.clear()
        counts = (self.stats.claimed, self.stats.failed, self.stats.answers, self.stats.in_flight)
        return told, held, counts, self.connection.writing, self.session.http3.streams.keys()


def binary(ids: list[int], **more: Any) -> list[bytes]:
    return h3_request("application/octet-stream", struct.pack(f"<{len(ids)}I", *ids), **more)


def document(fields: object, **more: Any) -> list[bytes]:
    return h3_request("application/json", json.dumps(fields).encode(), **more)


def h3_request(kind: str, body: bytes, length: int | None = None, **more: str) -> list[bytes]:
    """Return a request in pieces: header, and a body in frames of their own."""
    fields = {
        ":method": "POST", ":scheme": "https", ":authority": "localhost:4433",
        ":path": "/v1/generate", "content-type": kind,
        "content-length": str(len(body) if length is None else length),
    }  # fmt: skip
    fields.update({name.replace("_", "-"): value for name, value in more.items()})
    pairs = [(name.encode(), value.encode()) for name, value in fields.items()]
    middle = len(body) // 2 + 1
    parts = [part for part in (body[:middle], body[middle:]) if part]
    return [
        Http3(is_client=True).encode_headers(0, pairs),
        *(data_frame_header(len(part)) + part for part in parts),
    ]


BODIES = {
    "binary": binary([5, 6, 7], x_max_tokens="3", x_top_k="9"),
    "events": binary([5, 6, 7], accept="text/event-stream"),
    "json": document({"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}),
    "stream": document({"token_ids": [1, 2], "stream": True}),
    "no tokeniser": document({"prompt": "hello"}),
    "outside the vocabulary": binary([5, VOCAB, 7]),
    "not JSON": h3_request("application/json", b"{nothing}"),
    "longer than the context": document({"token_ids": [1] * (CONTEXT + 1)}),
    "too long": h3_request("application/octet-stream", bytes(12), 8),
    "too short": h3_request("application/octet-stream", bytes(8), 12),
    "garbage between": [*binary([5, 6, 7])[:2], b"\x01\x01\xff", b"\x00\x00"],
}

KNOWN_SOONER = ("outside the vocabulary", "too long", "too short", "garbage between")


def pieces_of(parts: list[bytes], alone: bool) -> list[tuple[bytes, bool]]:
    """Events of a stream; with `alone` its end comes by itself."""
    events = [(part, False) for part in parts]
    if alone:
        return [*events, (b"", True)]
    return [*events[:-1], (events[-1][0], True)]


@pytest.fixture
def devices(library: Library) -> Callable[[], tuple[H3, HostDevice]]:
    def start() -> tuple[H3, HostDevice]:
        server = H3(AskingTable, "device")
        return server, HostDevice(library, server.region)

    return start


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", BODIES)
def test_an_http3_request_fares_as_on_a_table_that_answers_at_once(
    devices: Callable[[], tuple[H3, HostDevice]], name: str, alone: bool
) -> None:
    pieces = pieces_of(BODIES[name], alone)
    host = H3(HostTable, "host")
    for data, fin in pieces:
        host.give(data, fin)
    expected = host.outcome()
    for answered in range(1, len(pieces) + 1):
        server, device = devices()
        for number, (data, fin) in enumerate(pieces, 1):
            server.give(data, fin)
            if number == answered:
                device.tick()
                server.settle()
        found = server.outcome()
        if name in (KNOWN_SOONER if alone else KNOWN_SOONER[1:]):
            # Before its claim was answered, so that it had no slot; or before its end, which then
            # has to be stopped.
            assert found[0][0] == expected[0][0]
            assert found[1] == expected[1] == []
            assert found[2][3:] == expected[2][3:] == (0,)
        else:
            assert found == expected
        device.tick()
        server.settle()
        device.tick()
        assert {device.word(slot)[0] for slot in range(SLOTS)} == {State.FREE}


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("how", ["reset", "stopped", "left"])
@pytest.mark.parametrize("name", ["binary", "json"])
def test_an_http3_client_that_leaves_meanwhile_holds_nothing(
    devices: Callable[[], tuple[H3, HostDevice]], name: str, how: str, count: int
) -> None:
    server, device = devices()
    pieces = pieces_of(BODIES[name], False)
    for data, fin in pieces[:count]:
        server.give(data, fin)
    connection: Any = server.connection
    assert isinstance(connection.streams[0], Asked)
    if how == "reset":
        server.front.stream_reset(connection, 0)
    elif how == "stopped":
        assert server.front.stop_sending(connection, 0)
    else:
        server.front.left(connection)
    device.tick()
    server.settle()
    device.tick()
    assert {device.word(slot)[0] for slot in range(SLOTS)} == {State.FREE}
    assert connection.streams == {}
    assert (server.stats.claimed, connection.writing) == (0, 0)
    assert not any(kind == "send" for kind, *_ in connection.told)
    asks = server.table.asks
    assert asks is not None
    assert not asks.pending


def test_an_http3_request_is_refused_while_its_body_is_on_its_way(
    devices: Callable[[], tuple[H3, HostDevice]],
) -> None:
    server, device = devices()
    for slot in range(SLOTS):
        assert isinstance(server.table.admit(Request(1), 1, 8), int), slot
    server.give(BODIES["binary"][0], False)
    device.tick()
    server.settle()
    (_, problem, fin), stopped = server.outcome()[0]
    assert (problem["status"], problem["detail"], fin) == (429, "every slot is taken", True)
    assert stopped == ("stop", 0x100)
    assert server.session.http3.is_discarded(0)
    server.give(BODIES["binary"][1], False)
    server.give(BODIES["binary"][2], True)
    assert server.session.http3.streams == {}
