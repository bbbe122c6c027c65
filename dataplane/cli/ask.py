"""Asking a daemon from the command line: a prompt to ids, the answer as it streams, the times.

The rules that hold here: what was asked for goes to stdout, everything else to stderr; with
`--json` stdout holds one object and nothing else, whatever happened.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dataplane.cli import prompts as cli_prompts
from dataplane.cli.prompts import IdText, PageRefusedError
from dataplane.client import Client, connect, keys
from dataplane.client.answer import BaseAnswer
from dataplane.client.h3 import Http3Client
from dataplane.errors import BusyError, DataplaneError, Status, UnavailableError, UsageError
from dataplane.text import TextStream

_EXIT_OF_STATUS: dict[int, int] = {
    Status.OK: 0,
    Status.BUSY: BusyError.exit_code,
    Status.UNAVAILABLE: UnavailableError.exit_code,
}

# What is measured between which two moments (contract 5); the last three are seen from here.
STAGES = {
    "queue": "header complete to slot claimed",
    "ingress": "prompt complete to published in the slot",
    "pickup": "published to taken by the runtime",
    "first_token": "prompt sent to first token here",
    "total": "prompt sent to whole answer here",
}


# ---------------------------------------------------------------- asking


def _exit_of(error: DataplaneError) -> int:
    """Return the exit status: bad usage is no kind of its own to whoever asked a question."""
    return 1 if isinstance(error, UsageError) else error.exit_code


@dataclass(slots=True)
class Outcome:
    """What became of a request: the fields of `--json`, and the exit code."""

    status: int | None = None
    slot: int | None = None
    request_id: str | None = None
    token_ids: list[int] | None = None
    text: str | None = None
    finish_reason: str | None = None
    usage: dict[str, int] | None = None
    timings_us: dict[str, int | None] | None = None
    error: str | None = None
    exit_code: int = 1

    @property
    def answered(self) -> bool:
        """Whether the whole answer came."""
        return self.exit_code == 0

    def to_json(self) -> str:
        """One line, with null where there is nothing."""
        return json.dumps(
            {
                "status": self.status,
                "slot": self.slot,
                "request_id": self.request_id,
                "token_ids": self.token_ids,
                "text": self.text,
                "finish_reason": self.finish_reason,
                "usage": self.usage,
                "timings_us": self.timings_us,
                "error": self.error,
            }
        )


def failure(error: DataplaneError) -> Outcome:
    """The outcome of a request that never was one."""
    status = error.status if isinstance(error, PageRefusedError) else None
    return Outcome(status=status, error=str(error), exit_code=_exit_of(error))


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask: `ids`, or else the text `prompt`.

    Attributes:
        text: Makes text of the answer to `ids`; without it the ids themselves are shown.
        chat: Whether the prompt is a user's message, or goes as it is.
    """

    ids: Sequence[int] | None = None
    text: TextStream | None = None
    prompt: str | None = None
    chat: bool = True
    max_output: int = 0
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Daemon:
    """Whom to ask, and how: `raw` or `h3`, with the packet pump or on aioquic alone.

    Attributes:
        api_key: Who asks, or None.
    """

    server: str
    ca: Path | None = None
    protocol: str = "raw"
    pump: bool = True
    api_key: bytes | None = field(default=None, repr=False)


async def ask(daemon: Daemon, question: Question, show: Callable[[str], None]) -> Outcome:
    """Ask one question; never raises a `DataplaneError`.

    Args:
        daemon: Whom.
        question: What to ask.
        show: Gets the answer piece by piece: its text, or its ids where it has none.
    """
    try:
        if daemon.protocol == "h3":
            async with connect(daemon.server, daemon.ca, protocol="h3", pump=daemon.pump) as client:
                return await _ask_h3(client, question, daemon.api_key, show)
        if question.ids is None:
            question = await _encoded(daemon, question)
        async with connect(daemon.server, daemon.ca, pump=daemon.pump) as raw:
            return await _ask_raw(raw, question, daemon.api_key, show)
    except DataplaneError as error:
        return failure(error)


async def _encoded(daemon: Daemon, question: Question) -> Question:
    """Turn the question's text into ids."""
    codec = await cli_prompts.fetch_codec(
        daemon.server,
        daemon.ca,
        question.chat,
        say_line,
        pump=daemon.pump,
        api_key=daemon.api_key,
    )
    return replace(question, ids=codec.encode(question.prompt or ""), text=codec.stream())


async def _ask_raw(
    client: Client, question: Question, api_key: bytes | None, show: Callable[[str], None]
) -> Outcome:
    answer = await client.submit(
        question.ids or (),
        max_output=question.max_output,
        temperature=question.temperature,
        seed=question.seed,
        api_key=api_key,
    )
    return await _follow_ids(answer, question.text, show)


async def _ask_h3(
    client: Http3Client, question: Question, api_key: bytes | None, show: Callable[[str], None]
) -> Outcome:
    parameters: dict[str, Any] = {
        "max_output": question.max_output,
        "temperature": question.temperature,
        "seed": question.seed,
        "api_key": api_key,
    }
    if question.ids is not None:
        return await _follow_ids(
            await client.submit(question.ids, **parameters), question.text, show
        )
    prompt = question.prompt or ""
    messages = [{"role": "user", "content": prompt}]
    answer = await client.ask(messages if question.chat else prompt, **parameters)
    error = None
    try:
        async for piece in answer.texts():
            show(piece)
    except DataplaneError as broken:
        error = broken
    return _outcome(answer, answer.text, error)


async def _follow_ids(
    answer: BaseAnswer, text: TextStream | None, show: Callable[[str], None]
) -> Outcome:
    """Show an answer's ids, or the text that they stand for, as they come."""
    pieces: list[str] = []
    shown = text or IdText()
    error: DataplaneError | None = None

    def take(piece: str) -> None:
        if piece:
            pieces.append(piece)
            show(piece)

    try:
        async for ids in answer:
            take(shown.push(ids))
    except DataplaneError as broken:
        error = broken
    take(shown.flush())
    has_text = text is not None and answer.status == Status.OK
    return _outcome(answer, "".join(pieces) if has_text else None, error)


def _outcome(answer: BaseAnswer, text: str | None, error: DataplaneError | None) -> Outcome:
    status, request_id = answer.status, answer.request_id
    outcome = Outcome(
        status=status,
        slot=answer.slot,
        request_id=f"{request_id:016x}" if isinstance(request_id, int) else request_id,
        text=text,
        finish_reason=answer.finish_reason,
        usage=answer.usage,
        timings_us=answer.timings_us,
    )
    if status == Status.OK:
        outcome.token_ids = answer.token_ids
        outcome.exit_code = _exit_of(error) if error else 0
        outcome.error = str(error) if error else None
        return outcome
    outcome.exit_code = 1 if status is None else _EXIT_OF_STATUS.get(status, 1)
    outcome.error = answer.reason or "refused without a reason"
    return outcome


# ---------------------------------------------------------------- showing


def say_line(line: str) -> None:
    """Say something beside the answer."""
    print(f"dataplane: {line}", file=sys.stderr, flush=True)


def show_on_stdout(piece: str) -> None:
    """Write a piece of the answer, seen at once."""
    sys.stdout.write(piece)
    sys.stdout.flush()


def show_nothing(piece: str) -> None:
    """For `--json`, which shows the whole answer at its end."""


def end_line(outcome: Outcome) -> None:
    """Close the last line of what `show_on_stdout` wrote."""
    shown = outcome.text if outcome.text is not None else outcome.token_ids
    if shown and not (isinstance(shown, str) and shown.endswith("\n")):
        print(flush=True)


def complain(outcome: Outcome) -> None:
    """Say on stderr, in one line, why there is no whole answer."""
    if outcome.error is not None:
        refused = outcome.status not in (None, Status.OK)
        status = f"{outcome.status}: " if refused else ""
        hint = f"; {keys.HINT}" if outcome.status == Status.UNAUTHORIZED else ""
        print(f"dataplane: {status}{' '.join(outcome.error.splitlines())}{hint}", file=sys.stderr)


def show_times(
    timings_us: Mapping[str, int | None] | None, stages: Iterable[str] = tuple(STAGES)
) -> None:
    """Print a table of where the time went to stderr."""
    table = Table(title="where the time went", title_justify="left", box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("time", justify="right")
    table.add_column("from and to", style="dim")
    for stage in stages:
        time = (timings_us or {}).get(stage)
        table.add_row(stage.replace("_", " "), _duration(time), STAGES[stage])
    Console(stderr=True, highlight=False).print(table)


def _duration(microseconds: int | None) -> str:
    if microseconds is None:
        return "-"
    if microseconds < 1000:
        return f"{microseconds} µs"
    if microseconds < 1_000_000:
        return f"{microseconds / 1000:.1f} ms"
    return f"{microseconds / 1e6:.2f} s"
