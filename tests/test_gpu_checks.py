"""`make test-gpu` without a GPU: waived, never passed; its checks hold on host threads; and one
that fails, hangs or crashes hides no other."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_checks
import gpu_runs
import pytest
from host_gpu import HostGpu, Library

from dataplane.apart import Ended
from dataplane.runtime.cuda import CudaError

PROGRAM = Path(__file__).with_name("gpu_runs.py")


def test_without_a_gpu_every_check_is_waived_with_its_reason() -> None:
    start = time.monotonic()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    names = [gpu_runs.DEVICE, *gpu_checks.CHECKS]
    assert len(lines) == len(names)
    for line, name in zip(lines, names, strict=True):
        assert line.startswith(f"{name}: waived: "), line
        assert len(line) > len(f"{name}: waived: ") + 20
    assert "passed" not in done.stdout
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("name", gpu_checks.CHECKS)
def test_a_check_holds_on_host_threads(name: str, library: Library) -> None:
    gpu = HostGpu(library)
    try:
        assert gpu_checks.CHECKS[name](gpu)
    except gpu_checks.WaivedError as error:
        pytest.skip(str(error))
    assert gpu.allocated == {}
    assert gpu.mapped == {}


def test_a_capture_that_admission_spoils_is_noticed(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = HostGpu(library)
    monkeypatch.setattr(gpu, "capture", lambda capturing=True: gpu.fail("cuStreamQuery", 900))
    with pytest.raises((AssertionError, CudaError)):
        gpu_checks.check_capture(gpu)


def test_steps_that_differ_from_the_cpus_are_noticed(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="no PyTorch")
    pytest.importorskip("gguf", reason="no gguf")
    logits, calls = gpu_checks._logits, []

    def wrong(batcher: Any, runtime: Any) -> Any:
        calls.append(batcher)
        return logits(batcher, runtime) * (1.2 if len(calls) == 1 else 1)

    monkeypatch.setattr(gpu_checks, "_logits", wrong)
    with pytest.raises(AssertionError, match="captured and eager"):
        gpu_checks.check_torch(HostGpu(library))


@pytest.mark.slow
def test_what_fails_hangs_or_crashes_hides_no_other(tmp_path: Path, library: Library) -> None:
    kept = tmp_path / "results" / "checks.json"
    faults = {
        "region": "crash",
        "admission by tick": "cuLaunchKernel=700",
        "admission by a resident kernel": "stuck",
    }
    names = [*faults, "abandoned claim"]
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--host-threads", f"--json={kept}", "--limit=8",
         *(f"--only={name}" for name in names)],
        capture_output=True, text=True, check=False, timeout=100,
        env={**os.environ, gpu_runs.FAULTS: ";".join(f"{k}={v}" for k, v in faults.items())},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert time.monotonic() - start < 80
    found = json.loads(kept.read_text(encoding="utf-8"))
    assert (found["is_gpu"], found["complete"]) == (False, False)
    states = {name: one["state"] for name, one in found["checks"].items()}
    assert states == dict.fromkeys(faults, "failed") | {
        gpu_runs.DEVICE: "passed", "abandoned claim": "passed",
    }  # fmt: skip
    said = {name: one["said"] for name, one in found["checks"].items()}
    assert said["region"] == "it was ended by SIGSEGV"
    assert "an unknown CUDA error, 700" in said["admission by tick"]
    assert "touched memory" in said["admission by tick"]
    assert said["admission by a resident kernel"] == "it was not done within 8 s"
    assert "cuda_admission.py" in found["checks"]["admission by a resident kernel"]["output"]
    for name, one in found["checks"].items():
        told = "FAILED" if one["state"] == "failed" else one["state"]
        assert f"{name}: {told}: {one['said']}" in done.stdout


def test_a_failure_says_where_and_what(monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
    class Forgetful(HostGpu):
        def download(self, address: int, size: int) -> bytes:
            return b"\0" * size

    monkeypatch.setattr(gpu_runs, "_open", lambda path: Forgetful(library))
    found = gpu_runs.run_check("region", None)
    assert found["state"] == "failed"
    assert found["said"].startswith("AssertionError in check_region: assert int.from_bytes(")


@pytest.mark.parametrize(
    ("is_there", "visible", "state"),
    [(False, "0", "waived"), (True, "0", "failed"), (True, "", "waived")],
)
def test_a_device_that_cannot_be_used_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool, visible: str, state: str
) -> None:
    def refuse(path: Path | None) -> Any:
        raise CudaError("no CuPy")

    monkeypatch.setattr(gpu_runs, "_open", refuse)
    monkeypatch.setattr("dataplane.gpus.DRIVER", tmp_path if is_there else tmp_path / "none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_runs.run_check("region", None) == {"state": state, "said": "no CuPy"}


def test_without_its_device_no_check_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def hang(command: list[str], limit_s: float, environ: object = None) -> Ended:
        asked.append(command[-1])
        return Ended(None, "it was not done within 45 s", "Timeout!", limit_s)

    monkeypatch.setattr(gpu_runs, "run_apart", hang)
    runs = gpu_runs.Runs(None, None, None)
    assert gpu_runs.run_all(runs, ["region"]) == 1
    assert asked == [gpu_runs.DEVICE]
    assert runs.found["region"] == {"state": "failed", "said": "not run: see the device"}


def test_nothing_is_begun_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_runs, "TOTAL_S", 0.5)
    assert gpu_runs.Runs(None, None, None).run("region")["said"] == "not run: 0.5 s are over"
