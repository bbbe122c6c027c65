"""`prompt/1` against contract 3: the layout byte by byte, good and bad headers in every cut."""

import math
import re
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane import prompt1
from dataplane.errors import Refusal, ResetCode, Status
from dataplane.prompt1 import (
    ProtocolError,
    Request,
    decode_trailer,
    decode_verdict,
    encode_end,
    encode_request,
    encode_verdict,
    parse_request,
    plain_request,
)

# Contract 3's table: field, offset, size in bytes.
FIELDS = {
    "magic": (0, 4),
    "length": (4, 2),
    "width": (6, 1),
    "flags": (7, 1),
    "n_tokens": (8, 4),
    "max_output": (12, 4),
    "request_id": (16, 8),
    "affinity": (24, 4),
    "temperature": (28, 4),
    "top_p": (32, 4),
    "top_k": (36, 4),
    "seed": (40, 4),
    "deadline_ms": (44, 4),
}
PLAIN = {"magic": b"DPQ1", "length": 48, "width": 4, "n_tokens": 3}
IDS = struct.pack("<3I", 7, 8, 9)


def header(extensions: bytes = b"", **fields: Any) -> bytes:
    """Lay a header out by hand; its length is right unless it is given."""
    data = bytearray(48)
    for name, value in {**PLAIN, "length": 48 + len(extensions), **fields}.items():
        offset, size = FIELDS[name]
        if isinstance(value, bytes):
            data[offset : offset + size] = value
        elif isinstance(value, float):
            data[offset : offset + size] = struct.pack("<f", value)
        else:
            data[offset : offset + size] = value.to_bytes(size, "little")
    return bytes(data) + extensions


def extension(kind: int, value: bytes) -> bytes:
    return struct.pack("<HH", kind, len(value)) + value


KEY = extension(1, b"sesame")

GOOD = {
    "the least": (header(), Request(n_tokens=3)),
    "every field": (
        header(
            width=2, flags=1, n_tokens=2**32 - 1, max_output=512, request_id=2**64 - 1,
            affinity=77, temperature=0.5, top_p=0.25, top_k=40, seed=2**32 - 1, deadline_ms=1500,
        ),
        Request(
            n_tokens=2**32 - 1, width=2, max_output=512, request_id=2**64 - 1, affinity=77,
            strict=True, temperature=0.5, top_p=0.25, top_k=40, seed=2**32 - 1, deadline_ms=1500,
        ),
    ),
    "bounds": (
        header(temperature=100.0, top_p=1.0),
        Request(n_tokens=3, temperature=100.0, top_p=1.0),
    ),
    "an API key": (header(KEY), Request(n_tokens=3, api_key=b"sesame", header_bytes=58)),
    "an empty API key": (
        header(extension(1, b"")),
        Request(n_tokens=3, api_key=b"", header_bytes=52),
    ),
    "an unknown extension": (
        header(extension(9, b"?" * 5)),
        Request(n_tokens=3, header_bytes=57),
    ),
    "a key among unknown extensions": (
        header(extension(0, b"") + extension(65535, b"xy") + KEY + extension(2, b"z")),
        Request(n_tokens=3, api_key=b"sesame", header_bytes=73),
    ),
    "the longest header": (
        header(extension(2, bytes(4044))),
        Request(n_tokens=3, header_bytes=4096),
    ),
}  # fmt: skip

BAD = {
    "the wrong magic": (header(magic=b"DPQ2"), "begins with 44505132, not with the magic DPQ1"),
    "HTTP": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(30), "begins with .*not with the magic"),
    "header length 0": (header(length=0), "header length is 0; it must be from 48 to 4096"),
    "header length 47": (header(length=47), "header length is 47; it must be from 48 to 4096"),
    "header length 4097": (header(length=4097), "header length is 4097; it must be from 48"),
    "header length 65535": (header(length=65535), "header length is 65535; it must be from 48"),
    "id width 0": (header(width=0), "id width is 0; it must be 2 or 4"),
    "id width 3": (header(width=3), "id width is 3; it must be 2 or 4"),
    "id width 8": (header(width=8), "id width is 8; it must be 2 or 4"),
    "unknown flag 1": (header(flags=2), r"unknown flags 0x02; only bit 0 \(strict affinity\)"),
    "unknown flags": (header(flags=0x81), "unknown flags 0x81; only bit 0"),
    "no tokens": (header(n_tokens=0), "the prompt is empty"),
    "temperature NaN": (
        header(temperature=math.nan),
        "temperature is nan; it must be from 0 to 100",
    ),
    "temperature -0.5": (header(temperature=-0.5), "temperature is -0.5; it must be from 0 to 100"),
    "temperature inf": (
        header(temperature=math.inf),
        "temperature is inf; it must be from 0 to 100",
    ),
    "temperature 100.5": (
        header(temperature=100.5),
        "temperature is 100.5; it must be from 0 to 100",
    ),
    "top_p 1.5": (header(top_p=1.5), "top_p is 1.5; it must be from 0 to 1"),
    "top_p -1": (header(top_p=-1.0), "top_p is -1; it must be from 0 to 1"),
    "top_p NaN": (header(top_p=math.nan), "top_p is nan; it must be from 0 to 1"),
    "top_p inf": (header(top_p=-math.inf), "top_p is -inf; it must be from 0 to 1"),
    "an extension cut in its type": (
        header(b"\x01"),
        "extension at byte 48 of the header is cut off",
    ),
    "an extension cut in its length": (
        header(KEY + b"\x02\x00\x01"),
        "extension at byte 58 of the header is cut off",
    ),
    "an extension longer than the header": (
        header(struct.pack("<HH", 1, 7) + b"sesame"),
        "extension of type 1 says 7 bytes; the header has 6 left",
    ),
    "an unknown extension longer than the header": (
        header(struct.pack("<HH", 500, 65535)),
        "extension of type 500 says 65535 bytes; the header has 0 left",
    ),
}


def refused(answer: object) -> str:
    assert isinstance(answer, Refusal)
    assert answer.status is Status.BAD_REQUEST
    assert answer.retry_after_ms == 0
    return answer.reason


# Numbers.


def test_numbers_are_the_contracts() -> None:
    assert prompt1.ALPN == "prompt/1"
    assert (prompt1.REQUEST_MAGIC, prompt1.VERDICT_MAGIC) == (b"DPQ1", b"DPV1")
    assert (prompt1.HEADER_MIN, prompt1.HEADER_MAX) == (48, 4096)
    assert (prompt1.VERDICT_BYTES, prompt1.TRAILER_BYTES) == (32, 16)
    assert (prompt1.NO_SLOT, prompt1.END_MARK) == (0xFFFF, 0xFFFFFFFF)
    assert (prompt1.FLAG_STRICT_AFFINITY, prompt1.EXTENSION_API_KEY) == (1, 1)
    assert prompt1.TEMPERATURE_MAX == 100.0
    assert {code.name: int(code) for code in ResetCode} == {
        "RUNTIME_LOST": 1, "RUNTIME_ERROR": 2, "SLOW_READER": 3, "SHUTTING_DOWN": 4,
    }  # fmt: skip
    assert {int(status) for status in Status} == {
        200, 400, 401, 403, 404, 405, 408, 411, 413, 415, 429, 431, 501, 503,
    }  # fmt: skip


# Good headers.


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("tail", [b"", IDS, b"DPQ1" * 100])
@pytest.mark.parametrize("fin", [False, True])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_a_good_header_whole(name: str, tail: bytes, fin: bool, kind: type) -> None:
    data, expected = GOOD[name]
    request = parse_request(kind(data + tail), fin)
    assert request == expected
    assert isinstance(request, Request)
    assert type(request.strict) is bool


@pytest.mark.parametrize("name", GOOD)
def test_a_good_header_byte_by_byte(name: str) -> None:
    data, expected = GOOD[name]
    for end in range(len(data)):
        assert parse_request(data[:end], False) is None
    assert parse_request(data, False) == expected


@pytest.mark.parametrize("name", GOOD)
def test_fin_inside_a_header(name: str) -> None:
    data, _ = GOOD[name]
    for end in range(len(data)):
        reason = refused(parse_request(data[:end], True))
        assert reason == f"the stream ended inside the header, after {end} bytes"


def test_the_last_api_key_counts() -> None:
    request = parse_request(header(KEY + extension(1, b"open")), False)
    assert isinstance(request, Request)
    assert request.api_key == b"open"


# Bad headers.


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("tail", [b"", IDS])
@pytest.mark.parametrize("fin", [False, True])
def test_a_bad_header_whole(name: str, tail: bytes, fin: bool) -> None:
    data, reason = BAD[name]
    assert re.search(reason, refused(parse_request(data + tail, fin)))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_header_byte_by_byte(name: str) -> None:
    """Refused once it cannot become good, for its own reason, and never taken back."""
    data, reason = BAD[name]
    answers = [parse_request(data[:end], False) for end in range(len(data) + 1)]
    first = next(end for end, answer in enumerate(answers) if answer is not None)
    assert answers[:first] == [None] * first
    for answer in answers[first:-1]:
        assert isinstance(answer, Refusal)
    assert re.search(reason, refused(answers[-1]))


def test_a_bad_magic_and_length_are_refused_before_the_header_is_whole() -> None:
    assert "begins with 58" in refused(parse_request(b"X", False))
    assert parse_request(b"DPQ1\x2f", False) is None
    assert "header length is 47" in refused(parse_request(b"DPQ1\x2f\0", False))


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_raise(data: bytes, fin: bool) -> None:
    for start in (b"", b"DPQ1", b"DPQ1\x30\0\x04\0\x03\0\0\0"):
        answer = parse_request(start + data, fin)
        assert answer is None or isinstance(answer, Request | Refusal)
        assert not (fin and answer is None)


# Round trips.

u32 = st.integers(0, 2**32 - 1)


def f32(high: float) -> st.SearchStrategy[float]:
    return st.floats(0, high, width=32)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    key = draw(st.none() | st.binary(max_size=300))
    return Request(
        n_tokens=draw(st.integers(1, 2**32 - 1)),
        width=draw(st.sampled_from([2, 4])),
        max_output=draw(u32),
        request_id=draw(st.integers(0, 2**64 - 1)),
        affinity=draw(u32),
        strict=draw(st.booleans()),
        temperature=draw(f32(100)),
        top_p=draw(f32(1)),
        top_k=draw(u32),
        seed=draw(u32),
        deadline_ms=draw(u32),
        api_key=key,
        header_bytes=48 if key is None else 52 + len(key),
    )


@given(request=requests(), tail=st.binary(max_size=20))
def test_a_request_comes_back_as_it_was(request: Request, tail: bytes) -> None:
    data = encode_request(request)
    assert len(data) == request.header_bytes
    assert parse_request(data + tail, False) == request
    assert parse_request(data, True) == request


@pytest.mark.parametrize("name", ["the least", "every field", "an API key", "an empty API key"])
def test_a_request_is_encoded_as_the_contract_lays_it_out(name: str) -> None:
    data, request = GOOD[name]
    assert encode_request(request) == data


def test_a_verdict_is_laid_out_as_the_contract_says() -> None:
    data = encode_verdict(200, 3, 0x1122334455667788, 41, 63, 0, 5)
    assert data == (
        b"DPV1" b"\xc8\0" b"\x03\0" b"\x88\x77\x66\x55\x44\x33\x22\x11"
        b"\x29\0\0\0" b"\x3f\0\0\0" b"\0\0\0\0" b"\x05\0\0\0"
    )  # fmt: skip
    assert decode_verdict(data + b"more") == (200, 3, 0x1122334455667788, 41, 63, 0, 5)


def test_a_refusals_verdict_names_no_slot() -> None:
    data = encode_verdict(429, prompt1.NO_SLOT, 1, 2, 0, 250, 0)
    assert data[6:8] == b"\xff\xff"
    assert decode_verdict(data).slot is None


def test_a_verdict_without_its_magic_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="begins with 48545450, not with the magic DPV1"):
        decode_verdict(b"HTTP" + bytes(28))


def test_the_end_is_laid_out_as_the_contract_says() -> None:
    data = encode_end(2, 5, 7)
    assert data == b"\xff" * 4 + struct.pack("<4I", 2, 5, 7, 0)
    assert decode_trailer(data[4:]) == (2, 5, 7)


def test_a_plain_request_is_the_request_that_states_nothing_else() -> None:
    assert plain_request(7, 2, 9) == Request(7, 2, 9)
    assert plain_request(7, 4) == Request(7)
    assert type(plain_request(1, 4)) is Request
