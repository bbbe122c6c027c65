"""The load generator: what it makes of a server, a bad one too."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import StartDaemon
from fake_daemon import (
    INGRESS_US,
    FakeDaemon,
    Stream,
    fake_daemon_thread,
    refusal,
    verdict,
    whole_answer,
)

from dataplane.client import read_ca
from dataplane.errors import UnavailableError
from dataplane.http3 import Http3
from dataplane.identity import load_identity
from dataplane.load import Load, Server
from dataplane.load import loop as load_module
from dataplane.load.wire import Exchange, RawDialogue, dialogues, raw_request
from dataplane.prompt1 import ALPN, ProtocolError

IDS = struct.pack("<3I", 5, 6, 7)
SECOND = 1_000_000_000


async def behave(stream: Stream) -> None:
    """Every fifth is refused, the one behind it broken off."""
    place = stream.number // 4 % 5
    if place == 3:
        stream.send(refusal(429, "every slot is taken"), fin=True)
    elif place == 4:
        stream.send(verdict())
        stream.reset(1)
    else:
        stream.send(whole_answer([1, 2, 3]), fin=True)


async def say_nothing(stream: Stream) -> None:
    pass


Faking = Callable[..., FakeDaemon]


@pytest.fixture
def fake(tmp_path: Path, engine: str) -> Iterator[Faking]:
    with contextlib.ExitStack() as stack:
        yield lambda behaviour: stack.enter_context(fake_daemon_thread(tmp_path, behaviour))


def load_of(port: int, ca: Path, connections: int = 1, stall_s: float = 10.0) -> Load:
    alpn, dialogue = dialogues("raw", "127.0.0.1", IDS, 0)
    return Load(Server(("127.0.0.1", port), read_ca(ca)), alpn, dialogue, connections, stall_s)


@pytest.mark.parametrize(("connections", "streams"), [(1, 1), (1, 7), (20, 2)])
def test_every_request_is_accounted_for(fake: Faking, connections: int, streams: int) -> None:
    daemon = fake(behave)
    seen: list[int] = []
    with load_of(daemon.port, daemon.ca, connections) as load:
        load.connect()
        outcome = load.run(100 * connections, streams, progress=seen.append)
        again = load.run(5 * connections, streams)
    if connections == 1:
        assert outcome.by_status == {"200": 60, "429": 20, "reset": 20}
        assert again.by_status == {"200": 3, "429": 1, "reset": 1}
    assert sum(outcome.by_status.values()) == seen[-1] == 100 * connections
    assert sum(again.by_status.values()) == 5 * connections
    assert len(daemon.streams) == 105 * connections
    assert len(daemon.connections) == connections
    whole = outcome.by_status["200"] + outcome.by_status["429"]
    assert len(outcome.totals_us) == whole
    assert len(outcome.verdicts_us) >= whole  # A reset may overtake its verdict.
    assert set(outcome.ingress_us) == {INGRESS_US}
    assert min(outcome.verdicts_us) > 0
    assert outcome.broken == outcome.by_status["reset"]
    assert outcome.rate == pytest.approx(whole / outcome.seconds)


def test_no_more_are_in_flight_than_asked_for(fake: Faking) -> None:
    now = most = 0

    async def answer_later(stream: Stream) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        stream.send(whole_answer([]), fin=True)

    daemon = fake(answer_later)
    with load_of(daemon.port, daemon.ca) as load:
        load.connect()
        assert load.run(30, 3).by_status == {"200": 30}
    assert most == 3


def test_an_open_loop_counts_from_when_a_request_was_due(fake: Faking) -> None:
    """Two requests that are due together on one stream: the second's wait is in its time."""
    held: list[Stream] = []

    async def hold_the_first(stream: Stream) -> None:
        held.append(stream)
        if len(held) == 1:
            await asyncio.sleep(0.2)
        stream.send(whole_answer([]), fin=True)

    daemon = fake(hold_the_first)
    with load_of(daemon.port, daemon.ca) as load:
        load.connect()
        outcome = load.run(3, 1, rate=100.0)
    assert outcome.by_status == {"200": 3}
    first, second, third = outcome.verdicts_us
    assert first >= 200_000
    assert second >= 190_000  # It was due 10 ms after the first.
    assert third >= 180_000


def test_a_lost_connection_takes_what_was_on_it_and_the_others_go_on(fake: Faking) -> None:
    async def close_the_second(stream: Stream) -> None:
        connection = daemon.connections.index(stream._protocol)
        if connection == 1:
            stream.close_connection(7, "enough")
        else:
            stream.send(whole_answer([]), fin=True)

    daemon = fake(close_the_second)
    with load_of(daemon.port, daemon.ca, connections=3) as load:
        load.connect()
        outcome = load.run(60, 4)
        assert outcome.by_status == {"200": 56, "lost": 4}
        assert load.run(10, 4).by_status == {"200": 10}


def test_without_a_connection_left_the_rest_is_lost(fake: Faking) -> None:
    async def vanish(stream: Stream) -> None:
        if stream.number < 20:
            stream.send(whole_answer([]), fin=True)
        elif not daemon.vanished:
            daemon.vanish()

    daemon = fake(vanish)
    with load_of(daemon.port, daemon.ca) as load:
        load.connect()
        outcome = load.run(1000, 1)
        assert outcome.by_status == {"200": 5, "lost": 995}
        assert load.run(3, 1).by_status == {"lost": 3}


def test_rubbish_ends_the_run(fake: Faking) -> None:
    async def rubbish(stream: Stream) -> None:
        stream.send(b"x" * 60, fin=True)

    daemon = fake(rubbish)
    with load_of(daemon.port, daemon.ca) as load:
        load.connect()
        with pytest.raises(ProtocolError, match="magic"):
            load.run(1, 1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (verdict()[:31], "ended inside its verdict"),
        (verdict() + b"\1\0\0\0", "ended without its trailer"),
        (whole_answer([1, 2])[:36] + whole_answer([1, 2])[40:], "counts 2 ids; 4 bytes came"),
    ],
)
def test_an_answer_that_is_not_whole_ends_the_run(fake: Faking, answer: bytes, words: str) -> None:
    async def cut(stream: Stream) -> None:
        stream.send(answer, fin=True)

    daemon = fake(cut)
    with load_of(daemon.port, daemon.ca) as load:
        load.connect()
        with pytest.raises(ProtocolError, match=words):
            load.run(3, 1)


def test_what_is_lost_on_the_way_comes_again(fake: Faking) -> None:
    """A request longer than the window, and answers that the server splits into many packets."""
    ids = struct.pack("<40000I", *range(40_000))

    async def echo(stream: Stream) -> None:
        answer = whole_answer(list(range(5000)))
        for at in range(0, len(answer), 700):
            stream.send(answer[at : at + 700], fin=at + 700 >= len(answer))

    daemon = fake(echo)
    alpn, dialogue = dialogues("raw", "127.0.0.1", ids, 0)
    server = Server(("127.0.0.1", daemon.port), read_ca(daemon.ca))
    with Load(server, alpn, dialogue, 2) as load:
        load.connect()
        assert load.run(6, 2).by_status == {"200": 6}
    assert {len(stream.data) for stream in daemon.streams} == {48 + len(ids)}
    assert daemon.streams[-1].ids == list(range(40_000))


@pytest.mark.parametrize("options", [{"gso": False}, {"busy_poll": True}])
def test_the_pumps_thread_may_be_told_how(
    fake: Faking, engine: str, options: dict[str, bool]
) -> None:
    if engine == "aioquic":
        pytest.skip("there is no such thread")
    daemon = fake(behave)
    alpn, dialogue = dialogues("raw", "127.0.0.1", IDS, 0)
    server = Server(("127.0.0.1", daemon.port), read_ca(daemon.ca))
    with Load(server, alpn, dialogue, 2, **options) as load:
        load.connect()
        assert load.native
        assert sum(load.run(20, 2).by_status.values()) == 20


def test_another_dialogue_gets_the_bytes_itself(fake: Faking) -> None:
    taken: list[int] = []

    class Counting(RawDialogue):
        def take(self, exchange: Exchange, stream_id: int, data: bytes, fin: bool) -> None:
            taken.append(len(data))
            super().take(exchange, stream_id, data, fin)

    daemon = fake(behave)
    request = raw_request(IDS, 0)
    server = Server(("127.0.0.1", daemon.port), read_ca(daemon.ca))
    with Load(server, ALPN, lambda: Counting(request), 1) as load:
        load.connect()
        assert not load.native
        assert load.run(3, 1).by_status == {"200": 3}
    assert sum(taken) == 3 * len(whole_answer([1, 2, 3]))


# ---------------------------------------------------------------- HTTP/3


def h3_load_of(fake: FakeDaemon, connections: int = 1) -> Load:
    """A load in HTTP/3, whatever the fake daemon calls what it speaks."""
    _, dialogue = dialogues("h3", "127.0.0.1", IDS, 0)
    server = Server(("127.0.0.1", fake.port), read_ca(fake.ca))
    return Load(server, ALPN, dialogue, connections)


def h3_head(*fields: tuple[bytes, bytes]) -> bytes:
    return Http3(is_client=False).encode_headers(0, list(fields))


def h3_frame(kind: int, payload: bytes) -> bytes:
    assert len(payload) < 64
    return bytes((kind, len(payload))) + payload


TIMED = h3_head((b":status", b"200"), (b"server-timing", b"queue;dur=1.5, ingress;dur=0.063"))
INTERIM = h3_head((b":status", b"103"), (b"link", b"</a>"))
BODY = whole_answer([1, 2, 3])[32:]


async def behave_in_h3(stream: Stream) -> None:
    """As `behave`, with frames of many kinds that come in many pieces."""
    place = stream.number // 4 % 5
    if place == 3:
        stream.send(h3_head((b":status", b"429")) + h3_frame(0, b"every slot"), fin=True)
    elif place == 4:
        stream.send(TIMED)
        stream.reset(1)
    else:
        frames = [INTERIM, h3_frame(0x21, b"later"), TIMED]
        frames += [h3_frame(0, BODY[:5]), h3_frame(0, b""), h3_frame(0, BODY[5:])]
        answer = b"".join(frames)
        step = (1, 7, len(answer))[place]
        for at in range(0, len(answer), step):
            stream.send(answer[at : at + step], fin=at + step >= len(answer))


@pytest.mark.parametrize(("connections", "streams"), [(1, 1), (1, 7), (4, 2)])
def test_every_h3_request_is_accounted_for(
    fake: Faking, engine: str, connections: int, streams: int
) -> None:
    daemon = fake(behave_in_h3)
    with h3_load_of(daemon, connections) as load:
        assert load.native == (engine == "pump")
        load.connect()
        outcome = load.run(50 * connections, streams)
        again = load.run(5 * connections, streams)
    if connections == 1:
        assert outcome.by_status == {"200": 30, "429": 10, "reset": 10}
        assert again.by_status == {"200": 3, "429": 1, "reset": 1}
    assert sum(outcome.by_status.values()) == 50 * connections
    whole = outcome.by_status["200"] + outcome.by_status["429"]
    assert len(outcome.totals_us) == whole
    assert len(outcome.verdicts_us) >= whole  # A reset may overtake its verdict.
    assert set(outcome.ingress_us) == {INGRESS_US}
    assert len(outcome.ingress_us) >= outcome.by_status["200"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "without a status|without a response"),
        (TIMED[:-1], "inside a frame|within a frame"),
        (TIMED + h3_frame(0, BODY)[:-1], "inside a frame|within a frame"),
        (h3_frame(0, BODY), "type 0x0 came|DATA before HEADERS"),
        (TIMED + h3_frame(4, b""), "type 0x4 came|no request stream may have"),
        (h3_head((b"vary", b"a")), "no answer's|no HTTP/3 message"),
        (h3_head((b":status", b"2x0")), "no answer's|no HTTP/3 message"),
        (h3_head((b":status", b"101")), "no status 101|no HTTP/3 message"),
        (h3_frame(1, b"\0\0\x80"), "no answer's|cannot be decompressed"),
        (TIMED + h3_frame(0, BODY[4:]), "counts 3 ids; 8 bytes came"),
        (TIMED, "ended without its trailer"),
    ],
)
def test_an_h3_answer_that_is_none_ends_the_run(fake: Faking, answer: bytes, words: str) -> None:
    async def give(stream: Stream) -> None:
        stream.send(answer, fin=True)

    daemon = fake(give)
    with h3_load_of(daemon) as load:
        load.connect()
        with pytest.raises(ProtocolError, match=words):
            load.run(3, 1)


def test_a_connection_that_goes_away_begins_no_more(fake: Faking) -> None:
    """The first of two does so within its third request, in pieces."""
    begun: dict[Any, int] = {}

    async def answer_until(stream: Stream) -> None:
        connection = stream._protocol
        begun[connection] = begun.get(connection, 0) + 1
        if connection is daemon.connections[0] and begun[connection] == 3:
            for byte in b"\0\4\0\x21\1\7\x07\1\x08":
                connection._quic.send_stream_data(3, bytes((byte,)))
                connection.transmit()
            await asyncio.sleep(0.05)
        stream.send(TIMED + h3_frame(0, BODY), fin=True)

    daemon = fake(answer_until)
    with h3_load_of(daemon, connections=2) as load:
        load.connect()
        assert load.run(40, 1).by_status == {"200": 40}
    assert [begun[connection] for connection in daemon.connections] == [3, 37]


def h3_load_on(served: Any, ids: bytes, max_output: int) -> Load:
    alpn, dialogue = dialogues("h3", "127.0.0.1", ids, max_output)
    return Load(Server(("127.0.0.1", served.port), read_ca(served.ca)), alpn, dialogue, 2)


def test_a_daemon_answers_h3(daemon: StartDaemon, engine: str) -> None:
    """Short answers, and longer ones than a packet to requests that are longer than the window."""
    served = daemon("--runtime=echo", "--context=40000", "--max-output=5000")
    for ids, output, requests in ((IDS, 8, 300), (struct.pack("<40000I", *range(40_000)), 5000, 6)):
        with h3_load_on(served, ids, output) as load:
            assert load.native == (engine == "pump")
            load.connect()
            outcome = load.run(requests, 3)
        assert outcome.by_status == {"200": requests}
        assert len(outcome.ingress_us) == len(outcome.totals_us) == requests
        assert 0 < max(outcome.ingress_us) < max(outcome.verdicts_us)


@pytest.mark.usefixtures("engine")
def test_a_daemon_refuses_h3(daemon: StartDaemon) -> None:
    with h3_load_on(daemon("--runtime=none"), IDS, 8) as load:
        load.connect()
        outcome = load.run(100, 4)
    assert outcome.by_status == {"503": 100}
    assert (len(outcome.verdicts_us), len(outcome.ingress_us)) == (100, 0)


# ---------------------------------------------------------------- nobody there


@pytest.fixture
def silent() -> Iterator[int]:
    """A UDP port that takes everything and says nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


@pytest.fixture
def ca(fake: Faking) -> Path:
    return fake(say_nothing).ca


def test_a_silent_port_is_said(silent: int, ca: Path) -> None:
    with (
        load_of(silent, ca, stall_s=0.2) as load,
        pytest.raises(UnavailableError, match=r"no answer within 0\.2 s") as caught,
    ):
        load.connect()
    assert caught.value.exit_code == 69


def test_a_server_that_answers_nothing_is_said(fake: Faking) -> None:
    daemon = fake(say_nothing)
    with load_of(daemon.port, daemon.ca, stall_s=0.5) as load:
        load.connect()
        words = r"answered nothing for 0\.5 s, with 4 requests in flight"
        with pytest.raises(UnavailableError, match=words):
            load.run(100, 4)


def test_the_time_between_two_requests_is_no_stall(fake: Faking) -> None:
    async def answer_later(stream: Stream) -> None:
        await asyncio.sleep(0.2)
        stream.send(whole_answer([]), fin=True)

    daemon = fake(answer_later)
    with load_of(daemon.port, daemon.ca, stall_s=0.5) as load:
        load.connect()
        assert load.run(2, 1, rate=1.0).by_status == {"200": 2}


def test_a_port_where_nobody_listens_is_said(silent: int, ca: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with (
        load_of(port, ca) as load,
        pytest.raises(UnavailableError, match=f"127.0.0.1:{port}: nobody listens there"),
    ):
        load.connect()


def test_the_next_address_of_a_host_is_tried(
    fake: Faking, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = fake(behave)
    addresses: list[tuple[Any, ...]] = [
        (socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.0.1", port))
        for port in (silent, daemon.port)
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: addresses)
    with load_of(1, daemon.ca, connections=2, stall_s=1.0) as load:
        load.connect()
        assert load.run(3, 1).by_status["200"] >= 2
    assert len(daemon.connections) == 2


def test_another_ca_is_refused(fake: Faking, tmp_path: Path) -> None:
    other = load_identity(tmp_path / "other", "localhost").ca
    assert other is not None
    with (
        load_of(fake(behave).port, other) as load,
        pytest.raises(UnavailableError, match=r"TLS: "),
    ):
        load.connect()


@pytest.mark.usefixtures("engine")
def test_an_idle_connection_is_kept(daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "_KEEP_ALIVE_NS", SECOND // 10)
    served = daemon("--runtime=null", "--idle-timeout=0.4")
    with load_of(served.port, served.ca) as load:
        load.connect()
        assert load.run(2, 1, rate=1.0).by_status == {"200": 2}
