"""`dataplane profile`: samples go to the stage whose code ran, and the table adds up."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dataplane
from dataplane.cli import sampler
from dataplane.cli.profile import summary
from dataplane.cli.sampler import STAGES, Sampler, stage_of


@pytest.mark.parametrize(
    ("filename", "function", "stage"),
    [
        ("/x/selectors.py", "select", "kernel"),
        ("/x/selectors.py", "register", None),
        ("/x/dataplane/socket_engine.py", "_readable", "kernel"),
        ("/x/dataplane/listener.py", "deliver", None),
        ("/x/aioquic/_crypto.py", "decrypt", "crypto"),
        ("/x/aioquic/quic/crypto.py", "decrypt_packet", "crypto"),
        ("/x/aioquic/quic/connection.py", "receive_datagram", "transport"),
        ("/x/dataplane/prompt1.py", "parse_request", "parse"),
        ("/x/dataplane/prompt1.py", "encode_verdict", None),
        ("/x/dataplane/http3_fields.py", "check_request", "parse"),
        ("/x/dataplane/http3_fields.py", "encode_section", "egress"),
        ("/x/dataplane/table.py", "admit", "claim"),
        ("/x/dataplane/table.py", "submit", "write"),
        ("/x/dataplane/egress.py", "flush", "egress"),
        ("/x/asyncio/base_events.py", "_run_once", None),
    ],
)
def test_a_function_belongs_to_its_stage(filename: str, function: str, stage: str | None) -> None:
    assert stage_of(filename, function) == stage


def test_what_the_table_names_is_there() -> None:
    root = Path(dataplane.__file__).parent.parent
    for ending, functions in sampler._TABLE.items():
        if ending.startswith("dataplane/"):
            text = (root / ending).read_text()
            for name in set(functions) - {"*"}:
                assert f"def {name}(" in text, f"{ending} has no {name}"


def test_a_sample_is_shared_by_what_each_thread_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two intervals of 4 ms the interpreter used 1 ms, then 5 as its clock was read late."""
    own, used = iter([0.0, 0.001, 0.006]), iter([0.0, 0.004, 0.008])
    monkeypatch.setattr("time.thread_time", lambda: next(own))
    monkeypatch.setattr("time.process_time", lambda: next(used))
    one = Sampler()
    one._sample(0, None)
    one._sample(0, None)
    assert one.counts == pytest.approx({"pump": 0.75, "interpreter": 1.25})


def test_the_shares_are_of_all_samples_and_the_times_of_the_cpu() -> None:
    found = {"samples": {"kernel": 30, "parse": 10}, "user_s": 3.0, "system_s": 1.0}
    document = summary(found, 80.0, {})
    assert document["samples"] == 40
    assert document["system_share"] == 0.25
    assert document["stages"]["kernel"] == {"share": 0.75, "us_per_request": 60.0}
    assert document["stages"]["claim"] == {"share": 0.0, "us_per_request": 0.0}
    assert list(document["stages"]) == list(STAGES)


@pytest.mark.parametrize(
    ("options", "stage"),
    [(["--requests=60000"], "pump"), (["--requests=4000", "--no-pump"], "transport")],
)
def test_a_real_profile_finds_what_carries_the_packets(options: list[str], stage: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dataplane", "profile", *options, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    document = json.loads(done.stdout)
    assert document["samples"] > 10
    shares = {stage: row["share"] for stage, row in document["stages"].items()}
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.01)
    assert shares[stage] == max(shares.values())
    assert document["latency_us"]["ingress"]["p50"] > 0
