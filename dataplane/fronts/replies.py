"""How `/v1/generate` answers: header fields, and the body in each of its three forms (contract 4).

A reply is made with its request and lives until its end. It is asked for bytes as output comes, so
that what is there at publish goes out with the header in one write.
"""

import math
import secrets
from array import array
from typing import Any, NamedTuple, Protocol

import msgspec

from dataplane._native import ffi, lib
from dataplane.errors import Refusal, Status
from dataplane.exchange import Exchange
from dataplane.http3 import data_frame_header
from dataplane.http3_fields import Pair
from dataplane.http_names import BINARY, EVENTS, FINISH_WORDS, JSON, PROBLEM, TITLES
from dataplane.prompt1 import encode_end
from dataplane.text import Tokenizer

_IDS_MAX: int = lib.DP_H3_IDS_MAX
_frame = ffi.new("uint8_t[]", lib.DP_H3_ACCEPTED_MAX + lib.DP_H3_IDS_MAX)
_frame_view = ffi.buffer(_frame)
_write_accepted, _write_binary = lib.dp_h3_accepted, lib.dp_h3_binary


class Reply(Protocol):
    """One answer's form."""

    content_type: bytes
    request_id: bytes  # the client's, or b"" for the slot's in hexadecimal

    def begin(self, exchange: Exchange, ids: bytes, finish: int, slots: int) -> bytes:
        """Return the HEADERS frame, and what `body` returns in a DATA frame, if anything."""

    def body(self, exchange: Exchange, ids: bytes, finish: int) -> bytes:
        """Return what goes out now for these output ids (u32 LE); with `finish`, the end too."""


class Binary:
    """Ids, end mark and trailer, as on the raw wire."""

    __slots__ = ("request_id",)
    content_type = BINARY

    def __init__(self, request_id: bytes) -> None:
        self.request_id = request_id

    def begin(self, exchange: Exchange, ids: bytes, finish: int, slots: int) -> bytes:
        if len(ids) > _IDS_MAX or len(ids) != exchange.sent * 4:
            return _begin(self, exchange, ids, finish, slots)
        request_id = self.request_id
        size = _write_binary(
            _frame, request_id, len(request_id), exchange.request_id, exchange.queue_us,
            exchange.ingress_us, slots, exchange.free_left, exchange.slot, ids, len(ids), finish,
            exchange.n_tokens,
        )  # fmt: skip
        return _frame_view[:size]  # type: ignore[no-any-return]

    def body(self, exchange: Exchange, ids: bytes, finish: int) -> bytes:
        if finish:
            return ids + encode_end(finish, exchange.n_tokens, exchange.sent)
        return ids


PLAIN = Binary(b"")
"""It keeps nothing of a request, so one serves all whose clients gave no identifier."""


class Json:
    """One object at the end."""

    __slots__ = ("_ids", "_tokenizer", "request_id")
    content_type = JSON

    def __init__(self, request_id: bytes, tokenizer: Tokenizer | None) -> None:
        self.request_id = request_id
        self._tokenizer = tokenizer
        self._ids = bytearray()

    def begin(self, exchange: Exchange, ids: bytes, finish: int, slots: int) -> bytes:
        return _begin(self, exchange, ids, finish, slots)

    def body(self, exchange: Exchange, ids: bytes, finish: int) -> bytes:
        self._ids += ids
        if not finish:
            return b""
        token_ids = array("I", self._ids).tolist()
        return msgspec.json.encode(
            {
                "request_id": request_id_of(self, exchange).decode(),
                "slot": exchange.slot,
                "token_ids": token_ids,
                "text": self._tokenizer.decode(token_ids) if self._tokenizer else None,
                **summary(exchange, finish),
            }
        )


class Events:
    """Server-sent events: one for each piece of output, one with the summary, `[DONE]`."""

    __slots__ = ("_text", "request_id")
    content_type = EVENTS

    def __init__(self, request_id: bytes, tokenizer: Tokenizer | None) -> None:
        self.request_id = request_id
        self._text = tokenizer.stream() if tokenizer else None

    def begin(self, exchange: Exchange, ids: bytes, finish: int, slots: int) -> bytes:
        return _begin(self, exchange, ids, finish, slots)

    def body(self, exchange: Exchange, ids: bytes, finish: int) -> bytes:
        out = b""
        if ids:
            token_ids = array("I", ids).tolist()
            text = self._text.push(token_ids) if self._text else None
            out = event({"token_ids": token_ids, "text": text})
        if finish:
            rest = self._text.flush() if self._text else ""
            if rest:
                out += event({"token_ids": [], "text": rest})
            out += event(summary(exchange, finish)) + b"data: [DONE]\n\n"
        return out


def event(value: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def summary(exchange: Exchange, finish: int) -> dict[str, Any]:
    """Return why the answer ended, what it used and where its time went."""
    return {
        "finish_reason": FINISH_WORDS[finish],
        "usage": {"prompt_tokens": exchange.n_tokens, "output_tokens": exchange.sent},
        "timings_us": {
            "queue": exchange.queue_us,
            "ingress": exchange.ingress_us,
            "pickup": _known(exchange.pickup_us),
            "first_token": _known(exchange.first_us) if exchange.sent else None,
            "total": _known(exchange.total_us),
        },
    }


def _known(microseconds: int) -> int | None:
    return microseconds if microseconds >= 0 else None


def request_id_of(reply: Reply, exchange: Exchange) -> bytes:
    """Return the identifier that the client knows the request by."""
    return reply.request_id or b"%016x" % exchange.request_id


def _begin(reply: Reply, exchange: Exchange, ids: bytes, finish: int, slots: int) -> bytes:
    """Return the beginning of an answer of any form (`Reply.begin`)."""
    media_type, request_id = reply.content_type, reply.request_id
    size = _write_accepted(
        _frame, media_type, len(media_type), request_id, len(request_id), exchange.request_id,
        exchange.queue_us, exchange.ingress_us, slots, exchange.free_left, exchange.slot,
    )  # fmt: skip
    header: bytes = _frame_view[:size]
    body = reply.body(exchange, ids, finish)
    return header + data_frame_header(len(body)) + body if body else header


class Limits(NamedTuple):
    """The slots that a request may have, and how many of them are free."""

    slots: int
    free_left: int


def common_fields(request_id: bytes, queue_us: int, limits: Limits) -> list[Pair]:
    """Return what every answer says."""
    return [
        (b"x-request-id", request_id),
        (b"request-id", request_id),
        (b"x-queue-time", b"%.3fms" % (queue_us / 1000)),
        (b"x-ratelimit-limit", b"%d" % limits.slots),
        (b"x-ratelimit-remaining", b"%d" % limits.free_left),
    ]


def problem(
    refusal: Refusal, request_id: bytes, queue_us: int, limits: Limits, slot: int | None = None
) -> tuple[list[Pair], bytes]:
    """Return the header fields and the body of a refusal (RFC 9457)."""
    status, reason, retry_after_ms = refusal
    body = msgspec.json.encode(
        {
            "type": "about:blank",
            "title": TITLES[status],
            "status": int(status),
            "detail": reason,
            "request_id": request_id.decode(),
        }
    )
    headers = [
        (b":status", b"%d" % status),
        (b"content-type", PROBLEM),
        (b"content-length", b"%d" % len(body)),
        *common_fields(request_id, queue_us, limits),
    ]
    if slot is not None:
        headers.append((b"x-slot", b"%d" % slot))
        headers.append((b"server-timing", b"queue;dur=%.3f" % (queue_us / 1000)))
    if status in (Status.BUSY, Status.UNAVAILABLE):
        headers += retry_fields(retry_after_ms)
    elif status == Status.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))  # RFC 9110 section 15.5.2
    return headers, body


def new_request_id() -> bytes:
    """Return an identifier for a request that holds no slot: 16 hexadecimal digits."""
    return secrets.token_hex(8).encode()


def retry_fields(retry_after_ms: int) -> list[Pair]:
    """Return what 429 and 503 add."""
    wait = max(1, retry_after_ms)
    return [
        (b"retry-after", b"%d" % math.ceil(wait / 1000)),
        (b"retry-after-ms", b"%d" % wait),
        (b"x-should-retry", b"true"),
    ]
