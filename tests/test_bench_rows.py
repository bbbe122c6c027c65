"""The comparison: its cases and what ONLY picks, its generators without sockets, its figures, and
one real run.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import cases, launch, readme, work
from bench.cases import Case, parse_case, select
from bench.clients import WrongAnswerError
from bench.clients.http1 import Http1
from bench.clients.http2 import END_STREAM, PREFACE, Http2, header_block
from bench.null_servers import Framing
from bench.results import Form, Row, bench_command, document, is_client_bound, write
from bench.systems import SYSTEMS, in_flight_words, shape_of
from dataplane.load.tally import Schedule, quantiles

KEYS = {
    "case", "system", "server_cpu_us", "p50_us", "p99_us", "p999_us", "requests", "client_bound",
}  # fmt: skip
WORDS = (
    "dataplane raw", "dataplane h3", "fastapi", "uvicorn json", "uvicorn binary", "granian",
    "hypercorn",
)  # fmt: skip
SECTIONS = ("noqueue", "growth")


def row(system: str = "granian h1", case: str = "128-c1", cpu: float = 10.0) -> Row:
    return Row(
        case, system, "HTTP/1.1", "json", False, "1 connection", "closed", cpu, None, 5.0,
        100.0, 200.0, 300.0, 400.0, 3000, 1.0, 3000.0, 9000.0, False,
    )  # fmt: skip


# ---------------------------------------------------------------- cases


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("128-c1", Case("128-c1", 128, 1, 1)),
        ("128-s32", Case("128-s32", 128, 1, 32)),
        ("2048-c32", Case("2048-c32", 2048, 32, 1)),
        ("131072-c1", Case("131072-c1", 131072, 1, 1)),
        ("echo-16", Case("echo-16", 128, 1, 32, output=16)),
        ("128-open", Case("128-open", 128, 1, 32, rated=True)),
    ],
)
def test_a_case_is_read_from_its_name(name: str, case: Case) -> None:
    assert parse_case(name) == case


@pytest.mark.parametrize(
    "name", ["", "128", "128-", "128-x1", "0-c1", "128-c0", "131073-c1", "128-s129", "128-c1 "]
)
def test_what_is_no_case_is_none(name: str) -> None:
    assert parse_case(name) is None


def test_the_quick_form_has_the_cases_that_were_promised() -> None:
    names = [case.name for case in cases.cases_of(Form.QUICK)]
    assert names[:6] == ["128-c1", "128-s32", "128-c32", "2048-c1", "2048-s32", "131072-c1"]
    assert set(names) <= {case.name for case in cases.cases_of(Form.FULL)}
    assert cases.LIMITS[Form.QUICK].rounds >= 3  # a row is a median


def test_only_picks_cases_systems_and_sections() -> None:
    systems = list(SYSTEMS)
    whole = select([], Form.QUICK, systems, SECTIONS)
    assert whole == (cases.cases_of(Form.QUICK), systems, list(SECTIONS))

    two = select(["128-s32", " 128-c32"], Form.QUICK, systems, SECTIONS)
    assert [case.name for case in two.cases] == ["128-s32", "128-c32"]
    assert (two.systems, two.sections) == (systems, [])

    peer = select(["granian", "128-s7"], Form.QUICK, systems, SECTIONS)
    assert [case.name for case in peer.cases] == ["128-s7"]
    assert peer.systems == [name for name in systems if "granian" in name]

    assert select(["growth"], Form.QUICK, systems, SECTIONS) == ([], [], ["growth"])
    with pytest.raises(ValueError, match="nothing is called '128-z1'"):
        select(["128-z1"], Form.QUICK, systems, SECTIONS)


@pytest.mark.parametrize("word", WORDS)
def test_each_system_is_there_by_its_word(word: str) -> None:
    assert any(word in name for name in SYSTEMS)


def test_without_multiplexing_streams_are_connections_and_the_row_says_so() -> None:
    case = parse_case("128-s32")
    assert case is not None
    assert shape_of(SYSTEMS["granian h2 binary tls"], case) == (1, 32)
    assert shape_of(SYSTEMS["uvicorn json"], case) == (32, 1)
    words = in_flight_words(SYSTEMS["uvicorn json"], case)
    assert words == "32 connections, 1 in flight on each (HTTP/1.1 has no 32 streams on one)"


# ---------------------------------------------------------------- figures


def test_a_row_has_what_was_promised() -> None:
    assert set(asdict(row())) >= KEYS


def test_the_busier_side_bounds_a_row() -> None:
    assert is_client_bound(1.0, 0.9)
    assert not is_client_bound(0.9, 0.9)
    assert not is_client_bound(0.1, 0.9)


def test_an_open_loop_counts_what_waited_for_a_slow_server() -> None:
    """Ten requests are due 1 ms apart; the server stands still for 100 ms and then answers all."""
    schedule = Schedule(10, rate=1000, start_ns=0)
    stall_ns = 100_000_000
    times = []
    while (began_ns := schedule.take(stall_ns)) is not None:
        times.append((stall_ns - began_ns) / 1000)
    assert times == [100_000 - 1000 * number for number in range(10)]
    assert quantiles(np.array(times))["p50"] == 95_000
    closed = Schedule(10, rate=None, start_ns=0)
    assert closed.take(stall_ns) == stall_ns  # what a closed loop would hide


def result_of(rows: list[Row]) -> dict[str, Any]:
    return document(Form.QUICK, ["128-c1"], {}, rows, [], {}, [])


def test_a_result_says_where_and_with_what_and_overwrites_none(tmp_path: Path) -> None:
    result = result_of([row()])
    assert result["command"] == "make bench ONLY=128-c1"
    assert bench_command(Form.FULL, []) == "make bench BENCH=full"
    for key in ("machine", "kernel", "versions", "commands", "commit", "date"):
        assert key in result
    first, second = write(result, tmp_path), write(result, tmp_path)
    day = result["date"][:10]
    assert [first.name, second.name] == [f"{day}.json", f"{day}-2.json"]
    latest = json.loads((tmp_path / "latest.json").read_text(encoding="utf-8"))
    assert latest["rows"] == [asdict(row())]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [first.name, second.name, "latest.json"]
    )


def test_the_readme_says_which_cases_are_lost(tmp_path: Path) -> None:
    rows = [row("dataplane raw", cpu=40.0), row("granian h1"), row("fastapi json", cpu=200.0)]
    lines = readme.section_lines(result_of(rows), tmp_path)
    lost = (
        "- 128-c1: dataplane raw (40.0 µs) is behind 1 of 2 peers, 0 of 0 with encryption."
        " The cheapest peer: granian h1, 10.0 µs."
    )
    assert lost in lines
    text = readme.rewrite(f"a\n{readme.BEGIN}\nold\n{readme.END}\nb\n", lines)
    assert text.startswith(f"a\n{readme.BEGIN}\n\n`make bench ONLY=128-c1` on ")
    assert text.endswith(f"\n{readme.END}\nb\n")
    assert "old" not in text
    with pytest.raises(ValueError, match="there are no"):
        readme.rewrite("no markers", lines)


# ---------------------------------------------------------------- the work


def test_ids_are_checked_against_the_vocabulary() -> None:
    ids = work.prompt(128)
    assert work.admit(ids) == work.admit_binary(work.binary_body(ids)) == 128
    assert work.admitted(128).tolist() == ids
    for bad in (work.VOCAB, -1, 2**31, 2**40):
        assert work.admit([1, bad]) == 0
    assert work.admit_binary(work.binary_body([1, 2**32 - 1])) == 0
    assert work.admit([]) == 0


# ---------------------------------------------------------------- generators


ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("answer", [ANSWER, CHUNKED])
@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_http1_takes_an_answer_in_any_pieces(answer: bytes, piece: int) -> None:
    wire = Http1(b"request", b"hello")
    for began_ns in (11, 22):
        assert wire.begin(began_ns) == b"request"
        ended: list[int] = []
        for at in range(0, len(answer), piece):
            assert wire.in_flight == 1
            now, more = wire.receive(answer[at : at + piece])
            ended += now
            assert more == b""
        assert ended == [began_ns]
        assert wire.in_flight == 0


@pytest.mark.parametrize(
    "answer",
    [
        ANSWER.replace(b"hello", b"jello"),
        ANSWER.replace(b"200", b"429"),
        ANSWER + b"HTTP",
        b"HTTP/1.1 200 OK\r\n\r\nhello",
        CHUNKED.replace(b"2\r\nhe", b"z\r\nhe"),
    ],
)
def test_http1_refuses_another_answer(answer: bytes) -> None:
    wire = Http1(b"request", b"hello")
    wire.begin(1)
    with pytest.raises(WrongAnswerError):
        wire.receive(answer)


def test_http2_keeps_to_the_windows_and_finds_its_answers() -> None:
    body = bytes(200_000)
    client = Http2(header_block("/p", "text/plain", len(body)), body, b"hello")
    server = Framing(b"hello")
    first = Http2.opening + client.begin(11) + client.begin(22)
    assert first.startswith(PREFACE)
    assert len(first) < 66_000  # the window that holds before the server said another
    ended: list[int] = []
    data = first
    while data:
        answer = server.receive(memoryview(data))
        data = b""
        for at in range(0, len(answer), 5):
            now, more = client.receive(answer[at : at + 5])
            ended += now
            data += more
    assert ended == [11, 22]
    assert client.in_flight == 0


def test_http2_refuses_another_answer() -> None:
    for answer, status in ((b"jello", 0x88), (b"hello", 0x8D)):
        client = Http2(header_block("/p", "text/plain", 1), b"x", b"hello")
        client.begin(1)
        headers = bytes([0, 0, 1, 1, 4, 0, 0, 0, 1, status])
        data = bytes([0, 0, 5, 0, END_STREAM, 0, 0, 0, 1]) + answer
        with pytest.raises(WrongAnswerError):
            client.receive(headers + data)


# ---------------------------------------------------------------- servers


def test_cpu_is_that_of_the_children_too_and_none_is_left() -> None:
    spin = "import time\nwhile time.process_time() < 0.2: pass\nprint('spun', flush=True)"
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {spin!r}" + (
        " + '; import time; time.sleep(60)'])"
    )
    with launch.server(["python", "-c", parent]) as child:
        child.wait_output("spun")
        cpu = child.cpu()
        processes = {pid for pid, _ in cpu.all}
        assert len(processes) == 2
        assert launch.spent_s({}, cpu.all) > 0.2
        assert launch.spent_s(cpu.all, cpu.all) == 0
    time.sleep(0.05)
    assert [launch.family_of(pid) for pid in processes] == [[], []]


def test_a_server_that_does_not_start_says_why() -> None:
    with (
        launch.server(["python", "-c", "raise SystemExit('no room')"]) as child,
        pytest.raises(launch.LaunchError, match="ended with 1: no room"),
    ):
        child.wait_output("ready")


@pytest.mark.slow
def test_one_case_of_one_system_for_real(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.run", "--results", str(tmp_path)]
    done = subprocess.run(
        [*command, "--only", "128-s2,dataplane raw"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    latest = json.loads((tmp_path / "latest.json").read_text(encoding="utf-8"))
    (measured,) = latest["rows"]
    assert set(measured) >= KEYS
    assert (measured["case"], measured["system"]) == ("128-s2", "dataplane raw")
    assert 3 * 8 <= measured["requests"] <= 300_000
    assert measured["server_cpu_us"] > 0
    assert 0 < measured["p50_us"] <= measured["p99_us"] <= measured["p999_us"]
    assert measured["ceiling_rate"] > 0
    assert str(tmp_path.parent) not in json.dumps(latest["commands"])
