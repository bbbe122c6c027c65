"""The command line: what goes where, in which form, and with which exit code."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import (
    FakeDaemon,
    Stream,
    fake_daemon_thread,
    refusal,
    verdict,
    whole_answer,
    words,
)

from dataplane import __version__
from dataplane.cli import prompts as cli_prompts
from dataplane.cli.main import main
from dataplane.cli.prompts import ByteCodec, IdText, parse_ids
from dataplane.errors import ResetCode, UsageError

FIELDS = [
    "status",
    "slot",
    "request_id",
    "token_ids",
    "text",
    "finish_reason",
    "usage",
    "timings_us",
    "error",
]  # fmt: skip


async def behave(stream: Stream) -> None:
    """Echo; a first id of three digits is the status to refuse with, 1 breaks off, 2 is slow."""
    first = stream.ids[0]
    if 400 <= first < 600:
        stream.send(refusal(first, "because\nit is so"), fin=True)
    elif first == 1:
        stream.send(verdict() + words([1, 2]))
        await asyncio.sleep(0.01)
        stream.reset(ResetCode.RUNTIME_LOST)
    elif first == 2:
        stream.send(verdict())
    else:
        stream.send(whole_answer(stream.ids), fin=True)


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("DATAPLANE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "identity"))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "identity"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with fake_daemon_thread(tmp_path, behave) as daemon:
        yield daemon


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Bytes for a tokeniser; the list gets whether the chat template was asked for."""
    asked = []

    async def fetch(server: str, ca: Path | None, chat: bool, say: Any, **how: Any) -> ByteCodec:
        asked.append(chat)
        return ByteCodec()

    monkeypatch.setattr(cli_prompts, "fetch_codec", fetch)
    return asked


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run `client --json`: stdout must be one object on one line, with every field in its place."""
    code = main(["client", "--json", *arguments])
    out = capsys.readouterr().out
    assert out.endswith("\n")
    assert out.count("\n") == 1
    answer: dict[str, Any] = json.loads(out)
    assert list(answer) == FIELDS
    return code, answer


# ---------------------------------------------------------------- client


def test_ids_are_answered_with_ids_and_a_table(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["client", "--server", daemon.address, "--ids", "7, 8,9", "--max-output=3"])
    out, err = capsys.readouterr()
    assert (code, out) == (0, "7,8,9\n")
    for stage, time in (
        ("queue", "41 µs"),
        ("ingress", "63 µs"),
        ("first token", ""),
        ("total", ""),
    ):
        assert any(line.startswith(stage) and time in line for line in err.splitlines())
    assert daemon.streams[0].request.max_output == 3


def test_json_is_one_object_with_all_there_is(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], state_dir: Path
) -> None:
    ca = ["--ca", str(state_dir / "ca.pem")]
    code, answer = run_json(capsys, "--server", daemon.address, "--ids", "7,8", *ca)
    times = answer.pop("timings_us")
    assert (code, answer) == (
        0,
        {
            "status": 200,
            "slot": 3,
            "request_id": "000000000000002a",
            "token_ids": [7, 8],
            "text": None,
            "finish_reason": "stop",
            "usage": {"prompt_tokens": 5, "output_tokens": 2},
            "error": None,
        },
    )
    assert (times["queue"], times["ingress"], times["pickup"]) == (41, 63, None)
    assert 0 < times["first_token"] <= times["total"]


@pytest.mark.parametrize(("status", "exit_code"), [(429, 75), (503, 69), (400, 1), (501, 1)])
def test_a_refusal_has_its_exit_code_and_its_reason(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], status: int, exit_code: int
) -> None:
    arguments = ["--server", daemon.address, "--ids", str(status)]
    code, answer = run_json(capsys, *arguments)
    assert (code, answer["status"], answer["error"]) == (exit_code, status, "because\nit is so")
    assert (answer["token_ids"], answer["slot"], answer["usage"]) == (None, None, None)
    assert main(["client", *arguments]) == exit_code
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"dataplane: {status}: because it is so\n")


def test_an_answer_that_breaks_off_is_no_success(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--server", daemon.address, "--ids", "1"]
    code, answer = run_json(capsys, *arguments)
    assert (code, answer["status"], answer["token_ids"]) == (1, 200, [1, 2])
    assert answer["finish_reason"] is None
    assert "the runtime was lost" in answer["error"]
    assert main(["client", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "1,2\n"
    assert err == "dataplane: the answer was broken off: the runtime was lost (code 1)\n"


def test_no_connection_is_69(
    tmp_path: Path, daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = str(daemon.ca)
    code, answer = run_json(capsys, "--server", "127.0.0.1:1", "--ca", ca, "--ids", "7")
    assert (code, answer["status"]) == (69, None)
    assert answer["error"].startswith("no connection to 127.0.0.1:1 ")
    assert answer["timings_us"] is None


def test_no_daemon_ever_is_69_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = run_json(capsys, "--ids", "7")
    assert code == 69
    assert "`dataplane serve` makes it at its first start" in answer["error"]


def test_text_is_tokenised_here_and_comes_back_as_text(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], no_model: list[bool]
) -> None:
    arguments = ["--server", daemon.address, "--no-chat", "héllo"]
    assert main(["client", *arguments]) == 0
    assert capsys.readouterr().out == "héllo\n"
    code, answer = run_json(capsys, *arguments[:2], "line\n")
    assert (code, answer["text"]) == (0, "line\n")
    assert answer["token_ids"] == list(b"line\n")
    assert no_model == [False, True]
    assert main(["client", *arguments[:2], "line\n"]) == 0
    assert capsys.readouterr().out == "line\n"  # its own line end is enough


def test_the_answer_is_shown_as_it_streams() -> None:
    shown: list[str] = []
    text = ByteCodec().stream()
    for number in "aé!".encode():
        shown.append(text.push([number]))
    assert shown == ["a", "", "é", "!"]
    assert (text.push([0xC3]), text.flush()) == ("", "�")
    ids = IdText()
    assert [ids.push([1, 2]), ids.push([]), ids.push([3])] == ["1,2", "", ",3"]


def test_ids_may_come_from_a_file(
    daemon: FakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ids"
    file.write_text("7 8,\n9\n")
    assert main(["client", "--server", daemon.address, "--ids-file", str(file)]) == 0
    assert daemon.streams[0].ids == [7, 8, 9]
    file.write_bytes(b"\xff\xfe")
    assert main(["client", "--ids-file", str(file)]) == 1
    assert main(["client", "--ids-file", str(tmp_path / "none")]) == 1
    err = capsys.readouterr().err
    assert "it is no text" in err
    assert "it cannot be read: No such file" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "number 1 is nothing"),
        ("1,,2", "number 2 is nothing"),
        ("1,2,", "number 3 is nothing"),
        ("1,x", "number 2 is 'x'"),
        ("1,-2", "number 2 is '-2'"),
        ("1.0", "number 1 is '1.0'"),
        ("4294967296", "number 1 is '4294967296'; ids are whole numbers from 0 to 4294967295"),
        ("٣", "number 1 is '٣'"),
    ],
)
def test_ids_that_are_none_are_refused_by_place(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=r"^--ids: ") as caught:
        parse_ids("--ids", text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "one of the arguments PROMPT --ids --ids-file is required"),
        (["--ids", "1", "text"], "not allowed with argument"),
        (["--ids", "1", "--seed", "x"], "--seed: 'x' is not allowed; it takes a whole number"),
        (["--ids", "1", "--temperature", "101"], "it takes a number from 0 to 100"),
        (["--ids", "1", "--max-output=-1"], "--max-output: '-1' is not allowed"),
        (["--ids", "1", "--protocol", "h2"], "invalid choice: 'h2'"),
        (
            ["--ids", "1", "--server", "here"],
            "the server 'here' is not allowed; it takes HOST:PORT",
        ),
        (["--ids", "1", "--ca", "/none"], "there is no CA file /none"),
        (["--ids", "1", "--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--ids", "1", "--max=3"], "unrecognized arguments: --max=3"),
    ],
)
def test_bad_usage_is_said_in_json_too(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, answer = run_json(capsys, *arguments)
    assert code == 1
    assert says in answer["error"]
    assert main(["client", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("dataplane: ")
    assert says in err
    assert err.count("\n") == 1


def test_an_interrupt_is_130_without_a_traceback(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(coroutine: Any) -> None:
        coroutine.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run", interrupt)
    assert main(["client", "--ids", "7"]) == 130
    assert capsys.readouterr() == ("", "")
    code, answer = run_json(capsys, "--ids", "7")
    assert (code, answer["error"]) == (130, "interrupted")


def test_a_bug_is_a_traceback_and_still_one_object(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, text: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli_prompts, "parse_ids", fail)
    with pytest.raises(ZeroDivisionError):
        main(["client", "--json", "--ids", "7"])
    assert "internal error" in json.loads(capsys.readouterr().out)["error"]


def test_a_reader_that_leaves_is_no_traceback(daemon: FakeDaemon) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "dataplane", "client", "--server", daemon.address]
    done = subprocess.run(
        [*command, "--ids", "7,8"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


# ---------------------------------------------------------------- the other commands


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dataplane {__version__}\n"
    for command in (["serve"], ["client"], ["run"], ["model", "install"], ["runtime", "echo"], []):
        assert main([*command, "--help"]) == 0
        assert capsys.readouterr().out.startswith("usage: dataplane")


def test_no_or_unknown_command_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["model"], ["runtime"], ["sevre"]):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)


def test_serve_gets_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def serve(config: Any) -> int:
        seen.append(config)
        return 7

    monkeypatch.setattr("dataplane.daemon.serve", serve)
    monkeypatch.setenv("DATAPLANE_SLOTS", "5")
    assert main(["serve", "--runtime", "echo", "--listen", "127.0.0.1:0"]) == 7
    config = seen[0]
    assert (config.runtime, config.listen, config.slots) == ("echo", ("127.0.0.1", 0), 5)
    assert config.socket == tmp_path / "identity" / "runtime.sock"
    assert main(["serve", "--slots", "0"]) == 2
    assert capsys.readouterr().err.startswith("dataplane: --slots: '0' is not allowed")


def test_a_runtime_gets_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def echo(*arguments: Any, partition: str) -> int:
        seen.append((*arguments[:-1], partition, os.environ.get("CUDA_VISIBLE_DEVICES")))
        return 3

    def smollm2(*arguments: Any, cache_dir: Path, partition: str) -> None:
        seen.append((*arguments[:-1], cache_dir, partition))

    monkeypatch.setattr("dataplane.runtime.echo.main", echo)
    monkeypatch.setattr("dataplane.runtime.smollm2.main", smollm2)
    path = tmp_path / "r.sock"
    socket = ["--socket", str(path)]
    assert main(["runtime", "echo", *socket, "--slots=2", "--token-delay-ms", "1.5"]) == 3
    assert main(["runtime", "smollm2", *socket, f"--state-dir={tmp_path / 'state'}"]) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert main(["runtime", "echo", *socket, "--partition=a=1"]) == 3
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert seen == [
        (path, 2, 1024, 512, 49152, 1.5, "default", None),
        (path, 8, 1024, 512, tmp_path / "state", "default"),
        (path, 8, 1024, 512, 49152, 0.0, "a", "1"),
    ]
    assert main(["runtime", "echo", *socket, "--partition=a=1", "--partition=b=2"]) == 2
    assert "a runtime serves one partition, not a=1 and b=2" in capsys.readouterr().err
    assert main(["runtime", "echo"]) == 2
    assert "--socket is required" in capsys.readouterr().err


def test_model_install_says_its_progress_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dataplane.model.install", lambda say: say("it is there"))
    assert main(["model", "install"]) == 0
    assert capsys.readouterr() == ("", "dataplane: it is there\n")
