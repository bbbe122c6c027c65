"""`dataplane run`: the daemon that it starts is asked, measured, and always gone at the end."""

import asyncio
import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import FakeDaemon, Stream, fake_daemon_thread, refusal, whole_answer

from dataplane.cli import demo
from dataplane.cli.ask import Question
from dataplane.cli.demo import ChildDaemon, Ready, ask_child, parse_ready
from dataplane.cli.prompts import ByteCodec
from dataplane.errors import UnavailableError

LINE = "ready quic=127.0.0.1:4433 admin=[::1]:9 runtime=echo slots=4 context=1024 ca=/a b/ca.pem"


def child(*lines: str, then: str = "time.sleep(60)") -> list[str]:
    """A command that prints lines and then does something."""
    code = f"import os, signal, sys, time\nfor line in {lines!r}: print(line, flush=True)\n{then}"
    return [sys.executable, "-c", code]


def is_gone(pid: int) -> bool:
    """Whether a process runs no more; one that nobody reaped does not either."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


@contextlib.contextmanager
def admin_port(latency: dict[str, Any]) -> Iterator[str]:
    """An admin port that knows the latency only."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health?latency99&window=10"
            body = json.dumps(latency).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def behave(stream: Stream) -> None:
    if stream.ids == list(b"full"):
        stream.send(refusal(429, "every slot is taken"), fin=True)
    else:
        stream.send(whole_answer(stream.ids), fin=True)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with fake_daemon_thread(tmp_path, behave) as daemon:
        yield daemon


def question(text: str) -> Question:
    return Question(ByteCodec().encode(text), ByteCodec().stream())


def ready_line(daemon: FakeDaemon, admin: str) -> str:
    return f"ready quic={daemon.address} admin={admin} runtime=x slots=1 context=9 ca={daemon.ca}"


def test_the_ready_line_is_read() -> None:
    assert parse_ready(LINE + "\n") == Ready(
        "127.0.0.1:4433", ("::1", 9), "echo", 4, 1024, Path("/a b/ca.pem")
    )
    for line in ("", "ready", LINE.replace("slots=4", "slots=x"), "not " + LINE):
        assert parse_ready(line) is None


def test_the_answer_goes_to_stdout_and_the_times_to_stderr(
    daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]
) -> None:
    with admin_port({"count": 1, "pickup": {"p50": 77}}) as admin:
        command = child("some other line", ready_line(daemon, admin))
        assert ask_child(command, question("hello")) == 0
    out, err = capfd.readouterr()
    assert out == "hello\n"
    lines = [line.split("  ")[0] for line in err.splitlines()]
    assert lines[-5:] == ["queue", "ingress", "pickup", "first token", "total"]
    assert "77 µs" in err


@pytest.mark.parametrize("latency", [{"count": 1}, {"unit": "us"}])
def test_times_are_shown_though_pickup_is_not_known(
    daemon: FakeDaemon, capfd: pytest.CaptureFixture[str], latency: dict[str, Any]
) -> None:
    with admin_port(latency) as admin:
        assert ask_child(child(ready_line(daemon, admin)), question("hello")) == 0
    lines = capfd.readouterr().err.splitlines()
    assert next(line for line in lines if line.startswith("pickup")).split()[1] == "-"


def test_a_refusal_has_its_exit_code(daemon: FakeDaemon, capfd: pytest.CaptureFixture[str]) -> None:
    assert ask_child(child(ready_line(daemon, "127.0.0.1:1")), question("full")) == 75
    assert "429: every slot is taken" in capfd.readouterr().err


def test_a_daemon_that_ends_before_it_is_ready_is_said() -> None:
    with (
        pytest.raises(UnavailableError, match="ended with code 3 before it was ready"),
        ChildDaemon(child("not yet", then="sys.exit(3)")) as starting,
    ):
        starting.wait_ready()


def test_a_daemon_gets_no_key_of_whoever_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_API_KEY", "alpha")
    monkeypatch.setenv("DATAPLANE_SLOTS", "7")
    then = (
        "slots = os.environ['DATAPLANE_SLOTS'] if 'DATAPLANE_API_KEY' not in os.environ else 0\n"
        "print(f'ready quic=a:1 admin=a:1 runtime=x slots={slots} context=1 ca=/', flush=True)\n"
        "time.sleep(60)"
    )
    with ChildDaemon(child(then=then)) as started:
        assert started.wait_ready().slots == 7


def test_a_daemon_that_is_never_ready_is_ended() -> None:
    with (
        pytest.raises(UnavailableError, match=r"not ready within 0\.2 s"),
        ChildDaemon(child("ready or not")) as starting,
    ):
        starting.wait_ready(0.2)


def test_a_daemon_that_does_not_end_is_killed_with_all_it_started(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "END_WITHIN_S", 0.2)
    then = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "below = os.fork()\n"
        "line = f'ready quic=a:1 admin=a:{below} runtime=x slots=1 context=1 ca=/'\n"
        "if below: print(line, flush=True)\n"
        "time.sleep(60)"
    )
    monkeypatch.setattr(demo, "parse_address", lambda text: ("", int(text.split(":")[1])))
    with ChildDaemon(child(then=then)) as stubborn:
        below = stubborn.wait_ready().admin[1]
        assert not is_gone(below)
    assert "does not end; it is killed" in capfd.readouterr().err
    deadline = time.monotonic() + 10  # whoever inherits it has to reap it
    while not is_gone(below) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(below)


def test_an_interrupt_leaves_no_daemon(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    wait_ready = ChildDaemon.wait_ready

    def note(self: ChildDaemon) -> Ready:
        assert self._process is not None
        started.append(self._process.pid)
        return wait_ready(self)

    def interrupt(coroutine: Any) -> None:
        coroutine.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(ChildDaemon, "wait_ready", note)
    monkeypatch.setattr(asyncio, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ask_child(child(ready_line(daemon, "127.0.0.1:1")), question("hello"))
    assert is_gone(started[0])


def run_command(tmp_path: Path, *arguments: str) -> "subprocess.Popen[str]":
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "s"), "TMPDIR": str(tmp_path / "t")}
    (tmp_path / "t").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "dataplane", "run", "--runtime", "echo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environ,
        text=True,
    )


def test_run_asks_a_real_daemon(tmp_path: Path) -> None:
    with run_command(tmp_path, "What is the capital of France?") as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "What is the capital of France?\n")
    times = [line for line in err.splitlines() if line.startswith(("queue", "pickup", "total"))]
    assert len(times) == 3
    assert all("µs" in line or "ms" in line for line in times)
    assert os.listdir(tmp_path / "t") == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing(tmp_path: Path, number: int) -> None:
    with run_command(tmp_path, "--max-output=64", "x" * 1000) as process:
        assert process.stderr is not None
        seen = ""
        while "attached (process " not in seen:
            seen = process.stderr.readline()
            assert seen
        runtime = int(seen.partition("(process ")[2].partition(")")[0])
        process.send_signal(number)
        process.communicate(timeout=30)
    assert process.returncode in (128 + number, 0)  # 0: the answer was there first
    assert is_gone(runtime)
    assert os.listdir(tmp_path / "t") == []
