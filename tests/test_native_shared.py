"""What Python and C both have: the constants of `prompt/1`, and histograms that one writes and the
other reads at the same time."""

import struct
import threading

import pytest

from dataplane import prompt1
from dataplane._native import ffi, lib
from dataplane.errors import Refusal, Status
from dataplane.latency import Latency, Series
from dataplane.pump import Pump

# ---------------------------------------------------------------- prompt/1


def test_the_constants_of_prompt1_are_the_same() -> None:
    def magic(number: int) -> bytes:
        return number.to_bytes(4, "little")

    assert magic(lib.DP_PROMPT1_REQUEST_MAGIC) == prompt1.REQUEST_MAGIC
    assert magic(lib.DP_PROMPT1_VERDICT_MAGIC) == prompt1.VERDICT_MAGIC
    assert lib.DP_PROMPT1_HEADER_MIN == prompt1.HEADER_MIN
    assert lib.DP_PROMPT1_HEADER_MAX == prompt1.HEADER_MAX
    assert prompt1._EXTENSION.size == lib.DP_PROMPT1_EXTENSION_BYTES
    assert lib.DP_PROMPT1_STRICT == prompt1.FLAG_STRICT_AFFINITY
    assert lib.DP_PROMPT1_TEMPERATURE_MAX == prompt1.TEMPERATURE_MAX
    assert lib.DP_PROMPT1_VERDICT_BYTES == prompt1.VERDICT_BYTES
    assert len(prompt1.END_MARK_BYTES) + prompt1.TRAILER_BYTES == lib.DP_PROMPT1_END_BYTES
    assert lib.DP_PROMPT1_END_MARK == prompt1.END_MARK
    assert lib.DP_PROMPT1_NO_SLOT == prompt1.NO_SLOT
    assert lib.DP_PROMPT1_OK == Status.OK
    assert lib.DP_PROMPT1_BUSY == Status.BUSY


def test_verdict_and_end_are_the_same_bytes() -> None:
    verdict = ffi.new("uint8_t[]", lib.DP_PROMPT1_VERDICT_BYTES)
    fields = (429, 0xFFFF, 2**64 - 2, 2**32 - 1, 3, 4, 5)
    lib.dp_prompt1_verdict(verdict, *fields)
    assert bytes(ffi.buffer(verdict)) == prompt1.encode_verdict(*fields)
    end = ffi.new("uint8_t[]", lib.DP_PROMPT1_END_BYTES)
    lib.dp_prompt1_end(end, 3, 2**31, 77)
    assert bytes(ffi.buffer(end)) == prompt1.encode_end(3, 2**31, 77)


WHOLE = prompt1.Request(
    n_tokens=7, width=2, max_output=9, request_id=2**63 + 1, affinity=4, strict=True,
    temperature=0.5, top_p=0.25, top_k=6, seed=8, deadline_ms=10, api_key=b"key",
)  # fmt: skip
HEADERS = {
    "everything": prompt1.encode_request(WHOLE),
    "nothing": prompt1.encode_request(prompt1.Request(1)),
    "no extension's value": prompt1.encode_request(prompt1.Request(1, api_key=b"")),
    "two keys": struct.pack("<4sHBB", b"DPQ1", 58, 4, 0)
    + prompt1.encode_request(prompt1.Request(1))[8:]
    + b"\1\0\1\0k"
    + b"\1\0\1\0K",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_every_changed_byte_of_a_header_is_read_alike(header: bytes) -> None:
    """Whole and cut anywhere, and with each byte at a few other values."""
    changed = [
        header[:at] + bytes([value]) + header[at + 1 :]
        for at in range(len(header))
        for value in (0, 1, 2, 0x30, 0x7F, 0x80, 0xC0, 0xFF)
    ]
    for data in [*(header[:at] for at in range(len(header) + 1)), *changed]:
        check_parsed(data)


def check_parsed(data: bytes) -> None:
    found = ffi.new("struct dp_prompt1_request *")
    parsed = lib.dp_prompt1_parse(data, len(data), found)
    wanted = prompt1.parse_request(data, fin=False)
    if wanted is None or isinstance(wanted, Refusal):
        kind = lib.DP_PROMPT1_BAD if wanted else lib.DP_PROMPT1_NOT_WHOLE
        assert parsed == kind, data.hex()
        return
    assert parsed == lib.DP_PROMPT1_WHOLE, data.hex()
    key = data[found.key_at : found.key_at + found.key_bytes]
    assert key == (wanted.api_key or b""), data.hex()
    for name in wanted._fields:
        if name != "api_key":
            assert getattr(found, name) == getattr(wanted, name), (name, data.hex())


def test_floats_are_those_of_the_wire() -> None:
    header = bytearray(HEADERS["nothing"])
    for at, value in ((28, 99.9), (28, 1e-40), (32, 0.1), (28, float("nan")), (32, -0.0)):
        struct.pack_into("<f", header, at, value)
        check_parsed(bytes(header))


# ---------------------------------------------------------------- histograms


def test_the_pumps_histogram_is_read_while_it_counts() -> None:
    """Python reads what `dp_raw_latency` gave while another thread counts: never more than was
    counted, never less than before, and in the end exactly all."""
    pump = Pump()
    native = lib.dp_raw_latency(pump.native)
    latency = Latency(clock=lambda: 1000.0)
    latency.now_s = 1000
    latency.add(native)
    values = 300_000
    done = threading.Event()

    def count() -> None:
        for value in range(values):
            lib.dp_latency_record(native, int(Series.INGRESS), value % 5000, 1000)
        done.set()

    writer = threading.Thread(target=count)
    writer.start()
    seen = 0
    reads = 0
    while not done.is_set():
        total = latency.total(Series.INGRESS)
        assert seen <= total.within[-1] <= values
        assert list(total.within) == sorted(total.within)
        window = latency.snapshot(10)
        assert 0 <= window["count"] <= values
        assert window["ingress"]["max"] <= 5000 * 1.002
        seen = total.within[-1]
        reads += 1
    writer.join()
    assert reads > 1
    total = latency.total(Series.INGRESS)
    assert total.within[-1] == latency.snapshot(10)["count"] == values
    assert total.sum_us == sum(value % 5000 for value in range(values))
