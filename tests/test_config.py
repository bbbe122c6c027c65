"""The settings of `serve`: their sources, their order, and what each refusal says."""

import argparse
from pathlib import Path

import pytest

from dataplane.config import SETTINGS, ServeConfig, add_flags, load
from dataplane.errors import UsageError
from dataplane.kinds import format_address, parse_address

BUSY = "DATAPLANE_BUSY_POLL"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def refusal(flags: dict[str, str | None], environ: dict[str, str]) -> str:
    with pytest.raises(UsageError) as caught:
        load(flags, environ)
    return str(caught.value)


def test_the_defaults_are_those_of_the_contract(tmp_path: Path, environ: dict[str, str]) -> None:
    state = tmp_path / "state" / "dataplane"
    assert load({}, environ) == ServeConfig(
        config=None,
        listen=("localhost", 4433),
        admin=("localhost", 9433),
        state_dir=state,
        socket=state / "runtime.sock",
        cert=None,
        key=None,
        runtime="none",
        bundle=None,
        slots=8,
        context=1024,
        max_output=512,
        vocab_size=49152,
        token_delay_ms=0.0,
        admission="tick",
        partition=(),
        tenants=None,
        body_timeout=5.0,
        idle_timeout=30.0,
        handshake_timeout=5.0,
        drain_timeout=30.0,
        max_connections=1024,
        max_writing=None,
        no_pump=False,
        busy_poll=False,
    )


def test_the_flags_are_those_of_the_contract() -> None:
    flags = "config listen admin state-dir socket cert key runtime bundle slots context"
    flags += " max-output vocab-size token-delay-ms admission partition tenants body-timeout"
    flags += " idle-timeout"
    flags += " handshake-timeout drain-timeout max-connections max-writing no-pump busy-poll"
    assert [setting.flag for setting in SETTINGS] == [f"--{name}" for name in flags.split()]


def test_every_flag_is_parsed_and_explained(environ: dict[str, str]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    for setting in SETTINGS:
        assert f"{setting.flag} {setting.unit}" in text
    options = vars(parser.parse_args(["--max-output=7", "--listen", "[::1]:0"]))
    config = load(options, environ)
    assert (config.max_output, config.listen) == (7, ("::1", 0))


def test_flags_win_over_variables_over_toml_over_defaults(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    file = tmp_path / "dataplane.toml"
    file.write_text("slots = 2\ncontext = 20\nmax_output = 200\nbody_timeout = 1.5\n")
    environ |= {"DATAPLANE_CONFIG": str(file), "DATAPLANE_CONTEXT": "30", "DATAPLANE_SLOTS": "3"}
    config = load({"slots": "4", "listen": None}, environ)
    assert (config.slots, config.context, config.max_output) == (4, 30, 200)
    assert (config.body_timeout, config.max_connections) == (1.5, 1024)
    assert config.config == file


def test_a_relative_path_in_a_file_starts_at_the_file(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "work").mkdir()
    file = tmp_path / "etc" / "dataplane.toml"
    file.write_text('socket = "in.sock"\nstate_dir = "../state"\n')
    monkeypatch.chdir(tmp_path / "work")
    config = load({"config": "../etc/dataplane.toml", "cert": "c.pem", "key": "k.pem"}, environ)
    assert config.socket == tmp_path / "etc" / "in.sock"
    assert config.state_dir == tmp_path / "state"
    assert config.cert == tmp_path / "work" / "c.pem"


def test_the_state_directory_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = tmp_path / ".local" / "state" / "dataplane"
    assert load({}, {}).state_dir == at_home
    assert load({}, {"XDG_STATE_HOME": "relative"}).state_dir == at_home
    assert load({}, {"XDG_STATE_HOME": "/x"}).state_dir == Path("/x/dataplane")
    assert load({"state_dir": "~/here"}, {}).socket == tmp_path / "here" / "runtime.sock"


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("slots", "0", "a whole number from 1 to 1024"),
        ("slots", "1025", "a whole number from 1 to 1024"),
        ("slots", "1_0", "a whole number"),
        ("slots", "+5", "a whole number"),
        ("slots", "٣", "a whole number"),  # a digit, but none of ours
        ("slots", "", "a whole number"),
        ("context", "1048577", "from 1 to 1048576"),
        ("max_output", "262145", "from 1 to 262144"),
        ("vocab_size", "2147483648", "from 1 to 2147483647"),
        ("token_delay_ms", "-1", "a number from 0 to 60000"),
        ("body_timeout", "nan", "a number from 0.01 to 3600"),
        ("body_timeout", "inf", "a number from 0.01 to 3600"),
        ("idle_timeout", "5s", "a number from 0.1 to 3600"),
        ("drain_timeout", "1e999", "a number from 0 to 3600"),
        ("max_writing", "0", "a whole number from 1 to 1024"),
        ("no_pump", "maybe", "true or false"),
        ("busy_poll", "2", "true or false"),
        ("runtime", "vllm", "one of none, null, echo, smollm2"),
        ("listen", "localhost", "HOST:PORT"),
        ("listen", ":4433", "HOST:PORT"),
        ("listen", "localhost:", "HOST:PORT"),
        ("listen", "localhost:65536", "from 0 to 65535"),
        ("listen", "::1:4433", "in brackets"),
        ("listen", "[::1:4433", "in brackets"),
        ("listen", "[::g]:4433", "in brackets"),
        ("listen", "a b:1", "HOST:PORT"),
        ("admin", "localhost:http", "HOST:PORT"),
        ("socket", "/" + "x" * 107, "at most 107 bytes"),
        ("cert", "", "a path"),
        ("state_dir", "~no-such-user/x", "a path"),
    ],
)
def test_a_bad_value_is_refused_by_source_value_and_what_is_allowed(
    name: str, text: str, allowed: str, environ: dict[str, str]
) -> None:
    flag = "--" + name.replace("_", "-")
    variable = "DATAPLANE_" + name.upper()
    for source, message in (
        (flag, refusal({name: text}, environ)),
        (variable, refusal({}, {**environ, variable: text})),
    ):
        assert message.startswith(f"{source}: {text!r} ")
        assert allowed in message


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("slots = 0", ":slots: 0 is not allowed; it takes a whole number from 1 to 1024"),
        ('slots = "8"', ":slots: '8' is not allowed"),
        ("slots = true", ":slots: True is not allowed"),
        ("slots = 8.0", ":slots: 8.0 is not allowed"),
        ("body_timeout = inf", ":body_timeout: inf is not allowed"),
        ("body_timeout = false", ":body_timeout: False is not allowed"),
        ("listen = 4433", ":listen: 4433 is not allowed; it takes HOST:PORT"),
        ("busy_poll = 1", ":busy_poll: 1 is not allowed; it takes true or false"),
        ('no_pump = "true"', ":no_pump: 'true' is not allowed"),
        ("runtime = []", ":runtime: [] is not allowed"),
        ("slot = 8", ":slot: there is no such setting; did you mean slots?"),
        ("max-output = 8", ":max-output: there is no such setting; did you mean max_output?"),
        ("zzzz = 8", ":zzzz: there is no such setting"),
        ('config = "x"', ":config: there is no such setting"),
        ("[serve]\nslots = 1", ":serve: there is no such setting"),
        ("slots = 1\nslots = 2", "at line 2"),
        ("\n\nslots 1", "at line 3"),
    ],
)
def test_a_bad_file_is_refused_by_key_or_line(
    line: str, says: str, tmp_path: Path, environ: dict[str, str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(line)
    message = refusal({"config": str(file)}, environ)
    assert message.startswith(str(file))
    assert says in message


def test_a_file_that_is_no_text_or_not_there_is_refused(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    file = tmp_path / "binary.toml"
    file.write_bytes(b"slots = 1\nlisten = '\xff'")
    assert "no UTF-8 text (at line 2)" in refusal({"config": str(file)}, environ)
    assert "No such file" in refusal({"config": str(tmp_path / "none.toml")}, environ)
    assert "directory" in refusal({"config": str(tmp_path)}, environ)


def test_a_variable_that_names_no_setting_is_said(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    config = load({}, {**environ, "DATAPLANE_SLOT": "4"})
    assert config == load({}, environ)
    assert caplog.messages == [
        "DATAPLANE_SLOT: there is no such setting; did you mean DATAPLANE_SLOTS?"
    ]


@pytest.mark.parametrize(
    "name", ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_QUIC", "PORT", "PORT_4433_UDP_ADDR"]
)
def test_variables_of_an_orchestrator_are_nobodys_mistake(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    load({}, {**environ, f"DATAPLANE_{name}": "tcp://10.0.0.1:4433"})
    assert not caplog.messages


def test_a_clients_key_is_no_setting_and_said_to_have_no_effect_where_nobody_needs_one(
    tmp_path: Path, environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    environ["DATAPLANE_API_KEY"] = "SECRET"
    load({}, environ)
    assert caplog.messages == [
        "DATAPLANE_API_KEY is what clients send: it does not make this daemon ask for a key,"
        " --tenants does"
    ]
    caplog.clear()
    load({"tenants": str(tmp_path / "tenants.toml")}, environ)
    assert not caplog.messages


def test_certificate_and_key_come_together(environ: dict[str, str]) -> None:
    assert "needs --key as well" in refusal({"cert": "/c.pem"}, environ)
    assert "needs --cert as well" in refusal({"key": "/k.pem"}, environ)


def test_a_state_directory_too_deep_for_a_socket_is_refused(environ: dict[str, str]) -> None:
    assert "at most 107 bytes" in refusal({"state_dir": "/" + "d" * 100}, environ)
    assert load({"state_dir": "/" + "d" * 100, "socket": "/s"}, environ).socket == Path("/s")


def test_no_home_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    assert "--state-dir" in refusal({}, {})
    assert load({"state_dir": "/s"}, {}).state_dir == Path("/s")


def test_addresses_are_read_and_written_alike() -> None:
    for text in ("localhost:4433", "127.0.0.1:0", "[::1]:9", "[fe80::1%eth0]:1"):
        assert format_address(parse_address(text)) == text
    with pytest.raises(ValueError, match="from 1 to 65535"):
        parse_address("localhost:0", lowest_port=1)


def test_a_switch_is_a_flag_alone_a_word_or_a_toml_boolean(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = vars(parser.parse_args(["--no-pump"]))
    assert load(flags, environ).no_pump
    assert load({}, {**environ, BUSY: "yes"}).busy_poll
    assert "--busy-poll is the packet pump's" in refusal(flags, environ | {BUSY: "1"})
    file = tmp_path / "switches.toml"
    file.write_text("busy_poll = true\nno_pump = false")
    config = load({"config": str(file)}, {**environ, BUSY: "0"})
    assert (config.no_pump, config.busy_poll) == (False, False)
