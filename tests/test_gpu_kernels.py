"""What nvcc makes of the kernels: every target compiles, with the scoped instructions that the
design asks for and no spills; and what it says of the driver's calls. Without nvcc these are
skipped, and say so."""

import re
import shutil
import subprocess
from pathlib import Path

import gpu_programs
import native_programs
import pytest

from dataplane import fatbin, kernels

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="waived: there is no nvcc here (the CUDA toolkit)"
)

SOURCE = kernels.SOURCES / "gpu" / "kernels.cu"
ENTRIES = {"dp_admission_tick", "dp_admission_resident", "dp_echo", "dp_engine_turn"}
MOST_REGISTERS = 80
TARGETS = (80, 90, 100)


def nvcc(*arguments: str) -> str:
    done = subprocess.run(["nvcc", "-std=c++20", "-O3", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def known_targets() -> set[int]:
    return {int(number) for number in re.findall(r"sm_(\d+)\b", nvcc("--list-gpu-code"))}


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    to = tmp_path_factory.mktemp("ptx") / "kernels.ptx"
    nvcc("-arch=compute_80", "-ptx", "-o", str(to), str(SOURCE))
    return to.read_text(encoding="utf-8")


def entry(ptx: str, name: str) -> str:
    """Return the body of one kernel."""
    found = re.search(rf"\.entry {name}\(.*?\n\}}\n", ptx, re.DOTALL)
    assert found, name
    return found[0]


def test_every_kernel_is_in_the_image(ptx: str) -> None:
    assert set(re.findall(r"\.entry (\w+)\(", ptx)) == ENTRIES


@pytest.mark.parametrize("name", ["dp_admission_tick", "dp_admission_resident"])
def test_admission_has_the_scoped_instructions(ptx: str, name: str) -> None:
    body = entry(ptx, name)
    for instruction in (
        "ld.acquire.sys.global.u64",  # a command
        "st.release.sys.global.u64",  # a verdict, a mirror
        "atom.acq_rel.gpu.global.cas.b64",  # a slot's word
        "ld.acquire.gpu.global.u64",
        "ld.relaxed.gpu.global.u64",  # the probe
    ):
        assert instruction in body, instruction


def test_echo_has_the_scoped_instructions(ptx: str) -> None:
    body = entry(ptx, "dp_echo")
    for instruction in (
        "atom.acq_rel.gpu.global.cas.b64",  # take, finish
        "st.release.sys.global.u64",  # progress and mirrors
        "st.release.gpu.global.u64",  # a slot given back
        "bar.sync",
    ):
        assert instruction in body, instruction


def test_an_engines_turn_has_the_scoped_instructions(ptx: str) -> None:
    body = entry(ptx, "dp_engine_turn")
    for instruction in (
        "atom.acq_rel.gpu.global.cas.b64",  # take, finish
        "st.release.sys.global.u64",  # progress and mirrors
        "st.release.gpu.global.u64",  # a slot given back
        "ld.relaxed.gpu.global.u64",  # whether a slot is READY, or cancelled
    ):
        assert instruction in body, instruction
    assert "bar.sync" not in body


def test_every_swap_is_in_device_memory_at_device_scope(ptx: str) -> None:
    swaps = set(re.findall(r"\b(?:atom|red)\.[\w.]+", ptx))
    assert swaps == {"atom.acq_rel.gpu.global.cas.b64"}


NON_COHERENT = r"\bld\.[\w.]*nc\b[\w.]*|\btex\.|\bldu\."


def test_nothing_is_read_through_the_non_coherent_path(ptx: str) -> None:
    assert not re.findall(NON_COHERENT, ptx)


def test_a_prompt_read_that_way_is_noticed(tmp_path: Path) -> None:
    for header in ("slots_device.cuh", "words.cuh", "echo.cu"):
        text = (SOURCE.parent / header).read_text(encoding="utf-8")
        text = text.replace("(uint32_t)prompt[i]", "(uint32_t)__ldg(&prompt[i])")
        (tmp_path / header).write_text(text, encoding="utf-8")
    include = f"-I{SOURCE.parent}"
    nvcc("-arch=compute_80", "-ptx", include, "-o", str(tmp_path / "k"), str(tmp_path / "echo.cu"))
    assert re.findall(NON_COHERENT, (tmp_path / "k").read_text(encoding="utf-8"))


def test_no_fences_no_warp_intrinsics_no_shared_memory(ptx: str) -> None:
    for instruction in ("membar", "fence.", "shfl", "vote", "match.", ".shared", ".volatile"):
        assert instruction not in ptx, instruction


def test_a_resident_kernel_naps_and_a_tick_does_not(ptx: str) -> None:
    assert "nanosleep" in entry(ptx, "dp_admission_resident")
    assert "nanosleep" not in entry(ptx, "dp_admission_tick")


@pytest.mark.parametrize("target", TARGETS)
def test_machine_code_spills_nothing(target: int, tmp_path: Path) -> None:
    if target not in known_targets():
        pytest.skip(f"waived: this nvcc knows no sm_{target}")
    arguments = (f"-arch=sm_{target}", "-cubin", "-Xptxas", "-v", "-Wno-deprecated-gpu-targets")
    said = nvcc(*arguments, "-o", str(tmp_path / "kernels.cubin"), str(SOURCE))
    named = re.findall(r"entry function '(\w+)' for 'sm_(\d+)'", said)
    assert {name for name, _ in named} == ENTRIES
    assert {int(machine) for _, machine in named} == {target}
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", said)
    assert frames == [("0", "0", "0")] * len(ENTRIES)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", said)]
    assert len(registers) == len(ENTRIES)
    assert max(registers) <= MOST_REGISTERS


def test_the_image_holds_every_target_and_ptx(tmp_path: Path) -> None:
    compiler = shutil.which("nvcc")
    assert compiler is not None
    kernels.compile_kernels(compiler, tmp_path / "kernels.fatbin")
    image = (tmp_path / "kernels.fatbin").read_bytes()
    assert b".entry dp_echo(" in image, "the PTX is packed, which not every driver unpacks"
    found = fatbin.targets_of(image, "kernels.fatbin")
    machines = [f"sm_{target}" for target in TARGETS if target in known_targets()]
    assert list(found) == [*machines, "compute_80"]


# The declarations.


def test_the_drivers_calls_are_declared_as_cuda_declares_them(tmp_path: Path) -> None:
    program = str(native_programs.PROGRAMS / "driver_types.cpp")
    # nvcc knows where its headers are.
    nvcc("-c", "-x", "c++", f"-I{gpu_programs.GPU}", program, "-o", str(tmp_path / "none.o"))
