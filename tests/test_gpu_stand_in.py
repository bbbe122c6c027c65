"""All that a first run on a GPU does, as it is done there, save that CuPy and CUDA's driver are
stand-ins: the checks, the bench with all its parts, and the profile."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_checks
import gpu_programs
import pytest

from bench import gpu_parts
from bench.results import ROOT
from dataplane import kernels
from dataplane.runtime.cuda import KERNELS

TESTS = Path(__file__).parent
# Of PyTorch and of compute-sanitizer there is none.
CHECKS = [name for name in gpu_checks.CHECKS if name not in gpu_checks.OF_THE_DEVICE_ALONE]

pytestmark = pytest.mark.skipif(
    shutil.which(gpu_programs.cxx()) is None or shutil.which("nvcc") is None,
    reason="waived: no C++ compiler or no nvcc here",
)


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Where `cupy` and CUDA's driver are the tests'."""
    folder = tmp_path_factory.mktemp("gpu")
    gpu_programs.build_library(folder).rename(folder / "libcuda.so.1")
    shutil.copy(TESTS / "stand_in_cupy.py", folder / "cupy.py")
    if not KERNELS.exists():
        assert kernels.main() == 0
    paths = {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(folder)}
    return {**os.environ, **paths, "CUDA_VISIBLE_DEVICES": "0"}


def run(
    environ: dict[str, str], *command: str, status: int = 0
) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=200, check=False,
        cwd=ROOT, env=environ,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("region", "capture beside admission", "cuda-echo"), id="some"),
        pytest.param(CHECKS, id="all", marks=pytest.mark.slow),
    ],
)
def test_the_checks_pass(tmp_path: Path, environ: dict[str, str], names: Sequence[str]) -> None:
    kept = tmp_path / "checks.json"
    only = [f"--only={name}" for name in names]
    run(environ, str(TESTS / "gpu_runs.py"), f"--json={kept}", *only)
    found = json.loads(kept.read_text(encoding="utf-8"))
    assert found["is_gpu"] is True
    assert found["checks"].pop("device")["said"].startswith("stand-in, compute capability 9.0")
    assert {name: one["state"] for name, one in found["checks"].items()} == dict.fromkeys(
        names, "passed"
    )


@pytest.mark.slow
def test_the_bench_measures_every_part(tmp_path: Path, environ: dict[str, str]) -> None:
    run(environ, "-m", "bench.gpu", f"--out={tmp_path}", status=1)  # no GPU is as slow
    [kept] = [path for path in tmp_path.iterdir() if path.suffix == ".json"]
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    assert found["complete"] is True
    assert found["device"] == {"name": "stand-in", "architecture": "sm_90"}
    parts = found["parts"]
    for name, part in parts.items():
        assert not {"failed", "waived"} & set(part), (name, part)
    assert parts["ping-pong"]["p50_us"] > 0
    assert len(parts["claim"]["rows"]) == 4
    assert [row["tokens"] for row in parts["prompt"]["rows"]] == list(gpu_parts.LENGTHS)
    assert None not in [row["met"] for row in found["targets"]]


@pytest.mark.slow
def test_the_profile_times_every_kernel(environ: dict[str, str]) -> None:
    done = run(environ, "-m", "dataplane", "profile", "--gpu", "--json")
    found = json.loads(done.stdout)
    assert found["waived"] is None
    assert found["device"]["name"] == "stand-in"
    assert len(found["kernels"]) == 5
    assert all(row["us"] > 0 and row["blocks"] == 16 for row in found["kernels"])
