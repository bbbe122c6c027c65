"""What a fatbin was built for, read from the file itself: what is said of it cannot be wrong then.

A fatbin holds machine code for some architectures and, perhaps, PTX, which the driver compiles when
it loads it. Targets are spelt as nvcc spells them: `sm_90` is machine code, `compute_90` is PTX.
`cpu` is the target of what needs no GPU. The rules that hold between a target and a device:

- Machine code runs on devices of its own major number whose minor number is not lower.
- PTX runs on every device that is not older, after a compilation.
- Of several that fit, machine code is taken before PTX.
"""

import re
import struct
from collections.abc import Iterable

from dataplane.errors import DataplaneError

Capability = tuple[int, int]

CPU = "cpu"
_HEADER = struct.Struct("<IHHQ")
_MAGIC = 0xBA55ED50
# Kind, size of the entry's header, size of what follows it, and the architecture.
_ENTRY = struct.Struct("<H2xIQ12xI")
_PTX, _MACHINE = 1, 2
_TARGET = re.compile(r"(sm|compute)_([0-9]+)([0-9])")


class FatbinError(DataplaneError):
    """The file is no fatbin, or ends early."""


def targets_of(data: bytes, name: str) -> tuple[str, ...]:
    """Return a fatbin's targets, machine code first, each in the order of the architectures.

    Args:
        data: The file.
        name: What the error calls it.

    Raises:
        FatbinError: It is no fatbin, or a damaged one.
    """
    found: set[tuple[bool, int]] = set()
    at = 0
    while at < len(data):
        end = _end_of(data, at, name)
        at += _HEADER.size
        while at < end:
            if end - at < _ENTRY.size:
                raise FatbinError(f"{name} is a damaged fatbin: it ends inside of an entry")
            kind, header, size, architecture = _ENTRY.unpack_from(data, at)
            if header < _ENTRY.size or header + size > end - at:
                raise FatbinError(f"{name} is a damaged fatbin: an entry reaches past its end")
            if kind in (_PTX, _MACHINE):
                found.add((kind == _PTX, architecture))
            at += header + size
    if not found:
        raise FatbinError(f"{name} holds no kernels")
    return tuple(f"{'compute' if is_ptx else 'sm'}_{number}" for is_ptx, number in sorted(found))


def _end_of(data: bytes, at: int, name: str) -> int:
    """Where the container that begins at `at` ends."""
    if len(data) - at < _HEADER.size:
        raise FatbinError(f"{name} is no fatbin")
    magic, _, header, size = _HEADER.unpack_from(data, at)
    if magic != _MAGIC or header != _HEADER.size:
        raise FatbinError(f"{name} is no fatbin")
    if size > len(data) - at - header:
        raise FatbinError(f"{name} is a damaged fatbin: it is shorter than it says")
    return at + _HEADER.size + int(size)


def is_target(text: str) -> bool:
    """Whether it is spelt like a target."""
    return text == CPU or _TARGET.fullmatch(text) is not None


def _parts(target: str) -> tuple[bool, Capability]:
    found = _TARGET.fullmatch(target)
    if found is None:
        raise ValueError(target)
    return found[1] == "sm", (int(found[2]), int(found[3]))


def fit(targets: Iterable[str], capability: Capability) -> str | None:
    """Return the target that a device takes, or None where none fits it."""
    machine: list[tuple[Capability, str]] = []
    ptx: list[tuple[Capability, str]] = []
    for target in targets:
        if target == CPU:
            continue
        is_machine, needs = _parts(target)
        if is_machine and needs[0] == capability[0] and needs <= capability:
            machine.append((needs, target))
        elif not is_machine and needs <= capability:
            ptx.append((needs, target))
    candidates = machine or ptx
    return max(candidates)[1] if candidates else None


def is_compiled_at_load(target: str) -> bool:
    """Whether the driver has work to do before it can use it."""
    return target.startswith("compute_")


def say_target(target: str) -> str:
    """The target in words."""
    return f"{target} (PTX)" if is_compiled_at_load(target) else target
