"""API keys on the client's side: where they come from, and what a daemon with tenants answers.

The daemon here has tenants and no runtime of its own; it keeps the SHA-256 of the key `alpha`.
"""

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import StartDaemon
from daemon_process import DaemonProcess, daemon_process, run
from generate_checks import attached, finish, take
from raw_runtime import Puppet
from tiny_tokenizer import TEMPLATE, byte_ids, chat_ids, make_tokenizer

from dataplane.cli.main import main
from dataplane.client import Client, Http3Client, connect
from dataplane.client.keys import key_fields, read_api_key
from dataplane.errors import UsageError

VARIABLE = "DATAPLANE_API_KEY"
KEY = "alpha"
TENANTS = """[acme]
key_sha256 = "8ed3f6ad685b959ead7022518e1af76cd816f8e8ec7ccdda1ed4018e8f2223f8"
"""
NEEDED = "an API key is needed"
UNKNOWN = "the API key is none of this daemon's"
HINT = "a key comes from --api-key-file FILE, or else from DATAPLANE_API_KEY"
IDS = [5, 6, 7]
BOTH = pytest.mark.parametrize("protocol", ["raw", "h3"])


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DATAPLANE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(scope="module")
def keyed_daemon(
    tmp_path_factory: pytest.TempPathFactory, daemon_engine: str
) -> Iterator[DaemonProcess]:
    directory = tmp_path_factory.mktemp("daemon")
    tenants = directory / "tenants.toml"
    tenants.write_text(TENANTS, encoding="utf-8")
    with daemon_process(directory, "--runtime=none", f"--tenants={tenants}") as daemon:
        yield daemon


def key_file(directory: Path, text: str | bytes) -> Path:
    path = directory / "key"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# ---------------------------------------------------------------- where a key comes from


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b"alpha", b"alpha"),
        (b"alpha\n", b"alpha"),
        (b"alpha\r\nof the blue team\n", b"alpha"),
        (b" \talpha \n", b"alpha"),
        (b"two words\n", b"two words"),
        (b"k\xc3\xabyP", b"k\xc3\xabyP"),
        (b"x" * 4044 + b"\r\n", b"x" * 4044),
    ],
)
def test_the_first_line_of_a_file_is_the_key(tmp_path: Path, text: bytes, key: bytes) -> None:
    assert read_api_key(key_file(tmp_path, text), {}) == key


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "its first line is to be the API key, and there is none in it"),
        (b"\nalpha\n", "its first line is to be the API key"),
        (b" \n", "its first line is to be the API key"),
        (b"SECRET\0", "a key is one line of visible characters"),
        (b"SECRET\x1bSECRET", "a key is one line of visible characters"),
        (b"SECRET" * 1000, "a key has at most 4044 bytes, and this one has more"),
        (b"x" * 4045 + b"\n", "a key has at most 4044 bytes"),
    ],
)
def test_a_file_without_a_usable_key_is_refused_and_the_key_not_shown(
    tmp_path: Path, text: bytes, says: str
) -> None:
    file = key_file(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_api_key(file, {})
    assert str(caught.value).startswith(f"--api-key-file {file}: {says}")
    assert "SECRET" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=f"--api-key-file {path}: it cannot be read: {why}"):
            read_api_key(path, {})


def test_a_file_is_read_no_further_than_a_key_is_long() -> None:
    with pytest.raises(UsageError, match="a key is one line"):
        read_api_key(Path("/dev/zero"), {})


def test_the_file_wins_over_the_variable_and_an_empty_variable_is_none(tmp_path: Path) -> None:
    file = key_file(tmp_path, "of the file")
    assert read_api_key(file, {VARIABLE: "of the variable"}) == b"of the file"
    assert read_api_key(None, {VARIABLE: " of the variable\n"}) == b"of the variable"
    assert read_api_key(None, {VARIABLE: "k\udcff"}) == b"k\xff"  # bytes that are no text
    assert read_api_key(None, {VARIABLE: " "}) is None
    assert read_api_key(None, {}) is None


def test_a_variable_with_an_unusable_key_is_refused_and_the_key_not_shown() -> None:
    with pytest.raises(UsageError) as caught:
        read_api_key(None, {VARIABLE: "SECRET\nSECRET"})
    assert str(caught.value).startswith(f"{VARIABLE}: a key is one line")
    assert "SECRET" not in str(caught.value)


def test_over_http3_a_key_is_a_bearer_token() -> None:
    assert key_fields(None) == []
    assert key_fields("k\u00eby") == [(b"authorization", b"Bearer k\xc3\xaby")]
    assert key_fields(b"x") == [(b"authorization", b"Bearer x")]
    for wrong in ("", " x", "x ", "x\r\ny", "\x7f"):
        with pytest.raises(UsageError, match="the API key: a key is one line"):
            key_fields(wrong)


# ---------------------------------------------------------------- the library


def test_a_raw_client_sends_its_key(keyed_daemon: DaemonProcess) -> None:
    async def test(runtime: Puppet) -> None:
        async with connect(keyed_daemon.address, keyed_daemon.ca) as client:
            await check_keys(client, runtime)

    with attached(keyed_daemon) as runtime:
        run(test(runtime))
    keyed_daemon.wait_for_status("no runtime")


def test_an_http3_client_sends_its_key_with_ids_text_and_pages(
    keyed_daemon: DaemonProcess,
) -> None:
    async def test(runtime: Puppet) -> None:
        async with connect(keyed_daemon.address, keyed_daemon.ca, protocol="h3") as client:
            await check_keys(client, runtime)
            assert (await client.ask("hi")).status == 401
            assert (await client.ask("hi", api_key="beta")).status == 401
            assert (await client.ask("hi", api_key=KEY)).status == 501  # let in: no tokeniser
            assert (await client.get("/props")).status == 401
            assert (await client.get("/props", api_key="beta")).status == 401
            page = await client.get("/props", api_key=KEY)
            assert (page.status, json.loads(page.body)["model"]) == (200, "puppet")
            assert (await client.get("/health")).status == 200

    with attached(keyed_daemon) as runtime:
        run(test(runtime))
    keyed_daemon.wait_for_status("no runtime")


async def check_keys(client: Client | Http3Client, runtime: Puppet) -> None:
    """Ask with no key, a wrong one and the right one, as text and as bytes."""
    refused = await client.submit(IDS)
    assert refused.status == 401
    assert refused.reason.startswith(NEEDED)
    refused = await client.submit(IDS, api_key="beta")
    assert (refused.status, refused.reason) == (401, UNKNOWN)
    with pytest.raises(UsageError, match="the API key is no valid Unicode") as caught:
        await client.submit(IDS, api_key="SECRET\udcff")
    assert caught.value.__suppress_context__
    for key in (KEY, KEY.encode()):
        asking = asyncio.ensure_future(client.submit(IDS, api_key=key))
        (taken,) = await take(runtime)
        finish(taken, [8, 9])
        result = await (await asking).result()
        assert result.token_ids == [8, 9]


# ---------------------------------------------------------------- `dataplane client`


@pytest.fixture(params=["file", "variable"])
def give_key(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], list[str]]:
    """Give the command line a key in each way; the arguments that this takes."""

    def give(key: str) -> list[str]:
        if request.param == "variable":
            monkeypatch.setenv(VARIABLE, key)
            return []
        monkeypatch.setenv(VARIABLE, "not this one")
        return ["--api-key-file", str(key_file(tmp_path, f"{key}\n"))]

    return give


def client(daemon: DaemonProcess, protocol: str, *arguments: str) -> int:
    """Run `dataplane client`; the exit code."""
    where = ["--server", daemon.address, "--ca", str(daemon.ca), "--protocol", protocol]
    return main(["client", *where, *arguments])


@BOTH
def test_the_command_line_asks_with_its_key(
    keyed_daemon: DaemonProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    give_key: Callable[[str], list[str]],
    protocol: str,
) -> None:
    """Text needs the daemon's pages over the raw protocol, and those need the key as well."""
    key = give_key(KEY)
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    prompts = []

    def answer(runtime: Puppet) -> None:
        for _ in range(2):
            (taken,) = runtime.take()
            prompts.append(taken.tokens.tolist())
            finish(taken, byte_ids("ok"))

    with attached(keyed_daemon, tokenizer, TEMPLATE) as runtime:
        run(until_text(keyed_daemon))
        answering = threading.Thread(target=answer, args=(runtime,), daemon=True)
        answering.start()
        assert client(keyed_daemon, protocol, *key, "hi") == 0
        assert capsys.readouterr().out == "ok\n"
        assert client(keyed_daemon, protocol, *key, "--json", "--ids", "5,6") == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == byte_ids("ok")
        answering.join(20)
    assert prompts == [chat_ids("hi"), [5, 6]]
    keyed_daemon.wait_for_status("no runtime")


async def until_text(daemon: DaemonProcess) -> None:
    """Wait until the daemon has read the tokeniser: until then it says 503 to text."""
    async with connect(daemon.address, daemon.ca, protocol="h3") as asking:
        for _ in range(1000):
            if (await asking.ask("", api_key=KEY)).status != 503:
                return
            await asyncio.sleep(0.01)
    raise AssertionError("the tokeniser never came")


@BOTH
@pytest.mark.parametrize("question", [["--ids", "1"], ["hi"]])
@pytest.mark.parametrize(("key", "reason"), [(None, NEEDED), ("beta", UNKNOWN)])
def test_a_401_is_1_with_the_daemons_reason_and_what_to_do(
    keyed_daemon: DaemonProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    protocol: str,
    question: list[str],
    key: str | None,
    reason: str,
) -> None:
    flags = [] if key is None else ["--api-key-file", str(key_file(tmp_path, key))]
    assert client(keyed_daemon, protocol, *flags, *question) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"dataplane: 401: {reason}")
    assert err.endswith(f"; {HINT}\n")
    assert err.count("\n") == err.count("401") == 1
    assert client(keyed_daemon, protocol, *flags, "--json", *question) == 1
    out, err = capsys.readouterr()
    answer: dict[str, Any] = json.loads(out)
    assert (answer["status"], answer["token_ids"]) == (401, None)
    assert answer["error"].startswith(reason)
    assert HINT in err


def test_a_key_file_that_is_not_there_is_bad_usage_in_json_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "none"
    for command, code in ((["client", "--json", "--ids=1"], 1), (["bench", "--server=h:1"], 2)):
        assert main([*command, f"--api-key-file={file}"]) == code
        out, err = capsys.readouterr()
        says = f"--api-key-file {file}: it cannot be read: No such file or directory"
        assert err == f"dataplane: {says}\n"
        assert out == "" or json.loads(out)["error"] == says


def test_a_key_goes_to_a_daemon_without_tenants_as_well(
    daemon: StartDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There the header is read in C, which passes a key over."""
    open_daemon = daemon("--runtime=echo")
    for protocol in ("raw", "h3"):
        key = f"--api-key-file={key_file(tmp_path, KEY)}"
        assert client(open_daemon, protocol, key, "--ids=5,6") == 0
        assert capsys.readouterr().out == "5,6\n"
