"""The manifest: what a runtime may state, and the reason it is told for everything else."""

import json
from typing import Any

import msgspec
import pytest

from dataplane import attachment
from dataplane import manifest as manifest_module
from dataplane._native import ffi
from dataplane.errors import AttachError
from dataplane.manifest import Manifest, decode_manifest

# As contract 2 prints it.
CONTRACT = (
    '{"abi": 1, "model": "SmolLM2-135M-Instruct", "partition": "default", "table": "host", '
    '"slots": 8, "context": 1024, "max_output": 512, "vocab_size": 49152, "stop_ids": [2], '
    '"chat_template": "...jinja...", "tokenizer_sha256": "..." , "max_step_ms": 5000}'
)
LEAST: dict[str, Any] = {
    "abi": 1, "model": "m", "slots": 2, "context": 64, "max_output": 16, "vocab_size": 100,
}  # fmt: skip
ABSENT = object()


def line(**changes: Any) -> bytes:
    """Return the least manifest as JSON, changed as told; ABSENT takes a field out."""
    fields = {**LEAST, **changes}
    return json.dumps({k: v for k, v in fields.items() if v is not ABSENT}).encode()


def refusal(data: bytes) -> str:
    with pytest.raises(AttachError) as caught:
        decode_manifest(data)
    return str(caught.value)


def test_numbers_are_the_contracts() -> None:
    assert (manifest_module.ABI, manifest_module.LINE_MAX) == (1, 65536)
    assert manifest_module.TABLES == {"host": 1, "device": 2}
    assert (attachment.HEARTBEAT_MS, attachment.READY_WITHIN_S) == (500, 120)
    assert (attachment.SILENT_RED_S, attachment.SILENT_DROP_S) == (2, 10)


def test_the_contracts_own_line_is_taken() -> None:
    manifest = decode_manifest(CONTRACT.encode())
    assert manifest == Manifest(
        model="SmolLM2-135M-Instruct", slots=8, context=1024, max_output=512, vocab_size=49152,
        stop_ids=(2,), chat_template="...jinja...", tokenizer_sha256="...",
    )  # fmt: skip
    assert json.loads(manifest.encode()) == json.loads(CONTRACT)


def test_defaults() -> None:
    manifest = decode_manifest(line())
    assert (manifest.partition, manifest.table, manifest.max_step_ms) == ("default", "host", 5000)
    assert (manifest.stop_ids, manifest.chat_template, manifest.tokenizer_sha256) == (
        (),
        None,
        None,
    )


def test_the_geometry_is_the_manifests() -> None:
    geometry = decode_manifest(line(table="device")).geometry(listeners=3)
    fields = [name for name, _ in ffi.typeof("struct dp_geometry").fields]
    assert {name: getattr(geometry, name) for name in fields} == {
        "table": 2, "slots": 2, "context": 64, "max_output": 16, "vocab_size": 100, "listeners": 3,
    }  # fmt: skip


# Bounds.

BOUNDS = {
    "slots": (1, 1024, "slots must be 1 to 1024"),
    "context": (1, 1048576, "context must be 1 to 1048576"),
    "max_output": (1, 262144, "max_output must be 1 to 262144"),
    "vocab_size": (1, 2**31 - 1, "vocab_size must be 1 to 2147483647"),
    "max_step_ms": (1, 600_000, "it must be 1 to 600000"),
}


@pytest.mark.parametrize("field", BOUNDS)
def test_a_field_at_its_bounds_is_taken(field: str) -> None:
    low, high, _ = BOUNDS[field]
    for value in (low, high):
        assert getattr(decode_manifest(line(**{field: value})), field) == value


@pytest.mark.parametrize("field", BOUNDS)
def test_a_field_beyond_its_bounds_is_named(field: str) -> None:
    low, high, reason = BOUNDS[field]
    for value in (low - 1, high + 1):
        assert reason in refusal(line(**{field: value}))
    for value in (-1, 2**32, 2**32 + 1, 2**63, 10**40):
        assert field in refusal(line(**{field: value}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"table": "gpu"}, "table is 'gpu'; it must be 'host' or 'device'"),
        ({"partition": ""}, "partition must be a name"),
        ({"partition": "a\nb"}, "partition must be a name"),
        ({"stop_ids": [0, 100]}, "stop id 100 is outside the vocabulary of 100"),
        ({"stop_ids": [-1]}, "stop id -1 is outside the vocabulary of 100"),
    ],
)
def test_a_rule_that_is_broken_is_named(changes: dict[str, Any], reason: str) -> None:
    assert refusal(line(**changes)) == reason
    fields = {**LEAST, **changes, "stop_ids": tuple(changes.get("stop_ids", ()))}
    with pytest.raises(AttachError, match=reason):
        Manifest(**fields).encode()


# Fields.


@pytest.mark.parametrize("field", LEAST)
def test_a_field_that_is_missing_is_named(field: str) -> None:
    assert f"missing required field `{field}`" in refusal(line(**{field: ABSENT}))


def test_a_field_that_is_unknown_is_named() -> None:
    assert "unknown field `slot`" in refusal(line(slot=1))


WRONG: dict[str, list[Any]] = {
    **{field: ["8", None, 1.5, [], True] for field in LEAST if field != "model"},
    "model": [1, None, ["m"]],
    "stop_ids": [2, "2", None, ["2"], [1.5], {}],
    "table": [1, None],
    "chat_template": [1, ["x"]],
    "tokenizer_sha256": [1, {}],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_a_field_of_a_wrong_type_is_named(field: str, value: Any) -> None:
    reason = refusal(line(**{field: value}))
    assert reason.startswith("the manifest cannot be read: Expected")
    assert f"$.{field}" in reason


# Another version.


@pytest.mark.parametrize("abi", [0, 2, -1, 2**40])
def test_another_abi_is_the_reason_whatever_else_is_odd(abi: int) -> None:
    reason = f"the runtime speaks ABI {abi}, this daemon speaks 1"
    assert refusal(line(abi=abi)) == reason
    assert refusal(line(abi=abi, slots="many", model=ABSENT, lanes=[1])) == reason
    assert refusal(b'{"lanes": 9, "abi": %d}' % abi) == reason
    with pytest.raises(AttachError, match=reason):
        Manifest(**{**LEAST, "abi": abi}).encode()


# What is no manifest at all.


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\0", b"{", b"[]", b"null", b"1", b'"abi"', b"{}", b"{'abi': 1}", b"\xff\xfe{}",
        line()[:-1], line() + b"}", line() + line(), line().replace(b'"m"', b'"\xff"'),
        line().replace(b'"m"', b'"\xed\xa0\x80"'), line().replace(b": 2", b": 02"),
        line().replace(b": 2", b": NaN"), b"{" * 60_000, b"[" * 60_000,
        b'{"abi": 1, "model": ' + b"[" * 60_000 + b"]" * 60_000 + b"}",
        b'{"abi": 1, "deep": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    assert refusal(data).startswith("the manifest cannot be read: ")


# The line's length.


def test_a_line_of_64_kib_is_the_longest() -> None:
    room = 65535 - len(Manifest(**LEAST, chat_template="").encode())
    longest = Manifest(**LEAST, chat_template="x" * room)
    assert len(longest.encode()) == 65535  # and the newline
    assert decode_manifest(longest.encode()) == longest
    too_long = msgspec.structs.replace(longest, chat_template="x" * (room + 1))
    with pytest.raises(AttachError, match="is 65536 bytes; at most 65535 fit a line"):
        too_long.encode()


def test_encoding_checks_the_rules() -> None:
    with pytest.raises(AttachError, match="slots must be 1 to 1024"):
        Manifest(**{**LEAST, "slots": 0}).encode()
