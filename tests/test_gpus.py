"""The machine's devices as NVML lists them, and which of them a process would get."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import CARD, GIB, INSTANCE, OTHER_CARD, FakeNvml, card

from dataplane.errors import UsageError
from dataplane.gpus import Device, Instance, look, visible
from dataplane.installing import pip_install


def test_a_card_is_listed_with_all_that_is_known_of_it() -> None:
    nvml = FakeNvml(card())
    found = look(nvml)
    assert found.devices == (Device(0, CARD, "NVIDIA H200", (9, 0), 140 * GIB, "off", 7),)
    assert (found.driver, found.cuda, found.missing) == ("580.95.05", "13.0", None)
    assert found.devices[0].architecture == "sm_90"
    assert nvml.open == 0, "NVML is left open"


def test_the_instances_of_a_split_card_are_listed_with_their_gaps() -> None:
    [device] = look(FakeNvml(card(mig="on", instances=(0, 2, 6)))).devices
    assert device.mig == "on"
    assert device.mig_most == 7
    assert device.instances == tuple(
        Instance(place, INSTANCE.format(place), "NVIDIA H200 MIG 1g.18gb", 16 * GIB)
        for place in (0, 2, 6)
    )


def test_what_a_small_card_does_not_support_is_no_error() -> None:
    [device] = look(FakeNvml(card(mig="none", memory=None, capability=(8, 7)))).devices
    assert (device.mig, device.mig_most, device.instances) == ("none", 0, ())
    assert device.memory_bytes == 0
    assert device.architecture == "sm_87"


@pytest.mark.parametrize("answer", [2, 4, 6])
def test_a_place_without_an_instance_of_ours_is_passed_over(answer: int) -> None:
    found = look(FakeNvml(card(mig="on", instances=(3,)), fails={"a gap": answer}))
    assert [instance.index for instance in found.devices[0].instances] == [3]


def test_an_instance_is_listed_where_its_cards_memory_is_not_told() -> None:
    """As in a container that was given the instance alone."""
    found = look(FakeNvml(card(mig="on", instances=(1,), memory=-1)))
    assert found.missing is None
    [device] = found.devices
    assert device.memory_bytes is None
    assert [instance.memory_bytes for instance in device.instances] == [16 * GIB]


@pytest.mark.parametrize(
    ("number", "what", "helps"),
    [
        (12, "there is no NVIDIA driver", "--gpus all"),
        (9, "not loaded", "modprobe nvidia"),
        (18, "does not answer", "restart the machine"),
        (4, "does not answer", "/dev/nvidia*"),
        (999, "does not answer", "nvidia-smi"),
    ],
)
def test_a_driver_that_does_not_answer_is_told_with_a_remedy(
    number: int, what: str, helps: str
) -> None:
    found = look(FakeNvml(fails={"nvmlInit": number}))
    assert found.devices == ()
    assert found.missing is not None
    assert what in found.missing
    assert found.remedy is not None
    assert helps in found.remedy


def test_an_error_after_the_beginning_closes_nvml_too() -> None:
    nvml = FakeNvml(card(), fails={"nvmlDeviceGetCount": 999})
    assert look(nvml).missing == "the NVIDIA driver does not answer: error 999"
    assert nvml.open == 0


# Without nvidia-ml-py.


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.mark.usefixtures("no_nvml")
def test_without_nvml_the_drivers_file_says_whether_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert look(driver_file=tmp_path / "none").missing == (
        "there is no NVIDIA driver on this machine"
    )
    there = tmp_path / "version"
    there.write_text("NVRM version")
    found = look(driver_file=there)
    assert found.missing is not None
    assert "nvidia-ml-py, which asks it, is not installed" in found.missing
    assert found.remedy == pip_install("gpu")


@pytest.mark.usefixtures("no_nvml")
def test_where_only_cupy_is_installed_a_process_of_its_own_asks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "version"
    there.write_text("NVRM version")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    answer = {
        "cuda": 12080,
        "devices": [["NVIDIA A100", 8, 0, 80 * GIB, CARD[4:].replace("-", "")]],
    }

    def run(command: list[str], **options: Any) -> Any:
        assert command[0] == sys.executable
        return subprocess.CompletedProcess(command, 0, json.dumps(answer), "")

    monkeypatch.setattr(subprocess, "run", run)
    found = look(driver_file=there)
    assert found.devices == (Device(0, CARD, "NVIDIA A100", (8, 0), 80 * GIB),)
    assert found.cuda == "12.8"

    def fail(command: list[str], **options: Any) -> Any:
        raise subprocess.CalledProcessError(1, command, stderr="Traceback\ncudaErrorNoDevice: no\n")

    monkeypatch.setattr(subprocess, "run", fail)
    assert look(driver_file=there).missing == (
        "CuPy cannot list the devices: cudaErrorNoDevice: no"
    )


FAKE_CUPY = """
import os
from types import SimpleNamespace
NAMES = [b"first", b"second"][: 1 if "CUDA_VISIBLE_DEVICES" in os.environ else 2]
assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
cuda = SimpleNamespace(runtime=SimpleNamespace(
    getDeviceCount=lambda: len(NAMES), driverGetVersion=lambda: 12080,
    getDeviceProperties=lambda number: {
        "name": NAMES[number], "major": 9, "minor": 0, "totalGlobalMem": 1 << 30, "uuid": b"\\x01"},
))
"""
FAKE_DRIVER = """
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = i % 2 ? i + device : 0;
    return 0;
}
"""


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_cupy_lists_all_devices_by_their_whole_uuids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cupy.py").write_text(FAKE_CUPY)
    (tmp_path / "driver.c").write_text(FAKE_DRIVER)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", "libcuda.so.1", "driver.c"], cwd=tmp_path, check=True
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    found = look(driver_file=tmp_path / "cupy.py")
    assert [device.uuid for device in found.devices] == [
        "GPU-00010003-0005-0007-0009-000b000d000f",
        "GPU-00020004-0006-0008-000a-000c000e0010",
    ], found.missing
    assert [device.index for device in visible(found, {"CUDA_VISIBLE_DEVICES": "1"})] == [0, 1]


# CUDA_VISIBLE_DEVICES.

BOTH = look(
    FakeNvml(
        card(mig="on", instances=(1,)),
        card(OTHER_CARD, "NVIDIA A10", (8, 6), 24 * GIB, "none"),
    )
)


@pytest.mark.parametrize(
    ("names", "order", "indices"),
    [
        (None, None, [0, 1]),
        ("1", "PCI_BUS_ID", [1]),
        ("1", None, [0, 1]),  # CUDA's own order may be another one
        (OTHER_CARD, None, [1]),
        (OTHER_CARD[:9] + ",0", None, [1]),
        (INSTANCE.format(1), None, [0]),
    ],
)
def test_the_devices_that_cuda_would_take(
    names: str | None, order: str | None, indices: list[int]
) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": names, "CUDA_DEVICE_ORDER": order}
    given = {name: value for name, value in environ.items() if value is not None}
    assert [device.index for device in visible(BOTH, given)] == indices


@pytest.mark.parametrize("names", ["", "-1", "2", "GPU-dead", "MIG-dead", "no"])
def test_a_variable_that_leaves_no_device_is_refused(names: str) -> None:
    with pytest.raises(UsageError, match=f"CUDA_VISIBLE_DEVICES='{names}' leaves none"):
        visible(BOTH, {"CUDA_VISIBLE_DEVICES": names})
