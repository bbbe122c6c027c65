"""`dataplane bench`: a load, how long the verdicts took, and what the server spent on a request.

Without `--server` it brings its own daemon, with a slot for every request that can be in flight, so
that what is refused was refused on purpose. The rules that hold here:

- A warm-up comes first, and neither its times nor its CPU count.
- A refusal is an answer and is counted by its status; only answers that broke off and connections
  that went make the exit status 1.
- The server's CPU is its own account (`cpu_s` of `/health`), less what it costs to ask.
- The result goes to stdout, progress to stderr. Whatever happens, a daemon that was started here is
  gone before this returns.
"""

import array
import contextlib
import gc
import http.client
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dataplane import quic as private
from dataplane.cli.demo import ChildDaemon
from dataplane.client import keys, read_ca
from dataplane.config import SOCKET_NAME
from dataplane.errors import Status, UnavailableError, UsageError
from dataplane.kinds import Address, format_address, parse_address
from dataplane.load import Load, Server
from dataplane.load.tally import Outcome, quantiles
from dataplane.load.wire import dialogues

SLOTS_MOST = 1024
_CONTEXT = 1024
_MAX_OUTPUT = 512
_VOCABULARY = 1000
"""Every model knows more ids than this, and what they are does not matter to anybody here."""
_WARM_UP = 200
_SHOW_EVERY_S = 1.0
_ADMIN_WITHIN_S = 5.0
_KEPT_RATE = 0.95


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do; the flags of the same names."""

    server: str | None
    ca: Path | None
    admin: Address | None
    requests: int
    connections: int
    streams: int
    prompt_tokens: int
    max_output: int
    protocol: str
    rate: float | None
    runtime: str | None
    slots: int | None
    api_key_file: Path | None = None
    json: bool = False
    no_pump: bool = False
    busy_poll: bool = False

    @property
    def in_flight(self) -> int:
        """How many requests can be under way."""
        return self.connections * self.streams


class Target(NamedTuple):
    """Whom to load, and with which API key; what is not known of it is None."""

    server: Server
    admin: Address | None
    context: int | None
    api_key: bytes | None = None


def run(plan: Plan) -> int:
    """Load, measure, show.

    Returns:
        0, or 1 when a request was not answered.

    Raises:
        DataplaneError: The flags do not go together, or there is no server to load.
    """
    private.check()
    _check(plan)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end_on_signal)
    with _own_daemon(plan) if plan.server is None else _foreign(plan) as target:
        if target.context is not None and plan.prompt_tokens > target.context:
            raise UsageError(
                f"--prompt-tokens {plan.prompt_tokens}: the daemon's context is {target.context}"
            )
        outcome, cpu_us = measure(plan, target)
    if plan.json:
        print(json.dumps(document(outcome, cpu_us)))
    else:
        _show(plan, outcome, cpu_us)
    if plan.rate is not None and outcome.rate < _KEPT_RATE * plan.rate:
        _say(
            f"{outcome.rate:,.0f} requests a second were made of the {plan.rate:,g} wanted:"
            f" the server, or this machine, has no time for more, or {plan.in_flight} in flight"
            " are too few"
        )
    keyless = outcome.by_status.get(str(Status.UNAUTHORIZED.value), 0)
    if keyless:
        _say(
            f"{keyless:,} of {outcome.requests:,} requests were answered with 401, no or unknown"
            f" API key: {keys.HINT}"
        )
    if outcome.broken:
        _say(f"{outcome.broken:,} of {outcome.requests:,} requests were not answered")
    return 1 if outcome.broken else 0


def _end_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _say(line: str) -> None:
    print(f"dataplane: {line}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- whom to load


def _check(plan: Plan) -> None:
    if plan.no_pump and plan.busy_poll:
        raise UsageError("--busy-poll is the packet pump's, which --no-pump leaves out")
    if plan.server is None:
        given = {"--ca": plan.ca, "--admin": plan.admin, keys.FLAG: plan.api_key_file}
        for flag, value in given.items():
            if value is not None:
                raise UsageError(f"{flag} is for a daemon that runs already: give --server too")
        return
    for flag, own in (("--runtime", plan.runtime), ("--slots", plan.slots)):
        if own is not None:
            raise UsageError(f"{flag} is for a daemon of its own: leave it or --server out")


@contextlib.contextmanager
def _own_daemon(plan: Plan) -> Iterator[Target]:
    slots = plan.slots or min(SLOTS_MOST, plan.in_flight)
    if plan.slots is None and slots < plan.in_flight:
        _say(f"{plan.in_flight:,} can be in flight, {slots:,} slots is the most: expect refusals")
    with (
        tempfile.TemporaryDirectory(prefix="dataplane-") as directory,
        ChildDaemon(serve_command(plan, slots, directory)) as daemon,
    ):
        ready = daemon.wait_ready()
        server = Server(parse_address(ready.quic), read_ca(ready.ca))
        yield Target(server, ready.admin, ready.context)


def serve_command(plan: Plan, slots: int, directory: str) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "dataplane",
        "serve",
        "--listen=localhost:0",
        "--admin=localhost:0",
        f"--state-dir={directory}",
        f"--socket={Path(directory) / SOCKET_NAME}",
        f"--runtime={plan.runtime or 'null'}",
        f"--slots={slots}",
        f"--max-writing={slots}",
        f"--context={max(_CONTEXT, plan.prompt_tokens)}",
        f"--max-output={max(_MAX_OUTPUT, plan.max_output)}",
        "--drain-timeout=1",
    ]
    command += ["--no-pump"] * plan.no_pump
    command += ["--busy-poll"] * plan.busy_poll
    return command


@contextlib.contextmanager
def _foreign(plan: Plan) -> Iterator[Target]:
    assert plan.server is not None
    try:
        address = parse_address(plan.server, lowest_port=1)
    except ValueError as error:
        raise UsageError(f"--server: {plan.server!r} is not allowed; it takes {error}") from error
    api_key = keys.read_api_key(plan.api_key_file, os.environ)
    context = None
    if plan.admin is not None:
        # 503 when no runtime is attached, and with `null`, which is none.
        status, props = _get(plan.admin, "/props")
        context = props.get("context") if status == http.HTTPStatus.OK else None
    yield Target(Server(address, read_ca(plan.ca)), plan.admin, context, api_key)


def _get(admin: Address, path: str) -> tuple[int, dict[str, Any]]:
    """Ask the admin port; the object that the page is, or an empty one."""
    connection = http.client.HTTPConnection(*admin, timeout=_ADMIN_WITHIN_S)
    where = format_address(admin)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        page = json.loads(body) if response.status == http.HTTPStatus.OK else {}
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UnavailableError(f"the admin port {where} does not answer {path}: {error}") from error
    finally:
        connection.close()
    return response.status, page if isinstance(page, dict) else {}


def _cpu_s(admin: Address | None) -> float:
    if admin is None:
        return 0.0
    cpu_s = _get(admin, "/health")[1].get("cpu_s")
    if not isinstance(cpu_s, float | int):
        raise UnavailableError(f"the admin port {format_address(admin)} states no cpu_s")
    return float(cpu_s)


# ---------------------------------------------------------------- the measurement


def measure(plan: Plan, target: Target) -> tuple[Outcome, float | None]:
    """Connect, warm up and run; the outcome, and the server's CPU a request in µs, if known."""
    ids = array.array("I", (i % _VOCABULARY for i in range(plan.prompt_tokens)))
    if sys.byteorder == "big":
        ids.byteswap()
    authority = format_address(target.server.address)
    alpn, dialogue = dialogues(
        plan.protocol, authority, ids.tobytes(), plan.max_output, target.api_key
    )
    engine = {"pump": not plan.no_pump, "busy_poll": plan.busy_poll}
    with Load(target.server, alpn, dialogue, plan.connections, **engine) as load:
        load.connect()
        load.run(min(plan.requests, max(_WARM_UP, plan.in_flight)), plan.streams)
        _settle_collector()
        before = _cpu_s(target.admin)
        asked = _cpu_s(target.admin)
        with _shown_progress(plan) as show:
            outcome = load.run(plan.requests, plan.streams, plan.rate, show)
        # Whoever spins spends that time whether it is asked or not.
        asking = 0.0 if plan.busy_poll else asked - before
        spent = _cpu_s(target.admin) - asked - asking
    if target.admin is None:
        return outcome, None
    return outcome, max(0.0, spent) / plan.requests * 1e6


def _settle_collector() -> None:
    """What is there by now stays; looking through it again would be a pause in the times."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def document(outcome: Outcome, cpu_us: float | None) -> dict[str, object]:
    """Return the object of `--json`; null where nothing was measured."""
    return {
        "requests": outcome.requests,
        "by_status": outcome.by_status,
        "verdict_us": quantiles(outcome.verdicts_us),
        "ingress_us": quantiles(outcome.ingress_us),
        "server_cpu_us_per_request": None if cpu_us is None else round(cpu_us, 2),
        "rate_per_s": round(outcome.rate, 1),
    }


# ---------------------------------------------------------------- showing


@contextlib.contextmanager
def _shown_progress(plan: Plan) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, lines elsewhere; once a second, as each costs the load its time.

    rich would draw from a thread of its own, which the times would show.
    """
    console = Console(stderr=True)
    pace = "" if plan.rate is None else f" at {plan.rate:,g} a second"
    _say(
        f"{plan.requests:,} requests of {plan.prompt_tokens:,} tokens{pace},"
        f" {plan.connections:,} connections with {plan.streams:,} streams"
    )
    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            bar = Progress(console=console, auto_refresh=False, transient=True)
            task = bar.add_task("requests", total=plan.requests)
            stack.enter_context(bar)

            def draw(ended: int) -> None:
                bar.update(task, completed=ended)
                bar.refresh()

        else:

            def draw(ended: int) -> None:
                _say(f"{ended:,} of {plan.requests:,} requests")

        due = time.monotonic() + _SHOW_EVERY_S

        def show(ended: int) -> None:
            nonlocal due
            now = time.monotonic()
            if now >= due:
                due = now + _SHOW_EVERY_S
                draw(ended)

        yield show


def _show(plan: Plan, outcome: Outcome, cpu_us: float | None) -> None:
    """Print the table and what else was found."""
    table = Table(box=None, pad_edge=False)
    table.add_column("µs")
    rows = (
        ("verdict", quantiles(outcome.verdicts_us), "sent to verdict, here"),
        ("ingress", quantiles(outcome.ingress_us), "whole to published, there"),
    )
    for name in rows[0][1]:
        table.add_column(name, justify="right")
    table.add_column("from and to", style="dim")
    for title, times, meaning in rows:
        shown = ("-" if time is None else f"{time:,}" for time in times.values())
        table.add_row(title, *shown, meaning)
    console = Console(highlight=False)
    console.print(table)
    statuses = ", ".join(f"{status}: {count:,}" for status, count in outcome.by_status.items())
    print(f"answers      {statuses}")
    print(f"rate         {outcome.rate:,.0f} a second")
    cpu = "not known: --admin names the port to ask"
    print(f"server CPU   {cpu if cpu_us is None else f'{cpu_us:.1f} µs a request'}")
    print(f"engine       {_engine(plan)}")


def _engine(plan: Plan) -> str:
    """Name what did the packets; of a server that was there before, only this side is known."""
    if plan.no_pump:
        name = "aioquic alone"
    else:
        name = "the packet pump" + ", busy-polling" * plan.busy_poll
    return name if plan.server is None else f"{name} (here)"
