"""HTTP/3 framing with aioquic's as the peer: it understands us, and agrees on the codes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from aioquic.h3.connection import H3Connection
from aioquic.h3.events import DataReceived, H3Event, HeadersReceived
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import StreamDataReceived
from http3_frames import GET, POST, SETTINGS, Log, Vector, headers, server
from http3_vectors import LONG, VECTORS, answer, message_error, sized

from dataplane.http3 import Code, Http3, data_frame_header


class Wire:
    """What H3Connection needs of a QuicConnection; it keeps what would be sent."""

    def __init__(self, is_client: bool) -> None:
        self.configuration = SimpleNamespace(is_client=is_client)
        self._quic_logger = None
        self._remote_max_datagram_frame_size = None
        self._next = {False: 0 if is_client else 1, True: 2 if is_client else 3}
        self.sent: list[tuple[int, bytes, bool]] = []
        self.closed_with: int | None = None

    def get_next_available_stream_id(self, is_unidirectional: bool = False) -> int:
        stream_id = self._next[is_unidirectional]
        self._next[is_unidirectional] += 4
        return stream_id

    def send_stream_data(self, stream_id: int, piece: bytes, end_stream: bool = False) -> None:
        self.sent.append((stream_id, piece, end_stream))

    def close(self, error_code: int, reason_phrase: str = "", **_: object) -> None:
        self.closed_with = error_code


class Pair3:
    """Our side and aioquic's, with SETTINGS exchanged."""

    def __init__(self, we_are_client: bool) -> None:
        self.h3, self.log = Http3(we_are_client), Log()
        self.wire = Wire(not we_are_client)
        self.peer = H3Connection(cast(QuicConnection, self.wire))
        self.heard: list[H3Event] = []
        ours = (2, 6, 10) if we_are_client else (3, 7, 11)
        for stream_id, piece in self.h3.start(ours):
            self.tell(stream_id, piece, False)
        self.listen()

    def tell(self, stream_id: int, piece: bytes, fin: bool) -> None:
        event = StreamDataReceived(data=piece, end_stream=fin, stream_id=stream_id)
        self.heard += self.peer.handle_event(event)
        assert self.wire.closed_with is None

    def listen(self, step: int = 1 << 30) -> None:
        for stream_id, piece, fin in self.wire.sent:
            for at in range(0, max(len(piece), 1), step):
                last = at + step >= len(piece)
                self.h3.receive(stream_id, piece[at : at + step], fin and last, self.log)
        self.wire.sent.clear()


@pytest.mark.parametrize("step", [1, 7, 1 << 30])
def test_aioquic_asks_and_we_answer(step: int) -> None:
    pair = Pair3(we_are_client=False)
    assert pair.h3.peer.settings is not None
    for turn in range(5):
        stream_id = turn * 4
        pair.log.events.clear()
        pair.heard.clear()
        request = [*sized(len(LONG)), (b"x-turn", b"%d" % turn), (b"user-agent", b"a b")]
        pair.peer.send_headers(stream_id, request)
        pair.peer.send_data(stream_id, LONG[:99], end_stream=False)
        pair.peer.send_data(stream_id, LONG[99:], end_stream=False)
        pair.peer.send_headers(stream_id, [(b"x-sum", b"1")], end_stream=True)
        pair.listen(step)
        assert pair.log.events == [
            ("headers", stream_id, dict(request), len(LONG)),
            ("data", stream_id, LONG),
            ("trailers", stream_id, {b"x-sum": b"1"}),
            ("end", stream_id),
        ]
        fields = [*answer(3), (b"x-queue-time", b"0.041ms"), (b"x-turn", b"%d" % turn)]
        stream = pair.h3.encode_headers(stream_id, fields) + data_frame_header(3) + b"abc"
        for at in range(0, len(stream), step):
            pair.tell(stream_id, stream[at : at + step], at + step >= len(stream))
        heads = [event for event in pair.heard if isinstance(event, HeadersReceived)]
        bodies = [event for event in pair.heard if isinstance(event, DataReceived)]
        assert [head.headers for head in heads] == [fields]
        assert b"".join(body.data for body in bodies) == b"abc"
        assert pair.heard[-1].stream_ended  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", [1, 7, 1 << 30])
def test_we_ask_and_aioquic_answers(step: int) -> None:
    pair = Pair3(we_are_client=True)
    for turn in range(5):
        stream_id = turn * 4
        pair.log.events.clear()
        pair.heard.clear()
        request = [*sized(3), (b"x-turn", b"%d" % turn)]
        pair.tell(stream_id, pair.h3.encode_headers(stream_id, request), False)
        pair.tell(stream_id, data_frame_header(3) + b"abc", True)
        assert [type(event) for event in pair.heard] == [HeadersReceived, DataReceived]
        assert cast(HeadersReceived, pair.heard[0]).headers == request
        pair.peer.send_headers(stream_id, [(b":status", b"103")])
        pair.peer.send_headers(stream_id, [*answer(len(LONG)), (b"x-turn", b"%d" % turn)])
        pair.peer.send_data(stream_id, LONG, end_stream=True)
        pair.listen(step)
        fields = {**dict(answer(len(LONG))), b"x-turn": b"%d" % turn}
        assert pair.log.events == [
            ("interim", stream_id, {b":status": b"103"}),
            ("headers", stream_id, fields, len(LONG)),
            ("data", stream_id, LONG),
            ("end", stream_id),
        ]


def test_what_closes_the_connection_in_aioquic_costs_one_stream_here() -> None:
    """The reason for this module: the oracle closes, we go on."""
    bad = headers([*POST, (b"content-length", b"five")])
    wire = Wire(is_client=False)
    oracle = H3Connection(cast(QuicConnection, wire))
    oracle.handle_event(StreamDataReceived(data=SETTINGS, end_stream=False, stream_id=2))
    oracle.handle_event(StreamDataReceived(data=bad, end_stream=True, stream_id=0))
    assert wire.closed_with is not None
    h3, log = server()
    h3.receive(0, bad, True, log)
    h3.receive(4, headers(GET), True, log)
    assert log.events == [message_error(), ("headers", 4, dict(GET), None), ("end", 4)]


# Where the oracle is laxer: it has a dynamic table, and looks less closely at the rest.
ORACLE_SAYS: dict[str, Code | None] = dict.fromkeys((
    "a required insert in a field section", "goaway going up", "goaway with a tail",
    "goaway without a number", "goaway cut off", "goaway of nine bytes", "cancelled push",
    "settings over 1 KiB", "cancelled push to a client", "goaway to a client names no request",
    "encoder inserts a name", "encoder refers to a name", "encoder sets a capacity", "encoder ends",
    "decoder cancels without end", "decoder ends", "a server pushes", "push",
    "a server opens a bidirectional stream",
))  # fmt: skip
# RFC 9114 sections 6.2.1 and 7.2.8 each have a code for this one.
ORACLE_SAYS["a frame of HTTP/2 first"] = Code.MISSING_SETTINGS
BROKEN = [v for v in VECTORS if v.want and v.want[-1][0] == "connection_error" and not v.heads]


@pytest.mark.parametrize("vector", BROKEN, ids=lambda v: v.name)
def test_aioquic_agrees_on_the_codes(vector: Vector) -> None:
    wire = Wire(is_client=vector.is_client)
    oracle = H3Connection(cast(QuicConnection, wire))
    if vector.stream_id == 0:
        control = 3 if vector.is_client else 2
        opening = StreamDataReceived(data=SETTINGS, end_stream=False, stream_id=control)
        oracle.handle_event(opening)
    event = StreamDataReceived(
        data=vector.stream, end_stream=vector.fin, stream_id=vector.stream_id
    )
    oracle.handle_event(event)
    assert wire.closed_with == ORACLE_SAYS.get(vector.name, vector.want[-1][1])
