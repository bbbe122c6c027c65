"""Building bundles: the same bytes for the same input, and nothing left of one that fails."""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from bundles import IMAGE, TOKENIZER, order, quiet

from dataplane import __version__, bundle, kernels, pack
from dataplane.bundle import BundleError, read, verify
from dataplane.errors import UsageError
from dataplane.manifest import ABI
from dataplane.pack import Parts, build


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_bundle_says_all_there_is_to_say(
    tmp_path: Path, tiny_runtime: str, tiny_weights: Path
) -> None:
    made = build(order(runtime=tiny_runtime), tmp_path / "b", quiet)
    stated = json.loads((tmp_path / "b" / "bundle.json").read_text())
    assert stated == {
        "format": 1,
        "dataplane": __version__,
        "abi": ABI,
        "runtime": "tiny",
        "model": "Tiny",
        "slots": 2,
        "context": 64,
        "max_output": 16,
        "vocab_size": 100,
        "stop_ids": [2, 7],
        "chat_template": "{{ messages }}",
        "targets": ["sm_90", "compute_80"],
        "needs": [],
        "tokenizer": {
            "file": "tokenizer.json",
            "sha256": hashlib.sha256(TOKENIZER).hexdigest(),
            "bytes": len(TOKENIZER),
        },
        "kernels": {
            "file": "kernels.fatbin",
            "sha256": hashlib.sha256(IMAGE).hexdigest(),
            "bytes": len(IMAGE),
        },
        "weights": {
            "sha256": hashlib.sha256(tiny_weights.read_bytes()).hexdigest(),
            "bytes": tiny_weights.stat().st_size,
            "source": "here",
            "file": None,
            "path": str(tiny_weights),
        },
    }
    assert files_of(tmp_path / "b").keys() == {"bundle.json", "tokenizer.json", "kernels.fatbin"}
    assert made.weights == tiny_weights
    verify(made)


@pytest.mark.parametrize("copy", [False, True])
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, tiny_runtime: str, copy: bool) -> None:
    for name in ("one", "two"):
        build(order(runtime=tiny_runtime, copy_weights=copy), tmp_path / name, quiet)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert ("tiny.gguf" in files_of(tmp_path / "one")) == copy


def test_copied_weights_are_the_bundles_own(
    tmp_path: Path, tiny_runtime: str, tiny_weights: Path
) -> None:
    content = tiny_weights.read_bytes()
    made = build(order(runtime=tiny_runtime, copy_weights=True), tmp_path / "b", quiet)
    tiny_weights.unlink()
    assert made.weights == tmp_path / "b" / "tiny.gguf"
    assert made.weights.read_bytes() == content
    verify(made)
    moved = (tmp_path / "b").rename(tmp_path / "elsewhere")
    verify(read(moved))


def test_everybody_may_read_a_bundle_whatever_the_umask(tmp_path: Path, tiny_runtime: str) -> None:
    old = os.umask(0o077)
    try:
        build(order(runtime=tiny_runtime), tmp_path / "b", quiet)
    finally:
        os.umask(old)
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "b").iterdir()} == {0o644}


def test_nothing_that_is_there_is_replaced_unasked(tmp_path: Path) -> None:
    out = tmp_path / "b"
    build(order(), out, quiet)
    before = files_of(out)
    with pytest.raises(UsageError, match="is there already; --force replaces a bundle"):
        build(order(slots=3), out, quiet)
    assert files_of(out) == before
    build(order(slots=3), out, quiet, force=True)
    assert read(out).contents.slots == 3
    assert os.listdir(tmp_path) == ["b"]


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda out: out.mkdir(), "is no bundle, and --force replaces nothing else"),
        (lambda out: out.write_text("x"), "is no bundle"),
        (lambda out: out.symlink_to("nowhere"), "is no bundle"),
        (
            lambda out: (build(order(), out, quiet), (out / "mine.txt").write_text("x")),
            "holds mine.txt, which is no part of the bundle there",
        ),
        (
            lambda out: (out.mkdir(), (out / "bundle.json").write_text("{}")),
            "has to be taken away first",
        ),
    ],
)
def test_force_replaces_a_bundle_and_nothing_else(
    tmp_path: Path, prepare: Callable[[Path], object], why: str
) -> None:
    out = tmp_path / "b"
    prepare(out)
    with pytest.raises(UsageError, match=why):
        build(order(slots=3), out, quiet, force=True)
    assert os.path.lexists(out)
    assert os.listdir(tmp_path) == ["b"]


def test_a_build_that_fails_leaves_nothing_and_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "b"
    build(order(), out, quiet)
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if target == out and read(path).contents.slots == 3:
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(BundleError, match="cannot be written: No space left"):
        build(order(slots=3), out, quiet, force=True)
    assert read(out).contents.slots == 2
    assert os.listdir(tmp_path) == ["b"]


def test_weights_that_cannot_be_read_leave_nothing(
    tmp_path: Path, tiny_runtime: str, tiny_weights: Path
) -> None:
    tiny_weights.unlink()
    with pytest.raises(BundleError, match=r"tiny\.gguf .*No such file"):
        build(order(runtime=tiny_runtime), tmp_path / "b", quiet)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"runtime": "null"}, "'null' cannot be packed; it takes one of echo, smollm2"),
        ({"copy_weights": True}, "--weights: echo has no weights"),
        ({"kernels": Path("/k")}, "--kernels: echo has no kernels"),
        (
            {"runtime": "smollm2", "vocab_size": 5},
            "--vocab-size 5: SmolLM2-135M-Instruct has 49152",
        ),
        ({"runtime": "smollm2", "context": 8000, "max_output": 512}, "more than the 8192 ids"),
        ({"slots": 0}, "slots"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        build(order(**changes), tmp_path / "b", quiet)
    assert os.listdir(tmp_path) == []


def test_the_targets_of_kernels_are_read_from_them(tmp_path: Path) -> None:
    image = tmp_path / "k.fatbin"
    image.write_bytes(IMAGE)
    made = build(order(runtime="cuda-echo", kernels=image), tmp_path / "b", quiet)
    assert made.contents.targets == ("sm_90", "compute_80")
    assert made.kernels is not None
    assert made.kernels.read_bytes() == IMAGE
    image.write_bytes(b"x")
    with pytest.raises(Exception, match=r"k\.fatbin is no fatbin"):
        build(order(runtime="cuda-echo", kernels=image), tmp_path / "c", quiet)


@pytest.mark.parametrize(("built_for", "packed"), [(["sm_90"], True), ([], False)])
def test_a_pytorch_for_gpus_is_packed_with_the_kernels_of_its_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built_for: list[str], packed: bool
) -> None:
    torch: Any = ModuleType("torch")
    torch.cuda = SimpleNamespace(get_arch_list=lambda: built_for)
    torch.__version__ = "1.0"
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(
        pack, "_small_model", lambda order, say, targets, needs: Parts("m", 9, targets=targets)
    )
    monkeypatch.setattr(kernels, "image", lambda ready, say: IMAGE)
    made = build(order(runtime="smollm2-torch"), tmp_path / "b", quiet)
    assert made.contents.targets == ("cpu", *built_for)
    assert (made.kernels is not None) == packed
    if packed:
        assert made.kernels is not None
        assert made.kernels.read_bytes() == IMAGE


def test_every_bundled_runtime_but_null_can_be_packed() -> None:
    from dataplane.config import RUNTIMES

    assert set(pack.RECIPES) == set(RUNTIMES) - {"none", "null"}
    assert bundle.SETTLED == ("runtime", "slots", "context", "max_output", "vocab_size")
