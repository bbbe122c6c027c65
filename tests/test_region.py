"""The region: how it is made, sealed and checked, and how long its memory lives."""

import errno
import fcntl
import gc
import mmap
import os
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_region import manifest, open_region

from dataplane import region as region_module
from dataplane._native import ffi, lib
from dataplane.errors import AttachError
from dataplane.region import Region, available_memory, create_region

HEADER = struct.Struct("<8sIIQ6I8Q")  # magic, abi, bytes, attachment, geometry, layout
HEADER_BYTES = 1408
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
GEOMETRY = {"table": 1, "slots": 3, "context": 100, "max_output": 70, "vocab_size": 500}
LAYOUT = {
    "states": 4096,
    "progress": 8192,
    "requests": 12288,
    "prompts": 16384,
    "outputs": 20480,
    "prompt_stride": 512,
    "output_stride": 512,
    "bytes": 24576,
}


@pytest.fixture
def region() -> Iterator[Region]:
    with open_region(slots=3, context=100, max_output=70, vocab_size=500) as region:
        yield region


def reopen(fd: int) -> Any:
    """Open as the runtime does: the C handle, or the reason why not."""
    error = ffi.new("const char **")
    native = lib.dp_region_open(fd, error)
    return ffi.gc(native, lib.dp_region_close) if native else str(ffi.string(error[0]), "ascii")


def traces() -> tuple[int, int, list[str]]:
    """What a region leaves in a process: descriptors, mappings, files in shared memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="ascii").count("memfd:dataplane-region")
    files = [name for name in os.listdir("/dev/shm") if "dataplane" in name]
    return len(os.listdir("/proc/self/fd")), maps, files


# Numbers.


def test_numbers_are_the_contracts() -> None:
    assert lib.DP_ABI == 1
    assert (lib.DP_MAX_SLOTS, lib.DP_MAX_CONTEXT, lib.DP_MAX_OUTPUT) == (1024, 1048576, 262144)
    assert (lib.DP_TABLE_HOST, lib.DP_TABLE_DEVICE) == (1, 2)
    assert lib.DP_MAX_LISTENERS == 16
    assert region_module.GENERATION_BITS == 40


def test_records_have_the_sizes_that_engines_are_compiled_with() -> None:
    offsets = {name: field.offset for name, field in ffi.typeof("struct dp_region_header").fields}
    assert ffi.sizeof("struct dp_region_header") == HEADER_BYTES
    assert ffi.sizeof("struct dp_request") == 128
    assert (offsets["heartbeat"], offsets["step"]) == (192, 256)
    assert (offsets["runtime_sleeping"], offsets["listener_sleeping"]) == (320, 384)
    request = {name: field.offset for name, field in ffi.typeof("struct dp_request").fields}
    assert [request[name] for name in ("published_ns", "n_tokens", "temperature", "top_p")] == [
        8, 16, 32, 36,
    ]  # fmt: skip
    assert (request["taken_ns"], request["finish_reason"]) == (64, 72)


def test_offsets_follow_from_the_geometry(region: Region) -> None:
    layout = region.native.layout
    assert {name: getattr(layout, name) for name in LAYOUT} == LAYOUT
    base = int(ffi.cast("uintptr_t", region.native.base))
    assert region.prompt_address(2) == base + 16384 + 2 * 512
    assert int(ffi.cast("uintptr_t", lib.dp_output(region.native, 1))) == base + 20480 + 512


def test_the_largest_geometry_has_a_size() -> None:
    largest = manifest(slots=1024, context=1048576, max_output=262144)
    layout = ffi.new("struct dp_layout *")
    lib.dp_layout_of(largest.geometry(16), layout)
    assert layout.bytes > 1024 * (1048576 + 262144) * 4


# Making.


def test_the_header_says_what_was_made(region: Region) -> None:
    fields = HEADER.unpack_from(bytes(ffi.buffer(region.native.base, HEADER_BYTES)))
    assert fields[:4] == (b"DDPREGN1", 1, HEADER_BYTES, 7)
    assert fields[4:10] == (*GEOMETRY.values(), 1)
    assert fields[10:] == tuple(LAYOUT.values())


def test_the_file_is_sealed_and_sized(region: Region) -> None:
    assert fcntl.fcntl(region.fd, fcntl.F_GET_SEALS) == SEALS
    assert os.fstat(region.fd).st_size == region.bytes == LAYOUT["bytes"]
    assert fcntl.fcntl(region.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    for size in (0, region.bytes - 1, region.bytes + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_forked_child_does_not_hold_the_region(region: Region) -> None:
    smaps = Path("/proc/self/smaps").read_text(encoding="ascii")
    flags = smaps.partition("memfd:dataplane-region")[2].partition("VmFlags:")[2].split("\n")[0]
    assert "dc" in flags.split()  # "do not copy on fork"


@pytest.mark.parametrize("field", ["table", "slots", "context", "max_output", "vocab_size"])
@pytest.mark.parametrize("value", [0, 2**32 - 1])
def test_a_geometry_out_of_bounds_makes_no_region(field: str, value: int) -> None:
    geometry = manifest().geometry(1)
    setattr(geometry, field, value)
    before = traces()
    assert lib.dp_region_create(geometry, 1, 1, ffi.new("int *")) == ffi.NULL
    assert ffi.errno == errno.EINVAL
    assert traces() == before


@pytest.mark.parametrize(("listeners", "sound"), [(0, False), (1, True), (16, True), (17, False)])
def test_listeners_are_1_to_16(listeners: int, sound: bool) -> None:
    error = lib.dp_geometry_error(manifest().geometry(listeners))
    assert (error == ffi.NULL) is sound
    if not sound:
        assert b"listeners must be 1 to 16" in ffi.string(error)


def test_too_little_memory_is_said_before_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(region_module, "available_memory", lambda: 8 << 20)
    with pytest.raises(AttachError, match="takes 16 MiB and 8 MiB of memory are free: ask for"):
        create_region(manifest(slots=64, context=65536), 1, 1)


def test_available_memory_is_read_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (available_memory() or 0) > 1 << 20

    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", absent)
    assert available_memory() is None


def test_a_refusing_system_is_named_and_leaves_nothing() -> None:
    before = traces()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(AttachError, match="cannot be made: File too large"):
            create_region(manifest(), 1, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert traces() == before


# Opening.


def test_reopening_maps_the_same_memory(region: Region) -> None:
    runtime = reopen(region.fd)
    assert runtime.attachment == 7
    assert runtime.geometry.context == 100
    assert runtime.writers == ffi.NULL
    assert (runtime.doorbell, runtime.outputs[0], runtime.outputs[15]) == (-1, -1, -1)
    lib.dp_prompt(runtime, 2)[5] = 77
    assert region.prompt(2, 6)[5] == 77


MAGIC, ABI, OWN_BYTES, LAYOUT_AT = 0, 8, 12, 48
CORRUPTIONS = {
    "magic": (MAGIC, 1, "does not begin with the magic"),
    "abi 2": (ABI, 2, "another ABI version"),
    "abi 0": (ABI, 0, "another ABI version"),
    "header_bytes": (OWN_BYTES, HEADER_BYTES + 64, "header has another size"),
    "table": (24, 3, "geometry is out of bounds"),
    "no slots": (28, 0, "geometry is out of bounds"),
    "slots": (28, 1025, "geometry is out of bounds"),
    "other slots": (28, 600, "offsets are not what its geometry asks for"),
    "context": (32, 1048577, "geometry is out of bounds"),
    "other context": (32, 1048576, "offsets are not what its geometry asks for"),
    "max_output": (36, 262145, "geometry is out of bounds"),
    "other max_output": (36, 262144, "offsets are not what its geometry asks for"),
    "vocab_size": (40, 2**31, "geometry is out of bounds"),
    "listeners": (44, 17, "geometry is out of bounds"),
    **{
        name: (LAYOUT_AT + 8 * i, 64, "offsets are not what its geometry asks for")
        for i, name in enumerate(LAYOUT)
    },
}


@pytest.mark.parametrize("field", CORRUPTIONS)
def test_a_header_field_that_is_wrong_is_refused_in_words(region: Region, field: str) -> None:
    offset, value, reason = CORRUPTIONS[field]
    before = traces()
    with mmap.mmap(region.fd, region.bytes) as writable:
        struct.pack_into("<I", writable, offset, value)
    assert reason in reopen(region.fd)
    assert traces() == before


def memfd(contents: bytes, seals: int) -> int:
    fd = os.memfd_create("dataplane-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, contents)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("change", "seals", "reason"),
    [
        (0, SEALS, None),
        (4096, SEALS, "another size than its geometry asks for"),
        (-4096, SEALS, "another size than its geometry asks for"),
        (HEADER_BYTES - 1 - LAYOUT["bytes"], SEALS, "no sealed memory file"),
        (-LAYOUT["bytes"], SEALS, "no sealed memory file"),
        (0, 0, "no sealed memory file"),
        (0, fcntl.F_SEAL_SHRINK, "no sealed memory file"),
        (0, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, "no sealed memory file"),
        (0, SEALS | fcntl.F_SEAL_WRITE, "cannot be mapped"),
    ],
)
def test_a_file_of_another_size_or_without_seals_is_refused(
    region: Region, change: int, seals: int, reason: str | None
) -> None:
    contents = bytes(ffi.buffer(region.native.base, region.bytes))
    contents = contents[:change] if change < 0 else contents + bytes(change)
    fd = memfd(contents, seals)
    try:
        answer = reopen(fd)
    finally:
        os.close(fd)
    if reason is None:
        assert answer.attachment == 7
    else:
        assert reason in answer


def test_what_is_no_memory_file_is_refused(region: Region, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(ffi.buffer(region.native.base, region.bytes)))
    with path.open("rb+") as file:
        assert "no sealed memory file" in reopen(file.fileno())
    reader, writer = os.pipe()
    try:
        assert "no sealed memory file" in reopen(reader)
    finally:
        os.close(reader)
        os.close(writer)
    assert "no sealed memory file" in reopen(-1)


# Views and lifetime.


def test_a_view_reads_the_region_and_cannot_write_it(region: Region) -> None:
    view = region.prompt(1, 4)
    assert (view.dtype, view.shape) == (np.dtype(np.int32), (4,))
    assert not view.flags.owndata
    lib.dp_prompt(region.native, 1)[0:4] = [1, 2, 3, 4]
    assert view.tolist() == [1, 2, 3, 4]
    assert view.ctypes.data == region.prompt_address(1)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 9
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.setflags(write=True)
    assert view[1:].base is not None
    assert lib.dp_prompt(region.native, 1)[0] == 1


@pytest.mark.parametrize(("slot", "count"), [(-1, 1), (3, 1), (0, 101), (0, -1)])
def test_a_view_beyond_the_region_is_refused(region: Region, slot: int, count: int) -> None:
    with pytest.raises(IndexError, match="prompt ids in slot"):
        region.prompt(slot, count)


def test_a_view_keeps_the_mapping_and_nothing_else_does() -> None:
    before = traces()
    region = create_region(manifest(), 1, 1)
    lib.dp_prompt(region.native, 0)[0:3] = [5, 6, 7]
    part = region.prompt(0, 3)[1:]
    del region
    assert traces()[1] == before[1] + 1
    assert part.tolist() == [6, 7]
    del part
    assert traces() == before


def test_the_mapping_outlives_its_descriptor() -> None:
    before = traces()
    region = create_region(manifest(), 1, 1)
    assert region.fd >= 0
    region.close_fd()
    region.close_fd()
    assert region.fd == -1
    assert traces()[:2] == (before[0], before[1] + 1)
    assert region.prompt(0, 2).tolist() == [0, 0]
    del region
    assert traces() == before
