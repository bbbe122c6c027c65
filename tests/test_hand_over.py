"""Connections that pass from aioquic to the packet pump, against aioquic on the other side."""

import random
from pathlib import Path
from typing import Any

import pytest
from aioquic.quic.connection import QuicConnection
from aioquic.quic.crypto import CryptoPair
from aioquic.quic.packet import QuicErrorCode
from pumped_ends import (
    CLIENT,
    REBOUND,
    SERVER,
    Pumped,
    Wire,
    connect,
    join,
)

from dataplane import pump as events
from dataplane import quic as private
from dataplane import quic_tap
from dataplane.errors import DataplaneError
from dataplane.pump import PATH_BYTES, Event, path_of

BOTH = pytest.mark.parametrize("kinds", ["plain-pumped", "pumped-plain", "pumped-pumped"])


def pumped(*ends: Any) -> list[Pumped]:
    return [end for end in ends if isinstance(end, Pumped)]


def pumped_of(wire: Wire) -> list[Pumped]:
    return pumped(wire.client, wire.server)


def echo(wire: Wire, data: bytes, within: float = 120.0) -> None:
    """Send on a new stream, have it answered with the same bytes, and check both."""
    stream = wire.client.open(data, True)
    wire.until(lambda: stream in wire.server.fins, within)
    assert bytes(wire.server.got[stream]) == data
    wire.server.send(stream, data, True)
    wire.until(lambda: stream in wire.client.fins, within)
    assert bytes(wire.client.got[stream]) == data


def settle(wire: Wire) -> None:
    """Let acknowledgements come; nothing is left of aioquic's in the packets."""
    wire.run_for(2.0)
    for end in pumped_of(wire):
        end.check_clean()
        assert end.hand_over._tokens == {}
        assert end.pump.unacked(end.hand_over.handle) == 0


# ---------------------------------------------------------------- aioquic's private names


@pytest.mark.parametrize(
    "name", ["_cryptos", "_host_cids", "_peer_cid", "_spaces", "_loss", "_remote_max_data"]
)
def test_a_private_name_that_is_gone_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(QuicConnection):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            delattr(self, name)

    monkeypatch.setattr(private, "QuicConnection", Changed)
    with pytest.raises(DataplaneError, match=f"lacks .*{name}.*: install 1.7.2"):
        private.check()


def test_a_private_name_of_a_part_is_told_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Changed(CryptoPair):
        @property
        def key_phase(self) -> int:
            raise AttributeError

    monkeypatch.setattr(private, "CryptoPair", Changed)
    with pytest.raises(DataplaneError, match=r"lacks pair\.key_phase: install"):
        private.check()


# ---------------------------------------------------------------- the passage


@BOTH
def test_the_handshake_ends_in_the_pump(state_dir: Path, kinds: str) -> None:
    wire = connect(state_dir, kinds)
    for end in pumped_of(wire):
        assert end.hand_over.adopted
    echo(wire, b"first")
    wire.until(lambda: wire.client.quic._handshake_confirmed)
    settle(wire)
    # All of the connection IDs that each announced have come to the other.
    for one, other in ((wire.client, wire.server), (wire.server, wire.client)):
        announced = {c.cid for c in one.quic._host_cids}
        known = {c.cid for c in other.quic._peer_cid_available} | {other.quic._peer_cid.cid}
        assert announced == known


@BOTH
def test_aioquic_sends_no_short_packets(state_dir: Path, kinds: str) -> None:
    wire = connect(state_dir, kinds)
    echo(wire, bytes(5000))
    settle(wire)
    if isinstance(wire.client, Pumped):
        assert wire.client.by_aioquic  # the handshake's end at least
    for end in pumped_of(wire):
        for data in end.by_aioquic:
            assert data[0] & 0x80
            assert quic_tap.split(data, 8) == len(data)


def test_a_request_coalesced_with_the_handshakes_end_costs_no_time_out(state_dir: Path) -> None:
    """The client's Finished and its first stream come in one datagram."""
    wire = join(state_dir, "plain-pumped")
    wire.client.on_up = lambda: wire.client.open(b"early", True)
    wire.until(lambda: wire.client.up)
    wire.until(lambda: 0 in wire.server.fins, within=0.0101)  # one way
    assert wire.server.got[0] == b"early"
    settle(wire)


def test_packets_that_overtake_the_handshakes_end_are_kept(state_dir: Path) -> None:
    wire = join(state_dir, "plain-pumped")
    server = wire.server
    assert isinstance(server, Pumped)
    kept: list[bytes] = []

    def hold_back(to_server: bool, data: bytes) -> bool:
        """Take the datagrams that end the handshake apart, and bring the tail first."""
        at = quic_tap.split(data, 8)
        if to_server and data[0] & 0x80 and at < len(data) and not kept:
            kept.append(data[:at].ljust(len(data), b"\0"))
            server.receive(data[at:], CLIENT, wire.now)
            return True
        return False

    wire.drop = hold_back
    wire.client.on_up = lambda: wire.client.open(b"early", True)
    wire.until(lambda: wire.client.up)
    assert kept, "no datagram ended the handshake and carried more"
    assert not server.hand_over.adopted
    server.receive(kept[0], CLIENT, wire.now)
    assert server.hand_over.adopted
    server.act(wire.now)
    assert server.got[0] == b"early"


@pytest.mark.parametrize("seed", range(4))
@BOTH
def test_data_comes_through_loss_duplication_and_reordering(
    state_dir: Path, kinds: str, seed: int
) -> None:
    wire = connect(state_dir, kinds, seed=seed, loss=0.15, duplication=0.1, jitter=0.02)
    data = random.Random(seed)
    for size in (1, 100, 3000, 60_000):
        echo(wire, data.randbytes(size), within=600.0)
    wire.until(lambda: wire.client.quic._handshake_confirmed)
    wire.run_for(60.0)
    for end in pumped_of(wire):
        end.check_clean()


@BOTH
def test_a_large_transfer_passes_every_limit(state_dir: Path, kinds: str) -> None:
    """More than the connection's and the stream's first windows of a mebibyte."""
    wire = connect(state_dir, kinds, delay=0.001)
    echo(wire, random.Random(5).randbytes(3 << 20))
    settle(wire)


@BOTH
def test_more_streams_than_were_granted_at_first(state_dir: Path, kinds: str) -> None:
    wire = connect(state_dir, kinds)
    for number in range(300):
        echo(wire, b"%d" % number)
    settle(wire)


# ---------------------------------------------------------------- the control plane's frames


def test_lost_control_frames_are_written_again(state_dir: Path) -> None:
    """HANDSHAKE_DONE and NEW_CONNECTION_ID are in the server's first 1-RTT packets."""
    wire = join(state_dir, "plain-pumped")
    dropped = 0

    def first_short(to_server: bool, data: bytes) -> bool:
        nonlocal dropped
        if to_server or data[0] & 0x80 or dropped >= 3:
            return False
        dropped += 1
        return True

    wire.drop = first_short
    wire.until(lambda: wire.client.up and wire.server.up)
    wire.until(lambda: wire.client.quic._handshake_confirmed)
    wire.until(lambda: len(wire.client.quic._peer_cid_available) == 7)
    assert dropped == 3
    settle(wire)


@pytest.mark.parametrize("kinds", ["plain-pumped", "pumped-pumped"])
def test_one_probe_time_out_repeats_control_frames_and_data(state_dir: Path, kinds: str) -> None:
    """No acknowledgement comes: a probe has to carry what is outstanding, not just ask for one."""
    wire = join(state_dir, kinds)
    client, server = wire.client, wire.server
    mute = False

    def lose(to_server: bool, data: bytes) -> bool:
        return mute if to_server else not mute and not data[0] & 0x80

    wire.drop = lose
    wire.until(lambda: client.up and server.up)
    stream = client.open(b"request", True)
    wire.until(lambda: stream in server.fins)
    server.send(stream, b"answer", True)
    wire.run_for(0.05)  # both have left by now, and were lost
    assert not client.quic._handshake_confirmed
    assert stream not in client.got
    mute = True
    wire.run_for(1.0)  # a few time-outs, of which the first is enough
    assert client.quic._handshake_confirmed
    assert len(client.quic._peer_cid_available) == 7
    assert client.got[stream] == b"answer"
    mute, wire.drop = False, lambda to_server, data: False
    echo(wire, b"and on")
    settle(wire)


@pytest.mark.parametrize("kinds", ["plain-pumped", "pumped-pumped"])
def test_the_two_probes_of_a_time_out_carry_different_data(state_dir: Path, kinds: str) -> None:
    wire = connect(state_dir, kinds)
    echo(wire, b"before")
    settle(wire)
    streams = [wire.client.open(b"request", True) for _ in range(2)]
    wire.until(lambda: wire.server.fins >= set(streams))
    settle(wire)
    wire.drop = lambda to_server, data: True
    for stream in streams:
        wire.server.send(stream, b"answer", True)
        wire.act()  # so that each has a packet of its own
    wire.drop = lambda to_server, data: to_server  # no acknowledgement comes
    wire.until(lambda: wire.client.fins >= set(streams), within=0.5)


def test_a_peer_that_is_heard_again_need_not_wait_for_the_time_out(state_dir: Path) -> None:
    """After half a minute of nothing the next time-out is as far; a packet says that it is over."""
    wire = connect(state_dir, "plain-pumped")
    echo(wire, b"before")
    stream = wire.client.open(b"request", True)
    wire.until(lambda: stream in wire.server.fins)
    settle(wire)
    wire.drop = lambda to_server, data: True
    wire.server.send(stream, b"answer", True)
    wire.run_for(30.0)
    wire.drop = lambda to_server, data: False
    wire.client.quic.send_ping(1)
    wire.until(lambda: stream in wire.client.fins, within=0.2)
    settle(wire)


@pytest.mark.parametrize("kinds", ["plain-pumped", "pumped-plain"])
def test_the_peers_key_updates_are_followed(state_dir: Path, kinds: str) -> None:
    wire = connect(state_dir, kinds)
    echo(wire, b"before")
    wire.until(lambda: wire.client.quic._handshake_confirmed)
    plain = wire.client if kinds == "plain-pumped" else wire.server
    for number in range(5):
        plain.quic.request_key_update()
        echo(wire, b"update %d" % number)
    settle(wire)


@BOTH
def test_the_pump_updates_its_own_keys(state_dir: Path, kinds: str) -> None:
    wire = connect(state_dir, kinds)
    wire.until(lambda: wire.client.quic._handshake_confirmed)
    for end in pumped_of(wire):
        end.pump.update_keys_every(end.hand_over.handle, 10)
    for number in range(60):
        echo(wire, b"%d" % number)
    for end in pumped_of(wire):
        stats = end.pump.conn_stats(end.hand_over.handle)
        assert stats is not None
        assert stats.key_updates >= 3
        assert stats.forged == 0
    settle(wire)


def test_connection_ids_change_and_their_routes_with_them(state_dir: Path) -> None:
    wire = connect(state_dir, "plain-pumped")
    server = wire.server
    assert isinstance(server, Pumped)
    wire.until(lambda: len(wire.client.quic._peer_cid_available) == 7)
    for _ in range(10):
        before = wire.client.quic._peer_cid.cid
        wire.client.quic.change_connection_id()
        echo(wire, b"changed")
        wire.until(lambda before=before: before not in server.hand_over._cids)  # type: ignore[misc]
        assert len(server.hand_over._cids) == 8
        assert wire.client.quic._peer_cid.cid in server.hand_over._cids
        wire.until(lambda: len(wire.client.quic._peer_cid_available) >= 1)
    settle(wire)


@pytest.mark.parametrize(
    "new_path", [REBOUND, path_of(("127.0.0.9", 50_000))], ids=["port", "address"]
)
def test_a_client_that_moves_is_followed_once_its_path_is_validated(
    state_dir: Path, new_path: bytes
) -> None:
    wire = connect(state_dir, "plain-pumped")
    echo(wire, b"here")
    settle(wire)
    wire.client_path = new_path
    echo(wire, b"there")
    assert private.path_in_use(wire.server.quic)[0] == new_path
    wire.until(lambda: private.path_in_use(wire.server.quic)[1])
    wire.answered_to.clear()
    echo(wire, bytes(50_000))
    assert set(wire.answered_to) == {new_path}
    settle(wire)


def test_a_probed_path_is_answered_there_and_not_gone_to(state_dir: Path) -> None:
    wire = connect(state_dir, "plain-pumped")
    server = wire.server
    assert isinstance(server, Pumped)
    echo(wire, b"here")
    settle(wire)
    cid = sorted(server.hand_over._cids)[0]
    challenge = b"\x1a" + b"question"
    body = REBOUND + cid + challenge
    assert len(body) == PATH_BYTES + 8 + 9
    event = Event(events.CONTROL, 1, server.hand_over.handle, 1200, 10_000, 0, body)
    server.hand_over.on_event(event, wire.now)
    built = server.act(wire.now)
    assert REBOUND in {path for _, path in built}
    assert private.path_in_use(server.quic)[0] == CLIENT


# ---------------------------------------------------------------- ends


@BOTH
@pytest.mark.parametrize("closer", ["client", "server"])
def test_a_close_is_told(state_dir: Path, kinds: str, closer: str) -> None:
    wire = connect(state_dir, kinds)
    echo(wire, b"x")
    settle(wire)
    ends = (wire.client, wire.server)
    one, other = ends if closer == "client" else ends[::-1]
    if isinstance(one, Pumped):
        one.hand_over.close(7, "enough")
    else:
        one.quic.close(error_code=7, reason_phrase="enough")
    wire.until(lambda: one.lost and other.lost)
    for end in ends:
        assert end.lost is not None
        assert (end.lost.error_code, end.lost.reason_phrase) == (7, "enough")
    for end in pumped_of(wire):
        end.hand_over.forget()
        assert end.pump.last_received(end.hand_over.handle) == 0


def test_a_lost_close_is_repeated(state_dir: Path) -> None:
    wire = connect(state_dir, "plain-pumped")
    server = wire.server
    assert isinstance(server, Pumped)
    settle(wire)
    lost = 0

    def first(to_server: bool, data: bytes) -> bool:
        nonlocal lost
        lost += not to_server
        return not to_server and lost == 1

    wire.drop = first
    server.hand_over.close(9, "over")
    wire.act()
    assert lost == 1
    wire.client.open(b"are you there", True)
    wire.until(lambda: wire.client.lost, within=5.0)
    assert wire.client.lost is not None
    assert wire.client.lost.error_code == 9


@BOTH
def test_silence_ends_a_connection_in_its_time(state_dir: Path, kinds: str) -> None:
    wire = connect(state_dir, kinds, idle_timeout=20.0)
    echo(wire, b"x")
    settle(wire)
    for _ in range(4):  # Traffic that aioquic does not see keeps it.
        wire.run_for(15.0)
        echo(wire, b"still here")
    settle(wire)
    heard = wire.now - 2.0
    wire.drop = lambda to_server, data: True
    wire.until(lambda: wire.client.lost and wire.server.lost, within=100.0)
    assert 20.0 <= wire.now - heard <= 22.0
    for end in (wire.client, wire.server):
        assert end.lost is not None
        assert end.lost.reason_phrase == "Idle timeout"


def test_a_sender_without_an_answer_gets_one_more_time_out(state_dir: Path) -> None:
    """What is sent after the last packet came starts the idle time anew, once."""
    wire = connect(state_dir, "pumped-plain", idle_timeout=20.0)
    echo(wire, b"x")
    settle(wire)
    wire.run_for(15.0)
    start = wire.now
    wire.drop = lambda to_server, data: True
    wire.client.open(b"anybody", True)
    wire.until(lambda: wire.client.lost, within=100.0)
    assert 20.0 <= wire.now - start <= 41.0


def test_a_broken_rule_closes_with_its_error(state_dir: Path) -> None:
    """A stream of the server's own that the client writes to: STREAM_STATE_ERROR."""
    wire = connect(state_dir, "plain-pumped")
    settle(wire)
    quic = wire.client.quic
    stream = quic._get_or_create_stream_for_send(0)
    del quic._streams[0]
    stream.stream_id = 1
    quic._streams[1] = stream
    stream.sender._stream_id = 1
    stream.sender.write(b"not mine", True)
    wire.until(lambda: wire.client.lost)
    assert wire.client.lost is not None
    assert wire.client.lost.error_code == QuicErrorCode.STREAM_STATE_ERROR


def test_a_stateless_reset_ends_a_client(state_dir: Path) -> None:
    wire = connect(state_dir, "pumped-plain")
    client = wire.client
    assert isinstance(client, Pumped)
    echo(wire, b"x")
    settle(wire)
    cid = client.quic._peer_cid
    token = cid.stateless_reset_token
    assert token
    client.receive(b"\x41" + bytes(24) + b"not the token!!!", SERVER, wire.now)
    client.act(wire.now)
    assert client.lost is None
    client.receive(b"\x41" + bytes(24) + token, SERVER, wire.now)
    assert client.act(wire.now) == []
    assert client.lost is not None
    assert "does not know" in client.lost.reason_phrase


def test_a_servers_tokens_are_derived_from_its_connection_ids(state_dir: Path) -> None:
    wire = connect(state_dir, "plain-pumped")
    wire.until(lambda: len(wire.client.quic._peer_cid_available) == 7)
    known = [wire.client.quic._peer_cid, *wire.client.quic._peer_cid_available]
    assert len(known) == 8
    for connection_id in known:
        assert connection_id.stateless_reset_token == private.reset_token(connection_id.cid)
