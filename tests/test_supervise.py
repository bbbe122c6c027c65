"""The bundled runtime's supervision, with scripts in the runtime's place."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_process import run, until

from dataplane import supervise
from dataplane.supervise import Supervisor

Script = Callable[[str], None]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Have the supervisor run this shell script, whatever arguments it gives."""

    def write(text: str) -> None:
        path = tmp_path / "runtime"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return write


class Told(list[int]):
    """What a supervisor was told of early ends."""

    def end(self, again: bool) -> Callable[[int], bool]:
        def note(status: int) -> bool:
            self.append(status)
            return again

        return note


def was_ready_once() -> Supervisor:
    supervisor = Supervisor(["echo"], lambda status: False)
    supervisor.ready()
    supervisor.start()
    return supervisor


def waits(caplog: pytest.LogCaptureFixture) -> list[float]:
    """The waits before each new start, as they were logged."""
    arguments = [record.args for record in caplog.records if "starts again" in record.msg]
    return [float(str(each[2])) for each in arguments if isinstance(each, tuple)]


@pytest.mark.parametrize("exists", [True, False])
def test_the_wait_grows_up_to_its_bound(
    script: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, exists: bool
) -> None:
    script("exit 7")
    if not exists:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(supervise, "BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(supervise, "BACKOFF_MAX_S", 0.04)

    async def main() -> None:
        supervisor = was_ready_once()
        await until("it was started often", lambda: len(waits(caplog)) >= 5)
        await supervisor.stop()

    run(main())
    assert waits(caplog)[:5] == [0.01, 0.02, 0.04, 0.04, 0.04]
    assert ("cannot be started: [Errno 2]" in caplog.text) is not exists
    assert ("status 7" in caplog.text) is exists


def test_an_early_end_is_told_and_final(script: Script) -> None:
    script("exit 3")
    told = Told()

    async def main() -> None:
        supervisor = Supervisor(["echo"], told.end(again=False))
        supervisor.start()
        await until("it is told", lambda: told)
        await supervisor.stop()

    run(main())
    assert told == [3]


def test_an_early_end_need_not_be_final(
    script: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script("exit 3")
    monkeypatch.setattr(supervise, "BACKOFF_FIRST_S", 0.01)
    told = Told()

    async def main() -> None:
        supervisor = Supervisor(["echo"], told.end(again=True), "the fourth one")
        supervisor.start()
        await until("it is told again", lambda: len(told) >= 3)
        await supervisor.stop()

    run(main())
    assert told[:3] == [3, 3, 3]
    assert "the fourth one ended with status 3; it starts again in 0.0 s" in caplog.messages


def test_one_that_was_ready_and_fails_at_its_next_start_is_told_and_started_again(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script("exit 7")
    monkeypatch.setattr(supervise, "BACKOFF_FIRST_S", 0.01)
    told = Told()

    async def main() -> None:
        supervisor = Supervisor(["echo"], told.end(again=False))
        supervisor.ready()
        supervisor.start()
        await until("it is told again", lambda: len(told) >= 3)
        await supervisor.stop()

    run(main())
    assert told[:3] == [7, 7, 7]


@pytest.mark.parametrize("attaches", [True, False])
def test_one_that_hangs_before_it_attaches_is_ended(
    script: Script, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    attaches: bool,
) -> None:  # fmt: skip
    script("exec sleep 60")
    monkeypatch.setattr(supervise, "ATTACH_WITHIN_S", 0.1)
    asked: list[int] = []
    told = Told()

    def has_attached(pid: int) -> bool:
        asked.append(pid)
        return attaches

    async def main() -> None:
        supervisor = Supervisor(["echo"], told.end(again=False), "the fifth", has_attached)
        supervisor.start()
        await until("it was looked for", lambda: asked)
        if not attaches:
            await until("its end is told", lambda: told)
        await supervisor.stop()

    run(main())
    assert told == ([] if attaches else [-signal.SIGKILL])
    said = "the fifth did not attach within 0.1 s: it is ended"
    assert (said in caplog.messages) is not attaches


POLITE = "trap 'echo > {asked}; exit 0' TERM\necho > {up}\nwhile :; do sleep 0.02; done"
STUBBORN = "trap '' TERM\necho > {up}\nexec sleep 60"


def test_stopping_asks_first(script: Script, tmp_path: Path) -> None:
    script(POLITE.format(asked=tmp_path / "asked", up=tmp_path / "up"))

    async def main() -> None:
        supervisor = was_ready_once()
        await until("it is up", (tmp_path / "up").exists)
        await supervisor.stop()
        assert (tmp_path / "asked").exists()

    run(main())


def test_what_will_not_end_is_killed(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(STUBBORN.format(up=tmp_path / "up"))
    monkeypatch.setattr(supervise, "END_WITHIN_S", 0.3)

    async def main() -> None:
        supervisor = was_ready_once()
        await until("it is up", (tmp_path / "up").exists)
        process = supervisor._process
        assert process is not None
        await supervisor.stop()
        assert process.returncode == -signal.SIGKILL

    run(main())


def test_what_hangs_after_its_attachment_is_killed_and_started_again(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(STUBBORN.format(up=tmp_path / "up"))
    monkeypatch.setattr(supervise, "END_WITHIN_S", 0.2)
    monkeypatch.setattr(supervise, "BACKOFF_FIRST_S", 0.01)

    async def main() -> None:
        supervisor = was_ready_once()
        await until("it is up", (tmp_path / "up").exists)
        (tmp_path / "up").unlink()
        assert supervisor._process is not None
        supervisor.lost(os.getpid())  # Another one's attachment: nobody is killed.
        supervisor.lost(supervisor._process.pid)
        await until("another one is up", (tmp_path / "up").exists)
        await supervisor.stop()

    run(main())
