"""The pages of a real daemon, against what its clients were told."""

import json
import signal
from typing import Any

import pytest
from conftest import StartDaemon
from daemon_process import DaemonProcess, run, wait_until
from hdrh.histogram import HdrHistogram
from prometheus_client.parser import text_string_to_metric_families

from dataplane.client import connect

NAMES = ("p50", "p90", "p99", "p999", "max")


def ask(daemon: DaemonProcess, requests: int, **fields: Any) -> list[dict[str, int | None]]:
    """Send that many prompts, one after another; the times that the client was told, in µs."""

    async def main() -> list[dict[str, int | None]]:
        times = []
        async with connect(daemon.address, daemon.ca) as client:
            for _ in range(requests):
                answer = await client.submit([1, 2, 3], **fields)
                assert (await answer.result()).status == 200
                times.append(answer.timings_us)
        return times

    return run(main())


def samples(daemon: DaemonProcess) -> dict[tuple[str, str], float]:
    """Scrape; each value by its name and the value of its label."""
    status, text = daemon.get("/metrics")
    assert status == 200
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def percentiles(values: list[int]) -> dict[str, int]:
    histogram = HdrHistogram(1, 60_000_000, 3)
    for value in values:
        histogram.record_value(value)
    found = [histogram.get_value_at_percentile(percent) for percent in (50, 90, 99, 99.9)]
    return dict(zip(NAMES, [*found, histogram.get_max_value()], strict=True))


def check_slots_of_null(process: DaemonProcess, generations: int) -> None:
    """The runtime that is no process has slots and properties too."""
    rows = process.slots()
    assert [row["slot"] for row in rows] == [0, 1, 2]
    assert {(row["partition"], row["state"]) for row in rows} == {("default", "FREE")}
    # Each claim is one more; a generation has 40 bits.
    assert (sum(row["generation"] for row in rows) - generations) % 2**40 == 0
    props = json.loads(process.get("/props")[1])
    assert (props["model"], props["slots"], props["context"]) == ("null", 3, 64)
    assert (props["max_output"], props["tokenizer_sha256"]) == (9, None)
    assert process.get("/tokenizer.json")[0] == 404
    assert process.get("/readyz") == (200, "ok\n")


def test_the_pages_say_what_the_clients_were_told(daemon: StartDaemon) -> None:
    process = daemon("--runtime=null", "--slots=3", "--context=64", "--max-output=9")
    before = sum(row["generation"] for row in process.slots())
    told = ask(process, 30)
    check_slots_of_null(process, before + 30)
    page = json.loads(process.get("/health?latency99&window=300")[1])
    for series in ("queue", "ingress"):
        values = [times[series] for times in told]
        assert page[series] == percentiles([value for value in values if value is not None])
        status, text = process.get(f"/health?latency99&window=300&format=hdr&series={series}")
        decoded = HdrHistogram.decode(text.encode())
        assert (status, decoded.get_total_count()) == (200, page["count"]) == (200, 30)
        assert decoded.get_max_value() == page[series]["max"]
    scraped = samples(process)
    assert scraped["dataplane_requests_total", "200"] == 30
    assert scraped["dataplane_claimed_total", ""] == 30
    assert scraped["dataplane_completed_total", ""] == 30
    assert scraped["dataplane_ingress_seconds_count", ""] == 30
    total = sum(times["ingress"] or 0 for times in told)
    assert scraped["dataplane_ingress_seconds_sum", ""] == pytest.approx(total / 1e6)
    assert scraped["dataplane_pickup_seconds_count", ""] == 0
    assert scraped["dataplane_slots", "FREE"] == 3
    assert scraped["vllm:num_requests_running", "null"] == 0


def test_a_slot_at_work_is_seen(daemon: StartDaemon) -> None:
    process = daemon("--runtime=echo", "--slots=4", "--token-delay-ms=20", "--max-output=500")

    async def main() -> None:
        async with connect(process.address, process.ca) as client:
            answer = await client.submit([1] * 400)
            (row,) = [row for row in process.slots() if row["state"] != "FREE"]
            assert row["slot"] == answer.slot
            wait_until("it is taken", lambda: process.states().count("RUNNING") == 1)
            wait_until("its age grows", lambda: process.slots()[row["slot"]]["age_ms"] > 100)
            scraped = samples(process)
            assert scraped["dataplane_slots", "RUNNING"] == 1
            assert scraped["dataplane_in_flight", ""] == 1
            assert scraped["vllm:num_requests_running", "echo"] == 1
            assert scraped["vllm:kv_cache_usage_perc", "echo"] == 0.25
            answer.cancel()

    run(main())
    process.wait_idle()
    assert samples(process)["dataplane_cancelled_total", ""] == 1
    assert json.loads(process.get("/props")[1])["stop_ids"] == []


def test_without_a_runtime_a_daemon_is_alive_and_not_ready(bare_daemon: DaemonProcess) -> None:
    assert bare_daemon.get("/livez") == (200, "ok\n")
    for path in ("/readyz", "/props"):
        status, text = bare_daemon.get(path)
        problem = json.loads(text)
        assert (status, problem["status"]) == (503, 503)
        assert "no runtime" in problem["detail"]
        assert (problem["title"], problem["type"]) == ("Service Unavailable", "about:blank")
    assert bare_daemon.slots() == []
    assert samples(bare_daemon)["vllm:num_requests_waiting", ""] == 0


def test_a_draining_daemon_is_alive_and_not_ready(daemon: StartDaemon) -> None:
    process = daemon("--runtime=echo", "--slots=1", "--token-delay-ms=20", "--max-output=500")

    async def main() -> None:
        async with connect(process.address, process.ca) as client:
            await client.submit([1] * 400)
            process.send(signal.SIGTERM)
            process.wait_for_status("draining")
            status, text = process.get("/readyz")
            assert (status, "shutting down" in text) == (503, True)
            assert process.get("/livez") == (200, "ok\n")
            process.send(signal.SIGTERM)

    run(main())
    assert process.wait_for_exit() == 0
