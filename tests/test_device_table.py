"""What only the `device` slot table has: a device that may be late or dead, rings, kernels."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import gpu_programs
import native_programs
import pytest
from host_gpu import HostDevice, Library
from native_region import open_region
from slot_rig import CANCELLING, DONE, FREE, ID_BYTES, READY, RUNNING, STOP, UNANSWERED, WRITING

from dataplane._native import ffi, lib
from dataplane.device_table import DeviceTable
from dataplane.prompt1 import Request


@pytest.fixture
def silent(library: Library) -> Iterator[tuple[DeviceTable, HostDevice, list[str]]]:
    """A device table whose device answers only when the test has it tick."""
    with open_region(slots=2, table="device") as region:
        table, said = DeviceTable(region, answer_ms=100), list[str]()
        table.on_dead = said.append
        yield table, HostDevice(library, region), said


Silent = tuple[DeviceTable, HostDevice, list[str]]


def test_a_device_that_does_not_answer_is_given_up(silent: Silent) -> None:
    table, device, said = silent
    start = time.monotonic()
    assert table.admit(Request(1), 1, 8) == UNANSWERED
    assert time.monotonic() - start < 1
    start = time.monotonic()
    assert [table.admit(Request(1), 1, 8) for _ in range(100)] == [UNANSWERED] * 100
    assert time.monotonic() - start < 0.1
    assert len(said) == 1
    assert "100 ms" in said[0]
    # It wakes up: the claim is granted and taken back, and stays refused.
    device.tick()
    assert [device.word(slot)[0] for slot in range(2)] == [FREE, FREE]
    assert device.word(0)[1] == 1
    assert table.admit(Request(1), 1, 8) == UNANSWERED


def test_by_default_a_claim_waits_less_than_a_second(library: Library) -> None:
    with open_region(slots=1, table="device") as region:
        table = DeviceTable(region)
        start = time.monotonic()
        assert table.admit(Request(1), 1, 8) == UNANSWERED
        assert 0.8 < time.monotonic() - start < 1.0


def test_what_is_not_waited_for_does_not_block(silent: Silent) -> None:
    table, device, _ = silent
    threading.Timer(0.02, device.tick).start()
    slot = table.admit(Request(1), 1, 8)
    assert slot == 0
    start = time.monotonic()
    assert table.submit(slot, table.generation, ID_BYTES, 0, 4) > 0
    assert table.let_go(slot, table.generation) == FREE
    assert time.monotonic() - start < 0.05
    assert device.word(0)[0] == WRITING
    device.tick()
    assert device.word(0)[0] == FREE


def test_letting_go_goes_on_when_the_device_was_given_up(silent: Silent) -> None:
    table, device, _ = silent
    threading.Timer(0.02, device.tick).start()
    slot = table.admit(Request(1), 1, 8)
    generation = table.generation
    assert table.submit(slot, generation, ID_BYTES, 0, 4) > 0
    assert table.cancel(slot, generation) == UNANSWERED
    assert table.revoke(slot, generation) == UNANSWERED
    assert table.let_go(slot, generation) == FREE
    device.tick()
    assert device.word(0)[0] == FREE


@pytest.mark.parametrize("held", [FREE, WRITING, READY, RUNNING, DONE])
def test_another_process_lets_go_for_a_listener_that_died(silent: Silent, held: int) -> None:
    dead, device, _ = silent
    threading.Timer(0.02, device.tick).start()
    slot = dead.admit(Request(1), 1, 8)
    generation = dead.generation
    if held >= READY:
        dead.submit(slot, generation, ID_BYTES, 0, 4)
        device.tick()
    if held >= RUNNING:
        assert device.take(slot)[0] == RUNNING
    if held == DONE:
        assert device.finish(slot, generation, STOP) == DONE
    if held == FREE:
        dead.let_go(slot, generation)
    del dead
    DeviceTable(device.region).let_go_all()
    device.tick()
    assert device.word(slot)[0] == (CANCELLING if held == RUNNING else FREE)
    if held == RUNNING:
        assert device.is_cancelled(slot, generation)
        assert device.finish(slot, generation, STOP) == FREE


def test_a_listener_cannot_touch_anothers_slot(library: Library) -> None:
    with open_region(listeners=2, slots=2, table="device") as region:
        device = HostDevice(library, region)
        mine, other = DeviceTable(region, 1), DeviceTable(region, 2)
        threading.Timer(0.02, device.tick).start()
        assert mine.admit(Request(1), 1, 8) == 0
        other.let_go_all()
        device.tick()
        assert device.word(0)[:2] == (WRITING, 1)


def test_rubbish_in_a_ring_changes_nothing(silent: Silent) -> None:
    _, device, _ = silent
    native = device.region.native
    before = [device.word(slot) for slot in range(2)]
    address = int(ffi.cast("uintptr_t", native.base)) + native.layout.rings
    entries = ffi.cast("struct dp_command *", address + ffi.sizeof("struct dp_ring"))
    count = lib.dp_ring_entries(2)
    seed = 1
    for i in range(count):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        kind = seed >> 60  # a claim of slots that there are would be none
        kind = 10 if kind == lib.DP_COMMAND_CLAIM else kind
        entries[i].command = (seed & (2**54 - 1)) & ~0xF | kind | 1 << 54
    device.tick()
    assert [device.word(slot) for slot in range(2)] == before
    assert [entries[i].verdict >> 54 for i in range(count)] == [1] * count


def test_the_ring_keeps_room(silent: Silent) -> None:
    for slots, entries in ((1, 16), (2, 32), (8, 64), (1024, 8192)):
        assert lib.dp_ring_entries(slots) == entries
        assert entries >= 6 * slots + 2


def test_an_echo_job_has_the_size_that_python_allocates(library: Library) -> None:
    from dataplane.runtime.cuda_echo import JOB_BYTES

    assert library.native.host_echo_job_bytes() == JOB_BYTES


def test_a_device_region_says_so_and_a_host_region_has_no_rings() -> None:
    with open_region(table="host") as host, open_region(table="device") as device:
        assert host.native.mirrors == ffi.NULL
        assert host.native.layout.ring_bytes == 0
        assert device.native.layout.ring_bytes > 0
        assert device.bytes > host.bytes


def test_the_program_of_threads_sees_only_what_is_allowed(tmp_path: Path) -> None:
    if shutil.which(gpu_programs.cxx()) is None:
        pytest.skip("no C++ compiler here")
    binary = gpu_programs.build_traffic(native_programs.PLAIN, tmp_path)
    done = native_programs.run(binary, native_programs.Run(gpu_programs.TRAFFIC, 300), seed=11)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "taken back" in done.stdout


def test_every_mutant_of_the_kernels_is_hunted() -> None:
    source = (native_programs.PROGRAMS / "gpu_mutants.h").read_text(encoding="utf-8")
    sown = [word.removeprefix("MUTANT_") for word in source.split() if word.startswith("MUTANT_")]
    assert sorted(sown) == sorted(mutant.name for mutant in gpu_programs.MUTANTS)
    assert os.path.exists(gpu_programs.GPU / "admission.cu")
