"""A daemon on the packet pump: what it shares between its two fronts, and what only it does."""

import asyncio
import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import StartDaemon
from daemon_process import DaemonProcess, run, wait_until
from h3_client import INTERNAL_ERROR, h3_client, words
from raw_runtime import puppet, serve_one

from dataplane import refusals
from dataplane._native import ffi, lib
from dataplane.client import ResetError, connect
from dataplane.errors import ResetCode
from dataplane.ingress import Ingress
from dataplane.latency import Latency, Series
from dataplane.prompt1 import Request, encode_request
from dataplane.pump import Refused
from dataplane.pump_engine import PumpEngine
from dataplane.stats import Stats, joint_hold_s

pytestmark = pytest.mark.pump_only

HALF = encode_request(Request(4)) + words([1, 2])
IDS = [5, 6, 7]


def threads_of(pid: int) -> dict[int, set[int]]:
    """The cores that each thread of a process may run on."""
    return {
        int(entry): os.sched_getaffinity(int(entry)) for entry in os.listdir(f"/proc/{pid}/task")
    }


@contextlib.contextmanager
def cores(allowed: set[int]) -> Iterator[None]:
    """What is started here may run on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, allowed)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def metrics(daemon: DaemonProcess) -> dict[str, float]:
    """The samples of /metrics by name and labels."""
    status, text = daemon.get("/metrics")
    assert status == 200
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


# ---------------------------------------------------------------- both fronts on one region


def test_the_pages_show_both_fronts_together(daemon: StartDaemon) -> None:
    process = daemon("--runtime=echo", "--slots=4")

    async def session() -> None:
        async with connect(process.address, process.ca) as raw, h3_client(process) as h3:
            for _ in range(7):
                assert (await (await raw.submit(IDS)).result()).token_ids == IDS
            for _ in range(5):
                assert (await h3.post(words(IDS)).answer()).ids() == IDS

    run(session())
    process.wait_idle()
    health = process.health()
    assert health["requests"] == {"200": 12}
    counts = [health[name] for name in ("claimed", "completed", "cancelled", "failed")]
    assert counts == [12, 12, 0, 0]
    status, text = process.get("/health?latency99&window=60")
    assert status == 200
    assert '"count":12' in text.replace(" ", "")
    samples = metrics(process)
    assert samples['dataplane_requests_total{status="200"}'] == 12
    assert samples["dataplane_claimed_total"] == samples["dataplane_completed_total"] == 12
    assert samples["dataplane_ingress_seconds_count"] == 12
    assert samples["dataplane_total_seconds_count"] == 12


def test_both_fronts_take_from_the_same_slots(daemon: StartDaemon) -> None:
    process = daemon("--runtime=none")

    async def session() -> None:
        async with connect(process.address, process.ca) as raw, h3_client(process) as h3:
            with_raw = await raw.submit(IDS)
            with_h3 = h3.post(words(IDS))
            await asyncio.to_thread(process.wait_for_states, "READY", "READY")
            refused = await raw.submit(IDS)
            await refused.result()
            assert (refused.status, refused.reason) == (429, refusals.BUSY)
            answer = await h3.post(words(IDS)).answer()
            assert answer.status == 429
            assert process.health()["in_flight"] == 2
            for taken in await asyncio.to_thread(runtime.take, 2):
                serve_one(taken, [taken.tokens[0] + 10])
            assert (await with_raw.result()).token_ids == [15]
            assert (await with_h3.answer()).ids() == [15]

    with puppet(process, slots=2) as runtime:
        run(session())
        process.wait_idle()
    assert process.health()["requests"] == {"200": 2, "429": 2}


def test_a_lost_runtime_is_told_on_both_fronts(daemon: StartDaemon) -> None:
    process = daemon("--runtime=none")

    async def session() -> None:
        async with connect(process.address, process.ca) as raw, h3_client(process) as h3:
            with puppet(process, slots=4):
                half = await raw.raw(HALF, fin=False)
                await asyncio.to_thread(process.wait_for_states, "WRITING")
                late = await raw.submit(IDS)
                await late.opened()
                whole = h3.post(words(IDS))
                await whole.header()
                process.wait_for_states("WRITING", "READY", "READY")
            await half.result()
            assert (half.status, half.reason) == (503, refusals.LOST)
            with pytest.raises(ResetError) as lost:
                await late.result()
            assert lost.value.code == ResetCode.RUNTIME_LOST
            assert await whole.reset_code() == INTERNAL_ERROR
            # Without a runtime both say so.
            refused = await raw.submit(IDS)
            await refused.result()
            assert refused.status == (await h3.post(words(IDS)).answer()).status == 503

    run(session())
    assert process.health()["in_flight"] == 0


# ---------------------------------------------------------------- strangers


def test_a_packet_of_a_connection_that_nobody_knows_is_reset(bare_daemon: DaemonProcess) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.connect(("127.0.0.1", bare_daemon.port))
        stranger.settimeout(5)
        cid = secrets.token_bytes(8)
        tokens = set()
        for size in (22, 30, 43, 400, 1200):
            stranger.send(b"\x41" + cid + secrets.token_bytes(size - 9))
            answer = stranger.recv(2048)
            assert 21 <= len(answer) < size
            assert len(answer) * 3 > min(size, 100)
            assert answer[0] & 0xC0 == 0x40
            tokens.add(answer[-16:])
        assert len(tokens) == 1
        stranger.send(b"\x41" + secrets.token_bytes(60))
        assert stranger.recv(2048)[-16:] not in tokens
        # One that is no longer than the shortest reset, or not of this version, gets none.
        stranger.send(b"\x41" + cid + secrets.token_bytes(12))
        stranger.send(b"\x01" + cid + secrets.token_bytes(60))
        stranger.settimeout(0.3)
        with pytest.raises(TimeoutError):
            stranger.recv(2048)


def test_resets_are_not_sent_without_end(bare_daemon: DaemonProcess) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.connect(("127.0.0.1", bare_daemon.port))
        for _ in range(1000):
            stranger.send(b"\x41" + secrets.token_bytes(60))
        stranger.settimeout(0.5)
        answers = 0
        start = time.monotonic()
        with contextlib.suppress(TimeoutError):
            while time.monotonic() - start < 5.0:
                stranger.recv(2048)
                answers += 1
        assert 1 <= answers <= 500


# ---------------------------------------------------------------- the engines and the core


def test_without_the_pump_one_listener_has_the_slots(daemon: StartDaemon) -> None:
    process = daemon("--runtime=null", "--no-pump")

    async def session() -> None:
        async with connect(process.address, process.ca) as client:
            assert (await (await client.submit(IDS)).result()).status == 200

    run(session())
    assert metrics(process)["dataplane_claimed_total"] == 1


def test_busy_polling_says_that_its_core_is_shared(daemon: StartDaemon) -> None:
    with cores({min(os.sched_getaffinity(0))}):
        process = daemon("--runtime=null", "--busy-poll")
    assert "busy-polling shares core" in process.stderr

    async def session() -> None:
        async with connect(process.address, process.ca) as client:
            assert (await (await client.submit(IDS)).result()).status == 200

    run(session())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_busy_polling_has_a_core_to_itself(daemon: StartDaemon) -> None:
    allowed = set(sorted(os.sched_getaffinity(0))[:2])
    with cores(allowed):
        process = daemon("--runtime=echo", "--busy-poll")
    found = re.search(r"the packet loop spins on core (\d+)", process.stderr)
    assert found
    core = int(found[1])
    assert core in allowed
    threads = threads_of(process.pid)
    assert [on for on in threads.values() if core in on] == [{core}]
    for pid in process.children():
        assert all(core not in on for on in threads_of(pid).values())

    async def session() -> None:
        async with connect(process.address, process.ca) as client:
            assert (await (await client.submit(IDS)).result()).token_ids == IDS

    run(session())


def test_a_client_that_vanished_loses_its_slot(daemon: StartDaemon, tmp_path: Path) -> None:
    process = daemon("--runtime=echo", "--slots=2", "--idle-timeout=1", "--body-timeout=60")

    async def session() -> None:
        client = connect(process.address, process.ca)
        entered = await client.__aenter__()
        await entered.raw(HALF, fin=False)
        await asyncio.to_thread(process.wait_for_states, "WRITING")
        # The loop ends here without a word to the daemon.

    run(session())
    process.wait_idle()
    wait_until("it is forgotten", lambda: metrics(process)["dataplane_connections"] == 0)


# ---------------------------------------------------------------- parts


def test_two_histograms_are_shown_as_one() -> None:
    latency = Latency(clock=lambda: 100.0)
    latency.now_s = 100
    other = ffi.gc(lib.dp_latency_new(len(Series)), lib.dp_latency_free)
    latency.add(other)
    latency.add(other)  # a second time changes nothing
    for value in (10, 1000):
        latency.record_ns(Series.INGRESS, value * 1000)
    for value in (10, 50_000):
        lib.dp_latency_record(other, Series.INGRESS, value, 100)
    lib.dp_latency_record(other, Series.QUEUE, 7, 100)
    for value in (5, 6, 70_000):
        latency.record_ns(Series.PICKUP, value * 1000)
    page = latency.snapshot(60)
    assert page["count"] == 4
    assert (page["ingress"]["p50"], page["ingress"]["max"]) == (10, 50_015)
    assert page["queue"]["max"] == 7
    assert page["pickup"]["max"] == 70_015
    total = latency.total(Series.INGRESS)
    assert total.within[-1] == 4
    assert total.sum_us == 10 + 1000 + 10 + 50_000


def test_the_counters_of_both_are_added_up() -> None:
    stats = Stats()
    stats.claimed, stats.completed, stats.failed = 10, 4, 1
    stats.answers.update({200: 4, 429: 2})
    raw = SimpleNamespace(
        claimed=30, completed=20, cancelled=3, failed=2, ok=21, busy=0, negative=1, hold_s=2.0
    )
    stats.raw = lambda: raw
    stats.loop = lambda: SimpleNamespace(dropped_out=9)
    counts = stats.counts()
    assert counts.answers == {200: 25, 429: 2}
    assert (counts.claimed, counts.completed, counts.cancelled, counts.failed) == (40, 24, 3, 3)
    assert counts.in_flight == stats.in_flight == 10
    assert (counts.negative, counts.datagrams_dropped) == (1, 9)
    assert stats.health("ok")["claimed"] == 40


def test_the_time_that_a_slot_is_held_is_that_of_both() -> None:
    raw = SimpleNamespace(claimed=30, hold_s=2.0)
    assert joint_hold_s(1.0, 10, None) == 1.0
    assert joint_hold_s(1.0, 10, raw) == pytest.approx(1.75)
    assert joint_hold_s(0.0, 0, raw) == 2.0
    assert joint_hold_s(1.0, 10, SimpleNamespace(claimed=0, hold_s=0.0)) == 1.0


def test_every_reason_of_the_raw_front_has_its_words() -> None:
    engine = PumpEngine()
    ingresses = Ingress(Stats(), 5.0, name="a"), Ingress(Stats(), 5.0, name="b")
    engine._ingresses = ingresses
    engine._vocab_sizes = {0: 50, 1: 100}

    def refused_for(why: int, a: int = 0, b: int = 0) -> Refused:
        return Refused(1, why, a, b, n_tokens=4, queue_us=0, partition=1)

    def words_of(why: int, a: int = 0, b: int = 0) -> tuple[int, str]:
        refusal = engine.refusal(refused_for(why, a, b))
        return int(refusal.status), refusal.reason

    assert words_of(lib.DP_WHY_BAD_TOKEN, 3, 100) == (
        400,
        "token 3 is 100; the vocabulary has 100",
    )
    assert words_of(lib.DP_WHY_OVERFLOW)[1].startswith("the body is longer than the 4 tokens")
    assert words_of(lib.DP_WHY_SHORT, 3, 2)[1].endswith("3 of 4 tokens and 2 bytes of the next")
    assert words_of(lib.DP_WHY_LATE, 2) == (408, "only 2 of 4 tokens came in time")
    assert words_of(lib.DP_WHY_HEADER_LATE, 20)[1] == "only 20 bytes of the header came in time"
    assert words_of(lib.DP_WHY_LOST) == (503, refusals.LOST)
    ingresses[1].draining = True
    assert words_of(lib.DP_WHY_LOST) == (503, refusals.DRAINING)
    assert engine.admitter(refused_for(lib.DP_WHY_LOST)) is ingresses[1]
    assert engine.admitter(refused_for(lib.DP_WHY_HEADER_LATE, 20)) is None
