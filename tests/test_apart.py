"""Parts of a measurement in processes of their own: what they reported outlives how they end."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from daemon_process import wait_until

from dataplane import apart
from dataplane.apart import Ended, run_apart

BEGIN = """
import ctypes, os, signal, subprocess, sys, threading, time
from dataplane.apart import limited, report
report({"rows": 1})
"""


def part(body: str, within_s: float = 20) -> Ended:
    return run_apart([sys.executable, "-c", BEGIN + body], within_s)


def test_the_last_report_counts_and_what_was_printed_is_kept() -> None:
    ended = part('print("hello"); report({"rows": 2})')
    assert (ended.found, ended.why, ended.output) == ({"rows": 2}, None, "hello\n")
    assert 0 < ended.seconds < 20


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("sys.exit(3)", "it ended with status 3"),
        ("raise ValueError", "it ended with status 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "it was ended by SIGKILL"),
        ("with limited(): ctypes.string_at(0)", "it was ended by SIGSEGV"),
    ],
)
def test_a_report_outlives_a_crash(body: str, why: str) -> None:
    ended = part(body)
    assert (ended.found, ended.why) == ({"rows": 1}, why)
    if "SIGSEGV" in why:
        assert "Fatal Python error" in ended.output


def test_a_part_that_hangs_says_where_and_ends() -> None:
    body = """
def stuck_kernel():
    # As one that waits in the driver: no signal of Python's is looked at.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.PyDLL(None).pause()
with limited():
    stuck_kernel()
"""
    start = time.monotonic()
    ended = part(body, within_s=3)
    assert (ended.found, ended.why) == ({"rows": 1}, "it was not done within 3 s")
    assert "stuck_kernel" in ended.output
    assert time.monotonic() - start < 15


def test_what_a_part_put_into_temporary_files_goes_with_it() -> None:
    ended = part("import tempfile; report(tempfile.mkdtemp()); os.kill(os.getpid(), 9)")
    assert "dataplane-apart-" in ended.found
    assert not Path(ended.found).exists()


def test_what_a_part_started_ends_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    body = f"""
# As the tests start a daemon: without what may be a setting of it.
kept = {{k: v for k, v in os.environ.items() if not k.startswith("DATAPLANE_")}}
child = subprocess.Popen(["sleep", "300"], start_new_session=True, env=kept)
open({str(pid_file)!r}, "w").write(str(child.pid))
os._exit(0)
"""
    assert part(body).why is None
    started = Path(f"/proc/{pid_file.read_text()}/cmdline")

    def is_over() -> bool:
        try:
            return started.read_bytes() == b""  # nobody has waited for it yet
        except OSError:
            return True

    wait_until("it ended", is_over)


def test_a_process_that_the_driver_holds_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "_END_WITHIN_S", 0.2)
    killed: list[int] = []
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid))
    try:
        ended = part("time.sleep(60)", within_s=1)
    finally:
        for pid in set(killed):
            kill(pid, signal.SIGKILL)
        while apart._left:
            apart._left.pop().wait(10)
    assert ended.why is not None
    assert ended.why.startswith("it was not done within 1 s; process ")
    assert "the driver holds it" in ended.why


def test_without_somebody_who_asked_a_report_goes_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("APART_REPORT", "APART_LIMIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    apart.report({"rows": 1})
    with apart.limited():
        assert not list(tmp_path.iterdir())
