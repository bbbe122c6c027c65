"""What a runtime states when it attaches (contract 2), read strictly, checked for both sides."""

from typing import Any

import msgspec

from dataplane._native import ffi, lib
from dataplane.errors import AttachError

ABI: int = lib.DP_ABI
LINE_MAX: int = lib.DP_LINE_MAX
"""Bytes of one JSON line of the handshake."""

TABLES = {"host": lib.DP_TABLE_HOST, "device": lib.DP_TABLE_DEVICE}
MAX_STEP_MS = 600_000
DEFAULT_PARTITION = "default"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A runtime's geometry and model.

    `context` bounds the prompt and `max_output` the answer, both in tokens; the engine has room for
    their sum. `max_step_ms` is the longest that one step of the engine may take.
    """

    model: str
    slots: int
    context: int
    max_output: int
    vocab_size: int
    abi: int = ABI
    partition: str = DEFAULT_PARTITION
    table: str = "host"
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    tokenizer_sha256: str | None = None
    max_step_ms: int = 5000

    def geometry(self, listeners: int) -> "ffi.CData":
        """Return the C geometry of the region that this manifest asks for."""
        geometry = ffi.new("struct dp_geometry *")
        geometry.table = TABLES[self.table]
        geometry.slots = self.slots
        geometry.context = self.context
        geometry.max_output = self.max_output
        geometry.vocab_size = self.vocab_size
        geometry.listeners = listeners
        return geometry

    def check(self) -> None:
        """Raise `AttachError` with the first rule that the manifest breaks."""
        _check_abi(self.abi)
        problem = self._problem()
        if problem:
            raise AttachError(problem)

    def _problem(self) -> str | None:
        if self.table not in TABLES:
            return f"table is {self.table!r}; it must be 'host' or 'device'"
        for name in ("slots", "context", "max_output", "vocab_size"):
            if not 0 <= getattr(self, name) < 2**32:
                return f"{name} is {getattr(self, name)}, out of bounds"
        error: Any = lib.dp_geometry_error(self.geometry(listeners=1))
        if error != ffi.NULL:
            return str(ffi.string(error), "ascii")
        if not 1 <= self.max_step_ms <= MAX_STEP_MS:
            return f"max_step_ms is {self.max_step_ms}; it must be 1 to {MAX_STEP_MS}"
        if not self.partition or not self.partition.isprintable():
            return "partition must be a name"
        outside = [i for i in self.stop_ids if not 0 <= i < self.vocab_size]
        if outside:
            return f"stop id {outside[0]} is outside the vocabulary of {self.vocab_size}"
        return None

    def encode(self) -> bytes:
        """Return the JSON object, without a newline.

        Raises:
            AttachError: A rule is broken, or the line is over 64 KiB.
        """
        self.check()
        line = msgspec.json.encode(self)
        if len(line) >= LINE_MAX:
            raise AttachError(
                f"the manifest is {len(line)} bytes; at most {LINE_MAX - 1} fit a line"
            )
        return line


def _check_abi(abi: int) -> None:
    if abi != ABI:
        raise AttachError(f"the runtime speaks ABI {abi}, this daemon speaks {ABI}")


class _Version(msgspec.Struct):
    """The field that every version has, read before the others are judged by this one's rules."""

    abi: int


_version_decoder = msgspec.json.Decoder(_Version)
_decoder = msgspec.json.Decoder(Manifest)


def decode_manifest(line: bytes) -> Manifest:
    """Read and check one line.

    Raises:
        AttachError: It is no JSON, speaks another ABI, has a field too many or too few or of a
        wrong type, or breaks a rule.
    """
    try:
        _check_abi(_version_decoder.decode(line).abi)
        manifest = _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AttachError(f"the manifest cannot be read: {error}") from error
    manifest.check()
    return manifest
