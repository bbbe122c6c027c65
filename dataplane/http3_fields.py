"""The parts of HTTP/3 that need no state: numbers, settings, field sections (RFC 9114, RFC 9204).

Most of it is the rules that a message's fields must keep. Checking fields is what costs a general
HTTP/3 library more than the request does, because it walks each name and value byte by byte in the
interpreter. Here a whole section is checked by a handful of C calls (a dict, set inclusion, one
join, one translate), and only what falls outside the common case is looked at field by field.

Rules that hold here:

- The QPACK dynamic table is never used, in either direction (RFC 9204 section 3.2.3 allows a
  capacity of 0). One decoder and one encoder, which keep nothing, therefore serve every connection.
- Work is linear in the section's length, which the caller has bounded.
- A breach is an exception: `MessageError` ends one message, `ProtocolError` the connection.
- Reasons are fixed words: they end up in answers, so they never repeat what a client sent.
"""

from __future__ import annotations

import re
from enum import IntEnum

import pylsqpack

Data = bytes | bytearray | memoryview
"""What a stream gave; a memoryview must be one of bytes (format `B`)."""

Pair = tuple[bytes, bytes]
Fields = dict[bytes, bytes]
"""A checked section by name. A field that came several times is one value, joined as RFC 9110
section 5.3 has it (`; ` for cookie, RFC 9114 section 4.2.1)."""


class Code(IntEnum):
    """Error codes of RFC 9114 section 8.1 and RFC 9204 section 8.3."""

    NO_ERROR = 0x100
    GENERAL_PROTOCOL_ERROR = 0x101
    INTERNAL_ERROR = 0x102
    STREAM_CREATION_ERROR = 0x103
    CLOSED_CRITICAL_STREAM = 0x104
    FRAME_UNEXPECTED = 0x105
    FRAME_ERROR = 0x106
    EXCESSIVE_LOAD = 0x107
    ID_ERROR = 0x108
    SETTINGS_ERROR = 0x109
    MISSING_SETTINGS = 0x10A
    REQUEST_REJECTED = 0x10B
    REQUEST_CANCELLED = 0x10C
    REQUEST_INCOMPLETE = 0x10D
    MESSAGE_ERROR = 0x10E
    QPACK_DECOMPRESSION_FAILED = 0x200
    QPACK_ENCODER_STREAM_ERROR = 0x201
    QPACK_DECODER_STREAM_ERROR = 0x202


class MessageError(Exception):
    """One message is unusable; its stream ends, the connection goes on (RFC 9114 section 4.1.2).

    `status` is what a server answers while it still can (0: nothing, reset the stream), `code`
    what it resets the stream with otherwise.
    """

    def __init__(self, reason: str, status: int = 400, code: Code = Code.MESSAGE_ERROR) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.code = code


class ProtocolError(Exception):
    """The peer broke a rule that RFC 9114 or RFC 9204 makes an error of the whole connection."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


# Names that need no further look in any message. The set decides about speed only: another name is
# checked by pattern and accepted all the same.
_PLAIN = frozenset(
    b"accept accept-encoding accept-language accept-ranges access-control-allow-origin age allow "
    b"alt-svc anthropic-version authorization cache-control content-encoding content-length "
    b"content-type cookie date dnt etag host idempotency-key if-none-match last-modified location "
    b"openai-organization openai-project origin pragma priority referer request-id retry-after "
    b"retry-after-ms sec-ch-ua sec-ch-ua-mobile sec-ch-ua-platform sec-fetch-dest sec-fetch-mode "
    b"sec-fetch-site server server-timing traceparent tracestate user-agent vary via x-affinity "
    b"x-affinity-strict x-api-key x-deadline-ms x-forwarded-for x-forwarded-proto x-max-tokens "
    b"x-queue-time x-ratelimit-limit x-ratelimit-remaining x-request-id x-seed x-should-retry "
    b"x-slot x-stainless-arch x-stainless-async x-stainless-lang x-stainless-os "
    b"x-stainless-package-version x-stainless-read-timeout x-stainless-retry-count "
    b"x-stainless-runtime x-stainless-runtime-version x-temperature x-top-k x-top-p".split()
)
_REQUEST_PSEUDO = frozenset((b":method", b":scheme", b":authority", b":path"))
_RESPONSE_PSEUDO = frozenset((b":status",))
_REQUEST_NAMES = _PLAIN | _REQUEST_PSEUDO
_RESPONSE_NAMES = _PLAIN | _RESPONSE_PSEUDO
_NAME_MAX = max(map(len, _REQUEST_NAMES | _RESPONSE_NAMES))
# RFC 9114 section 4.2: what speaks about the connection has no place in HTTP/3.
_CONNECTION_NAMES = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
# Joining two of these would hide a contradiction that somebody else may resolve differently.
_ONCE = _REQUEST_PSEUDO | _RESPONSE_PSEUDO | {b"content-length", b"host"}

# RFC 9110 sections 5.1 and 5.6.2, less the upper case that RFC 9114 section 4.2 forbids.
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_METHODS = frozenset((b"GET", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"PATCH"))
# RFC 9110 section 5.5: a value is made of visible characters, space, tab and bytes above 0x7f.
_VISIBLE = bytes(range(0x21, 0x7F))
_VALUE_BYTES = bytes(c for c in range(256) if (c >= 0x20 and c != 0x7F) or c == 0x09)
_LENGTH_MAX = (1 << 63) - 1

# RFC 9114 section 7.2.4.1: numbers that HTTP/2 used for settings that HTTP/3 has not.
_HTTP2_SETTINGS = frozenset((0x00, 0x02, 0x03, 0x04, 0x05))

_decoder = pylsqpack.Decoder(0, 0)
_encoder = pylsqpack.Encoder()


def varint(number: int) -> bytes:
    """`number` as QUIC writes it (RFC 9000 section 16)."""
    if number < 0x40:
        return number.to_bytes(1, "big")
    if number < 0x4000:
        return (0x4000 | number).to_bytes(2, "big")
    if number < 0x40000000:
        return (0x80000000 | number).to_bytes(4, "big")
    return (0xC000000000000000 | number).to_bytes(8, "big")


def read_varint(data: Data, pos: int, end: int) -> tuple[int, int]:
    """The number at `pos` and where it ends; (0, -1) when it is cut off. Any length will do."""
    if pos >= end:
        return 0, -1
    first = data[pos]
    size = 1 << (first >> 6)
    if size == 1:
        return first, pos + 1
    if pos + size > end:
        return 0, -1
    number = int.from_bytes(data[pos : pos + size], "big")
    return number & ((1 << (8 * size - 2)) - 1), pos + size


def read_frame_header(data: Data, pos: int, end: int) -> tuple[int, int, int] | None:
    """Type, length and start of payload of the frame at `pos`, when they are all there."""
    kind, pos = read_varint(data, pos, end)
    if pos < 0:
        return None
    length, pos = read_varint(data, pos, end)
    return None if pos < 0 else (kind, length, pos)


def parse_settings(payload: bytes) -> dict[int, int]:
    """The peer's settings; unknown ones are kept and mean nothing (RFC 9114 section 7.2.4)."""
    settings: dict[int, int] = {}
    pos, end = 0, len(payload)
    while pos < end:
        key, pos = read_varint(payload, pos, end)
        value, pos = read_varint(payload, pos, end) if pos >= 0 else (0, -1)
        if pos < 0:
            raise ProtocolError(Code.FRAME_ERROR, "SETTINGS ends within a setting")
        if key in _HTTP2_SETTINGS:
            raise ProtocolError(Code.SETTINGS_ERROR, "a setting of HTTP/2")
        if key in settings:
            raise ProtocolError(Code.SETTINGS_ERROR, "a setting came twice")
        settings[key] = value
    return settings


def encode_section(pairs: list[Pair]) -> bytes:
    """The QPACK form of `pairs`, from the static table and literals alone."""
    return _encoder.encode(0, pairs)[1]


def decode_section(block: bytes) -> list[Pair]:
    """The fields in `block`; one that cannot be read ends the connection (RFC 9204 section 2.2).

    ls-qpack counts an empty name among the unreadable, so that one is not a `MessageError`.
    """
    try:
        return _decoder.feed_header(0, block)[1]
    except pylsqpack.DecompressionFailed:
        if block == b"\0\0":  # no fields at all: legal, but unknown to ls-qpack
            return []
    except pylsqpack.StreamBlocked:
        # Not seen with a table of size 0; the decoder is shared, so nothing may stay behind in it.
        _decoder.cancel_stream(0)
    raise ProtocolError(Code.QPACK_DECOMPRESSION_FAILED, "a field section cannot be decompressed")


def content_length(value: bytes) -> int:
    """The number in a content-length: ASCII digits alone, at most 2^63-1 (RFC 9110 section 8.6).

    `int()` would also take a sign, spaces and underscores, and lists of equal numbers are not
    merged: what two readers could understand differently is refused.
    """
    if not value.isdigit():
        raise MessageError("content-length is not made of digits alone")
    if len(value) > 18:
        value = value.lstrip(b"0") or b"0"
        # The number of digits is looked at first because int() takes quadratic time.
        if len(value) > 19 or int(value) > _LENGTH_MAX:
            raise MessageError("content-length is over 2^63-1")
    return int(value)


def check_request(pairs: list[Pair], limit: int) -> tuple[Fields, int | None]:
    """The fields of a request and its content-length (RFC 9114 section 4.3.1)."""
    fields = _gather(pairs, limit, _REQUEST_NAMES)
    find = fields.get
    method, scheme, path = find(b":method"), find(b":scheme"), find(b":path")
    authority, host = find(b":authority"), find(b"host")
    if method not in _METHODS and (method is None or not _TOKEN.fullmatch(method)):
        raise MessageError(":method is missing or no token")
    if method == b"CONNECT":
        # It names a host and port and nothing else (RFC 9114 section 4.4).
        if scheme is not None or path is not None or not authority:
            raise MessageError("CONNECT has :method and :authority alone")
        count = 2
    else:
        if scheme is None or path is None:
            raise MessageError(":scheme is missing" if scheme is None else ":path is missing")
        if scheme == b"https" or scheme.lower() in (b"https", b"http"):
            if path[:1] != b"/" and (path != b"*" or method != b"OPTIONS"):
                raise MessageError(":path does not begin with a slash")
            if not (authority or host) or authority == b"" or host == b"":
                raise MessageError(":authority or host is missing or empty")
        count = 3 if authority is None else 4
    if authority is not None:
        if host is not None and host != authority:
            raise MessageError(":authority and host differ")
        if 0x40 in authority:  # the at sign, after a name or password
            raise MessageError(":authority holds user information")
    for name in fields:  # other pseudo-fields have been refused, so those counted must lead
        if name[0] != 0x3A:
            break
        count -= 1
    if count:
        raise MessageError("a pseudo-field comes after a regular field")
    length = find(b"content-length")
    return fields, None if length is None else content_length(length)


def check_response(pairs: list[Pair], limit: int) -> tuple[Fields, int, int | None]:
    """The fields of a response, its status and its content-length (RFC 9114 section 4.3.2)."""
    fields = _gather(pairs, limit, _RESPONSE_NAMES)
    status = fields.get(b":status")
    if status is None:
        raise MessageError(":status is missing")
    if len(status) != 3 or not status.isdigit() or status < b"100":
        raise MessageError(":status is not a number of three digits")
    if status == b"101":
        raise MessageError("HTTP/3 has no status 101")  # RFC 9114 section 4.5
    if next(iter(fields)) != b":status":
        raise MessageError("a pseudo-field comes after a regular field")
    length = fields.get(b"content-length")
    return fields, int(status), None if length is None else content_length(length)


def check_trailers(pairs: list[Pair], limit: int) -> Fields:
    """The fields of a trailer section, which has no pseudo-fields (RFC 9114 section 4.3)."""
    return _gather(pairs, limit, _PLAIN)


def _gather(pairs: list[Pair], limit: int, known: frozenset[bytes]) -> Fields:
    """Bound the section, check each name and value, and make it a dict.

    In the common case every name is `known`, none comes twice, and the values are visible ASCII
    characters; each of these is one call for the whole section.
    """
    count = len(pairs)
    if 32 * count > limit:  # one byte can stand for a field: spare the work on thousands
        raise MessageError("the field section is too large", 431, Code.EXCESSIVE_LOAD)
    fields = dict(pairs)
    common = len(fields) == count and known.issuperset(fields)
    text = b"".join(fields.values() if common else [value for _, value in pairs])
    size = len(text) + 32 * count  # RFC 9114 section 4.2.2, but for the names
    if not common or size + _NAME_MAX * count > limit:
        size += sum([len(name) for name, _ in pairs])
        if size > limit:
            raise MessageError("the field section is too large", 431, Code.EXCESSIVE_LOAD)
    if text.translate(None, _VISIBLE):
        _check_values(text, [value for _, value in pairs])
    if not common:
        if len(fields) != count:
            fields = _join_repeated(pairs)
        _check_names(fields, known)
    return fields


def _check_values(text: bytes, values: list[bytes]) -> None:
    """RFC 9114 sections 4.2 and 10.3: neither controls nor space at either end."""
    if text.translate(None, _VALUE_BYTES):
        raise MessageError("a field value has a character that is not allowed")
    if list(map(bytes.strip, values)) != values:
        raise MessageError("a field value begins or ends with a space")


def _check_names(fields: Fields, known: frozenset[bytes]) -> None:
    """Check the names that are not `known` for this kind of section (RFC 9114 section 4.2)."""
    for name in [name for name in fields if name not in known]:
        if name in _CONNECTION_NAMES:
            raise MessageError(f"{name.decode()} is not allowed in HTTP/3")
        if name == b"te" and (known is not _REQUEST_NAMES or fields[name].lower() != b"trailers"):
            raise MessageError("te may only be trailers, in a request")
        if name[:1] == b":":
            raise MessageError("a pseudo-field is unknown or out of place")
        if not _NAME.fullmatch(name):
            raise MessageError("a field name is empty or has a character that is not allowed")


def _join_repeated(pairs: list[Pair]) -> Fields:
    """One value for each name; the names that must be unique are refused."""
    values: dict[bytes, list[bytes]] = {}
    for name, value in pairs:
        held = values.setdefault(name, [])
        if held and name in _ONCE:
            raise MessageError(f"{name.decode()} comes more than once")
        held.append(value)
    return {n: (b"; " if n == b"cookie" else b", ").join(held) for n, held in values.items()}
