"""Plain HTTP/3 requests that come whole, and a front that takes them either way: by the shortcut
through C, or through the framing.
"""

import re
from array import array
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pylsqpack
from http3_recorder import Answer, Pairs, Quiet, Recorder

from dataplane.exchange import Exchange
from dataplane.fronts.generate import Generate
from dataplane.fronts.session import Session
from dataplane.http3 import data_frame_header
from dataplane.http3_fields import decode_section
from dataplane.ingress import Ingress, Routes
from dataplane.manifest import Manifest
from dataplane.region import create_region
from dataplane.stats import Stats
from dataplane.table import HostTable
from dataplane.tenants import KeyedRoutes

VOCAB, SLOTS, CONTEXT, MOST = 1000, 4, 64, 32
AT_NS = 1_000_000_000
KEYS = {b"alpha": "a", b"k" * 480: "a", b"beta": "b", b"two words": "b", b"joined, key": "b"}
IDS = array("I", range(16)).tobytes()
# What differs from one request to the next whichever way it took.
VARYING = {b"x-queue-time", b"server-timing"}
MADE_UP = {b"x-request-id", b"request-id"}


class Server:
    """A front with slots of its own; `null` as the runtime of that name. With `keyed` there are two
    partitions, of which the second has room for a little more, and `KEYS` say whose is whose."""

    def __init__(self, null: bool, keyed: bool = False) -> None:
        stats = Stats()
        self.ingresses = [Ingress(stats, 5.0, SLOTS, name) for name in "ab"[: 1 + keyed]]
        self.ingress = self.ingresses[0]
        for more, ingress in enumerate(self.ingresses):
            manifest = Manifest(
                model="m", slots=SLOTS, context=CONTEXT + more, max_output=MOST + more,
                vocab_size=VOCAB,
            )  # fmt: skip
            ingress.attach(HostTable(create_region(manifest, 1 + more, 2)), null)
        routes: Routes = self.ingress
        if keyed:
            by_name = {ingress.name: ingress for ingress in self.ingresses}
            routes = KeyedRoutes(
                by_name, {sha256(key).digest(): name for key, name in KEYS.items()}
            )
        pages: Any = Quiet()
        self.front = Generate(routes, pages)

    def ask(self, data: bytes, whole: bool) -> tuple[Recorder, bool]:
        """Give a stream's bytes; what was told, and whether the shortcut was taken."""
        connection = Recorder()
        session = connection.extra = Session(self.front, connection)
        if whole and session.take_whole(0, data, 0, len(data), AT_NS):
            return connection, True
        session.at_ns, session.fin = AT_NS, True
        session.http3.receive(0, data, True, session)
        return connection, False

    def outcome(self, data: bytes, whole: bool) -> tuple[Any, bool]:
        """Everything that can be seen of a request, but what differs each time."""
        before = self.counted()
        connection, short = self.ask(data, whole)
        for ingress in self.ingresses:
            ingress.egress.flush()
        seen: list[Any] = []
        for kind, *rest in connection.told:
            if kind == "send":
                answer = Answer(rest[0]) if rest[1] else None
                seen.append((kind, rest[1], self.readable(rest[0], answer)))
            else:
                seen.append((kind, *rest))
        held = []
        for exchange in self.live():
            ingress = exchange.ingress
            assert ingress.table is not None
            request = ingress.table.request(exchange.slot)
            ids = ingress.table.region.prompt(exchange.slot, request.n_tokens).tolist()
            ids = [] if exchange.writing else ids  # what stands there is another request's
            held.append((ingress.name, request.n_tokens, request.max_output, ids,
                         request.temperature, request.top_p, request.top_k, request.seed,
                         exchange.n_tokens,
                         exchange.max_output, exchange.stream_id, exchange.complete_ns,
                         exchange.answered, exchange.writing, exchange.sent))  # fmt: skip
            ingress.leave(exchange)
        return (seen, held, self.counted(before), connection.writing), short

    def live(self) -> list[Exchange]:
        every = [one for ingress in self.ingresses for one in ingress._exchanges]
        return [exchange for exchange in every if exchange.live]

    def counted(self, before: tuple[int, ...] = (0,) * 9) -> tuple[int, ...]:
        stats = self.ingress.stats
        totals = [stats.latency.total(series).within[-1] for series in (0, 1)]
        now = (stats.claimed, stats.completed, stats.failed, stats.answers[200],
               stats.answers[400], stats.answers[401], stats.answers[429], *totals)  # fmt: skip
        return tuple(a - b for a, b in zip(now, before, strict=False))

    @staticmethod
    def readable(data: bytes, answer: Answer | None) -> Any:
        if answer is None:
            # The beginning of an answer: its HEADERS frame alone.
            return sorted(name for name, _ in decode_section(data[3:]))
        fields = []
        for name, value in answer.fields:
            if name in VARYING or (name in MADE_UP and len(value) == 16) or name == b"x-slot":
                value = b"?" * (name != b"content-length")
            fields.append((name, value))
        body = answer.body
        if (b"content-type", b"application/problem+json") in answer.fields:
            at = body.index(b'"request_id"')
            body = body[:at]
        elif (b"content-type", b"application/json") in answer.fields:
            body = re.sub(rb"[0-9a-f]{16}|[0-9]+", b"?", body)
        return fields, body


PLAIN: Pairs = [
    (b":method", b"POST"),
    (b":scheme", b"https"),
    (b":authority", b"localhost:4433"),
    (b":path", b"/v1/generate"),
    (b"content-type", b"application/octet-stream"),
    (b"content-length", b"%d" % len(IDS)),
]


def section(pairs: Pairs) -> bytes:
    return bytes(pylsqpack.Encoder().encode(0, pairs)[1])


def bare(pairs: Pairs) -> bytes:
    """A section of literals that are not compressed."""

    def number(first: int, bits: int, value: int) -> bytes:
        most = (1 << bits) - 1
        if value < most:
            return bytes((first | value,))
        value, out = value - most, bytes((first | most,))
        while value >= 0x80:
            out += bytes((value & 0x7F | 0x80,))
            value >>= 7
        return out + bytes((value,))

    return b"\0\0" + b"".join(
        number(0x20, 3, len(name)) + name + number(0, 7, len(value)) + value
        for name, value in pairs
    )


def message(pairs: Pairs, body: bytes = IDS, encode: Callable[[Pairs], bytes] = section) -> bytes:
    block = encode(pairs)
    head = (0x014000 | len(block)).to_bytes(3, "big") + block
    return head + (data_frame_header(len(body)) + body if body else b"")


def without(name: bytes) -> Pairs:
    return [pair for pair in PLAIN if pair[0] != name]


def instead(name: bytes, value: bytes) -> Pairs:
    return [(n, value if n == name else v) for n, v in PLAIN]


def same(server: Server, data: bytes) -> bool:
    """The outcome is the same both ways; whether the shortcut was taken."""
    by_whole, short = server.outcome(data, True)
    by_framing, _ = server.outcome(data, False)
    assert by_whole == by_framing
    return short
