"""What a `/v1/generate` request asks for: its header fields and its JSON body (contract 4).

Everything here is a function from what came to a `Request`, or to a `Refusal` that names the field.
Numbers are read strictly: digits where an integer is meant, no signs, spaces or underscores,
nothing out of range.
"""

import re
from array import array
from typing import Any

import msgspec

from dataplane.errors import Refusal, Status
from dataplane.http3_fields import Fields
from dataplane.http_names import BINARY, EVENTS, JSON, VISIBLE_ID
from dataplane.prompt1 import TEMPERATURE_MAX, Request, plain_request

_U32_MAX = 2**32 - 1
_DIGITS = re.compile(rb"[0-9]{1,10}")
_DECIMAL = re.compile(rb"[0-9]{1,20}(\.[0-9]{1,30})?")
# JSON bodies may be this long: some for text and parameters, and room for each id of a full context
# with its comma and white space.
_JSON_BASE = 64 << 10
_JSON_PER_ID = 16
_JSON_MAX = 32 << 20

# Header parameters that are whole numbers, and the field of `Request` that each sets.
_WHOLE = {
    b"x-max-tokens": "max_output",
    b"x-top-k": "top_k",
    b"x-seed": "seed",
    b"x-affinity": "affinity",
    b"x-deadline-ms": "deadline_ms",
}
_FLOATS = {b"x-temperature": ("temperature", TEMPERATURE_MAX), b"x-top-p": ("top_p", 1.0)}
_PARAMETERS = frozenset((*_WHOLE, *_FLOATS, b"x-affinity-strict"))
_ONLY_MAX_TOKENS = frozenset((b"x-max-tokens",))


def _bad(reason: str) -> Refusal:
    return Refusal(Status.BAD_REQUEST, reason)


def json_limit(context: int) -> int:
    """Return how long a JSON body may be for a runtime of this context, in bytes.

    Without a runtime the context is 0: then only what no runtime takes is too long.
    """
    if not context:
        return _JSON_MAX
    return min(_JSON_MAX, _JSON_BASE + _JSON_PER_ID * context)


def _read_parameter(name: bytes, text: bytes) -> tuple[str, Any] | Refusal:
    """Return the field of `Request` that a header parameter sets, and its value."""
    attribute = _WHOLE.get(name)
    if attribute is not None:
        if not _DIGITS.fullmatch(text) or (number := int(text)) > _U32_MAX:
            return _bad(f"{name.decode()} must be a whole number from 0 to {_U32_MAX}")
        return attribute, number
    if name in _FLOATS:
        attribute, most = _FLOATS[name]
        if not _DECIMAL.fullmatch(text) or float(text) > most:
            return _bad(f"{name.decode()} must be a decimal number from 0 to {most:g}")
        return attribute, float(text)
    if text not in (b"0", b"1"):
        return _bad("x-affinity-strict must be 0 or 1")
    return "strict", text == b"1"


def read_header_parameters(fields: Fields, n_tokens: int = 0, width: int = 4) -> Request | Refusal:
    """Return the request that the `x-` fields ask for."""
    found = _PARAMETERS.intersection(fields)
    if not found:
        return plain_request(n_tokens, width)
    if found == _ONLY_MAX_TOKENS:
        parameter = _read_parameter(b"x-max-tokens", fields[b"x-max-tokens"])
        if isinstance(parameter, Refusal):
            return parameter
        return plain_request(n_tokens, width, parameter[1])
    values: dict[str, Any] = {}
    for name in found:
        parameter = _read_parameter(name, fields[name])
        if isinstance(parameter, Refusal):
            return parameter
        values[parameter[0]] = parameter[1]
    return Request(n_tokens, width, **values)


def given_id(fields: Fields) -> bytes:
    """Return the client's own identifier of its request, if it is one that can be repeated."""
    given = fields.get(b"x-request-id")
    return given if given is not None and VISIBLE_ID.fullmatch(given) else b""


def key_of(fields: Fields) -> bytes | None:
    """Return the API key of a request: a bearer token (RFC 6750 section 2.1), or `x-api-key`."""
    scheme, _, token = fields.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and (token := token.strip()):
        return token
    return fields.get(b"x-api-key")


def read_binary(fields: Fields, parameter: bytes, length: int) -> Request | Refusal:
    """Return the request of a binary body; `parameter` is what follows `;` in its media type."""
    width = 4
    if parameter:
        if parameter not in (b"width=2", b"width=4"):
            return _bad("the media type's only parameter is width, which is 2 or 4")
        width = int(parameter[-1:])
    if not length:
        return _bad("the prompt is empty")
    if length % width:
        return _bad(f"the body of {length} bytes is no whole number of ids of {width} bytes")
    return read_header_parameters(fields, min(length // width, _U32_MAX), width)


class Sampling(msgspec.Struct, rename=None):
    """`sampling_params`: what is supported, and what is known and refused by name."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    # The rest of the fields that engines of this kind take.
    n: Any = None
    best_of: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    min_tokens: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    bad_words: Any = None
    ignore_eos: Any = None
    include_stop_str_in_output: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    flat_logprobs: Any = None
    logit_bias: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    detokenize: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    guided_decoding: Any = None
    structured_outputs: Any = None


# Those that are whole numbers, and the field of `Request` that each sets.
_SAMPLING_WHOLE = {"max_tokens": "max_output", "top_k": "top_k", "seed": "seed"}
SUPPORTED = ("max_tokens", "temperature", "top_p", "top_k", "seed")
_UNSUPPORTED = tuple(name for name in Sampling.__struct_fields__ if name not in SUPPORTED)


class Message(msgspec.Struct):
    """One turn of a chat."""

    role: str
    content: str


class Body(msgspec.Struct):
    """A JSON request; one of the first three is there."""

    token_ids: list[int] | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    sampling_params: Sampling | None = None
    stream: bool = False


_decoder = msgspec.json.Decoder(Body)


def read_json(data: bytes | bytearray) -> Body | Refusal:
    """Read a JSON body and hold it against its schema; unknown fields are ignored."""
    try:
        body = _decoder.decode(data)
    except RecursionError:
        return _bad("the JSON body is nested too deeply")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _bad(f"the JSON body cannot be used: {error}")
    given = [
        name for name in ("token_ids", "prompt", "messages") if getattr(body, name) is not None
    ]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        return _bad(f"one of token_ids, prompt, messages is needed, not {found}")
    return body


def pack_ids(ids: list[int]) -> bytes | Refusal:
    """Return the ids as u32 little-endian; those that cannot be are named."""
    if not ids:
        return _bad("the prompt is empty")
    try:
        packed = array("I", ids)
    except OverflowError:
        index = next(i for i, token in enumerate(ids) if not 0 <= token <= _U32_MAX)
        return _bad(f"token {index} is {ids[index]}; a token id is a number from 0 to {_U32_MAX}")
    return packed.tobytes()


def apply_sampling(request: Request, sampling: Sampling | None) -> Request | Refusal:
    """Return the request with what `sampling_params` sets; it wins over header fields."""
    if sampling is None:
        return request
    for name in _UNSUPPORTED:
        if getattr(sampling, name) is not None:
            return _bad(f"sampling_params.{name} is not supported: leave it out")
    values: dict[str, Any] = {}
    for name, attribute in _SAMPLING_WHOLE.items():
        number = getattr(sampling, name)
        if number is None:
            continue
        if name == "top_k" and number == -1:
            number = 0
        if not 0 <= number <= _U32_MAX:
            return _bad(f"sampling_params.{name} is {number}; it must be from 0 to {_U32_MAX}")
        values[attribute] = number
    for name, most in (("temperature", TEMPERATURE_MAX), ("top_p", 1.0)):
        real = getattr(sampling, name)
        if real is not None:
            if not 0.0 <= real <= most:
                return _bad(f"sampling_params.{name} is {real:g}; it must be from 0 to {most:g}")
            values[name] = real
    return request._replace(**values)


def split_media_type(value: bytes) -> tuple[bytes, bytes]:
    """Split `type/subtype; parameter` into its lower-case halves, without white space."""
    kind, _, parameter = value.partition(b";")
    return kind.strip().lower(), parameter.strip().lower()


def preferred_form(accept: bytes | None, default: bytes) -> bytes:
    """Return the answer's media type: the known one that `accept` ranks highest (RFC 9110 12.5.1).

    Without one that is known, `default`: a client is answered rather than refused over its wishes.
    """
    if accept is None or accept == b"*/*":
        return default
    best, best_quality = default, 0.0
    for item in accept.split(b","):
        kind, parameter = split_media_type(item)
        quality = 1.0
        found = re.search(rb"(?:^|;)\s*q=([0-9.]{1,5})", parameter)
        if found:
            try:
                quality = float(found[1])
            except ValueError:
                continue
        if kind in (BINARY, JSON, EVENTS) and quality > best_quality:
            best, best_quality = kind, quality
    return best
