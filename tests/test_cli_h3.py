"""`dataplane client` against real daemons, over both protocols: text that becomes ids, and ids."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import StartDaemon
from daemon_process import DaemonProcess
from generate_checks import attached, finish
from raw_runtime import Puppet
from tiny_tokenizer import TEMPLATE, byte_ids, chat_ids, make_tokenizer

from dataplane.cli.main import main
from dataplane.cli.prompts import model_codec
from dataplane.runtime import Finish, Taken

FIELDS = [
    "status", "slot", "request_id", "token_ids", "text", "finish_reason", "usage", "timings_us",
    "error",
]  # fmt: skip
TIMES = ["queue", "ingress", "pickup", "first_token", "total"]


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DATAPLANE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "tokenizer.json")


class Answering:
    """A thread that answers the puppet's next request, and keeps what was asked."""

    def __init__(self, runtime: Puppet, answer: Callable[[Taken], None]) -> None:
        self.prompt: list[int] = []
        self.request: Taken | None = None
        self._runtime = runtime
        self._answer = answer
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self.request = self._runtime.take()[0]
        self.prompt = self.request.tokens.tolist()
        self._answer(self.request)

    def __enter__(self) -> "Answering":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


def client(daemon: DaemonProcess, protocol: str, *arguments: str) -> int:
    """Run `dataplane client`; the exit code."""
    where = ["--server", daemon.address, "--ca", str(daemon.ca), "--protocol", protocol]
    return main(["client", *where, *arguments])


def read_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the one object that stdout has to be."""
    out = capsys.readouterr().out
    assert out.endswith("\n")
    assert out.count("\n") == 1
    answer: dict[str, Any] = json.loads(out)
    assert list(answer) == FIELDS
    if answer["timings_us"] is not None:
        assert list(answer["timings_us"]) == TIMES
    return answer


BOTH = pytest.mark.parametrize("protocol", ["raw", "h3"])


@BOTH
@pytest.mark.parametrize(("flags", "chat"), [([], True), (["--no-chat"], False)])
def test_text_is_tokenised_by_the_daemons_tokeniser(
    bare_daemon: DaemonProcess,
    tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
    protocol: str,
    flags: list[str],
    chat: bool,
) -> None:
    expected = chat_ids("h\u00e9") if chat else byte_ids("h\u00e9")
    with attached(bare_daemon, tokenizer, TEMPLATE) as runtime:
        with Answering(runtime, lambda taken: finish(taken, byte_ids("y\u00ebs"))) as asked:
            assert client(bare_daemon, protocol, *flags, "--max-output=9", "h\u00e9") == 0
        out, err = capsys.readouterr()
        assert out == "y\u00ebs\n"
        stages = {line.split("  ")[0] for line in err.splitlines()}
        assert {"queue", "ingress", "first token", "total"} <= stages
        assert ("pickup" in stages) == (protocol == "h3")
        assert asked.prompt == expected
        assert asked.request is not None
        assert asked.request.max_output == 9

        with Answering(runtime, lambda taken: finish(taken, byte_ids("y\u00ebs"))):
            assert client(bare_daemon, protocol, *flags, "--json", "h\u00e9") == 0
        answer = read_json(capsys)
        assert (answer["status"], answer["text"]) == (200, "y\u00ebs")
        assert answer["token_ids"] == byte_ids("y\u00ebs")
        assert (answer["finish_reason"], answer["error"]) == ("stop", None)
        assert answer["usage"] == {"prompt_tokens": len(expected), "output_tokens": 4}
        assert len(answer["request_id"]) == 16
        assert (answer["timings_us"]["pickup"] is None) == (protocol == "raw")
        assert answer["timings_us"]["total"] > 0
    bare_daemon.wait_for_status("no runtime")


@BOTH
def test_ids_are_answered_with_ids(
    bare_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], protocol: str
) -> None:
    arguments = ["--ids", "5,6", "--temperature", "0.5", "--seed", "7"]
    with attached(bare_daemon) as runtime:
        with Answering(runtime, lambda taken: finish(taken, [8, 9])) as asked:
            assert client(bare_daemon, protocol, *arguments) == 0
        assert capsys.readouterr().out == "8,9\n"
        assert asked.prompt == [5, 6]
        assert asked.request is not None
        assert (asked.request.temperature, asked.request.seed) == (0.5, 7)
        with Answering(runtime, lambda taken: finish(taken, [8, 9])):
            assert client(bare_daemon, protocol, "--json", *arguments) == 0
        answer = read_json(capsys)
        assert (answer["status"], answer["token_ids"], answer["text"]) == (200, [8, 9], None)
        assert answer["finish_reason"] == "stop"
    bare_daemon.wait_for_status("no runtime")


def test_the_text_is_printed_as_it_comes(bare_daemon: DaemonProcess, tokenizer: Path) -> None:
    where = ["--server", bare_daemon.address, "--ca", str(bare_daemon.ca)]
    command = [sys.executable, "-m", "dataplane", "client", *where, "--protocol", "h3", "hi"]
    with (
        attached(bare_daemon, tokenizer, TEMPLATE) as runtime,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process,
    ):
        taken = runtime.take()[0]
        assert process.stdout is not None
        for part, shown in ((b"a", b"a"), (b"b\xc3", b"b"), (b"\xa9c", "\u00e9c".encode())):
            taken.emit(list(part))
            assert process.stdout.read(len(shown)) == shown
        taken.finish(Finish.STOP)
        assert process.stdout.read() == b"\n"
        assert process.wait(10) == 0
    bare_daemon.wait_for_status("no runtime")


@BOTH
def test_an_answer_that_breaks_off_is_no_success(
    bare_daemon: DaemonProcess,
    tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
    protocol: str,
) -> None:
    def fail(taken: Taken) -> None:
        taken.emit(byte_ids("so "))
        bare_daemon.wait_for_states("RUNNING")
        taken.finish(Finish.ERROR)

    with attached(bare_daemon, tokenizer, TEMPLATE) as runtime:
        with Answering(runtime, fail):
            assert client(bare_daemon, protocol, "--json", "hi") == 1
        answer = read_json(capsys)
        assert (answer["status"], answer["finish_reason"]) == (200, None)
        assert "the answer was broken off" in answer["error"]
    bare_daemon.wait_for_status("no runtime")


@BOTH
def test_every_refusal_has_its_exit_code(
    bare_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], protocol: str
) -> None:
    bare_daemon.wait_for_status("no runtime")
    for question in (["--ids", "1"], ["hi"]):
        assert client(bare_daemon, protocol, *question) == 69
        out, err = capsys.readouterr()
        assert out == ""
        assert "runtime is" in err
        assert client(bare_daemon, protocol, "--json", *question) == 69
        assert "runtime is" in read_json(capsys)["error"]
    with attached(bare_daemon) as runtime:
        with Answering(runtime, lambda taken: finish(taken, [1])):
            assert client(bare_daemon, protocol, "--ids", "2") == 0
        capsys.readouterr()
        assert client(bare_daemon, protocol, "--json", "--ids", "70000") == 1
        answer = read_json(capsys)
        assert (answer["status"], answer["token_ids"]) == (400, None)
        assert "token 0 is 70000" in answer["error"]
    bare_daemon.wait_for_status("no runtime")


@BOTH
def test_a_full_daemon_is_75(
    daemon: StartDaemon, capsys: pytest.CaptureFixture[str], protocol: str
) -> None:
    full = daemon("--runtime=none")
    with attached(full) as runtime:
        threads = [
            threading.Thread(target=client, args=(full, "h3", "--ids", "1")) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        taken = runtime.take(4)
        capsys.readouterr()
        assert client(full, protocol, "--json", "--ids", "1") == 75
        answer = read_json(capsys)
        assert (answer["status"], answer["error"]) == (429, "every slot is taken")
        for each in taken:
            finish(each, [])
        for thread in threads:
            thread.join(20)


def test_without_any_tokeniser_text_cannot_be_asked(
    bare_daemon: DaemonProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("dataplane.model.WEIGHTS_MODULE", "no_such_module")
    with attached(bare_daemon):
        assert client(bare_daemon, "raw", "--json", "hi") == 1
        error = read_json(capsys)["error"]
        assert error.startswith("the runtime has no tokeniser")
        assert "give --ids" in error
        assert "`dataplane model install`" in error
        assert client(bare_daemon, "h3", "--json", "hi") == 1
        answer = read_json(capsys)
        assert (answer["status"], answer["token_ids"]) == (501, None)
        assert "the runtime has no tokeniser" in answer["error"]
    bare_daemon.wait_for_status("no runtime")


def test_the_small_models_tokeniser_takes_the_place_of_none(
    bare_daemon: DaemonProcess,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("dataplane.model.locate", lambda: None)
    monkeypatch.setattr("dataplane.model.tokenizer_json", lambda files, directory: tokenizer)
    with attached(bare_daemon) as runtime:
        with Answering(runtime, lambda taken: finish(taken, byte_ids("ok"))) as asked:
            assert client(bare_daemon, "raw", "--no-chat", "hi") == 0
        out, err = capsys.readouterr()
        assert (out, asked.prompt) == ("ok\n", byte_ids("hi"))
        assert "dataplane: the runtime has no tokeniser: using the one of the small model" in err
    bare_daemon.wait_for_status("no runtime")


def test_without_a_chat_template_text_goes_as_it_is_or_not_at_all(
    bare_daemon: DaemonProcess, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with attached(bare_daemon, tokenizer) as runtime:
        assert client(bare_daemon, "raw", "hi") == 1
        assert "no chat template: use --no-chat" in capsys.readouterr().err
        assert client(bare_daemon, "h3", "hi") == 1
        assert "no chat template" in capsys.readouterr().err
        for protocol in ("raw", "h3"):
            with Answering(runtime, lambda taken: finish(taken, byte_ids("ok"))) as asked:
                assert client(bare_daemon, protocol, "--no-chat", "hi") == 0
            assert asked.prompt == byte_ids("hi")
            assert capsys.readouterr().out == "ok\n"
    bare_daemon.wait_for_status("no runtime")


@BOTH
def test_nobody_there_is_69(
    bare_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str], protocol: str
) -> None:
    arguments = ["--server", "127.0.0.1:1", "--ca", str(bare_daemon.ca), "--protocol", protocol]
    for question in (["--ids", "1"], ["hi"]):
        assert main(["client", "--json", *arguments, *question]) == 69
        assert read_json(capsys)["error"].startswith("no connection to 127.0.0.1:1 ")


def test_text_that_is_no_unicode_is_bad_usage(
    bare_daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with attached(bare_daemon):
        assert client(bare_daemon, "h3", "\udcff") == 1
        assert "lone surrogate" in capsys.readouterr().err
    bare_daemon.wait_for_status("no runtime")


@pytest.mark.model
def test_the_models_own_tokeniser_comes_from_the_daemon(
    bare_daemon: DaemonProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its document is 1.7 MB long, and gives the same ids there and here."""
    from dataplane import model

    document = model.tokenizer_json(model.locate_weights(), tmp_path)
    prompt = "What is the capital of France? \u2713"
    with attached(bare_daemon, document, model.CHAT_TEMPLATE, vocab_size=49_152) as runtime:
        for protocol in ("raw", "h3"):
            expected = model_codec(tmp_path).encode(prompt)
            with Answering(runtime, lambda taken: finish(taken, taken.tokens.tolist())) as asked:
                assert client(bare_daemon, protocol, prompt) == 0
            assert asked.prompt == expected
            assert prompt in capsys.readouterr().out
    bare_daemon.wait_for_status("no runtime")
