"""Kernels for a bundle: those that lie ready, or are compiled."""

import os
from pathlib import Path

import pytest
from bundles import IMAGE, quiet

from dataplane import kernels
from dataplane.kernels import KernelsError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "native" / "gpu").mkdir(parents=True)
    (tmp_path / "native" / "gpu" / "kernels.cu").write_text("")
    return tmp_path / "native"


def fake_nvcc(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{text}\n")
    nvcc.chmod(0o755)
    return folder


def test_kernels_that_lie_ready_are_taken_unless_their_sources_are_newer(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    ready = tmp_path / "k.fatbin"
    with pytest.raises(KernelsError, match=r"is not there, and there is no nvcc .*`make kernels`"):
        kernels.image(ready, quiet, tree)
    ready.write_bytes(IMAGE)
    assert kernels.image(ready, quiet, tree) == IMAGE
    os.utime(ready, (1, 1))
    with pytest.raises(KernelsError, match="is older than its sources, and there is no nvcc"):
        kernels.image(ready, quiet, tree)
    assert kernels.image(ready, quiet, tmp_path / "no tree") == IMAGE


def test_nvcc_compiles_for_the_targets_that_it_has_and_is_quoted_when_it_fails(
    tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        'if [ "$1" = --list-gpu-code ]; then echo sm_80; echo sm_90; exit; fi\n'
        'for last; do :; done; echo "$@" > "$last"'
    )
    monkeypatch.setenv("PATH", f"{fake_nvcc(tmp_path / 'bin', script)}:/bin:/usr/bin")
    asked = kernels.image(tmp_path / "none", quiet, tree).decode()
    assert "code=sm_80" in asked
    assert "code=sm_90" in asked
    assert "code=compute_80" in asked
    assert "sm_100" not in asked
    fake_nvcc(tmp_path / "bin", "echo 'k.cu(3): error: expected a \";\"' >&2; exit 2")
    with pytest.raises(KernelsError, match=r'k\.cu\(3\): error: expected a ";"'):
        kernels.image(tmp_path / "none", quiet, tree)
