"""What a `/v1/generate` request asks for: pure functions, held to what any input may be."""

import json
import string
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import Refusal
from dataplane.fronts.parameters import (
    Body,
    apply_sampling,
    json_limit,
    pack_ids,
    preferred_form,
    read_binary,
    read_header_parameters,
    read_json,
    split_media_type,
)
from dataplane.prompt1 import Request

U32 = 2**32 - 1
BINARY, JSON, EVENTS = b"application/octet-stream", b"application/json", b"text/event-stream"
WHOLE = {
    b"x-max-tokens": "max_output",
    b"x-top-k": "top_k",
    b"x-seed": "seed",
    b"x-affinity": "affinity",
    b"x-deadline-ms": "deadline_ms",
}
u32 = st.integers(0, U32)
ids = st.lists(u32, min_size=1, max_size=50)


def request_of(n_tokens: int = 0, **values: Any) -> Request:
    """A request with these fields besides the defaults."""
    return Request(n_tokens)._replace(**values)


def refused(answer: object) -> str:
    """The reason of what has to be a 400."""
    assert isinstance(answer, Refusal)
    assert answer.status == 400
    assert answer.reason
    return answer.reason


# ---------------------------------------------------------------- header fields


def test_without_parameters_everything_is_the_default() -> None:
    assert read_header_parameters({b"accept": b"*/*"}) == Request(0)


@given(st.dictionaries(st.sampled_from(sorted(WHOLE)), u32))
def test_whole_numbers_are_read_as_they_stand(numbers: dict[bytes, int]) -> None:
    request = read_header_parameters({name: b"%d" % value for name, value in numbers.items()})
    assert request == request_of(**{WHOLE[name]: n for name, n in numbers.items()})


@given(st.sampled_from(sorted(WHOLE)), st.binary(max_size=12))
def test_a_whole_number_is_digits_within_32_bits(name: bytes, text: bytes) -> None:
    answer = read_header_parameters({name: text})
    if text and set(text) <= set(b"0123456789") and len(text) <= 10 and int(text) <= U32:
        assert answer == request_of(**{WHOLE[name]: int(text)})
    else:
        assert refused(answer) == f"{name.decode()} must be a whole number from 0 to 4294967295"


@given(st.text("0123456789.eE+-_ ", max_size=8))
def test_a_decimal_number_is_digits_with_a_point_between(text: str) -> None:
    whole, point, fraction = text.partition(".")
    digits = set(string.digits)
    fine = bool(whole) and set(whole + fraction) <= digits and bool(fraction) == bool(point)
    for name, attribute, most in ((b"x-temperature", "temperature", 100), (b"x-top-p", "top_p", 1)):
        answer = read_header_parameters({name: text.encode()})
        if fine and float(text) <= most:
            values: dict[str, Any] = {attribute: float(text)}
            assert answer == request_of(**values)
        else:
            expected = f"{name.decode()} must be a decimal number from 0 to {most}"
            assert refused(answer) == expected


@pytest.mark.parametrize("text", ["0" * 21, "0." + "0" * 31, "\u0663", "1\n"])
def test_a_decimal_number_is_bounded_and_ascii(text: str) -> None:
    refused(read_header_parameters({b"x-temperature": text.encode()}))


@pytest.mark.parametrize(("text", "strict"), [(b"1", True), (b"0", False)])
def test_strict_affinity_is_0_or_1(text: bytes, strict: bool) -> None:
    assert read_header_parameters({b"x-affinity-strict": text}) == Request(0, strict=strict)
    for wrong in (b"", b"true", b"01", b" 1"):
        refused(read_header_parameters({b"x-affinity-strict": wrong}))


# ---------------------------------------------------------------- binary bodies


@given(st.integers(0, 2**63 - 1), st.sampled_from([b"", b"width=2", b"width=4"]))
def test_a_binary_body_is_whole_ids(length: int, parameter: bytes) -> None:
    width = 2 if parameter == b"width=2" else 4
    answer = read_binary({}, parameter, length)
    if length == 0:
        assert refused(answer) == "the prompt is empty"
    elif length % width:
        assert f"{length} bytes is no whole number of ids of {width} bytes" in refused(answer)
    else:
        assert answer == Request(n_tokens=min(length // width, U32), width=width)


@given(st.binary(max_size=12))
def test_no_other_parameter_of_the_media_type_is_known(parameter: bytes) -> None:
    if parameter not in (b"", b"width=2", b"width=4"):
        assert "width, which is 2 or 4" in refused(read_binary({}, parameter, 8))


def test_a_binary_body_takes_parameters_or_their_refusal() -> None:
    request = read_binary({b"x-seed": b"7"}, b"", 8)
    assert request == Request(n_tokens=2, seed=7)
    assert "x-seed" in refused(read_binary({b"x-seed": b"-7"}, b"", 8))


# ---------------------------------------------------------------- JSON


@given(ids, st.booleans())
def test_json_ids_are_what_was_sent(numbers: list[int], stream: bool) -> None:
    body = read_json(json.dumps({"token_ids": numbers, "stream": stream}).encode())
    assert isinstance(body, Body)
    assert (body.token_ids, body.stream) == (numbers, stream)
    assert pack_ids(numbers) == struct.pack(f"<{len(numbers)}I", *numbers)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
KNOWN = ["token_ids", "prompt", "messages", "sampling_params", "stream"]


@given(st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=5), json_values, max_size=5))
def test_any_json_is_a_body_or_a_refusal(document: dict[str, Any]) -> None:
    answer = read_json(json.dumps(document).encode())
    given = [name for name in KNOWN[:3] if document.get(name) is not None]
    if isinstance(answer, Body):
        assert len(given) == 1
    else:
        refused(answer)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_body_or_a_refusal(data: bytes) -> None:
    answer = read_json(data)
    assert isinstance(answer, Body) or refused(answer)


def test_json_that_is_cut_off_is_refused_wherever() -> None:
    text = json.dumps({"token_ids": [1, 2, 3], "sampling_params": {"seed": 3}}).encode()
    for length in range(len(text)):
        refused(read_json(text[:length]))
    assert isinstance(read_json(text), Body)


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000, '{"x":' + "[" * 20_000])
def test_depth_is_an_error_in_words(deep: str) -> None:
    refused(read_json(deep.encode()))


@given(st.lists(st.integers(-5, 2**70), min_size=1, max_size=20))
def test_an_id_that_is_none_is_named_by_its_place(numbers: list[int]) -> None:
    wrong = [place for place, number in enumerate(numbers) if not 0 <= number <= U32]
    answer = pack_ids(numbers)
    if wrong:
        place = wrong[0]
        assert refused(answer).startswith(f"token {place} is {numbers[place]}; ")
    else:
        assert answer == struct.pack(f"<{len(numbers)}I", *numbers)


def test_no_ids_are_no_prompt() -> None:
    assert refused(pack_ids([])) == "the prompt is empty"


@given(st.integers(0, 2**40))
def test_the_json_limit_has_room_for_a_full_context(context: int) -> None:
    limit = json_limit(context)
    assert 64 << 10 <= limit <= 32 << 20
    if context <= 1_048_576:
        assert limit >= len("4294967295, ") * context


# ---------------------------------------------------------------- sampling


def sampled(request: Request, **values: Any) -> Request | Refusal:
    body = read_json(json.dumps({"token_ids": [1], "sampling_params": values}).encode())
    assert isinstance(body, Body), body
    return apply_sampling(request, body.sampling_params)


@given(u32, u32, st.integers(-1, U32), st.floats(0, 100), st.floats(0, 1))
def test_sampling_wins_over_the_header(
    max_tokens: int, seed: int, top_k: int, temperature: float, top_p: float
) -> None:
    header = Request(5, max_output=1, seed=2, top_k=3, temperature=0.5, top_p=0.75, deadline_ms=9)
    assert sampled(header) == header
    assert sampled(
        header, max_tokens=max_tokens, seed=seed, top_k=top_k, temperature=temperature, top_p=top_p
    ) == Request(
        5, max_output=max_tokens, seed=seed, top_k=max(0, top_k), temperature=temperature,
        top_p=top_p, deadline_ms=9,
    )  # fmt: skip


@given(st.sampled_from(["max_tokens", "seed", "top_k"]), st.integers())
def test_sampling_out_of_range_is_named(name: str, number: int) -> None:
    answer = sampled(Request(1), **{name: number})
    if 0 <= number <= U32 or (name == "top_k" and number == -1):
        assert isinstance(answer, Request)
    else:
        assert refused(answer).startswith(f"sampling_params.{name} is {number}; it must be from 0")


@given(st.sampled_from([("temperature", 100), ("top_p", 1)]), st.floats(allow_nan=False))
def test_sampling_floats_out_of_range_are_named(field: tuple[str, int], number: float) -> None:
    name, most = field
    if number in (float("inf"), float("-inf")):
        return  # There is no JSON for them.
    answer = sampled(Request(1), **{name: number})
    if 0 <= number <= most:
        assert answer == request_of(1, **{name: number})
    else:
        assert refused(answer).startswith(f"sampling_params.{name} is ")


def test_no_sampling_changes_nothing() -> None:
    assert apply_sampling(Request(3, seed=4), None) == Request(3, seed=4)


# ---------------------------------------------------------------- media types


@given(st.sampled_from([BINARY, JSON, EVENTS]), st.sampled_from([b"", b" ", b"\t"]))
def test_a_media_type_is_read_whatever_its_case(kind: bytes, space: bytes) -> None:
    value = space + kind.title() + space + b";" + space + b"Width=2" + space
    assert split_media_type(value) == (kind, b"width=2")
    assert split_media_type(kind) == (kind, b"")


@given(st.binary(max_size=40) | st.none(), st.sampled_from([BINARY, JSON, EVENTS]))
def test_any_accept_gives_a_form(accept: bytes | None, default: bytes) -> None:
    assert preferred_form(accept, default) in (BINARY, JSON, EVENTS)
    assert preferred_form(None, default) == default


@given(
    st.lists(
        st.tuples(st.sampled_from([BINARY, JSON, EVENTS, b"text/html"]), st.integers(0, 1000)),
        max_size=6,
    )
)
def test_the_form_of_the_highest_quality_wins(items: list[tuple[bytes, int]]) -> None:
    accept = b", ".join(b"%s;q=%.3f" % (kind, quality / 1000) for kind, quality in items)
    known = [(quality, -place, kind) for place, (kind, quality) in enumerate(items) if quality]
    known = [item for item in known if item[2] != b"text/html"]
    expected = max(known)[2] if known else JSON
    assert preferred_form(accept, JSON) == expected
