"""`dataplane bench`: against real daemons, its own and others, down to the processes it leaves."""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from conftest import StartDaemon
from daemon_process import DaemonProcess
from fake_daemon import Stream, fake_daemon_thread, refusal, verdict, whole_answer

from dataplane.cli import bench as cli_bench
from dataplane.cli.main import main

WITHIN_S = 30.0
QUANTILES = ["p50", "p90", "p99", "p999", "max"]
MARK = "TEST_BENCH_MARK"


class Bench:
    """Runs of the command, each of which has to leave no process and no file."""

    def __init__(self, directory: Path) -> None:
        self._temporary = directory / "tmp"
        self._temporary.mkdir()
        self._mark = f"{MARK}={directory}"
        environ = {n: v for n, v in os.environ.items() if not n.startswith("DATAPLANE_")}
        self._environ = {
            **environ,
            MARK: str(directory),
            "TMPDIR": str(self._temporary),
            "XDG_STATE_HOME": str(directory / "state"),
        }

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "dataplane", "bench", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environ,
            text=True,
        )

    def run(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=WITHIN_S)
        assert process.returncode == status, err
        return out, err

    def json(self, *arguments: str, status: int = 0) -> dict[str, Any]:
        out, _ = self.run("--json", *arguments, status=status)
        assert out.count("\n") == 1
        result: dict[str, Any] = json.loads(out)
        return result

    def left(self) -> list[str]:
        """Processes of these runs, and files in the directory for temporary ones."""
        found = os.listdir(self._temporary)
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark.encode() in (
                    entry / "environ"
                ).read_bytes().split(b"\0"):
                    found.append(entry.name)
            except OSError:
                continue
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def to(daemon: DaemonProcess) -> list[str]:
    return [f"--server={daemon.address}", f"--ca={daemon.ca}"]


def wait_for_line(process: "subprocess.Popen[str]", pattern: str) -> str:
    """Read stderr until a line matches; what came."""
    assert process.stderr is not None
    descriptor = process.stderr.fileno()
    text = ""
    deadline = time.monotonic() + WITHIN_S
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not re.search(pattern, text):
            assert selector.select(max(0.0, deadline - time.monotonic())), text
            data = os.read(descriptor, 65536)
            assert data, text
            text += data.decode()
    return text


# ---------------------------------------------------------------- its own daemon


@pytest.mark.parametrize(
    "options",
    [["--protocol=raw"], ["--protocol=h3"], ["--protocol=raw", "--no-pump"], ["--busy-poll"]],
)
def test_the_object_is_as_promised(bench: Bench, options: list[str]) -> None:
    result = bench.json("--requests=600", "--connections=3", "--streams=5", *options)
    assert list(result) == [
        "requests",
        "by_status",
        "verdict_us",
        "ingress_us",
        "server_cpu_us_per_request",
        "rate_per_s",
    ]
    assert result["requests"] == 600
    assert result["by_status"] == {"200": 600}
    for name in ("verdict_us", "ingress_us"):
        times = result[name]
        assert list(times) == QUANTILES
        assert all(type(time) is int and time > 0 for time in times.values())
        assert sorted(times.values()) == list(times.values())
    assert result["ingress_us"]["p50"] < result["verdict_us"]["p50"]
    assert 0.5 < result["server_cpu_us_per_request"] < 5000
    assert 10 < result["rate_per_s"] < 1e6
    # One request's latency is what `in flight / rate` says, on average (Little's law).
    assert result["verdict_us"]["max"] > 15e6 / result["rate_per_s"] / 4
    assert bench.left() == []


def test_a_table_goes_to_stdout_and_the_rest_to_stderr(bench: Bench) -> None:
    out, err = bench.run(
        "--runtime=echo", "--requests=50", "--connections=1", "--streams=2", "--max-output=7"
    )
    title, verdict_row, ingress_row, answers, rate, cpu, engine = out.splitlines()
    assert title.split()[:6] == ["µs", *QUANTILES]
    assert verdict_row.split()[0] == "verdict"
    assert ingress_row.split()[0] == "ingress"
    assert answers.split() == ["answers", "200:", "50"]
    assert re.fullmatch(r"rate +[\d,]+ a second", rate)
    assert re.fullmatch(r"server CPU +[\d.]+ µs a request", cpu)
    assert engine.split() == ["engine", "the", "packet", "pump"]
    assert "50 requests of 128 tokens, 1 connections with 2 streams" in err
    assert bench.left() == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_no_process(bench: Bench, number: int, status: int) -> None:
    with bench.start("--requests=1000000") as process:
        wait_for_line(process, "1,000,000 requests")
        process.send_signal(number)
        out, _ = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, out) == (status, "")
    assert bench.left() == []


# ---------------------------------------------------------------- another daemon


def test_refusals_are_counted_and_are_no_error(bench: Bench, daemon: StartDaemon) -> None:
    served = daemon("--runtime=echo", "--slots=1", "--token-delay-ms=5")
    result = bench.json(
        *to(served),
        f"--admin=127.0.0.1:{served.admin_port}",
        *("--requests=400", "--connections=2", "--streams=4", "--max-output=4"),
    )
    counts = result["by_status"]
    assert set(counts) == {"200", "429"}
    assert sum(counts.values()) == 400
    assert counts["429"] > counts["200"] > 0
    assert result["server_cpu_us_per_request"] > 0
    health = served.health()["requests"]
    assert sum(health.values()) == 400 + 200  # the warm-up's too
    assert health["429"] >= counts["429"]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("protocol", ["raw", "h3"])
@pytest.mark.parametrize("flags", [[], ["--no-pump"]])
def test_a_load_has_a_key_and_tells_who_had_none(
    daemon: StartDaemon,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    flags: list[str],
) -> None:
    monkeypatch.delenv("DATAPLANE_API_KEY", raising=False)
    tenants, key = tmp_path / "tenants.toml", tmp_path / "key"
    tenants.write_text(f'[acme]\nkey_sha256 = "{sha256(b"alpha").hexdigest()}"\n')
    key.write_text("alpha\n")
    served = daemon("--runtime=echo", "--slots=2", f"--tenants={tenants}")
    load = ["bench", "--json", *to(served), f"--protocol={protocol}", *flags]
    load += ["--requests=40", "--connections=1", "--streams=1"]

    def count(*arguments: str) -> tuple[dict[str, int], bool]:
        assert main([*load, *arguments]) == 0
        out, err = capsys.readouterr()
        told = (
            "40 of 40 requests were answered with 401, no or unknown API key:"
            " a key comes from --api-key-file FILE, or else from DATAPLANE_API_KEY"
        )
        return json.loads(out)["by_status"], told in err

    assert count() == ({"401": 40}, True)
    assert count(f"--api-key-file={key}") == ({"200": 40}, False)
    monkeypatch.setenv("DATAPLANE_API_KEY", "alpha")
    assert count() == ({"200": 40}, False)


def test_an_open_loop_keeps_its_rate(bench: Bench, daemon: StartDaemon) -> None:
    served = daemon("--runtime=null")
    result = bench.json(*to(served), "--requests=100", "--rate=200", "--connections=2")
    assert result["by_status"] == {"200": 100}
    assert 20 < result["rate_per_s"] < 203  # the last is due after 99 intervals
    assert result["server_cpu_us_per_request"] is None


def test_a_rate_that_cannot_be_kept_is_said(bench: Bench, daemon: StartDaemon) -> None:
    served = daemon("--runtime=echo", "--slots=1", "--token-delay-ms=20")
    arguments = ["--requests=10", "--rate=1000", "--connections=1", "--streams=1"]
    _, err = bench.run(*to(served), *arguments, "--max-output=1")
    assert "requests a second were made of the 1,000 wanted" in err


def test_a_daemon_that_dies_is_counted_as_lost(bench: Bench, daemon: StartDaemon) -> None:
    served = daemon("--runtime=null")
    with bench.start(*to(served), "--requests=1000000", "--json") as process:
        wait_for_line(process, "1,000,000 requests")
        served.kill()
        out, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 1
    result = json.loads(out)
    assert result["by_status"]["lost"] > 0
    assert sum(result["by_status"].values()) == result["requests"] == 1_000_000


@pytest.fixture
def handlers() -> Any:
    """The signal handlers that a command in this process may change."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_answers_that_break_off_make_the_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def behave(stream: Stream) -> None:
        kind = stream.number // 4 % 4
        if kind == 1:
            stream.send(verdict())
            stream.reset(1)
        elif kind == 2:
            stream.send(refusal(503, "no runtime is attached"), fin=True)
        else:
            stream.send(whole_answer([1]), fin=True)

    with fake_daemon_thread(tmp_path, behave) as fake:
        arguments = ["bench", "--json", f"--server={fake.address}", f"--ca={fake.ca}"]
        assert main([*arguments, "--requests=40", "--connections=1", "--streams=4"]) == 1
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["by_status"] == {"200": 20, "503": 10, "reset": 10}
    assert "10 of 40 requests were not answered" in err


@pytest.mark.usefixtures("handlers")
def test_where_nothing_was_measured_stands_null(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def behave(stream: Stream) -> None:
        stream.send(refusal(429, "every slot is taken"), fin=True)

    with fake_daemon_thread(tmp_path, behave) as fake:
        arguments = ["bench", "--json", f"--server={fake.address}", f"--ca={fake.ca}"]
        assert main([*arguments, "--requests=3"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["by_status"] == {"429": 3}
        assert result["ingress_us"] == dict.fromkeys(QUANTILES)
        assert min(result["verdict_us"].values()) > 0
        assert main([*arguments[:1], *arguments[2:], "--requests=3"]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[2].split()[1:6] == ["-"] * 5
        assert "not known: --admin names the port" in out


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--requests=0"], "--requests: '0' is not allowed; it takes a whole number from 1"),
        (["--connections=0"], "--connections: '0' is not allowed"),
        (["--streams=129"], "--streams: '129' is not allowed; it takes a whole number from 1 to"),
        (["--prompt-tokens=0"], "--prompt-tokens: '0' is not allowed"),
        (["--max-output=-1"], "--max-output: '-1' is not allowed"),
        (["--rate=0"], "--rate: '0' is not allowed"),
        (["--slots=1025"], "--slots: '1025' is not allowed"),
        (["--protocol=h2"], "invalid choice"),
        (["--runtime=smollm2"], "invalid choice"),
        (["--server=nowhere"], "--server: 'nowhere' is not allowed; it takes HOST:PORT"),
        (["--server=h:1", "--runtime=echo"], "--runtime is for a daemon of its own"),
        (["--server=h:1", "--slots=1"], "--slots is for a daemon of its own"),
        (["--no-pump", "--busy-poll"], "--busy-poll is the packet pump's"),
        (["--ca=x.pem"], "--ca is for a daemon that runs already"),
        (["--admin=localhost:1"], "--admin is for a daemon that runs already"),
        (["--api-key-file=key"], "--api-key-file is for a daemon that runs already"),
        (["--server=localhost:1", "--ca=/none.pem"], "there is no CA file /none.pem"),
    ],
)
@pytest.mark.usefixtures("handlers")
def test_flags_are_refused_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err


def test_a_prompt_that_the_daemon_cannot_take_is_refused(bench: Bench, daemon: StartDaemon) -> None:
    served = daemon("--runtime=echo", "--context=64")
    admin = f"--admin=127.0.0.1:{served.admin_port}"
    arguments = [*to(served), admin, "--requests=5", "--connections=1"]
    out, err = bench.run(*arguments, "--prompt-tokens=65", status=2)
    assert (out, "--prompt-tokens 65: the daemon's context is 64" in err) == ("", True)
    assert bench.json(*arguments, "--prompt-tokens=64")["by_status"] == {"200": 5}


@pytest.mark.usefixtures("handlers")
def test_an_admin_port_where_nobody_answers_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--server=localhost:1", "--admin=127.0.0.1:1"]) == 69
    words = "dataplane: the admin port 127.0.0.1:1 does not answer /props"
    assert capsys.readouterr().err.startswith(words)


def test_its_own_daemon_has_a_slot_for_each_in_flight() -> None:
    plan = cli_bench.Plan(
        server=None,
        ca=None,
        admin=None,
        requests=1,
        connections=5,
        streams=7,
        prompt_tokens=2000,
        max_output=600,
        protocol="raw",
        rate=None,
        runtime=None,
        slots=None,
    )
    command = cli_bench.serve_command(plan, plan.in_flight, "/d")
    assert {"--slots=35", "--max-writing=35", "--context=2000", "--max-output=600"} <= set(command)
    assert "--runtime=null" in command
    assert not {"--no-pump", "--busy-poll"} & set(command)


@pytest.mark.parametrize("flag", ["--no-pump", "--busy-poll"])
def test_its_own_daemon_runs_on_the_same_engine(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[cli_bench.Plan] = []

    def run(plan: cli_bench.Plan) -> int:
        plans.append(plan)
        return 0

    monkeypatch.setattr(cli_bench, "run", run)
    assert main(["bench", flag]) == 0
    assert flag in cli_bench.serve_command(plans[0], 1, "/d")
