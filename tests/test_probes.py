"""How handshakes and answers get over a link that loses datagrams, in a clock of its own."""

from pathlib import Path

import pytest
from pumped_ends import CLIENT, Pumped, Wire, join

KINDS = pytest.mark.parametrize("kinds", ["pumped-pumped", "plain-plain"])
FIRST_PTO = 0.2  # twice the initial round trip (RFC 9002 section 6.2.2)
SMALLEST_INITIAL = 1200


def sent_within(wire: Wire, seconds: float, to_server: bool) -> int:
    before = wire.sent[to_server]
    wire.run_for(seconds)
    return wire.sent[to_server] - before


@KINDS
def test_a_client_probes_with_two_datagrams_that_can_open_a_connection(
    state_dir: Path, kinds: str
) -> None:
    wire = join(state_dir, kinds)
    sizes: list[int] = []

    def lose(to_server: bool, data: bytes) -> bool:
        sizes.append(len(data))
        return True

    wire.drop = lose
    assert sent_within(wire, FIRST_PTO / 2, to_server=True) == 1
    # At 0.2, 0.6 and 1.4 s: the time-out doubles.
    assert [sent_within(wire, after, to_server=True) for after in (0.2, 0.4, 0.8)] == [2, 2, 2]
    assert sizes == [SMALLEST_INITIAL] * 7


@KINDS
def test_a_server_probes_twice_within_three_times_what_came(state_dir: Path, kinds: str) -> None:
    """RFC 9000 section 8.1: an address that is not validated gets no more than that."""
    wire = join(state_dir, kinds)
    came: list[int] = []
    went: list[int] = []

    def only_the_first(to_server: bool, data: bytes) -> bool:
        if to_server and came:
            return True
        (came if to_server else went).append(len(data))
        return not to_server

    wire.drop = only_the_first
    wire.run_for(FIRST_PTO / 2)
    first = len(went)
    assert first
    assert sent_within(wire, FIRST_PTO, to_server=False) == 2
    wire.run_for(10.0)
    assert len(went) == first + 2
    assert sum(went) <= 3 * sum(came) == 3 * SMALLEST_INITIAL


@KINDS
def test_a_flight_of_two_datagrams_is_probed_with_once(state_dir: Path, kinds: str) -> None:
    wire = join(state_dir, kinds)
    server = wire.server.quic.configuration
    server.certificate_chain = [server.certificate] * 2
    wire.drop = lambda to_server, data: not to_server
    wire.run_for(FIRST_PTO / 2)
    assert wire.sent[False] == 2
    wire.run_for(FIRST_PTO)  # the client probes, so that the server may send six more
    assert wire.sent[False] == 4  # aioquic's answer to a repeated Initial
    assert sent_within(wire, FIRST_PTO, to_server=False) == 2  # its own time-out


def test_a_handshake_that_completed_meanwhile_is_not_probed_for(state_dir: Path) -> None:
    wire = join(state_dir, "plain-plain")
    server, finished = wire.server.quic, []

    def keep(to_server: bool, data: bytes) -> bool:
        if to_server and wire.client.up:
            finished.append(data)
        return to_server and wire.client.up

    wire.drop = keep
    wire.until(lambda: wire.client.up)
    assert finished
    due = server.get_timer()
    assert due is not None
    server.handle_timer(due)
    for data in finished:
        server.receive_datagram(data, CLIENT, due)
    assert len(server.datagrams_to_send(due)) == 1


@KINDS
def test_handshakes_over_a_link_that_loses_half(state_dir: Path, kinds: str) -> None:
    """One datagram a time-out leaves one in a hundred undone after 30 s."""
    times = []
    for seed in range(100):
        wire = join(state_dir, kinds, seed=seed, loss=0.5)
        began = wire.now
        wire.until(lambda wire=wire: wire.client.up and wire.server.up, within=60.0)  # type: ignore[misc]
        times.append(wire.now - began)
    assert max(times) < 30.0
    assert sorted(times)[len(times) // 2] < 2.0


@KINDS
def test_a_handshake_without_loss_sends_nothing_twice(state_dir: Path, kinds: str) -> None:
    wire = join(state_dir, kinds)
    wire.until(lambda: wire.client.up and wire.server.up)
    wire.run_for(1.0)
    assert wire.sent[True] <= 5
    assert wire.sent[False] <= 5


# ---------------------------------------------------------------- requests

KEEP_ALIVE = 0.5  # a client pings so often while it waits


def ping(wire: Wire) -> None:
    client = wire.client
    if isinstance(client, Pumped):
        client.pump.ping(client.hand_over.handle)
    else:
        client.quic.send_ping(1)
    wire.act()


def ask(wire: Wire, within: float) -> float:
    """How long a request takes from the first flight to the answer's end, in seconds."""
    client, server = wire.client, wire.server
    began = wire.now
    wire.until(lambda: client.up)
    stream = client.open(b"r" * 800, True)
    answered = False

    def is_answered() -> bool:
        nonlocal answered
        if not answered and stream in server.fins:
            answered = True
            server.send(stream, b"verdict", False)
            wire.act()
            server.send(stream, b"a" * 800, True)
        return stream in client.fins

    while not wire.comes_true(is_answered, KEEP_ALIVE):
        assert wire.now - began < within
        ping(wire)
    return wire.now - began


@pytest.mark.parametrize("kinds", ["plain-pumped", "pumped-pumped"])
def test_requests_over_a_link_that_loses_a_third(state_dir: Path, kinds: str) -> None:
    """Acknowledgements are lost too: whoever waits for them alone waits ever longer."""
    link = {"loss": 0.3, "duplication": 0.1, "jitter": 0.01, "delay": 0.001}
    times = [ask(join(state_dir, kinds, seed=seed, **link), within=5.0) for seed in range(150)]
    assert sorted(times)[len(times) // 2] < 0.5


# ---------------------------------------------------------------- what probes repeat


def lose_answers(wire: Wire, count: int) -> set[int]:
    """Have the server answer so many requests, in packets of their own, all of which are lost."""
    streams = {wire.client.open(b"request", True) for _ in range(count)}
    wire.until(lambda: wire.server.fins >= streams)
    wire.run_for(1.0)
    wire.drop = lambda to_server, data: True
    for stream in streams:
        wire.server.send(stream, b"answer", True)
        wire.act()
    return streams


@pytest.mark.parametrize("kinds", ["plain-pumped", "pumped-pumped"])
def test_time_outs_get_round_to_all_that_is_outstanding(state_dir: Path, kinds: str) -> None:
    """No acknowledgement comes back, so that each time-out knows no more than the one before."""
    wire = join(state_dir, kinds)
    wire.until(lambda: wire.client.up and wire.server.up)
    streams = lose_answers(wire, 6)
    wire.drop = lambda to_server, data: to_server
    wire.until(lambda: wire.client.fins >= streams, within=5.0)


@pytest.mark.parametrize("kinds", ["plain-pumped", "pumped-pumped"])
def test_the_probes_of_a_time_out_carry_the_control_frames(state_dir: Path, kinds: str) -> None:
    """Those that were lost before it, in its own datagrams and not in those of the next."""
    wire = join(state_dir, kinds)
    client = wire.client.quic
    times: list[float] = []

    def lose(to_server: bool, data: bytes) -> bool:
        if to_server:
            return bool(wire.server.up)
        if not data[0] & 0x80:
            times.append(wire.now)
        return not data[0] & 0x80 and times[-1] == times[0]

    wire.drop = lose
    wire.until(lambda: wire.server.up)
    wire.until(lambda: client._handshake_confirmed, within=5.0)
    assert len(set(times)) == 2
