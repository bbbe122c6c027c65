"""Fatbins made by hand, for several test files."""

import struct

PTX, MACHINE, OTHER = 1, 2, 16
ENTRY_BYTES = 64


def entry(kind: int, architecture: int, size: int = 24, stated: int | None = None) -> bytes:
    size_said = size if stated is None else stated
    head = struct.pack("<HHIQIIHHI", kind, 0x101, ENTRY_BYTES, size_said, 0, 0, 0, 9, architecture)
    return head.ljust(ENTRY_BYTES, b"\0") + b"\xaa" * size


def fatbin(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


WHOLE = fatbin(entry(PTX, 80), entry(MACHINE, 100), entry(MACHINE, 80), entry(OTHER, 0))
