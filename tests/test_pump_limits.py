"""Where the packet pump meets a limit: a full take, many sockets, an address that nobody proved, no
credit, too many gaps. And the constants that C and Python must have alike.
"""

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pumped_ends
import pytest
from aioquic.buffer import encode_uint_var as var
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.packet import QuicPacketType
from aioquic.quic.packet_builder import QuicPacketBuilder
from aioquic.tls import Epoch
from pumped_ends import CLIENT, REBOUND, Plain, Pumped, Wire, connect

from dataplane import connection, egress, ingress, pump, refusals
from dataplane._native import ffi, lib
from dataplane.errors import ResetCode
from dataplane.latency import Series

PUMP_SOURCES = Path(__file__).parent.parent / "native" / "pump"
QUIC_SOURCES = Path(__file__).parent.parent / "native" / "quic"

TAKE = pump.TAKE_BYTES


def server_of(wire: Wire) -> Pumped:
    assert isinstance(wire.server, Pumped)
    return wire.server


# ---------------------------------------------------------------- more than a take has room for


def leave_unread(server: Pumped, patch: pytest.MonkeyPatch) -> None:
    """From now on the server's packets go their way, but its application reads no event."""
    handle = server.hand_over.handle

    def act(now: float) -> list[tuple[bytes, bytes]]:
        at, out = int(now * 1e9), []
        server.pump.on_timer(handle, at)
        while (built := server.pump.build(handle, at)) is not None:
            out.append(built)
        return out

    patch.setattr(server, "act", act)


def all_events(server: Pumped) -> list[pump.Event]:
    """Take all that is told now, the control plane's left out."""
    found: list[pump.Event] = []
    while some := server.pump.events():
        found += some
    return [event for event in found if event.kind not in (pump.CONTROL, pump.DELIVERED)]


SIZES = [
    1, TAKE // 4, TAKE // 4 + 1, TAKE - 2 * pump.EVENT_BYTES, TAKE - pump.EVENT_BYTES,
    TAKE - pump.EVENT_BYTES + 1, TAKE, TAKE + 1, 400_000,
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_a_stream_that_was_reset_are_all_told(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = connect(tmp_path, "plain-pumped", delay=0.001)
    server = server_of(wire)
    leave_unread(server, monkeypatch)
    sent = bytes(number % 251 for number in range(size))
    broken = wire.client.open(sent, False)
    wire.run_for(3)
    wire.client.quic.reset_stream(broken, 7)
    wire.run_for(1)
    behind = wire.client.open(b"behind it", True)
    wire.run_for(1)
    told = all_events(server)
    kinds = [event.kind for event in told if event.stream == broken]
    data = [event for event in told if event.stream == broken and event.kind == pump.DATA]
    assert b"".join(event.body for event in data) == sent
    assert not any(event.flags for event in data)
    assert kinds[len(data)] == pump.RESET
    assert pump.DATA not in kinds[len(data) :]
    later = [event for event in told if event.stream == behind and event.kind == pump.DATA]
    assert [(event.body, event.flags) for event in later] == [(b"behind it", 1)]
    again = wire.client.open(b"once more", True)
    wire.run_for(1)
    assert [(event.stream, event.body) for event in all_events(server)] == [(again, b"once more")]


@pytest.mark.parametrize("size", [0, *SIZES])
def test_bytes_of_a_stream_that_closed_are_all_told_with_their_end(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = connect(tmp_path, "plain-pumped", delay=0.001)
    server = server_of(wire)
    leave_unread(server, monkeypatch)
    sent = bytes(number % 251 for number in range(size))
    stream = wire.client.open(sent, True)
    wire.run_for(3)
    server.send(stream, b"", True)
    wire.run_for(1)
    told = [event for event in all_events(server) if event.stream == stream]
    data = [event for event in told if event.kind == pump.DATA]
    assert b"".join(event.body for event in data) == sent
    assert [event.flags for event in data] == [0] * (len(data) - 1) + [1]
    assert [event.kind for event in told[len(data) :]] == [pump.CLOSED]


# ---------------------------------------------------------------- the thread's end

SOCKETS, STARTS = 20, 50  # more sockets than are asked in turns
HALT_S = 30.0
START_AND_HALT = f"""
import socket
from dataplane.pump import Pump

for _ in range({STARTS}):
    pump, sockets = Pump(), []
    for _ in range({SOCKETS}):
        sockets.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
        sockets[-1].bind(("127.0.0.1", 0))
        pump.listen(sockets[-1].fileno())
    pump.start_thread()
    for _ in range(3):
        sockets[0].sendto(b"?" * 20, sockets[5].getsockname())  # it is awake when the stop comes
    pump.stop_thread()
    for one in sockets:
        one.close()
print("stopped", flush=True)
"""


def test_a_pump_of_many_sockets_always_stops() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", START_AND_HALT],
        capture_output=True, text=True, timeout=HALT_S, check=False,
    )  # fmt: skip
    assert (ran.stdout, ran.returncode) == ("stopped\n", 0), ran.stderr


# ---------------------------------------------------------------- an address that nobody proved


class Spoofed:
    """A wire whose client seems to move to an address where nothing is ever received.

    Attributes:
        came: Bytes from there.
        went: Bytes sent there.
    """

    def __init__(self, wire: Wire, patch: pytest.MonkeyPatch) -> None:
        self.came = self.went = 0
        self.server = server_of(wire)
        receive, act = self.server.receive, self.server.act

        def counted(data: bytes, path: bytes, now: float) -> None:
            self.came += len(data) if path == REBOUND else 0
            receive(data, path, now)

        def kept_back(now: float) -> list[tuple[bytes, bytes]]:
            out = act(now)
            self.went += sum(len(data) for data, path in out if path == REBOUND)
            assert self.went <= 3 * self.came
            return [(data, path) for data, path in out if path != REBOUND]

        patch.setattr(self.server, "receive", counted)
        patch.setattr(self.server, "act", kept_back)
        wire.client_path = REBOUND


def ping_on(wire: Wire, times: int) -> None:
    for number in range(times):
        wire.client.quic.send_ping(number)
        wire.run_for(0.0005)


def lose_every_second(wire: Wire) -> None:
    """Make every acknowledgement long: there are many gaps to tell of."""
    count = 0

    def drop(to_server: bool, data: bytes) -> bool:
        nonlocal count
        count += to_server
        return to_server and count % 2 == 0

    wire.drop = drop
    ping_on(wire, 120)


@pytest.fixture
def gappy(tmp_path: Path) -> Wire:
    wire = connect(tmp_path, "plain-pumped", delay=0.001)
    wire.run_for(2)
    lose_every_second(wire)
    return wire


def test_acknowledgements_count_against_an_address_nobody_proved(
    gappy: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoofed = Spoofed(gappy, monkeypatch)
    ping_on(gappy, 200)
    assert not spoofed.server.quic._network_paths[0].is_validated
    assert spoofed.came > 1000
    assert spoofed.came < spoofed.went <= 3 * spoofed.came


@pytest.mark.parametrize("reason_bytes", [0, 900])
def test_a_close_counts_against_an_address_nobody_proved(
    reason_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = connect(tmp_path, "plain-pumped", delay=0.001)
    wire.run_for(2)
    spoofed = Spoofed(wire, monkeypatch)
    ping_on(wire, 8)
    assert not spoofed.server.quic._network_paths[0].is_validated
    spent = spoofed.went
    assert spent > 0
    spoofed.server.hand_over.close(0, "x" * reason_bytes)
    wire.run_for(0.2)
    left = 3 * spoofed.came - spent
    assert (spoofed.went > spent) == (reason_bytes < left)  # it leaves if there is room for it


# ---------------------------------------------------------------- probes without credit

# Spent before the congestion window is full, and just when it is, so that a stream that is opened
# then has not even been looked at when the probe is due.
CREDITS = (5_000, 11_650)
WINDOW = 12_000


@pytest.mark.parametrize("credit", CREDITS)
@pytest.mark.parametrize("more", [0, 1, 3])
def test_a_probe_leaves_although_credit_is_spent(
    credit: int, more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pumped_ends.configuration

    def stingy(state_dir: Path, is_client: bool, idle_timeout: float) -> QuicConfiguration:
        of_one = made(state_dir, is_client, idle_timeout)
        of_one.max_data = of_one.max_data if is_client else credit
        return of_one

    monkeypatch.setattr(pumped_ends, "configuration", stingy)
    wire = connect(tmp_path, "pumped-plain", delay=0.001)
    wire.run_for(1)
    client = wire.client
    assert isinstance(client, Pumped)
    wire.drop = lambda to_server, data: to_server
    client.open(bytes(20_000), False)
    sent = [len(data) for data, _ in client.act(wire.now)]
    assert credit < sum(sent) <= WINDOW
    due = client.pump.timer(client.hand_over.handle) / 1e9
    act, probes = client.act, list[tuple[float, int]]()

    def logged(now: float) -> list[tuple[bytes, bytes]]:
        if out := act(now):
            probes.append((now, len(out)))
        return out

    monkeypatch.setattr(client, "act", logged)
    for _ in range(more):
        client.open(b"blocked", True)
    start = wire.now
    wire.run_for(2.5)
    assert len(probes) >= 4
    assert {count for _, count in probes} <= {1, 2}
    assert probes[0][0] == pytest.approx(due, abs=1e-3)
    waits = [after - before for before, after in pairwise([start, *(at for at, _ in probes)])]
    assert all(after > 1.5 * before for before, after in pairwise(waits))  # each a time-out's own


# ---------------------------------------------------------------- gaps

DP_TAKEN, DP_NOT_KEPT, DP_DUPLICATE = 0, 4, 3
RANGES_MAX = 1024
PER_PACKET = 10
GAPPED = 4  # the number of the stream


def packet(end: Plain, payload: bytes) -> bytes:
    """Seal a 1-RTT packet of aioquic's with such frames."""
    quic = end.quic
    builder = QuicPacketBuilder(
        host_cid=quic.host_cid,
        is_client=True,
        max_datagram_size=1200,
        peer_cid=quic._peer_cid.cid,
        version=quic._version or 1,
        packet_number=quic._packet_number,
    )
    builder.start_packet(QuicPacketType.ONE_RTT, quic._cryptos[Epoch.ONE_RTT])
    builder.start_frame(payload[0], capacity=len(payload)).push_bytes(payload[1:])
    datagrams, _ = builder.flush()
    quic._packet_number = builder.packet_number
    return bytes(datagrams[0])


def frame(offset: int, data: bytes = b"z") -> bytes:
    return b"\x0e" + var(GAPPED) + var(offset) + var(len(data)) + data


def test_a_packet_with_too_many_gaps_is_not_kept_and_nothing_breaks(tmp_path: Path) -> None:
    wire = connect(tmp_path, "plain-pumped", delay=0.001)
    wire.run_for(1)
    server, client = server_of(wire), wire.client
    assert isinstance(client, Plain)

    def inject(data: bytes) -> int:
        at = int(wire.now * 1e9)
        return server.pump.inject(server.hand_over.handle, data, CLIENT, at, at)

    def gaps(first: int, count: int) -> bytes:
        """Make so many ranges of one byte, with a gap before each."""
        return packet(client, b"".join(frame(1 + 2 * (first + n)) for n in range(count)))

    kept = 0
    while kept + PER_PACKET <= RANGES_MAX:
        assert inject(gaps(kept, PER_PACKET)) == DP_TAKEN
        kept += PER_PACKET
    left = RANGES_MAX - kept
    assert 0 < left < PER_PACKET
    refused = gaps(kept, left + 2)
    assert inject(refused) == DP_NOT_KEPT
    assert inject(refused) == DP_NOT_KEPT
    assert inject(gaps(kept, left)) == DP_TAKEN  # nothing of the other was kept
    assert inject(gaps(RANGES_MAX, 1)) == DP_NOT_KEPT
    assert pump.FAILED not in [event.kind for event in all_events(server)]

    for offset in range(0, 2 * RANGES_MAX, 1000):
        assert inject(packet(client, frame(offset, bytes(1000)))) == DP_TAKEN
    assert inject(refused) == DP_TAKEN  # it had not been acknowledged
    assert inject(refused) == DP_DUPLICATE

    stream = client.open(b"and on", True)
    wire.until(lambda: stream in server.fins)
    server.send(stream, b"it lives", True)
    wire.until(lambda: stream in client.fins)
    assert client.got[stream] == b"it lives"
    assert client.lost is None
    assert pump.FAILED not in server.taken


# ---------------------------------------------------------------- what C and Python both have

NUMBERS = re.compile(r"[\d\s.()*<]+")


def defined(source: Path, name: str) -> float:
    """Return the value of a macro, which is a number or a simple term."""
    text = re.sub(r"\\\n", " ", source.read_text())
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    found = re.findall(rf"^#define\s+{name}\s+(\S.*)$", text, flags=re.MULTILINE)
    assert len(found) == 1, f"{name} stands {len(found)} times in {source.name}"
    term = re.sub(r"\bU?INT64_C\((\d+)\)", r"\1", found[0])
    assert NUMBERS.fullmatch(term), f"{name} is {term}"
    value: float = eval(term)
    return value


def enumerators(source: Path, name: str, prefix: str) -> dict[str, int]:
    found = re.search(rf"enum {name} \{{(.*?)\}};", source.read_text(), flags=re.DOTALL)
    assert found
    return {key: int(value) for key, value in re.findall(rf"{prefix}(\w+) = (\d+)", found.group(1))}


def test_limits_of_the_raw_front_are_the_same() -> None:
    inside = PUMP_SOURCES / "raw_inside.h"
    assert defined(inside, "DP_RAW_BUFFER_LIMIT") == connection.BUFFER_LIMIT == 4 << 20
    assert defined(inside, "DP_RAW_HOLD_NS") == egress.HOLD_S * 1e9 == 2e9
    assert defined(PUMP_SOURCES / "raw_out.c", "HOLD_WEIGHT") == egress._HOLD_WEIGHT
    assert defined(inside, "DP_RAW_RETRY_MS") == refusals.RETRY_MS
    assert defined(inside, "DP_RAW_RETRY_MS_MAX") == ingress._RETRY_MS_MAX


def test_reset_codes_are_the_same() -> None:
    inside = PUMP_SOURCES / "raw_inside.h"
    for code in (ResetCode.RUNTIME_ERROR, ResetCode.SLOW_READER):
        assert defined(inside, f"DP_RAW_{code.name}") == code
    codes = {code.value for code in ResetCode}
    assert defined(inside, "DP_RAW_NO_ERROR") not in codes


def test_series_have_the_same_order() -> None:
    series = enumerators(PUMP_SOURCES / "raw_inside.h", "dp_raw_series", "DP_RAW_")
    assert series.pop("SERIES") == len(Series)
    assert series == {one.name: one.value for one in Series}


def test_what_is_announced_of_connections_is_the_same() -> None:
    quic = QuicConnection(configuration=QuicConfiguration())
    cid_bytes = defined(PUMP_SOURCES / "loop_in.c", "CID_BYTES")
    assert cid_bytes == connection.CID_BYTES == QuicConfiguration().connection_id_length
    source = (QUIC_SOURCES / "conn_out.c").read_text()
    unit = re.findall(r"largest_at\) / 1000 / (\d+);", source)
    assert [int(number) for number in unit] == [1 << quic._local_ack_delay_exponent]


def test_what_goes_up_to_python_has_the_same_size() -> None:
    assert pump.EVENT.size == lib.DP_EVENT_BYTES == ffi.sizeof("struct dp_pump_event")
    assert pump._REFUSED.size == ffi.sizeof("struct dp_refused")
    assert defined(PUMP_SOURCES / "pump.h", "DP_EVENT_BYTES") == pump.EVENT.size
    assert defined(QUIC_SOURCES / "streams.h", "DP_STREAM_RANGES") == RANGES_MAX
