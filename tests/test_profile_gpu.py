"""`dataplane profile --gpu`: what compilers say is read right, what cannot be had is waived, and
the measuring runs the real kernels, here on host threads with a clock that is no GPU's."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from host_gpu import HostGpu, Library

from dataplane import kernel_resources
from dataplane.apart import Ended
from dataplane.cli import profile_gpu
from dataplane.kernel_resources import Usage
from dataplane.runtime.cuda import CudaError, Stream
from dataplane.runtime.cuda_device import Resources

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'dp_echo' for 'sm_100'
ptxas info    : Function properties for dp_echo
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 25 registers, used 1 barriers, 64 bytes smem, 376 bytes cmem[0]
ptxas info    : Compile time = 84.667 ms
ptxas info    : Compiling entry function 'dp_echo' for 'sm_80'
ptxas info    : Function properties for dp_echo
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers
"""
CUOBJDUMP = """\

Fatbin elf code:
================
arch = sm_90
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function dp_echo:
  REG:24 STACK:8 SHARED:64 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
# cudaDeviceAttr of an H100.
ATTRIBUTES = {
    16: 132, 36: 2_619_000, 37: 5120, 39: 2048, 81: 233_472, 82: 65_536, 106: 32, 111: 1024,
}  # fmt: skip


# What compilers say.


def test_what_ptxas_says_is_read_for_every_target() -> None:
    assert kernel_resources.of_ptxas(PTXAS) == (
        Usage("dp_echo", "sm_80", 24, 0, 0, 0),
        Usage("dp_echo", "sm_100", 25, 64, 16, 12),
    )


def test_what_cuobjdump_says_is_read_and_it_says_nothing_of_spills() -> None:
    assert kernel_resources.of_cuobjdump(CUOBJDUMP) == (Usage("dp_echo", "sm_90", 24, 64, 8, None),)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="waived: there is no nvcc here")
def test_nvcc_is_asked_for_every_target(tmp_path: Path) -> None:
    found = kernel_resources.look(tmp_path / "none.fatbin")
    assert found.waived is None
    assert {usage.target for usage in found.usages} >= {"sm_80", "sm_90"}
    assert {usage.kernel for usage in found.usages} > {"dp_admission_tick", "dp_echo"}
    assert all(usage.registers > 0 and usage.spill_bytes == 0 for usage in found.usages)


def test_without_a_compiler_and_a_fatbin_it_is_waived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = kernel_resources.look(tmp_path / "none.fatbin")
    assert found.usages == ()
    assert found.waived
    assert "nvcc" in found.waived


def test_a_fatbin_alone_is_read_by_cuobjdump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "cuobjdump"
    tool.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{CUOBJDUMP}END\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    fatbin = tmp_path / "kernels.fatbin"
    assert "make kernels" in str(kernel_resources.look(fatbin).waived)
    fatbin.touch()
    found = kernel_resources.look(fatbin)
    assert [usage.registers for usage in found.usages] == [24]
    assert found.by == "cuobjdump, from kernels.fatbin"


# Occupancy without the driver.


@pytest.mark.parametrize(
    ("resources", "threads", "blocks"),
    [
        (Resources(16, 0, 0, 1024), 128, 16),  # by its threads: 2048 of them
        (Resources(16, 0, 0, 1024), 1, 32),  # by its places for blocks
        (Resources(128, 0, 0, 512), 128, 4),  # by its registers: 65,536 of them
        (Resources(127, 0, 0, 512), 128, 4),  # given out in steps of eight a thread
        (Resources(16, 57_344, 0, 1024), 128, 4),  # by its shared memory, 1024 reserved a block
    ],
)
def test_occupancy_is_what_the_scarcest_allows(
    resources: Resources, threads: int, blocks: int
) -> None:
    assert profile_gpu.computed_blocks(resources, threads, ATTRIBUTES.__getitem__) == blocks


# Measuring.


class TimedGpu(HostGpu):
    """Host threads with what a card says of itself; its times are the host's."""

    name, capability = "host threads", (9, 0)
    blocks: int | None = None

    def attribute(self, number: int) -> int:
        return ATTRIBUTES[number]

    def resources(self, kernel: str) -> Resources:
        return Resources(56, 0, 0, 128)

    def resident_blocks(self, kernel: str, threads: int) -> int | None:
        return self.blocks

    def elapsed_us(
        self, stream: Stream, work: Callable[[], None], before: Callable[[], None]
    ) -> float:
        before()
        stream.wait()
        start = time.perf_counter_ns()
        work()
        stream.wait()
        return (time.perf_counter_ns() - start) / 1000

    def copy(self, stream: Stream, to: int, source: int, size: int) -> None:
        raise AssertionError("no profile copies")

    def more_kernels(self, image: Path, names: tuple[str, ...]) -> None:
        raise AssertionError("a profile is of the kernels that are there")


STEP = {"what": "a step", "us": 900.0, "gb_per_s": 300.0, "note": "a note"}


def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all parts measured in this process, without the compiler and PyTorch."""
    usages = kernel_resources.of_ptxas(PTXAS)
    found = kernel_resources.Found(usages, "a test")
    monkeypatch.setattr(kernel_resources, "look", lambda fatbin: found)
    document = profile_gpu.document

    def ask(part: str) -> dict[str, Any]:
        return profile_gpu.kernels_part() if part == "kernels" else dict(STEP)

    monkeypatch.setattr(profile_gpu, "document", lambda: document(ask=ask))


def test_every_kernel_does_its_work_while_it_is_timed(library: Library) -> None:
    gpu = TimedGpu(library)
    found = list(profile_gpu.measure(gpu, slots=4, tokens=32, runs=2))
    assert [row.kernel for row in found] == [
        "dp_admission_tick", "dp_admission_tick", "dp_admission_resident", "dp_engine_turn",
        "dp_echo",
    ]  # fmt: skip
    assert all(row.us > 0 and row.gb_per_s > 0 for row in found)
    assert found[1].each_us == pytest.approx(found[1].us / 4, abs=0.01)
    echo = found[-1]
    assert echo.moved_bytes == 4 * 32 * 8
    # 56 registers a thread are 7,168 a block, of 65,536; 128 threads, of 2,048.
    assert (echo.blocks, echo.occupancy, echo.occupancy_by) == (9, 0.5625, "computed")
    assert gpu.allocated == {}
    assert gpu.mapped == {}


def test_the_driver_has_the_word_on_occupancy(library: Library) -> None:
    gpu = TimedGpu(library)
    gpu.blocks = 16
    echo = list(profile_gpu.measure(gpu, slots=1, tokens=8, runs=1))[-1]
    assert (echo.blocks, echo.occupancy, echo.occupancy_by) == (16, 1.0, "the driver")


def test_the_cards_bandwidth_is_its_clocks_and_its_buss(library: Library) -> None:
    device = profile_gpu.device_of(TimedGpu(library))
    assert device["memory_gb_per_s"] == 3352.3
    assert device["architecture"] == "sm_90"


def test_an_echo_that_was_not_published_is_an_error(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.device_table.DeviceTable.submit", lambda *arguments: -3)
    with pytest.raises(Exception, match="publishing a prompt was answered with -3"):
        list(profile_gpu.measure(TimedGpu(library), slots=1, tokens=8, runs=1))


def test_what_is_printed_names_times_card_and_registers(
    library: Library, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = TimedGpu(library)
    here(monkeypatch)
    monkeypatch.setattr(profile_gpu, "CupyGpu", lambda: gpu)
    rows = list(profile_gpu.measure(gpu, slots=2, tokens=8, runs=1))
    monkeypatch.setattr(profile_gpu, "measure", lambda gpu: rows)
    monkeypatch.setenv("COLUMNS", "200")
    assert profile_gpu.run(as_json=False) == 0
    said = capsys.readouterr().out
    assert "3,352.3 GB/s (2 x 2,619,000 kHz x 5,120 bits)" in said
    assert "dp_admission_resident" in said
    assert "900.0 µs, 300.0 GB/s, 9% of the memory's" in said
    assert "56.2%" in said
    assert profile_gpu.run(as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kernels"][0]["registers"] == 56
    assert document["waived"] is None


@pytest.mark.parametrize("columns", ["80", "200"])
def test_no_figure_is_cut_off(
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    columns: str,
) -> None:
    gpu = TimedGpu(library)
    [first, *rest] = profile_gpu.measure(gpu, slots=2, tokens=8, runs=1)
    rows = [dataclasses.replace(first, us=12_345.67, gb_per_s=0.12345, share=0.1234), *rest]
    here(monkeypatch)
    monkeypatch.setattr(profile_gpu, "CupyGpu", lambda: gpu)
    monkeypatch.setattr(profile_gpu, "measure", lambda gpu: rows)
    monkeypatch.setenv("COLUMNS", columns)
    assert profile_gpu.run(as_json=False) == 0
    said = capsys.readouterr().out
    for figure in ("12,345.67", "0.12345", "12.34%", "dp_admission_resident"):
        assert figure in said
    assert "…" not in said


def test_a_device_that_fails_is_waived_in_its_words(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise CudaError("no\ndevice")

    here(monkeypatch)
    monkeypatch.setattr(profile_gpu, "CupyGpu", fail)
    assert profile_gpu.document()["waived"] == "no device"


def test_what_was_measured_before_a_failure_is_printed(
    library: Library, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(TimedGpu):
        def resources(self, kernel: str) -> Resources:
            if kernel == "dp_engine_turn":
                raise CudaError("a kernel failed")
            return super().resources(kernel)

    here(monkeypatch)
    measure = profile_gpu.measure
    monkeypatch.setattr(profile_gpu, "CupyGpu", lambda: Failing(library))
    monkeypatch.setattr(profile_gpu, "measure", lambda gpu: measure(gpu, 2, 8, 1))
    monkeypatch.setenv("COLUMNS", "200")
    assert profile_gpu.run(as_json=False) == 0
    said = capsys.readouterr().out
    assert "dp_admission_resident" in said
    assert "dp_echo" not in said.split("by a test")[1]
    assert "waived: a kernel failed" in said
    assert "decode step on PyTorch: 900.0" in said


def test_a_card_whose_driver_states_no_clock_is_measured(library: Library) -> None:
    class Unclocked(TimedGpu):
        def attribute(self, number: int) -> int:
            return 0 if number == 36 else super().attribute(number)

    rows = list(profile_gpu.measure(Unclocked(library), slots=1, tokens=8, runs=1))
    assert {row.share for row in rows} == {None}
    assert all(row.us > 0 for row in rows)


@pytest.mark.parametrize(
    ("ended", "found"),
    [
        (Ended({"us": 1}, None, "", 1.0), {"us": 1}),
        (Ended(None, "it ended with status 1", "T\nValueError: no\n", 1.0),
         {"waived": "it ended with status 1: ValueError: no"}),
        (Ended({"kernels": [1]}, "it was not done within 120 s", "", 1.0),
         {"kernels": [1], "waived": "it was not done within 120 s"}),
    ],
)  # fmt: skip
def test_a_part_that_ends_early_is_waived_with_what_it_had(
    monkeypatch: pytest.MonkeyPatch, ended: Ended, found: dict[str, object]
) -> None:
    monkeypatch.setattr(profile_gpu, "run_apart", lambda command, within_s: ended)
    assert profile_gpu.ask_apart("kernels") == found


def test_without_a_gpu_the_command_ends_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dataplane", "profile", "--gpu"],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": "/none"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "machine code: waived: there is no nvcc" in done.stdout
    assert "times, occupancy, bytes moved: waived: " in done.stdout
    assert "decode step on PyTorch: waived: " in done.stdout
