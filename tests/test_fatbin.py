"""What a fatbin was built for, read from its bytes; and what that runs on."""

import shutil
import subprocess
from pathlib import Path

import pytest
from fatbins import MACHINE, OTHER, PTX, WHOLE, entry, fatbin

from dataplane.fatbin import FatbinError, fit, is_target, say_target, targets_of


def test_the_targets_are_read_in_order() -> None:
    assert targets_of(WHOLE, "k") == ("sm_80", "sm_100", "compute_80")
    assert targets_of(fatbin(entry(MACHINE, 90)) + fatbin(entry(PTX, 90)), "k") == (
        "sm_90",
        "compute_90",
    )


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "holds no kernels"),
        (fatbin(), "holds no kernels"),
        (fatbin(entry(OTHER, 0)), "holds no kernels"),
        (b"\x7fELF" + bytes(60), "is no fatbin"),
        (WHOLE[:8], "is no fatbin"),
        (WHOLE + b"x", "is no fatbin"),
        (WHOLE[:-1], "shorter than it says"),
        (fatbin(entry(PTX, 80)[:20]), "ends inside of an entry"),
        (fatbin(entry(PTX, 80)[:-1]), "reaches past its end"),
        (fatbin(entry(PTX, 80, stated=2**40)), "reaches past its end"),
        (fatbin(bytes(40)), "reaches past its end"),
    ],
)
def test_what_is_no_whole_fatbin_is_refused_by_name(data: bytes, why: str) -> None:
    with pytest.raises(FatbinError, match=f"^/some/k .*{why}"):
        targets_of(data, "/some/k")


@pytest.mark.parametrize("cut", range(len(WHOLE)))
def test_every_beginning_of_one_is_refused(cut: int) -> None:
    with pytest.raises(FatbinError):
        targets_of(WHOLE[:cut], "k")


BUILT = ("sm_80", "sm_90", "sm_100", "compute_80")


@pytest.mark.parametrize(
    ("targets", "capability", "taken"),
    [
        (BUILT, (9, 0), "sm_90"),
        (BUILT, (8, 0), "sm_80"),
        (BUILT, (8, 9), "sm_80"),
        (BUILT, (10, 3), "sm_100"),
        (BUILT, (12, 0), "compute_80"),
        (BUILT, (7, 5), None),
        (("sm_86",), (8, 0), None),
        (("sm_80", "sm_86"), (8, 9), "sm_86"),
        (("sm_80",), (9, 0), None),
        (("compute_80", "compute_90"), (12, 0), "compute_90"),
        (("compute_90",), (8, 9), None),
        (("cpu",), (9, 0), None),
        ((), (9, 0), None),
    ],
)
def test_what_a_device_takes(
    targets: tuple[str, ...], capability: tuple[int, int], taken: str | None
) -> None:
    assert fit(targets, capability) == taken


def test_how_targets_are_spelt() -> None:
    assert all(map(is_target, (*BUILT, "cpu")))
    assert not any(map(is_target, ("", "sm_", "sm_9", "sm_90a", "gpu", "compute_90 (PTX)")))
    assert say_target("compute_80") == "compute_80 (PTX)"
    assert say_target("sm_80") == "sm_80"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_it_reads_what_nvcc_makes(tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text('extern "C" __global__ void k(int *a) { *a = 1; }\n')
    target = tmp_path / "k.fatbin"
    codes = ("arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90",
             "arch=compute_80,code=compute_80")  # fmt: skip
    subprocess.run(
        [
            "nvcc",
            "-fatbin",
            *(f"-gencode={code}" for code in codes),
            str(source),
            "-o",
            str(target),
        ],
        check=True,
    )
    assert targets_of(target.read_bytes(), "k") == ("sm_80", "sm_90", "compute_80")
