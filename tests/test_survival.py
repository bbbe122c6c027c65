"""What a connection has to survive: bad links, attackers, and peers that misbehave."""

import asyncio
import contextlib
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aioquic.tls import Epoch
from conftest import StartDaemon
from daemon_process import DaemonProcess, daemon_process, run, wait_until
from hand import Frame
from lossy_proxy import AWFUL, PATIENT, Link, LossyProxy, lossy_proxy
from paired_servers import Pumped
from raw_runtime import puppet

from dataplane._native import ffi, lib
from dataplane.client import connect
from dataplane.errors import UnavailableError
from dataplane.prompt1 import Request, encode_request
from dataplane.runtime import Finish

pytestmark = pytest.mark.pump_only

VOCAB = 50_000
ENDS = pytest.mark.parametrize("pump", [True, False], ids=["pump", "aioquic"])
PROTOCOLS = pytest.mark.parametrize("protocol", ["raw", "h3"])


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """An echo with room for long prompts, that waits for slow links."""
    with daemon_process(
        tmp_path_factory.mktemp("echo"), "--runtime=echo", "--slots=64", "--context=8192",
        "--max-output=8192", f"--vocab-size={VOCAB}", "--max-writing=64", *PATIENT,
    ) as daemon:  # fmt: skip
        yield daemon


def ids_of(seed: int, count: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(VOCAB) for _ in range(count)]


def patient_client(address: str, daemon: DaemonProcess, **options: Any) -> Any:
    """A handshake over a link that loses a third takes its time."""
    return connect(address, daemon.ca, timeout=120.0, idle_timeout=300.0, **options)


async def ask(address: str, daemon: DaemonProcess, ids: list[int], **options: Any) -> None:
    """One connection, one request, whose echo is whole."""
    async with patient_client(address, daemon, **options) as client:
        result = await (await client.submit(ids)).result()
    assert (result.status, result.token_ids) == (200, ids)


# ---------------------------------------------------------------- an awful link


def ask_over(daemon: DaemonProcess, link: Link, connections: int, **options: Any) -> None:
    async def session(proxy: LossyProxy) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(connections):
                ids = ids_of(number, 200 + 40 * (number % 10))
                group.create_task(ask(proxy.address, daemon, ids, **options))

    with lossy_proxy(daemon.port, link) as proxy:
        run(session(proxy), within=180)
    daemon.wait_idle()


@ENDS
@PROTOCOLS
def test_every_connection_completes_over_an_awful_link(
    echo: DaemonProcess, protocol: str, pump: bool
) -> None:
    ask_over(echo, AWFUL, 12, protocol=protocol, pump=pump)


@pytest.mark.slow
@ENDS
@PROTOCOLS
def test_fifty_of_fifty_complete(echo: DaemonProcess, protocol: str, pump: bool) -> None:
    ask_over(echo, AWFUL, 50, protocol=protocol, pump=pump)


# ---------------------------------------------------------------- much at once

LONG = 500_000  # ids: 2 MB


@pytest.fixture(scope="module")
def long_echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """An echo of the longest prompts there are."""
    with daemon_process(
        tmp_path_factory.mktemp("long"), "--runtime=echo", "--slots=2", "--context=1048576",
        "--max-output=262144", f"--vocab-size={VOCAB}", *PATIENT,
    ) as daemon:  # fmt: skip
        yield daemon


@pytest.mark.slow
@ENDS
def test_two_megabytes_each_way_at_two_percent_loss(long_echo: DaemonProcess, pump: bool) -> None:
    ids = ids_of(1, LONG)

    async def session(address: str) -> None:
        async with patient_client(address, long_echo, pump=pump) as client:
            result = await (await client.submit(ids)).result()
            assert result.token_ids == ids[:262_144]
            # And out again: what an answer may have at most, twice.
            for _ in range(2):
                result = await (await client.submit(ids[:262_144])).result()
                assert result.token_ids == ids[:262_144]

    with lossy_proxy(long_echo.port, Link(loss=0.02, reordering=0.02)) as proxy:
        run(session(proxy.address), within=240)
    long_echo.wait_idle()


@ENDS
@PROTOCOLS
def test_half_a_megabyte_at_two_percent_loss(
    long_echo: DaemonProcess, protocol: str, pump: bool
) -> None:
    ids = ids_of(2, 131_072)
    with lossy_proxy(long_echo.port, Link(loss=0.02, reordering=0.02)) as proxy:
        options = {"protocol": protocol, "pump": pump}
        run(ask(proxy.address, long_echo, ids, **options), within=120)
    long_echo.wait_idle()


# ---------------------------------------------------------------- keys


@ENDS
def test_a_daemon_that_updates_its_keys_often(tmp_path: Path, pump: bool) -> None:
    """And a client that follows, and updates its own as often where it can be told to."""
    program = Path(__file__).with_name("updating_daemon.py")
    ids = ids_of(3, 60_000)

    async def session(daemon: DaemonProcess, address: str) -> None:
        async with patient_client(address, daemon, pump=pump) as client:
            keys = Keys(client)
            for number in range(6):
                answer = await client.submit(ids)
                keys.update(often=number % 2 == 0)
                assert (await answer.result()).token_ids == ids
            assert keys.changed() >= 3

    with (
        daemon_process(
            tmp_path, "--runtime=echo", "--slots=2", "--context=65536", "--max-output=65536",
            f"--vocab-size={VOCAB}", *PATIENT, program=program,
        ) as daemon,
        lossy_proxy(daemon.port, Link(loss=0.01, reordering=0.01)) as proxy,
    ):  # fmt: skip
        run(session(daemon, proxy.address), within=120)
        daemon.wait_idle()


class Keys:
    """The keys of a client's connection, whichever engine it has."""

    def __init__(self, client: Any) -> None:
        self._transport = client._link._quic
        self._quic = self._transport._quic
        self._seen = set() if self._handle() else {self._secret()}

    def _secret(self) -> bytes:
        secret = self._quic._cryptos[Epoch.ONE_RTT].recv.secret
        assert secret
        return bytes(secret)

    def update(self, often: bool) -> None:
        """Have this side update its keys, with the pump after each hundred packets."""
        if self._handle():
            self._transport._pump.update_keys_every(self._handle(), 100 if often else 0)
            return
        self._seen.add(self._secret())
        if often:
            self._quic.request_key_update()

    def _handle(self) -> int:
        return int(getattr(self._transport, "handle", 0))

    def changed(self) -> int:
        """How often they changed, as far as was seen."""
        if self._handle():
            stats = self._transport._pump.conn_stats(self._handle())
            assert stats is not None
            return int(stats.key_updates)
        self._seen.add(self._secret())
        return len(self._seen) - 1


@ENDS
def test_a_client_that_updates_its_keys_often(long_echo: DaemonProcess, pump: bool) -> None:
    ids = ids_of(4, 60_000)

    async def session(address: str) -> None:
        async with patient_client(address, long_echo, pump=pump) as client:
            keys = Keys(client)
            for _ in range(6):
                keys.update(often=True)
                assert (await (await client.submit(ids)).result()).token_ids == ids
            assert keys.changed() >= 3

    with lossy_proxy(long_echo.port, Link(loss=0.01, reordering=0.01)) as proxy:
        run(session(proxy.address), within=120)
    long_echo.wait_idle()


# ---------------------------------------------------------------- an attacker on the path

CANARY = 0x5A5A5A5A


def attack(choose: random.Random, seen: list[bytes]) -> Any:
    """What an attacker adds to each datagram of a client's: he sees and sends, but has no keys."""

    def on_datagram(to_server: bool, data: bytes) -> list[bytes]:
        if not to_server or data[0] & 0x80:
            return [data]
        seen.append(data)
        head = data[:9]  # the right connection ID
        at = choose.randrange(9, len(data))
        flipped = data[:at] + bytes([data[at] ^ 1 << choose.randrange(8)]) + data[at + 1 :]
        tag = data[:-16] + choose.randbytes(16)
        forged = head + choose.randbytes(choose.choice([24, 400, len(data)]))
        cut = data[: choose.randrange(10, len(data))]
        longer = data + choose.randbytes(3)
        again = choose.choice(seen)
        # First the lies, each of which would write where the truth has to.
        return [flipped, tag, forged, cut, longer, data, again, data]

    return on_datagram


@pytest.mark.parametrize("width", [2, 4])
def test_forged_packets_into_a_slot_change_nothing(daemon: StartDaemon, width: int) -> None:
    """Around the prompt lie canaries: the slot's rest, and the slots beside it."""
    context = 65_536
    process = daemon("--runtime=none", *PATIENT)
    ids = ids_of(5, 50_000)

    async def session(address: str) -> None:
        async with patient_client(address, process) as client:
            answer = await client.submit(ids, width=width)
            (taken,) = await asyncio.to_thread(runtime.take)
            assert taken.tokens.tolist() == ids
            for slot in range(3):
                prompt = prompts[slot]
                first = len(ids) if slot == taken.slot else 0
                assert all(word == CANARY for word in prompt[first:context])
            taken.emit([1])
            taken.finish(Finish.STOP)
            assert (await answer.result()).token_ids == [1]

    with puppet(process, slots=3, context=context) as runtime:
        for slot in range(3):
            pointer = lib.dp_prompt(runtime.native, slot)
            ffi.memmove(pointer, struct.pack("<I", CANARY) * context, context * 4)
        prompts = [lib.dp_prompt(runtime.native, slot) for slot in range(3)]
        with lossy_proxy(process.port, Link(loss=0.02, reordering=0.05)) as proxy:
            seen: list[bytes] = []
            proxy.on_datagram = attack(random.Random(width), seen)
            run(session(proxy.address), within=120)
            assert len(seen) > 70, len(seen)
        process.wait_idle()


# ---------------------------------------------------------------- paths and ends


@ENDS
def test_a_client_whose_port_changes_in_the_middle_of_an_upload(
    long_echo: DaemonProcess, pump: bool
) -> None:
    ids = ids_of(6, 131_072)  # 512 KB
    with lossy_proxy(long_echo.port, Link(delay=0.002)) as proxy:
        datagrams = [0]

        def on_datagram(to_server: bool, data: bytes) -> list[bytes]:
            datagrams[0] += to_server
            if to_server and datagrams[0] in (150, 300):
                proxy.rebind()
            return [data]

        proxy.on_datagram = on_datagram
        run(ask(proxy.address, long_echo, ids, pump=pump), within=60)
        assert datagrams[0] > 300
    long_echo.wait_idle()


def connections(daemon: DaemonProcess) -> int:
    """How many connections a daemon has, half-open ones too."""
    _, text = daemon.get("/metrics")
    line = next(line for line in text.splitlines() if line.startswith("dataplane_connections "))
    return int(float(line.split()[1]))


@pytest.mark.slow
@ENDS
def test_a_close_arrives_or_silence_does(daemon: StartDaemon, pump: bool) -> None:
    """A third of all closes are lost; then the daemon finds out by itself."""
    process = daemon("--runtime=echo", "--slots=8", "--idle-timeout=5", "--handshake-timeout=60")

    async def one(proxy: LossyProxy) -> None:
        async with patient_client(proxy.address, process, pump=pump) as client:
            await client.raw(encode_request(Request(4)) + bytes(8), fin=False)

    async def session(proxy: LossyProxy) -> None:
        await asyncio.gather(*(one(proxy) for _ in range(6)))

    with lossy_proxy(process.port, AWFUL) as proxy:
        run(session(proxy), within=60)
        wait_until("it is forgotten", lambda: connections(process) == 0)
    process.wait_idle()


def test_a_client_that_falls_silent_times_out_on_both_sides(daemon: StartDaemon) -> None:
    process = daemon("--runtime=none", "--idle-timeout=1", "--body-timeout=60")

    async def session(proxy: LossyProxy) -> None:
        async with connect(proxy.address, process.ca, idle_timeout=1.0) as client:
            answer = await client.raw(encode_request(Request(4)) + bytes(8), fin=False)
            await asyncio.to_thread(process.wait_for_states, "WRITING")
            proxy.silent = True
            with pytest.raises(UnavailableError):
                await answer.result()

    with puppet(process), lossy_proxy(process.port) as proxy:
        run(session(proxy))
        process.wait_idle()
        wait_until("it is forgotten", lambda: connections(process) == 0)


# ---------------------------------------------------------------- peers that misbehave


def test_a_byte_on_each_of_128_streams(daemon: StartDaemon) -> None:
    process = daemon("--runtime=echo", "--slots=2", "--body-timeout=0.5")

    async def session() -> None:
        async with connect(process.address, process.ca) as client:
            begun = [await client.raw(b"D", fin=False) for _ in range(128)]
            results = [await answer.result() for answer in begun]
            assert {(result.status, result.reason) for result in results} == {
                (408, "only 1 bytes of the header came in time")
            }
            for _ in range(3):  # and there are streams again
                answers = [await client.submit([1, 2]) for _ in range(128)]
                statuses = {(await answer.result()).status for answer in answers}
                assert statuses <= {200, 429}

    run(session())
    process.wait_idle()


def test_a_peer_that_never_acknowledges(state_dir: Path) -> None:
    """It is probed ever more rarely; what it did not acknowledge is there when it does."""
    server = Pumped(state_dir, 1000.0, max_writing=5)
    with contextlib.closing(server):
        streams = range(0, 400, 4)
        data = encode_request(Request(1)) + bytes(4)
        sent: list[bytes] = []
        for stream in streams:
            packet = server.hand.packet(Frame("stream", stream, 0, data, True).encode())
            server.serve([packet], lambda: answer_all_at_length(server))
            sent += server.out
            server.out = []
        end = server.now + 300.0
        while (at := server.next_at()) is not None and at < end:
            server.now = max(server.now + 1e-6, at)
            server.serve()
            sent += server.out
            server.out = []
        stats = server.conn_stats()
        assert stats.window <= 20_000
        assert stats.memory < 500_000
        # What the first window let out, and probes that doubled their distance.
        assert sum(map(len, sent)) < 60_000
        assert len(sent) < 150
        assert server.states() == ["FREE"] * 4
        for packet in sent:
            server.hand.receive(packet)
        for _ in range(200):
            server.serve([server.hand.packet(server.hand.acknowledgement())])
            out, server.out = server.out, []
            for packet in out:
                server.hand.receive(packet)
            if all(server.hand.of(stream).whole for stream in streams):
                break
            server.now += 0.01
        assert all(server.hand.of(stream).whole for stream in streams)


def answer_all_at_length(server: Pumped) -> None:
    for job in server.take():
        job.emit(range(job.room))
        job.finish(1)


def finish_all(server: Pumped) -> None:
    for job in server.take():
        job.finish(1)


# ---------------------------------------------------------------- memory

CONNECTIONS = 200
USED = 20  # requests on each


def grown(process: DaemonProcess) -> tuple[float, float]:
    """By how many bytes a daemon grows per connection that is idle, and per one that was used."""

    def another() -> Any:
        return connect(process.address, process.ca, pump=False)

    async def session() -> tuple[float, float]:
        async with contextlib.AsyncExitStack() as stack:
            first = [await stack.enter_async_context(another()) for _ in range(20)]
            for client in first:
                await (await client.submit([1])).result()
            before = process.health()["rss_bytes"]
            clients = [await stack.enter_async_context(another()) for _ in range(CONNECTIONS)]
            idle = process.health()["rss_bytes"]
            for _ in range(USED):
                for client in clients:
                    result = await (await client.submit(list(range(200)))).result()
                    assert result.status == 200
            used = process.health()["rss_bytes"]
        return (idle - before) / CONNECTIONS, (used - before) / CONNECTIONS

    return run(session(), within=120)


@pytest.mark.slow
def test_a_connection_costs_little_beside_aioquics_own(daemon: StartDaemon) -> None:
    options = ("--runtime=null", "--slots=8", "--context=256", "--idle-timeout=300")
    reference = grown(daemon(*options, "--no-pump"))
    pumped = grown(daemon(*options))
    print(f"bytes a connection, idle and used: aioquic {reference}, pump {pumped}")
    for ours, theirs in zip(pumped, reference, strict=True):
        assert ours - theirs <= 16 << 10


def test_no_packet_reaches_the_allocator(state_dir: Path) -> None:
    """Ten thousand requests after a few hundred: the pool serves them all."""
    server = Pumped(state_dir, 1000.0, max_writing=5)
    with contextlib.closing(server):
        answered = 0
        deadline = time.monotonic() + 120.0
        data = encode_request(Request(4)) + struct.pack("<4I", 1, 2, 3, 4)
        stream, counted = 0, 0
        while answered < 10_500:
            assert time.monotonic() < deadline
            frames = [Frame("stream", stream + 4 * i, 0, data, True) for i in range(4)]
            stream += 16
            payload = b"".join(frame.encode() for frame in frames)
            server.serve([server.hand.packet(payload)], lambda: finish_all(server))
            while server.out:
                out, server.out = server.out, []
                elicits = [packet for packet in out if server.hand.receive(packet)]
                if elicits:
                    server.serve([server.hand.packet(server.hand.acknowledgement())])
            server.hand.acked = set(sorted(server.hand.acked)[-64:])
            answered += sum(got.whole for got in server.hand.got.values())
            server.hand.got.clear()
            server.taken.clear()
            server.now += 0.001
            if answered >= 500 and not counted:
                counted = server.allocations()
        assert server.allocations() == counted
        assert counted < 100
