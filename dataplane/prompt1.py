"""The `prompt/1` codec: one prompt on one QUIC stream, little-endian (contract 3).

Sans-IO and for both sides. This is the only place that knows the wire's layout. Nothing here raises
on what a peer
sent: `parse_request` answers a `Request`, a `Refusal`, or None for "not whole yet", since bad input
is no exception on the hot path. The client's side, which has only its own daemon to fear, raises
`ProtocolError`.
"""

import struct
from typing import NamedTuple

from dataplane.errors import DataplaneError, Refusal, Status

ALPN = "prompt/1"

REQUEST_MAGIC = b"DPQ1"
VERDICT_MAGIC = b"DPV1"
HEADER_MIN = 48
HEADER_MAX = 4096
FLAG_STRICT_AFFINITY = 1
EXTENSION_API_KEY = 1
NO_SLOT = 0xFFFF
END_MARK = 0xFFFFFFFF
END_MARK_BYTES = b"\xff\xff\xff\xff"
TEMPERATURE_MAX = 100.0

# magic, header length, id width, flags, n_tokens, max_output, request id, affinity, temperature,
# top_p, top_k, seed, deadline.
_REQUEST = struct.Struct("<4sHBBIIQIffIII")
_EXTENSION = struct.Struct("<HH")
API_KEY_MAX = HEADER_MAX - HEADER_MIN - _EXTENSION.size
"""Bytes of the longest key that a header holds."""
# magic, status, slot, request id, queue µs, ingress µs, retry after ms, free slots left.
_VERDICT = struct.Struct("<4sHHQIIII")
# finish reason, prompt tokens, output tokens, 0.
_TRAILER = struct.Struct("<IIII")

VERDICT_BYTES = _VERDICT.size
TRAILER_BYTES = _TRAILER.size

_unpack_request = _REQUEST.unpack_from
_pack_verdict = _VERDICT.pack
_pack_trailer = _TRAILER.pack
_new_tuple = tuple.__new__


class ProtocolError(DataplaneError):
    """The daemon sent what `prompt/1` does not allow."""


class Request(NamedTuple):
    """A request's header. Every front makes one of these; the ranges are those of contract 3.

    `header_bytes` is where the ids begin in the stream and `width` their size on the wire (2 or 4).
    """

    n_tokens: int
    width: int = 4
    max_output: int = 0  # 0: the slot's maximum
    request_id: int = 0  # 0: the daemon's choice
    affinity: int = 0  # 0: none
    strict: bool = False
    temperature: float = 0.0  # 0: greedy
    top_p: float = 0.0  # 0 or 1: off
    top_k: int = 0  # 0: off
    seed: int = 0  # 0: random
    deadline_ms: int = 0  # after arrival; 0: none
    api_key: bytes | None = None
    header_bytes: int = HEADER_MIN


def plain_request(n_tokens: int, width: int, max_output: int = 0) -> Request:
    """Return a request that states nothing else; a third of the cost of the class's own way."""
    return _new_tuple(
        Request,
        (n_tokens, width, max_output, 0, 0, False, 0.0, 0.0, 0, 0, 0, None, HEADER_MIN),
    )


class Verdict(NamedTuple):
    """The daemon's answer to a header: 200 or why not."""

    status: int
    slot: int | None
    request_id: int
    queue_us: int
    ingress_us: int
    retry_after_ms: int
    free_left: int


class Trailer(NamedTuple):
    """What stands behind the last output id."""

    finish_reason: int
    prompt_tokens: int
    output_tokens: int


def _bad(reason: str) -> Refusal:
    return Refusal(Status.BAD_REQUEST, reason)


def parse_request(data: bytes | bytearray, fin: bool) -> Request | Refusal | None:
    """Read the header at the start of a stream.

    Args:
        data: The stream's bytes so far, from offset 0.
        fin: Whether they are all there will ever be.

    Returns:
        The request once its header is whole, a refusal as soon as it cannot become one, None while
        it may.
    """
    have = len(data)
    if have < HEADER_MIN:
        return _parse_short(data, fin)
    (
        magic, length, width, flags, n_tokens, max_output, request_id, affinity, temperature, top_p,
        top_k, seed, deadline,
    ) = _unpack_request(data)  # fmt: skip
    if magic != REQUEST_MAGIC or not HEADER_MIN <= length <= HEADER_MAX:
        return _bad_prefix(magic, length)
    if width not in (2, 4):
        return _bad(f"the id width is {width}; it must be 2 or 4")
    if flags & ~FLAG_STRICT_AFFINITY:
        return _bad(f"unknown flags 0x{flags:02x}; only bit 0 (strict affinity) is defined")
    # A NaN fails every comparison, so it is refused here too.
    if not 0.0 <= temperature <= TEMPERATURE_MAX:
        return _bad(f"the temperature is {temperature:g}; it must be from 0 to {TEMPERATURE_MAX:g}")
    if not 0.0 <= top_p <= 1.0:
        return _bad(f"top_p is {top_p:g}; it must be from 0 to 1")
    if n_tokens == 0:
        return _bad("the prompt is empty")
    api_key = None
    if length > HEADER_MIN:
        if have < length:
            return _ended_in_header(have) if fin else None
        extensions = _parse_extensions(data, length)
        if isinstance(extensions, Refusal):
            return extensions
        api_key = extensions
    # Not through Request's own __new__, which is Python and costs more than the parsing.
    return _new_tuple(
        Request,
        (
            n_tokens, width, max_output, request_id, affinity, bool(flags), temperature, top_p,
            top_k, seed, deadline, api_key, length,
        ),
    )  # fmt: skip


def _bad_prefix(magic: bytes, length: int) -> Refusal:
    if magic != REQUEST_MAGIC:
        return _bad(f"the stream begins with {magic.hex()}, not with the magic DPQ1")
    return _bad(f"the header length is {length}; it must be from {HEADER_MIN} to {HEADER_MAX}")


def _ended_in_header(have: int) -> Refusal:
    return _bad(f"the stream ended inside the header, after {have} bytes")


def _parse_short(data: bytes | bytearray, fin: bool) -> Refusal | None:
    """Fewer bytes than the shortest header: refuse what can be told already."""
    if not REQUEST_MAGIC.startswith(bytes(data[:4])):
        return _bad_prefix(bytes(data[:4]), 0)
    if len(data) >= 6:
        length = int.from_bytes(data[4:6], "little")
        if not HEADER_MIN <= length <= HEADER_MAX:
            return _bad_prefix(REQUEST_MAGIC, length)
    return _ended_in_header(len(data)) if fin else None


def _parse_extensions(data: bytes | bytearray, end: int) -> bytes | Refusal | None:
    """Walk the extensions between the fixed header and `end`; unknown types are skipped."""
    api_key = None
    at = HEADER_MIN
    while at < end:
        if end - at < _EXTENSION.size:
            return _bad(f"an extension at byte {at} of the header is cut off")
        kind, length = _EXTENSION.unpack_from(data, at)
        at += _EXTENSION.size
        if length > end - at:
            return _bad(
                f"the extension of type {kind} says {length} bytes; the header has {end - at} left"
            )
        if kind == EXTENSION_API_KEY:
            api_key = bytes(data[at : at + length])
        at += length
    return api_key


def encode_request(request: Request) -> bytes:
    """Return the header's bytes; the ids follow it on the stream."""
    extensions = b""
    if request.api_key is not None:
        extensions = _EXTENSION.pack(EXTENSION_API_KEY, len(request.api_key)) + request.api_key
    return (
        _REQUEST.pack(
            REQUEST_MAGIC,
            HEADER_MIN + len(extensions),
            request.width,
            FLAG_STRICT_AFFINITY if request.strict else 0,
            request.n_tokens,
            request.max_output,
            request.request_id,
            request.affinity,
            request.temperature,
            request.top_p,
            request.top_k,
            request.seed,
            request.deadline_ms,
        )
        + extensions
    )


def encode_verdict(
    status: int,
    slot: int,
    request_id: int,
    queue_us: int,
    ingress_us: int,
    retry_after_ms: int,
    free_left: int,
) -> bytes:
    """Return the 32 bytes of a verdict; `slot` is NO_SLOT where none was held."""
    return _pack_verdict(
        VERDICT_MAGIC, status, slot, request_id, queue_us, ingress_us, retry_after_ms, free_left
    )


def decode_verdict(data: bytes) -> Verdict:
    """Read the first 32 bytes of an answer.

    Raises:
        ProtocolError: The magic is not there.
    """
    magic, status, slot, request_id, queue, ingress, retry, free = _VERDICT.unpack_from(data)
    if magic != VERDICT_MAGIC:
        raise ProtocolError(f"the answer begins with {magic.hex()}, not with the magic DPV1")
    return Verdict(
        status, None if slot == NO_SLOT else slot, request_id, queue, ingress, retry, free
    )


def encode_end(finish_reason: int, prompt_tokens: int, output_tokens: int) -> bytes:
    """Return the end mark and the trailer, 20 bytes."""
    return END_MARK_BYTES + _pack_trailer(finish_reason, prompt_tokens, output_tokens, 0)


def decode_trailer(data: bytes) -> Trailer:
    """Read the 16 bytes behind the end mark."""
    reason, prompt_tokens, output_tokens, _ = _TRAILER.unpack_from(data)
    return Trailer(reason, prompt_tokens, output_tokens)
