"""Answers that the pump is given for later leave in their order, and before what follows them."""

from pathlib import Path

import pytest
from pumped_ends import Pumped, Wire, connect


@pytest.fixture
def wire(tmp_path: Path) -> Wire:
    return connect(tmp_path, "plain-pumped")


def server_of(wire: Wire) -> Pumped:
    assert isinstance(wire.server, Pumped)
    return wire.server


def test_pieces_of_a_stream_keep_their_order(wire: Wire) -> None:
    server = server_of(wire)
    pump, handle = server.pump, server.hand_over.handle
    streams = [wire.client.open(b"?", True) for _ in range(3)]
    wire.until(lambda: server.fins >= set(streams))
    long = bytes(range(256)) * 100  # too long to be kept for later
    for piece, fin in ((b"one", False), (b"", False), (long, False), (b"two", True)):
        for stream in streams:
            pump.send_later(handle, stream, piece, fin)
    wire.until(lambda: wire.client.fins >= set(streams))
    assert [wire.client.got[stream] for stream in streams] == [b"one" + long + b"two"] * 3


def test_what_cannot_be_sent_is_left_out_alone(wire: Wire) -> None:
    server = server_of(wire)
    pump, handle = server.pump, server.hand_over.handle
    stream = wire.client.open(b"?", True)
    wire.until(lambda: stream in server.fins)
    pump.send_later(handle, stream + 400, b"no such stream", True)
    pump.send_later(handle + 1, stream, b"no such connection", True)
    pump.send_later(handle, stream, b"an answer", True)
    pump.send_later(handle, stream, b"after its end", True)
    wire.until(lambda: stream in wire.client.fins)
    assert wire.client.got[stream] == b"an answer"


def test_what_waits_counts_as_not_acknowledged(wire: Wire) -> None:
    server = server_of(wire)
    pump, handle = server.pump, server.hand_over.handle
    stream = wire.client.open(b"?", True)
    wire.until(lambda: stream in server.fins)
    pump.send_later(handle, stream, b"12345", False)
    assert pump.unacked(handle) == 5
    pump.send_later(handle, stream, b"678", False)
    assert pump.progress(handle) == {stream: 0}
    assert pump.unacked(handle) == 8
