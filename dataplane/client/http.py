"""The client's half of `/v1/generate` without a socket: fields out, and an answer's parts back.

Why apart from `client_h3`: as in `client_wire`, what a byte means can be tested a byte at a time.
The rules that hold here:

- An answer may be split anywhere; what comes out does not depend on where.
- A 200 is over only when it is whole: with its trailer, or with its summary and `[DONE]`. Anything
  else is a `ProtocolError`, never a short answer that looks complete.
- What is held is bounded, whatever the daemon sends.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from dataplane.client.wire import LONGEST_REASON, IdsReader
from dataplane.errors import UsageError
from dataplane.http3_fields import Fields, Pair
from dataplane.http_names import BINARY, EVENTS, FINISH_WORDS, VISIBLE_ID
from dataplane.prompt1 import ProtocolError, Request

_LONGEST_EVENT = 16 << 20
_TIMING = re.compile(r"(queue|ingress);dur=([0-9]{1,12}(?:\.[0-9]{1,6})?)")
# Fields of a `Request`, and the header fields that carry them.
_IN_FIELDS = {
    "max_output": b"x-max-tokens",
    "temperature": b"x-temperature",
    "top_p": b"x-top-p",
    "top_k": b"x-top-k",
    "seed": b"x-seed",
    "affinity": b"x-affinity",
    "deadline_ms": b"x-deadline-ms",
}
_U32_FIELDS = ("max_output", "top_k", "seed", "affinity", "deadline_ms")
_DEFAULT = Request(0)


# ---------------------------------------------------------------- to the wire


def parameter_fields(request: Request, request_id: str | None) -> list[Pair]:
    """Return the header fields for what differs from the defaults.

    Raises:
        UsageError: A value does not fit its field.
    """
    for name in _U32_FIELDS:
        value = getattr(request, name)
        if not 0 <= value <= 2**32 - 1:
            raise UsageError(f"{name} is {value}; it must be from 0 to {2**32 - 1}")
    fields = []
    for name, field in _IN_FIELDS.items():
        value = getattr(request, name)
        if value != getattr(_DEFAULT, name):
            fields.append((field, _number(value)))
    if request.strict:
        fields.append((b"x-affinity-strict", b"1"))
    if request_id is not None:
        if not VISIBLE_ID.fullmatch(request_id.encode("utf-8", "surrogatepass")):
            raise UsageError(
                f"the request id {request_id!r} is not 1 to 64 visible ASCII characters"
            )
        fields.append((b"x-request-id", request_id.encode()))
    return fields


def _number(value: float) -> bytes:
    """Return a number without an exponent, which the daemon does not take."""
    if isinstance(value, int):
        return b"%d" % value
    return f"{value:.12f}".rstrip("0").rstrip(".").encode()


def request_head(authority: str, method: bytes, path: bytes, fields: Sequence[Pair]) -> list[Pair]:
    """Return a request's fields, the pseudo-fields first."""
    return [
        (b":method", method),
        (b":scheme", b"https"),
        (b":authority", authority.encode()),
        (b":path", path),
        *fields,
    ]


def text_body(prompt: str | Sequence[Mapping[str, str]]) -> bytes:
    """Return the JSON that asks with text or with messages, for a streamed answer.

    Raises:
        UsageError: The text is no Unicode.
    """
    name = "prompt" if isinstance(prompt, str) else "messages"
    try:
        return msgspec.json.encode({name: prompt, "stream": True})
    except UnicodeEncodeError as error:
        raise UsageError("the text is no valid Unicode: it holds a lone surrogate") from error


# ---------------------------------------------------------------- from the wire


class Head(NamedTuple):
    """What an answer's header says."""

    status: int
    content_type: bytes
    request_id: str
    slot: int | None
    queue_us: int | None
    ingress_us: int | None
    retry_after_ms: int | None


def read_head(fields: Fields) -> Head:
    """Read an answer's header; what is missing or odd there is None."""
    timing = dict(_TIMING.findall(_text(fields, b"server-timing")))
    if "queue" not in timing:
        queue = _text(fields, b"x-queue-time")
        if queue.endswith("ms"):
            timing |= dict(_TIMING.findall(f"queue;dur={queue[:-2]}"))
    return Head(
        status=int(fields[b":status"]),
        content_type=fields.get(b"content-type", b"").partition(b";")[0].strip().lower(),
        request_id=_text(fields, b"x-request-id"),
        slot=_whole(fields, b"x-slot"),
        queue_us=_microseconds(timing.get("queue")),
        ingress_us=_microseconds(timing.get("ingress")),
        retry_after_ms=_whole(fields, b"retry-after-ms"),
    )


def _text(fields: Fields, name: bytes) -> str:
    return fields.get(name, b"").decode("latin-1")


def _whole(fields: Fields, name: bytes) -> int | None:
    value = fields.get(name, b"")
    return int(value) if value.isdigit() and len(value) < 20 else None


def _microseconds(milliseconds: str | None) -> int | None:
    return None if milliseconds is None else round(float(milliseconds) * 1000)


class End(NamedTuple):
    """What stands at the end of a 200. Times are the daemon's; empty where it does not say them."""

    finish_reason: str
    usage: dict[str, int]
    timings_us: Mapping[str, int | None]


class Body(Protocol):
    """A 200's body as it comes in: `ids` and `pieces` of text since the last call."""

    def feed(self, data: bytes) -> tuple[list[int], list[str]]:
        """Take the next bytes; return the ids and the text that became whole."""

    def end(self) -> End:
        """No more comes: what the answer says of itself."""


class IdsBody:
    """Ids, end mark and trailer, as on the raw wire."""

    def __init__(self) -> None:
        self._reader = IdsReader()

    def feed(self, data: bytes) -> tuple[list[int], list[str]]:
        return self._reader.feed(data), []

    def end(self) -> End:
        trailer = self._reader.end()
        usage = {"prompt_tokens": trailer.prompt_tokens, "output_tokens": trailer.output_tokens}
        return End(FINISH_WORDS[trailer.finish_reason], usage, {})


class _Event(msgspec.Struct):
    """An event's document: a piece of the output, or the summary."""

    token_ids: list[int] | None = None
    text: str | None = None
    finish_reason: str | None = None
    usage: dict[str, int] | None = None
    timings_us: dict[str, int | None] | None = None


_event_decoder = msgspec.json.Decoder(_Event)


class EventsBody:
    """Server-sent events, `[DONE]` the last."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._end: End | None = None
        self._done = False
        self._ids: list[int] = []
        self._pieces: list[str] = []

    def feed(self, data: bytes) -> tuple[list[int], list[str]]:
        self._data += data
        *events, rest = self._data.split(b"\n\n")
        self._data = rest
        if len(rest) > _LONGEST_EVENT:
            raise ProtocolError(f"an event is over {_LONGEST_EVENT} bytes")
        for event in events:
            self._take(bytes(event))
        ids, pieces, self._ids, self._pieces = self._ids, self._pieces, [], []
        return ids, pieces

    def _take(self, event: bytes) -> None:
        name, _, value = event.partition(b":")
        if name != b"data" or self._done:
            shown = event[:40].decode("utf-8", "replace")
            raise ProtocolError(f"what comes is no event of an answer: {shown!r}")
        value = value.strip()
        if value == b"[DONE]":
            self._done = True
            return
        try:
            document = _event_decoder.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"an event cannot be read: {error}") from error
        if document.finish_reason is not None and document.usage is not None:
            self._end = End(document.finish_reason, document.usage, document.timings_us or {})
        elif self._end is not None:
            raise ProtocolError("output comes behind the summary")
        self._ids += document.token_ids or ()
        if document.text is not None:
            self._pieces.append(document.text)

    def end(self) -> End:
        if self._end is None or not self._done or self._data:
            raise ProtocolError("the answer ended before its last event")
        return self._end


def body_of(head: Head) -> Body:
    """Return the reader for a 200.

    Raises:
        ProtocolError: It is of no form that this client asked for.
    """
    if head.content_type == BINARY:
        return IdsBody()
    if head.content_type == EVENTS:
        return EventsBody()
    raise ProtocolError(f"the answer is of the type {head.content_type.decode('latin-1')!r}")


class _Problem(msgspec.Struct):
    detail: str = ""
    title: str = ""


class ReasonBody:
    """Why a request was refused: a problem document, or whatever text stands in its place."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > LONGEST_REASON:
            raise ProtocolError(f"the reason of a refusal is over {LONGEST_REASON} bytes")

    @property
    def reason(self) -> str:
        """The reason, as far as it is there."""
        return read_reason(self._data)


def read_reason(body: bytes | bytearray) -> str:
    """Return what a refusal's body says."""
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode("utf-8", "replace").strip()
    return problem.detail or problem.title


def decode_json(data: bytes) -> Any:
    """Read a page's JSON.

    Raises:
        ProtocolError: It is none.
    """
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the page cannot be read: {error}") from error
