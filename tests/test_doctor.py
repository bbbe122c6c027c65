"""`dataplane doctor`: what is there, what is not, and a remedy for each lack."""

import importlib.metadata
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import CARD, GIB, INSTANCE, OTHER_CARD, FakeNvml, card
from fatbins import WHOLE

from dataplane import doctor, gpus, model
from dataplane.doctor import ABSENT, MISSING, OK, Finding, Report, examine, memlock, ranges


def report(*cards: Any, **fails: int) -> Report:
    return examine(lambda: gpus.look(FakeNvml(*cards, fails=fails)))


def named(report: Report, name: str) -> Finding:
    [finding] = [finding for finding in report.findings if finding.name.strip() == name]
    return finding


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_this_machine_can_run_the_daemon() -> None:
    found = report()
    assert found.can_run
    for name in ("memfd", "eventfd", "SO_TIMESTAMPNS", "libcrypto"):
        assert named(found, name).state == OK
    assert named(found, "libcrypto").found.startswith("OpenSSL 3.")
    assert named(found, "AES-GCM").found.startswith(("by ipsec-mb", "by libcrypto"))


def test_every_lack_has_a_remedy() -> None:
    found = report(nvmlInit=12)
    for finding in found.findings:
        assert finding.state == OK or finding.remedy, finding


def test_without_a_driver_it_says_so_and_that_is_no_failure() -> None:
    found = report(nvmlInit=12)
    assert named(found, "driver").found == "there is no NVIDIA driver on this machine"
    assert named(found, "driver").state == ABSENT
    assert found.can_run


def test_a_card_and_its_instances_are_told_in_words() -> None:
    found = report(
        card(mig="on", instances=(0, 5)), card(OTHER_CARD, "NVIDIA A10", (8, 6), 24 * GIB, "none")
    )
    assert named(found, "driver").found == "580.95.05, up to CUDA 13.0"
    assert named(found, "device 0").found == (
        f"{CARD}  NVIDIA H200, sm_90, 140.0 GiB, MIG on: 2 of at most 7 instances"
    )
    assert named(found, "instance 5").found == (
        f"{INSTANCE.format(5)}  NVIDIA H200 MIG 1g.18gb, 16.0 GiB"
    )
    assert named(found, "device 1").found == (
        f"{OTHER_CARD}  NVIDIA A10, sm_86, 24.0 GiB, cannot be split (no MIG)"
    )


def test_a_card_that_could_be_split_says_into_how_many() -> None:
    assert named(report(card()), "device 0").found.endswith(
        "MIG off (it could be split into at most 7 instances)"
    )


def test_a_split_card_without_instances_runs_nothing_and_says_so() -> None:
    device = named(report(card(mig="on")), "device 0")
    assert device.state == ABSENT
    assert device.remedy is not None
    assert "nvidia-smi mig" in device.remedy


def test_a_driver_without_devices_says_so() -> None:
    assert named(report(), "devices").found == "the driver lists none"


@pytest.mark.parametrize(
    ("names", "state", "text"),
    [
        (CARD, OK, f"CUDA_VISIBLE_DEVICES='{CARD}': device 0"),
        ("7", ABSENT, "CUDA_VISIBLE_DEVICES='7' leaves none of this machine's devices"),
    ],
)
def test_the_choice_of_the_environment_is_shown(
    monkeypatch: pytest.MonkeyPatch, names: str, state: str, text: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    visible = named(report(card()), "visible")
    assert (visible.state, visible.found) == (state, text)


def test_what_the_daemon_cannot_do_without_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("os.memfd_create", fail)
    found = report()
    assert not found.can_run
    memfd = named(found, "memfd")
    assert memfd.state == MISSING
    assert memfd.found == "sealed shared memory: Function not implemented"
    assert "MISSING: sealed shared memory" in str(found)
    assert "-> run a newer kernel" in str(found)


def test_what_it_does_without_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(level: int, option: int) -> None:
        if option == 104:
            raise OSError(92, "Protocol not available")

    monkeypatch.setattr(doctor, "_set_option", fail)
    found = report()
    assert named(found, "UDP GRO").state == ABSENT
    assert found.can_run


def test_one_core_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3})
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    cores = named(report(), "cores")
    assert (cores.state, cores.found) == (ABSENT, "1 of 8 (3)")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [({0}, "0"), ({0, 1, 2, 3, 8}, "0-3,8"), ({5, 1, 3}, "1,3,5"), (set(), "")],
)
def test_cores_are_listed_as_the_kernel_does(numbers: set[int], text: str) -> None:
    assert ranges(numbers) == text


@pytest.mark.parametrize(
    ("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None)]
)
def test_a_control_groups_quota_is_read(tmp_path: Path, text: str, cores: float | None) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(text)
    assert doctor.read_quota(path) == cores
    assert doctor.read_quota(tmp_path / "none") is None


def test_a_small_limit_of_locked_memory_is_told() -> None:
    assert memlock(resource.RLIM_INFINITY).found == "no limit"
    assert memlock(8 << 30).state == OK
    small = memlock(8 << 20)
    assert (small.state, small.found.split(",")[0]) == (ABSENT, "at most 8192 KiB")
    assert small.remedy is not None
    assert "--ulimit memlock=-1" in small.remedy


def test_the_kernels_and_their_targets_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "k.fatbin"
    monkeypatch.setattr(doctor, "_kernels_file", lambda: path)
    lack = named(report(), "kernels")
    assert (lack.state, lack.found) == (ABSENT, "not built")
    assert lack.remedy is not None
    assert lack.remedy.startswith("make kernels")
    path.write_bytes(WHOLE)
    assert named(report(), "kernels").found == "sm_80, sm_100, compute_80 (PTX)"
    path.write_bytes(b"x")
    assert named(report(), "kernels").found == f"{path} is no fatbin"


@pytest.mark.parametrize(
    ("installed", "weights", "found", "remedy"),
    [
        ((), True, "not installed; it is for smollm2-torch", "pip install -e '.[torch]'"),
        (("torch",), True, "2.13, for smollm2-torch, but gguf is not installed", "pip install -e"),
        (("torch", "gguf"), False, "but the model SmolLM2-135M-Instruct is not", "model install"),
        (("torch", "gguf"), True, "2.13, for smollm2-torch", None),
    ],
)
def test_what_smollm2_torch_lacks_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: tuple[str, ...],
    weights: bool,
    found: str,
    remedy: str | None,
) -> None:
    def version(package: str) -> str:
        if package in installed:
            return "2.13"
        raise importlib.metadata.PackageNotFoundError(package)

    def directory(module: str) -> Path | None:
        return tmp_path if module == model.WEIGHTS_MODULE and weights else None

    (tmp_path / model.GGUF_NAME).touch()
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(model, "_package_dir", directory)
    torch = named(report(), "torch")
    assert found in torch.found
    assert torch.state == (ABSENT if remedy else OK)
    assert (remedy is None) == (torch.remedy is None)
    assert (remedy or "") in (torch.remedy or "")


def test_the_json_holds_the_same_and_the_devices() -> None:
    found = report(card(mig="on", instances=(1,)))
    page = json.loads(found.to_json())
    assert page["can_run"] is True
    assert len(page["findings"]) == len(found.findings)
    assert page["gpu"]["driver"] == "580.95.05"
    assert page["gpu"]["mig_most_instances"] == 7
    [device] = page["gpu"]["devices"]
    assert device["capability"] == [9, 0]
    assert device["instances"][0]["uuid"] == INSTANCE.format(1)


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_the_command_ends_with_0_on_this_machine(flags: tuple[str, ...]) -> None:
    line = [sys.executable, "-m", "dataplane", "doctor", *flags]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if flags:
        assert json.loads(done.stdout)["can_run"] is True
    else:
        assert done.stdout.startswith("processor  cores")
