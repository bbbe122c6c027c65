"""Asking a daemon from the command line: a prompt to ids, the answer as it streams, the times.

The rules that hold here: what was asked for goes to stdout, everything else to stderr; with
`--json` stdout holds one object and nothing else, whatever happened.
"""

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.table import Table

from dataplane.client import Answer, Client, connect
from dataplane.errors import BusyError, DataplaneError, Status, UnavailableError, UsageError
from dataplane.identity import make_state_dir
from dataplane.text import TextStream

_EXIT_OF_STATUS: dict[int, int] = {
    Status.OK: 0,
    Status.BUSY: BusyError.exit_code,
    Status.UNAVAILABLE: UnavailableError.exit_code,
}
_ID = re.compile(r"[0-9]{1,10}")
_ID_MOST = 2**32 - 1

# What is measured between which two moments (contract 5); the last three are seen from here.
STAGES = {
    "queue": "header complete to slot claimed",
    "ingress": "prompt complete to published in the slot",
    "pickup": "published to taken by the runtime",
    "first_token": "prompt sent to first token here",
    "total": "prompt sent to whole answer here",
}


# ---------------------------------------------------------------- prompts


class Codec(Protocol):
    """Text to ids, and an answer's ids to text."""

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt."""

    def stream(self) -> TextStream:
        """A decoder for one answer."""


class ModelCodec:
    """The small model's tokeniser, with its chat template unless `chat` is off."""

    def __init__(self, state_dir: Path, chat: bool = True) -> None:
        from dataplane import model, text

        files = model.locate()
        make_state_dir(state_dir)
        document = model.tokenizer_json(files, state_dir).read_bytes()
        self._tokenizer = text.Tokenizer(document)
        self._template = model.CHAT_TEMPLATE if chat else None

    def encode(self, prompt: str) -> list[int]:
        if self._template is None:
            return self._tokenizer.encode(prompt)
        return self._tokenizer.encode_chat([{"role": "user", "content": prompt}], self._template)

    def stream(self) -> TextStream:
        return self._tokenizer.stream()


class ByteCodec:
    """For a runtime without a vocabulary, as echo: a text's bytes are its ids."""

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode("utf-8", "surrogateescape"))

    def stream(self) -> TextStream:
        return _ByteText()


class _ByteText:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(bytes(number if number < 256 else 0x3F for number in ids))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class IdText:
    """Shows ids as numbers with commas, as `--ids` takes them."""

    def __init__(self) -> None:
        self._separator = ""

    def push(self, ids: Iterable[int]) -> str:
        text = "".join(f",{number}" for number in ids)
        if not self._separator:
            text = text[1:]
        self._separator = self._separator or text[:1]
        return text

    def flush(self) -> str:
        return ""


def parse_ids(source: str, text: str) -> list[int]:
    """Read token ids that stand between commas or white space.

    Raises:
        UsageError: One of them is no id, or there is none; the text names it and its place.
    """
    words = re.split(r"\s*,\s*|\s+", text.strip())
    ids = []
    for place, word in enumerate(words, 1):
        if not _ID.fullmatch(word) or int(word) > _ID_MOST:
            shown = repr(word) if word else "nothing"
            raise UsageError(
                f"{source}: number {place} is {shown}; ids are whole numbers from 0 to {_ID_MOST}"
                " with commas or white space between them"
            )
        ids.append(int(word))
    return ids


def read_ids(path: str) -> list[int]:
    """Read a file of token ids.

    Raises:
        UsageError: It cannot be read, or holds anything else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--ids-file {path}: it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--ids-file {path}: it is no text") from error
    return parse_ids(f"--ids-file {path}", text)


# ---------------------------------------------------------------- asking


@dataclass(slots=True)
class Outcome:
    """What became of a request: the fields of `--json`, and the exit code."""

    status: int | None = None
    slot: int | None = None
    request_id: int | None = None
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
        request_id = None if self.request_id is None else f"{self.request_id:016x}"
        return json.dumps(
            {
                "status": self.status,
                "slot": self.slot,
                "request_id": request_id,
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
    return Outcome(error=str(error), exit_code=error.exit_code)


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask. Without a `text` stream the answer has no text."""

    ids: Sequence[int]
    text: TextStream | None = None
    max_output: int = 0
    temperature: float = 0.0
    seed: int = 0


async def ask(
    server: str, ca: Path | None, question: Question, show: Callable[[str], None]
) -> Outcome:
    """Ask one question; never raises a `DataplaneError`.

    Args:
        server: `HOST:PORT`.
        ca: The file to verify it with; the state directory's if None.
        question: What to ask.
        show: Gets the answer piece by piece: its text, or its ids where it has none.
    """
    try:
        async with connect(server, ca) as client:
            return await _ask_on(client, question, show)
    except DataplaneError as error:
        return failure(error)


async def _ask_on(client: Client, question: Question, show: Callable[[str], None]) -> Outcome:
    answer = await client.submit(
        question.ids,
        max_output=question.max_output,
        temperature=question.temperature,
        seed=question.seed,
    )
    pieces: list[str] = []
    shown = question.text or IdText()
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
    has_text = question.text is not None and answer.status == Status.OK
    return _outcome(answer, "".join(pieces) if has_text else None, error)


def _outcome(answer: Answer, text: str | None, error: DataplaneError | None) -> Outcome:
    status = answer.status
    outcome = Outcome(
        status=status,
        slot=answer.slot,
        request_id=answer.request_id,
        text=text,
        finish_reason=answer.finish_reason,
        usage=answer.usage,
        timings_us=answer.timings_us,
    )
    if status == Status.OK:
        outcome.token_ids = answer.token_ids
        outcome.exit_code = error.exit_code if error else 0
        outcome.error = str(error) if error else None
        return outcome
    outcome.exit_code = 1 if status is None else _EXIT_OF_STATUS.get(status, 1)
    outcome.error = answer.reason or "refused without a reason"
    return outcome


# ---------------------------------------------------------------- showing


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
        print(f"dataplane: {status}{' '.join(outcome.error.splitlines())}", file=sys.stderr)


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
