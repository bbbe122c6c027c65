"""The command line: `serve`, `client`, `run`, `bench`, `profile`, `model`, `runtime`.

The rules that hold here:

- Results go to stdout; logs, progress and complaints to stderr. A `DataplaneError` is one line and
  its exit code; a traceback is a bug.
- Exit codes: 0 answered or done, 75 every slot taken, 69 nobody can serve, 2 a command line or
  setting that cannot be taken, 130 Ctrl-C, 1 anything else.
- Nothing is imported before the command that needs it: `serve` loads no client, `client` no daemon.
"""

import argparse
import asyncio
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dataplane import __version__
from dataplane.cli.runtimes import RUNTIMES, Run
from dataplane.config import API_KEY_VARIABLE, BY_NAME, Setting, add_flags, load, state_dir_of
from dataplane.errors import DataplaneError, UsageError
from dataplane.kinds import ADDRESS, PATH, decimal, integer

if TYPE_CHECKING:
    from dataplane.cli.ask import Question

    Commands = argparse._SubParsersAction["_Parser"]

INTERRUPTED = 128 + signal.SIGINT

_MAX_OUTPUT = Setting("max_output", "N", integer(0, 2**32 - 1), "0", "most tokens to answer with")
_CA = Setting("ca", "FILE", PATH, None, "CA to verify with", "ca.pem in the state directory")
_API_KEY_FILE = Setting(
    "api_key_file",
    "FILE",
    PATH,
    None,
    "its first line is the API key, for a daemon with tenants",
    f"{API_KEY_VARIABLE} in the environment",
)
_CLIENT_SETTINGS = (
    _CA,
    _API_KEY_FILE,
    _MAX_OUTPUT,
    Setting("temperature", "T", decimal(0, 100), "0", "0 takes the likeliest token"),
    Setting("seed", "N", integer(0, 2**32 - 1), "0", "of the sampling; 0 is a random one"),
)
_BENCH_SETTINGS = (
    _CA,
    _API_KEY_FILE,
    Setting("admin", "HOST:PORT", ADDRESS, None, "--server's admin port, to ask for its CPU"),
    Setting("requests", "N", integer(1, 10_000_000), "5000", "how many"),
    Setting("connections", "C", integer(1, 1000), "4", "QUIC connections"),
    Setting("streams", "S", integer(1, 128), "8", "requests in flight on each"),
    Setting("prompt_tokens", "T", integer(1, 1_048_576), "128", "tokens of each prompt"),
    Setting("max_output", "M", integer(0, 262_144), "16", "most tokens to answer with"),
    Setting("rate", "R", decimal(0.001, 1e6), None, "requests a second", "as fast as answered"),
    Setting("slots", "N", integer(1, 1024), None, "of its own daemon", "one for each in flight"),
)
_PROFILE_SETTINGS = (
    # The kernel's profiling timer ticks a few hundred times a second: this makes a few hundred.
    Setting("requests", "N", integer(1, 10_000_000), "30000", "how many"),
    Setting("connections", "C", integer(1, 1000), "1", "QUIC connections"),
    Setting("streams", "S", integer(1, 128), "32", "requests in flight on each"),
    *(setting for setting in _BENCH_SETTINGS if setting.name in ("prompt_tokens", "max_output")),
)
_BUNDLE = Setting("out", "DIR", PATH, None, "the bundle's directory, which is made")
_BUNDLE_SETTINGS = (
    *(BY_NAME[name] for name in ("slots", "context", "max_output")),
    Setting("vocab_size", "N", integer(1, 2**31 - 1), None, "ids it knows", "the runtime's"),
    Setting("kernels", "FILE", PATH, None, "a fatbin", "this installation's, or compiled by nvcc"),
)


class _Parser(argparse.ArgumentParser):
    """Raises its complaints, so that `main` says all of them in one way."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see `{self.prog} --help`)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an ASCII terminal is no reason to fail
    # What ends a connection is said in our own words; aioquic's would stand before them.
    logging.getLogger("quic").setLevel(logging.CRITICAL)
    try:
        return _run(arguments)
    except DataplaneError as error:
        _print_json_failure(arguments, str(error))
        print(f"dataplane: {' '.join(str(error).splitlines())}", file=sys.stderr)
        # The client's exit status says what became of the question, and bad usage is "otherwise".
        if arguments[:1] == ["client"] and isinstance(error, UsageError):
            return 1
        return error.exit_code
    except KeyboardInterrupt:
        _print_json_failure(arguments, "interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read stdout is gone; without this, Python complains of it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        _print_json_failure(arguments, f"internal error: {error!r}")
        raise


def _run(arguments: Sequence[str]) -> int:
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    command: Callable[[argparse.Namespace], int] = options.run
    code = command(options)
    sys.stdout.flush()
    return code


def _print_json_failure(arguments: Sequence[str], why: str) -> None:
    """Keep the promise that `client --json` prints one object, whatever happens."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if arguments[:1] == ["client"] and "--json" in arguments[:end]:
        from dataplane.cli.ask import Outcome

        print(Outcome(error=why).to_json())


def _say(line: str) -> None:
    print(f"dataplane: {line}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- the parser


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dataplane",
        description="QUIC ingress for an inference engine: a slot or a 429, at once.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dataplane {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = _command(commands, "serve", _serve, "run the daemon")
    serve.epilog = "Each setting is also DATAPLANE_NAME in the environment; flags win."
    add_flags(serve)
    _add_client(commands)
    run = _command(commands, "run", _demo, "start a daemon, ask it one question, show the times")
    run.add_argument("prompt", metavar="PROMPT")
    run.add_argument("--runtime", choices=("smollm2", "echo"), default="smollm2")
    _add_settings(run, [_MAX_OUTPUT])
    _add_bench(commands)
    _add_profile(commands)
    _add_bundle(commands)
    doctor = _command(commands, "doctor", _doctor, "what this machine has, what it lacks, and why")
    doctor.add_argument("--json", action="store_true", help="print one JSON object and no more")
    model = commands.add_parser("model", help="the small model", allow_abbrev=False)
    _command(
        model.add_subparsers(metavar="COMMAND", required=True),
        "install",
        _model_install,
        "fetch the small model and what runs it",
    )
    runtime = commands.add_parser("runtime", help="attach a runtime by hand", allow_abbrev=False)
    runtimes = runtime.add_subparsers(metavar="RUNTIME", required=True)
    for name, (text, flags, attach) in RUNTIMES.items():
        add_flags(_command(runtimes, name, partial(_runtime, attach), text), flags)
    return parser


def _command(
    commands: "Commands", name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def _add_client(commands: "Commands") -> None:
    parser = _command(commands, "client", _client, "ask a daemon one question")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("prompt", metavar="PROMPT", nargs="?", help="text, as the user's message")
    prompt.add_argument("--ids", metavar="1,2,3", help="token ids; the answer's are printed")
    prompt.add_argument("--ids-file", metavar="FILE", help="the same, in a file")
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        default="localhost:4433",
        help="the daemon's --listen (default: localhost:4433)",
    )
    parser.add_argument(
        "--protocol",
        choices=("raw", "h3"),
        default="raw",
        help="raw: ids, made here of text; h3: HTTP/3, text as it is (default: raw)",
    )
    _add_settings(parser, _CLIENT_SETTINGS)
    parser.add_argument(
        "--no-chat", action="store_true", help="send the text as it is, without the chat template"
    )
    _add_no_pump(parser, "run on aioquic alone, without the packet pump")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no more")


def _add_bench(commands: "Commands") -> None:
    parser = _command(commands, "bench", _bench, "measure a daemon under load")
    parser.add_argument(
        "--server",
        metavar="HOST:PORT",
        help="the daemon's --listen (default: starts one, with the null runtime)",
    )
    _add_settings(parser, _BENCH_SETTINGS)
    parser.add_argument("--protocol", choices=("raw", "h3"), default="raw")
    parser.add_argument("--runtime", choices=("null", "echo"), help="of its own daemon")
    _add_no_pump(parser, "run on aioquic alone, its own daemon too")
    parser.add_argument(
        "--busy-poll",
        action="store_true",
        help="spin instead of sleeping between packets, its own daemon too: a core for each",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no more")


def _add_no_pump(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--no-pump", action="store_true", help=text)


def _add_profile(commands: "Commands") -> None:
    parser = _command(commands, "profile", _profile, "where the time of a request goes")
    _add_settings(parser, _PROFILE_SETTINGS)
    parser.add_argument("--protocol", choices=("raw", "h3"), default="raw")
    parser.add_argument("--runtime", choices=("null", "echo"), help="default: null")
    _add_no_pump(parser, "run on aioquic alone")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="the kernels instead: what each takes and, on a GPU, how long; no daemon, no load",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no more")


def _add_bundle(commands: "Commands") -> None:
    bundle = commands.add_parser("bundle", help="a runtime, packed ahead", allow_abbrev=False)
    of_bundle = bundle.add_subparsers(metavar="COMMAND", required=True)
    text = "pack what a runtime needs, for `dataplane serve --bundle`"
    build = _command(of_bundle, "build", _bundle_build, text)
    build.add_argument("--runtime", metavar="NAME", required=True, help="which runtime")
    build.add_argument(_BUNDLE.flag, metavar="DIR", required=True, help=_BUNDLE.help)
    _add_settings(build, _BUNDLE_SETTINGS)
    build.add_argument("--weights", action="store_true", help="copy the weights into the bundle")
    build.add_argument("--force", action="store_true", help="replace a bundle that is there")
    show = _command(of_bundle, "show", _bundle_show, "print what a bundle holds, and check it")
    show.add_argument("dir", metavar="DIR")
    show.add_argument("--json", action="store_true", help="print one JSON object and no more")


def _add_settings(parser: argparse.ArgumentParser, settings: Iterable[Setting]) -> None:
    for setting in settings:
        parser.add_argument(setting.flag, metavar=setting.unit, help=setting.say())


def _values(options: argparse.Namespace, settings: Iterable[Setting]) -> dict[str, Any]:
    """The parsed values of settings that only flags can set."""
    given: Mapping[str, str | None] = vars(options)
    values: dict[str, Any] = {}
    for setting in settings:
        text = given[setting.name]
        text = setting.default if text is None else text
        values[setting.name] = None if text is None else setting.parse_flag(text)
    return values


# ---------------------------------------------------------------- the commands


def _serve(options: argparse.Namespace) -> int:
    config = load(vars(options), os.environ)
    from dataplane.daemon import serve

    return serve(config)


def _client(options: argparse.Namespace) -> int:
    from dataplane.cli import ask as cli_client
    from dataplane.client.keys import read_api_key

    values = _values(options, _CLIENT_SETTINGS)
    daemon = cli_client.Daemon(
        options.server,
        values["ca"],
        options.protocol,
        pump=not options.no_pump,
        api_key=read_api_key(values["api_key_file"], os.environ),
    )
    question = _question(options, values)
    show = cli_client.show_nothing if options.json else cli_client.show_on_stdout
    outcome = asyncio.run(cli_client.ask(daemon, question, show))
    if options.json:
        print(outcome.to_json())
    else:
        cli_client.end_line(outcome)
    cli_client.complain(outcome)
    if outcome.answered and not options.json:
        times = outcome.timings_us or {}
        # The raw protocol does not say when the runtime took the prompt.
        stages = [name for name in cli_client.STAGES if name != "pickup" or times.get(name)]
        cli_client.show_times(times, stages)
    return outcome.exit_code


def _question(options: argparse.Namespace, values: Mapping[str, Any]) -> "Question":
    from dataplane.cli.ask import Question
    from dataplane.cli.prompts import parse_ids, read_ids

    ids = None
    if options.ids is not None:
        ids = parse_ids("--ids", options.ids)
    elif options.ids_file is not None:
        ids = read_ids(options.ids_file)
    return Question(
        ids=ids,
        prompt=options.prompt,
        chat=not options.no_chat,
        max_output=values["max_output"],
        temperature=values["temperature"],
        seed=values["seed"],
    )


def _demo(options: argparse.Namespace) -> int:
    from dataplane.cli.demo import run

    values = _values(options, [_MAX_OUTPUT])
    state_dir = state_dir_of(None, os.environ)
    return run(options.runtime, options.prompt, values["max_output"], state_dir)


def _bench(options: argparse.Namespace) -> int:
    values = _values(options, _BENCH_SETTINGS)
    from dataplane.cli.bench import Plan, run

    return run(
        Plan(
            server=options.server,
            protocol=options.protocol,
            runtime=options.runtime,
            json=options.json,
            no_pump=options.no_pump,
            busy_poll=options.busy_poll,
            **values,
        )
    )


def _profile(options: argparse.Namespace) -> int:
    if options.gpu:
        from dataplane.cli import profile_gpu

        return profile_gpu.run(options.json)
    values = _values(options, _PROFILE_SETTINGS)
    from dataplane.cli.bench import Plan
    from dataplane.cli.profile import run

    return run(
        Plan(
            server=None,
            ca=None,
            admin=None,
            rate=None,
            slots=None,
            protocol=options.protocol,
            runtime=options.runtime,
            no_pump=options.no_pump,
            json=options.json,
            **values,
        )
    )


def _bundle_build(options: argparse.Namespace) -> int:
    values = _values(options, _BUNDLE_SETTINGS)
    out = _BUNDLE.parse_flag(options.out)
    from dataplane.bundle import describe
    from dataplane.pack import Order, build

    order = Order(options.runtime, copy_weights=options.weights, **values)
    print(describe(build(order, out, _say, force=options.force)))
    return 0


def _bundle_show(options: argparse.Namespace) -> int:
    from dataplane import bundle

    found = bundle.read(_BUNDLE.parse("DIR", options.dir, Path.cwd()))
    print(bundle.to_json(found) if options.json else bundle.describe(found))
    bundle.verify(found)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from dataplane import doctor

    report = doctor.examine()
    print(report.to_json() if options.json else report)
    return 0 if report.can_run else 1


def _model_install(options: argparse.Namespace) -> int:
    from dataplane.model import install

    install(_say)
    return 0


def _runtime(run: Run, options: argparse.Namespace) -> int:
    return run(vars(options), _say)
