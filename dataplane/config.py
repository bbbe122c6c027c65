"""The settings of `dataplane serve`: one table, from which flags, variables and TOML keys derive.

Why one table: a setting that is spelt in three places drifts apart in three places. `SETTINGS` says
what there is; everything below only walks it. The rules that hold here:

- Flags win over `DATAPLANE_*` variables, those over the TOML file, that over the default.
- A source is read strictly: an unknown key or variable, a value of a wrong type, a number out of
  range is refused in words that name the source, the value and what is allowed.
- A relative path in a TOML file is relative to that file; elsewhere to the current directory.
"""

import argparse
import difflib
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.errors import UsageError
from dataplane.kinds import (
    ADDRESS,
    PARTITIONS,
    PATH,
    SOCKET,
    SWITCH,
    Address,
    Kind,
    choice,
    decimal,
    integer,
)  # fmt: skip
from dataplane.partitions import Partition

ENV_PREFIX = "DATAPLANE_"
API_KEY_VARIABLE = ENV_PREFIX + "API_KEY"
"""The key that `dataplane client` and `dataplane bench` ask with; a daemon has none."""
# What Kubernetes sets in every pod beside a Service named dataplane.
_ORCHESTRATED = re.compile(r"DATAPLANE_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\w+)?)")
_log = logging.getLogger("dataplane.config")
RUNTIMES = ("none", "null", "echo", "smollm2", "smollm2-torch", "cuda-echo")
ADMISSIONS = ("tick", "persistent")
SOCKET_NAME = "runtime.sock"

# ---------------------------------------------------------------- the table


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: flag `--max-output`, variable `DATAPLANE_MAX_OUTPUT`, TOML key `max_output`.

    `default` is text, as if given by a flag, or None where there is none or it hangs on another
    setting; `otherwise` then says what holds.
    """

    name: str
    unit: str
    kind: Kind
    default: str | None
    help: str
    otherwise: str = "none"
    in_file: bool = True

    @property
    def flag(self) -> str:
        """The command line's spelling."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment's spelling."""
        return ENV_PREFIX + self.name.upper()

    def say(self) -> str:
        """The help text with the default."""
        default = self.otherwise if self.default is None else self.default
        # argparse takes a % for the beginning of a format.
        return f"{self.help} (default: {default})".replace("%", "%%")

    def parse(self, source: str, value: object, base: Path) -> Any:
        """Make the setting's value of what a source holds.

        Raises:
            UsageError: It is not allowed; the text names source, value and what is.
        """
        try:
            return self.kind.parse(value, base)
        except (ValueError, OverflowError) as error:
            raise self.refuse(source, value) from error
        except UsageError as error:  # says the flag, and more than "not allowed"
            raise error if source == self.flag else UsageError(f"{source}: {error}") from error

    def parse_flag(self, text: str) -> Any:
        """`parse` what the flag holds."""
        return self.parse(self.flag, text, Path.cwd())

    def refuse(self, source: str, value: object) -> UsageError:
        """The error for a value that is not allowed."""
        return UsageError(f"{source}: {value!r} is not allowed; it takes {self.kind.takes}")


_STATE = "in the state directory"

SETTINGS: tuple[Setting, ...] = (
    Setting("config", "FILE", PATH, None, "settings in TOML, keys spelt with _", in_file=False),
    Setting("listen", "HOST:PORT", ADDRESS, "localhost:4433", "UDP, for QUIC; port 0: a free one"),
    Setting("admin", "HOST:PORT", ADDRESS, "localhost:9433", "TCP, for health; port 0: a free one"),
    Setting("state_dir", "DIR", PATH, None, "certificates, the socket", "dataplane/ in XDG state"),
    Setting("socket", "PATH", SOCKET, None, "where runtimes attach", f"{SOCKET_NAME} {_STATE}"),
    Setting("cert", "FILE", PATH, None, "certificate chain, PEM; needs --key", f"made {_STATE}"),
    Setting("key", "FILE", PATH, None, "its private key, PEM; needs --cert", f"made {_STATE}"),
    Setting("runtime", "NAME", choice(RUNTIMES), "none", f"{', '.join(RUNTIMES)}: started along"),
    Setting("bundle", "DIR", PATH, None, "what `dataplane bundle build` packed, to be started"),
    Setting("slots", "N", integer(1, 1024), "8", "slots of a bundled runtime"),
    Setting("context", "N", integer(1, 1_048_576), "1024", "tokens of its longest prompt"),
    Setting("max_output", "N", integer(1, 262_144), "512", "tokens of its longest answer"),
    Setting("vocab_size", "N", integer(1, 2**31 - 1), "49152", "ids that echo knows"),
    Setting("token_delay_ms", "D", decimal(0, 60_000), "0", "ms that echo waits before a token"),
    Setting("admission", "HOW", choice(ADMISSIONS), "tick",
            "how a CUDA runtime runs the admission kernel: tick or persistent"),
    Setting("partition", "NAME=DEVICE", PARTITIONS, None,
            "a runtime on this device alone; again for each"),
    Setting("tenants", "FILE", PATH, None, "API keys, and whose requests go to which partition"),
    Setting("body_timeout", "S", decimal(0.01, 3600), "5", "seconds for a body to be complete"),
    Setting("idle_timeout", "S", decimal(0.1, 3600), "30", "seconds a connection may be silent"),
    Setting("handshake_timeout", "S", decimal(0.1, 600), "5", "seconds for a handshake"),
    Setting("drain_timeout", "S", decimal(0, 3600), "30", "seconds for answers to end at the stop"),
    Setting("max_connections", "N", integer(1, 1_048_576), "1024", "connections at once"),
    Setting("max_writing", "N", integer(1, 1024), None, "slots one connection may be filling",
            "half the slots, rounded up"),
    Setting("no_pump", "", SWITCH, "false", "do every packet in Python, without the packet pump"),
    Setting("busy_poll", "", SWITCH, "false", "spin on a core instead of sleeping between packets"),
)  # fmt: skip
BY_NAME = {setting.name: setting for setting in SETTINGS}


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """The settings of one daemon. Paths are absolute; times are seconds unless the name says ms."""

    config: Path | None
    listen: Address
    admin: Address
    state_dir: Path
    socket: Path
    cert: Path | None
    key: Path | None
    runtime: str
    bundle: Path | None
    slots: int
    context: int
    max_output: int
    vocab_size: int
    token_delay_ms: float
    admission: str
    partition: tuple[Partition, ...]
    tenants: Path | None
    body_timeout: float
    idle_timeout: float
    handshake_timeout: float
    drain_timeout: float
    max_connections: int
    max_writing: int | None
    no_pump: bool
    busy_poll: bool


def add_flags(parser: argparse.ArgumentParser, names: Iterable[str] = tuple(BY_NAME)) -> None:
    """Give `parser` the flags of these settings. Their values stay text until they are loaded."""
    for name in names:
        setting = BY_NAME[name]
        if setting.kind is SWITCH:
            # The flag alone says yes; its value stays text, like every other's.
            parser.add_argument(
                setting.flag, dest=name, action="store_const", const="true", help=setting.help
            )
        elif setting.kind is PARTITIONS:
            parser.add_argument(
                setting.flag, dest=name, action=_Gather, metavar=setting.unit, help=setting.say()
            )
        else:
            parser.add_argument(setting.flag, dest=name, metavar=setting.unit, help=setting.say())


class _Gather(argparse.Action):
    """A flag that may be given again: its texts, separated as in a variable."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before} {values}")


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """`dataplane/` in the XDG state directory.

    Raises:
        UsageError: There is no home directory to put it in.
    """
    given = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(given):  # the XDG specification has relative ones ignored
        return Path(given) / "dataplane"
    try:
        return Path.home() / ".local" / "state" / "dataplane"
    except RuntimeError as error:
        raise UsageError(
            "there is no home directory to keep state in: set --state-dir or XDG_STATE_HOME"
        ) from error


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"{path}: it cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UsageError(f"{path}: it is no UTF-8 text (at line {line})") from error
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise UsageError(f"{path}: it is no TOML: it nests too deep") from error
    except tomllib.TOMLDecodeError as error:
        end = f"at line {len(text.splitlines())}, the last"
        reason = str(error).replace("at end of document", end)
        raise UsageError(f"{path}: it is no TOML: {reason}") from error


def _from_file(path: Path) -> dict[str, Any]:
    known = {setting.name: setting for setting in SETTINGS if setting.in_file}
    values = {}
    for key, value in _read_toml(path).items():
        source = f"{path}:{key}"
        if key not in known:
            raise UsageError(f"{source}: there is no such setting{_suggest(key, known)}")
        # For Python a TOML `true` is an int.
        types = known[key].kind.types
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise known[key].refuse(source, value)
        values[key] = known[key].parse(source, value, path.parent)
    return values


def _from_environ(environ: Mapping[str, str]) -> dict[str, Any]:
    known = {setting.variable: setting for setting in SETTINGS}
    values = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        if variable not in known:
            # Not an error: an orchestrator makes variables of its own from a service's name.
            if variable != API_KEY_VARIABLE and not _ORCHESTRATED.fullmatch(variable):
                _log.warning("%s: there is no such setting%s", variable, _suggest(variable, known))
            continue
        values[known[variable].name] = known[variable].parse(variable, text, Path.cwd())
    return values


def flag_values(flags: Mapping[str, str | None], names: Iterable[str]) -> dict[str, Any]:
    """The parsed values of the flags that were given, among `names`.

    Raises:
        UsageError: One of them is not allowed.
    """
    given = {name: flags.get(name) for name in names}
    return {
        name: BY_NAME[name].parse_flag(text) for name, text in given.items() if text is not None
    }


def settled(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, and what their bundle decides, where there is one.

    Raises:
        UsageError: One of them contradicts the bundle, or no runtime here serves it.
        BundleError: It cannot be read.
    """
    if values.get("bundle") is None:
        return dict(values)
    from dataplane import bundle

    complete = bundle.settle(values, bundle.read(values["bundle"]))
    if complete["runtime"] not in RUNTIMES:
        raise UsageError(
            f"--bundle {values['bundle']} is for the runtime {complete['runtime']}, which this"
            f" dataplane does not have; it has {', '.join(RUNTIMES)}"
        )
    return complete


def with_defaults(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """`values`, and the defaults of those in `names` that it lacks."""
    complete = dict(values)
    for name in names:
        if name not in complete:
            text = BY_NAME[name].default
            complete[name] = None if text is None else BY_NAME[name].parse_flag(text)
    return complete


def state_dir_of(flag: str | None, environ: Mapping[str, str]) -> Path:
    """The state directory, for a command that needs nothing else of the settings.

    Raises:
        UsageError: The flag or the variable holds no path, or there is no home directory.
    """
    setting = BY_NAME["state_dir"]
    for source, text in ((setting.flag, flag), (setting.variable, environ.get(setting.variable))):
        if text is not None:
            path: Path = setting.parse(source, text, Path.cwd())
            return path
    return default_state_dir(environ)


def load(flags: Mapping[str, str | None], environ: Mapping[str, str]) -> ServeConfig:
    """Bring the sources together.

    Args:
        flags: Text by setting name; None or absent where the flag was not given.
        environ: The process's environment.

    Raises:
        UsageError: A source holds what is not allowed.
    """
    values = {**_from_environ(environ), **flag_values(flags, BY_NAME)}
    if "config" in values:
        values = {**_from_file(values["config"]), **values}
    values = with_defaults(settled(values), BY_NAME)
    for given, missing in (("cert", "key"), ("key", "cert")):
        if values[given] is not None and values[missing] is None:
            raise UsageError(f"--{given} {values[given]} needs --{missing} as well")
    if values["no_pump"] and values["busy_poll"]:
        raise UsageError("--busy-poll is the packet pump's, which --no-pump leaves out")
    values["partition"] = values["partition"] or ()
    _check_partitions(values)
    if API_KEY_VARIABLE in environ and values["tenants"] is None:
        # Elsewhere a variable of this kind has a server ask for the key.
        _log.warning(
            "%s is what clients send: it does not make this daemon ask for a key, --tenants does",
            API_KEY_VARIABLE,
        )
    if values["state_dir"] is None:
        values["state_dir"] = default_state_dir(environ)
    if values["socket"] is None:
        path = str(values["state_dir"] / SOCKET_NAME)
        values["socket"] = BY_NAME["socket"].parse("--socket (from --state-dir)", path, Path.cwd())
    return ServeConfig(**values)


def _check_partitions(values: Mapping[str, Any]) -> None:
    """Hold partitions against what else was asked for."""
    partitions = values["partition"]
    if partitions and values["runtime"] == "null":
        raise UsageError(
            "--partition is for runtimes, and --runtime null is none: leave one of them out"
        )
    if len(partitions) > 1 and values["tenants"] is None:
        names = ", ".join(partition.name for partition in partitions)
        raise UsageError(
            f"the partitions {names} need --tenants FILE, which says whose requests go to which"
        )
