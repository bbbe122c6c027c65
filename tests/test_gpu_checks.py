"""`make test-gpu` without a GPU: waived, never passed; and its checks hold on host threads."""

import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_checks
import pytest
from host_gpu import HostGpu, Library

PROGRAM = Path(__file__).with_name("gpu_checks.py")


def test_without_a_gpu_every_check_is_waived_with_its_reason() -> None:
    start = time.monotonic()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(gpu_checks.CHECKS)
    for line, name in zip(lines, gpu_checks.CHECKS, strict=True):
        assert line.startswith(f"{name}: waived: "), line
        assert len(line) > len(f"{name}: waived: ") + 20
    assert "passed" not in done.stdout
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("name", gpu_checks.CHECKS)
def test_a_check_holds_on_host_threads(name: str, library: Library) -> None:
    gpu = HostGpu(library)
    assert gpu_checks.CHECKS[name](gpu)
    assert gpu.allocated == {}
    assert gpu.mapped == {}


def test_a_check_that_fails_says_so(library: Library, capsys: pytest.CaptureFixture[str]) -> None:
    class Forgetful(HostGpu):
        def download(self, address: int, size: int) -> bytes:
            return b"\0" * size

    assert not gpu_checks.run_checks(Forgetful(library), ("region",))
    assert capsys.readouterr().out.startswith("region: FAILED: AssertionError")
