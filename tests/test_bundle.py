"""Bundles: the same bytes for the same input, refused where they do not fit, else served."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from conftest import StartDaemon
from daemon_process import command, run
from fake_nvml import OTHER_CARD, FakeNvml, card
from test_fatbin import MACHINE, PTX, entry, fatbin

from dataplane import __version__, bundle, kernels, model, pack
from dataplane.bundle import (
    Bundle,
    BundleError,
    Contents,
    Packed,
    Weights,
    check_device,
    check_version,
    read,
    settle,
    take,
    verify,
)
from dataplane.client import connect
from dataplane.config import load
from dataplane.errors import UsageError
from dataplane.gpus import Gpus, look
from dataplane.kernels import KernelsError
from dataplane.manifest import ABI
from dataplane.model import ModelFiles
from dataplane.pack import Order, Parts, build

TOKENIZER = b'{"version": "1.0"}'
IMAGE = fatbin(entry(MACHINE, 90), entry(PTX, 80))


def order(**changes: Any) -> Order:
    values = {"runtime": "echo", "slots": 2, "context": 64, "max_output": 16, **changes}
    return Order(**values)


def quiet(line: str) -> None:
    pass


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF" + bytes(range(256)) * 8192)
    return path


@pytest.fixture
def tiny(weights: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A runtime `tiny` with a file of every sort."""

    def recipe(order: Order, say: Callable[[str], None]) -> Parts:
        return Parts(
            "Tiny", 100, stop_ids=(2, 7), chat_template="{{ messages }}", tokenizer=TOKENIZER,
            kernels=IMAGE, weights=weights, weights_source="here", targets=("sm_90", "compute_80"),
        )  # fmt: skip

    monkeypatch.setattr(pack, "RECIPES", {**pack.RECIPES, "tiny": recipe})
    monkeypatch.setattr(pack, "_WITH_WEIGHTS", ("tiny",))
    return "tiny"


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


# Building.


def test_a_bundle_says_all_there_is_to_say(tmp_path: Path, tiny: str, weights: Path) -> None:
    made = build(order(runtime=tiny), tmp_path / "b", quiet)
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
            "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
            "bytes": weights.stat().st_size,
            "source": "here",
            "file": None,
            "path": str(weights),
        },
    }
    assert files_of(tmp_path / "b").keys() == {"bundle.json", "tokenizer.json", "kernels.fatbin"}
    assert made.weights == weights
    verify(made)


@pytest.mark.parametrize("copy", [False, True])
def test_the_same_input_gives_the_same_bytes(tmp_path: Path, tiny: str, copy: bool) -> None:
    for name in ("one", "two"):
        build(order(runtime=tiny, copy_weights=copy), tmp_path / name, quiet)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert ("tiny.gguf" in files_of(tmp_path / "one")) == copy


def test_copied_weights_are_the_bundles_own(tmp_path: Path, tiny: str, weights: Path) -> None:
    content = weights.read_bytes()
    made = build(order(runtime=tiny, copy_weights=True), tmp_path / "b", quiet)
    weights.unlink()
    assert made.weights == tmp_path / "b" / "tiny.gguf"
    assert made.weights.read_bytes() == content
    verify(made)
    moved = (tmp_path / "b").rename(tmp_path / "elsewhere")
    verify(read(moved))


def test_everybody_may_read_a_bundle_whatever_the_umask(tmp_path: Path, tiny: str) -> None:
    old = os.umask(0o077)
    try:
        build(order(runtime=tiny), tmp_path / "b", quiet)
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
    tmp_path: Path, tiny: str, weights: Path
) -> None:
    weights.unlink()
    with pytest.raises(BundleError, match=r"tiny\.gguf .*No such file"):
        build(order(runtime=tiny), tmp_path / "b", quiet)
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


# Kernels that lie ready, or are compiled.


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


# Reading.


def stated(**changes: Any) -> Contents:
    values: dict[str, Any] = {
        "format": 1, "dataplane": __version__, "abi": ABI, "runtime": "echo", "model": "echo",
        "slots": 2, "context": 64, "max_output": 16, "vocab_size": 100, "stop_ids": (),
        "chat_template": None, "targets": ("cpu",), "needs": (), "tokenizer": None,
        "kernels": None, "weights": None, **changes,
    }  # fmt: skip
    return Contents(**values)


def written(directory: Path, contents: Contents | bytes) -> Path:
    directory.mkdir(exist_ok=True)
    data = contents if isinstance(contents, bytes) else contents.encode()
    (directory / "bundle.json").write_bytes(data)
    return directory


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    contents = stated(stop_ids=(3, 4), targets=("sm_80", "compute_80"), needs=("a==1",))
    found = read(written(tmp_path, contents))
    assert found.contents == contents
    assert found.sha256 == hashlib.sha256(contents.encode()).hexdigest()


PACKED = Packed(file="t", sha256="0" * 64, bytes=1)


def stated_weights(file: str | None = None, path: str | None = None) -> Weights:
    return Weights(sha256="0" * 64, bytes=1, source="s", file=file, path=path)


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        (b"", "cannot be read"),
        (b"[]", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"format": 2, "what": "else"}', "is of format 2, this dataplane .* reads 1"),
        (b'{"format": 1}', "cannot be read: Object missing required field"),
        (b" " * (1 << 20) + b"{}", "is over 1 MiB"),
        (stated(slots=0), "breaks a rule"),
        (stated(stop_ids=(100,)), "stop id 100 is outside the vocabulary"),
        (stated(targets=()), "the targets .* are none"),
        (stated(targets=("sm_90a",)), "the targets .* are none"),
        (stated(tokenizer=msgspec.structs.replace(PACKED, file="../t")), "is no name of a file"),
        (stated(tokenizer=msgspec.structs.replace(PACKED, file="/t")), "is no name of a file"),
        (stated(tokenizer=msgspec.structs.replace(PACKED, file="..")), "is no name of a file"),
        (stated(kernels=msgspec.structs.replace(PACKED, file="bundle.json")), "is no name"),
        (stated(tokenizer=PACKED, kernels=PACKED), "two files have one name"),
        (stated(weights=stated_weights()), "either a file or a path"),
        (stated(weights=stated_weights(file="w", path="/w")), "either a file or a path"),
        (stated(weights=stated_weights(path="w")), "is not absolute"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_refused(
    tmp_path: Path, contents: Contents | bytes, why: str
) -> None:
    with pytest.raises(BundleError, match=why):
        read(written(tmp_path, contents))


def test_a_directory_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(BundleError, match=r"is no bundle: it holds no bundle\.json"):
            read(path)


@pytest.mark.parametrize("name", ["tokenizer.json", "kernels.fatbin", "tiny.gguf"])
def test_a_changed_file_is_refused_by_name(tmp_path: Path, tiny: str, name: str) -> None:
    made = build(order(runtime=tiny, copy_weights=True), tmp_path / "b", quiet)
    path = made.directory / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BundleError, match=f"{name} has changed: its sha256 is"):
        verify(made)
    path.write_bytes(data + b"x")
    with pytest.raises(BundleError, match=f"{name} has changed: it has {len(data) + 1} bytes"):
        verify(made)
    path.unlink()
    with pytest.raises(BundleError, match=f"{name} is not there; `dataplane bundle build`"):
        verify(made)


def test_referenced_weights_that_changed_are_refused_by_name(
    tmp_path: Path, tiny: str, weights: Path
) -> None:
    made = build(order(runtime=tiny), tmp_path / "b", quiet)
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(BundleError, match=f"{weights} has changed"):
        verify(made)


# What a bundle fits.


def of(**changes: Any) -> Bundle:
    return Bundle(Path("/b"), stated(**changes), "0" * 64)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dataplane": "0.0.1"}, "was made by dataplane 0.0.1"),
        ({"abi": ABI + 1}, rf"\(ABI {ABI + 1}\), this is"),
        ({"needs": ("msgspec==0.0.1",)}, "needs msgspec==0.0.1, and msgspec .* is installed"),
        ({"needs": ("no-such-package==1",)}, "no-such-package is not installed"),
    ],
)
def test_another_version_or_a_missing_package_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(BundleError, match=why):
        check_version(of(**changes))


def devices(*cards: SimpleNamespace) -> Callable[[], Gpus]:
    return lambda: look(FakeNvml(*cards))


BUILT = {"targets": ("sm_80", "sm_90", "compute_80")}
NO_PTX = {"targets": ("sm_80", "sm_90")}


def test_what_runs_on_the_processor_asks_no_device() -> None:
    def fail() -> Gpus:
        raise AssertionError("it asked")

    assert check_device(of(targets=("cpu", "sm_90")), fail, {}) is None


def test_a_device_that_it_was_built_for_is_taken() -> None:
    assert check_device(of(**BUILT), devices(card()), {}) is None
    assert check_device(of(**NO_PTX), devices(card(capability=(8, 6))), {}) is None


def test_ptx_that_the_driver_has_to_compile_is_said() -> None:
    said = check_device(of(**BUILT), devices(card(capability=(12, 0))), {})
    assert said is not None
    assert "there is no machine code for sm_120, so the driver compiles its PTX" in said


@pytest.mark.parametrize(
    ("cards", "environ", "why"),
    [
        (
            [card(name="Tesla T4", capability=(7, 5))],
            {},
            "built for sm_80, sm_90, and Tesla T4 is sm_75: build it with kernels for sm_75",
        ),
        (
            [card(), card(OTHER_CARD, "NVIDIA B200", (10, 0))],
            {"CUDA_VISIBLE_DEVICES": OTHER_CARD},
            "NVIDIA B200 is sm_100",
        ),
        ([], {}, "it needs an NVIDIA GPU; the driver lists no device"),
    ],
)
def test_a_device_that_it_was_not_built_for_is_refused_in_words(
    cards: list[SimpleNamespace], environ: dict[str, str], why: str
) -> None:
    with pytest.raises(BundleError) as caught:
        check_device(of(**NO_PTX), devices(*cards), environ)
    assert str(caught.value).startswith("the bundle /b was built for sm_80, sm_90")
    assert why in str(caught.value)


def test_a_machine_without_a_gpu_is_told_what_the_bundle_needs() -> None:
    gone = look(FakeNvml(fails={"nvmlInit": 12}))
    with pytest.raises(BundleError) as caught:
        check_device(of(**BUILT), lambda: gone, {})
    assert str(caught.value) == (
        "the bundle /b was built for sm_80, sm_90, compute_80 (PTX), so it needs an NVIDIA GPU;"
        " there is no NVIDIA driver on this machine: install NVIDIA's driver; in a container,"
        " start that with the NVIDIA container toolkit (--gpus all)"
    )


# Its settings.


@pytest.mark.parametrize(
    ("name", "value"),
    [("runtime", "null"), ("slots", 3), ("context", 65), ("max_output", 17), ("vocab_size", 9)],
)
def test_a_setting_that_contradicts_the_bundle_is_refused_by_name(name: str, value: Any) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(UsageError, match=f"^{flag} {value} contradicts the bundle /b"):
        settle({name: value}, of())


def test_a_bundle_decides_its_settings_and_no_others(tmp_path: Path) -> None:
    made = build(order(vocab_size=77), tmp_path / "b", quiet)
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    config = load({"bundle": str(made.directory), "slots": "2", "body_timeout": "7"}, environ)
    found = (config.runtime, config.slots, config.context, config.max_output, config.vocab_size)
    assert found == ("echo", 2, 64, 16, 77)
    assert config.body_timeout == 7
    environ["DATAPLANE_SLOTS"] = "3"
    with pytest.raises(UsageError, match=r"^--slots 3 contradicts"):
        load({"bundle": str(made.directory)}, environ)


def test_a_runtime_that_is_not_here_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "b", stated(runtime="other"))
    with pytest.raises(UsageError, match="is for the runtime other, which this dataplane does not"):
        load({"bundle": str(tmp_path / "b")}, {"XDG_STATE_HOME": str(tmp_path)})


# In the runtime's process.


def test_a_runtime_takes_the_bundles_files(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_bundled", None)
    monkeypatch.setattr(model, "_find_library", lambda: Path("/engine.so"))
    made = build(order(runtime=tiny, copy_weights=True), tmp_path / "b", quiet)
    values = take(made.directory, "tiny", {"slots": 2, "socket": "/s"})
    assert values == {
        "socket": "/s", "runtime": "tiny", "slots": 2, "context": 64, "max_output": 16,
        "vocab_size": 100,
    }  # fmt: skip
    files = model.locate()
    assert files == ModelFiles(made.directory / "tiny.gguf", Path("/engine.so"))
    assert model.tokenizer_json(files.gguf, tmp_path / "cache") == made.tokenizer
    assert not (tmp_path / "cache").exists()


def test_a_runtime_refuses_what_is_not_for_it_or_changed(tmp_path: Path, tiny: str) -> None:
    made = build(order(runtime=tiny), tmp_path / "b", quiet)
    with pytest.raises(UsageError, match="is for the runtime tiny, not for echo"):
        take(made.directory, "echo", {})
    (made.directory / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json has changed"):
        take(made.directory, "tiny", {})


# The commands.


def dataplane(*arguments: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "dataplane", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def test_a_bundle_is_built_shown_and_served(tmp_path: Path, daemon: StartDaemon) -> None:
    out = tmp_path / "b"
    built = dataplane("bundle", "build", "--runtime=echo", f"--out={out}", "--slots=3")
    assert (built.returncode, built.stderr) == (0, "")
    shown = dataplane("bundle", "show", str(out))
    assert shown.stdout == built.stdout
    rows = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
    assert rows["slots"] == "3 of 1024 + 512 ids"
    assert rows["targets"] == "cpu"
    assert rows["files"] == "as they were built"
    stated = json.loads(dataplane("bundle", "show", str(out), "--json").stdout)
    assert stated["sha256"] == rows["sha256"] == read(out).sha256
    assert stated["slots"] == 3

    served = daemon(f"--bundle={out}")
    assert (served.runtime, served.slots_count, served.context) == ("echo", 3, 1024)
    assert f"the bundle {out} ({rows['sha256'][:16]}) is as it was built" in served.stderr

    async def ask() -> list[int]:
        async with connect(served.address, str(served.ca)) as client:
            answer = await client.submit([5, 6, 7])
            return [number async for ids in answer for number in ids]

    assert run(ask()) == [5, 6, 7]


def test_show_names_a_changed_file_and_fails(tmp_path: Path, tiny: str) -> None:
    made = build(order(runtime=tiny), tmp_path / "b", quiet)
    (made.directory / "tokenizer.json").write_bytes(b"{}")
    shown = dataplane("bundle", "show", str(made.directory))
    assert shown.returncode == 1
    assert "tokenizer.json has changed: it has 2 bytes, not 18" in shown.stdout
    assert "tokenizer.json has changed" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (("--slots=9",), 2, "--slots 9 contradicts the bundle"),
        (("--runtime=null",), 2, "--runtime null contradicts the bundle"),
    ],
)
def test_serve_refuses_a_flag_that_contradicts(
    tmp_path: Path, arguments: tuple[str, ...], status: int, why: str
) -> None:
    made = build(order(), tmp_path / "b", quiet)
    line = command(tmp_path, f"--bundle={made.directory}", *arguments)
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert why in done.stderr
    assert done.stdout == ""


def test_serve_refuses_a_bundle_that_does_not_fit_before_it_makes_anything(tmp_path: Path) -> None:
    image = tmp_path / "k.fatbin"
    image.write_bytes(fatbin(entry(MACHINE, 20)))  # of no device that there still is
    made = build(order(runtime="cuda-echo", kernels=image), tmp_path / "b", quiet)
    line = command(tmp_path / "state", f"--bundle={made.directory}")
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "was built for sm_20" in done.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.model
@pytest.mark.usefixtures("files")
def test_the_small_model_answers_from_a_bundle_alone(tmp_path: Path, daemon: StartDaemon) -> None:
    out = tmp_path / "b"
    made = build(order(runtime="smollm2", copy_weights=True), out, quiet)
    served = daemon(f"--bundle={out}")
    assert (served.runtime, served.slots_count) == ("smollm2", 2)
    assert not list(tmp_path.glob("*.tokenizer.json")), "a tokeniser was made at the start"
    child = served.children()[0]
    assert str(made.weights) in Path(f"/proc/{child}/maps").read_text()

    async def ask() -> list[int]:
        async with connect(served.address, str(served.ca)) as client:
            answer = await client.submit([504, 3575, 282, 4649, 314], max_output=1)
            return [number async for ids in answer for number in ids]

    assert run(ask()) == [7042]
    status, tokenizer = served.get("/tokenizer.json")
    assert status == 200
    assert made.contents.tokenizer is not None
    assert hashlib.sha256(tokenizer.encode()).hexdigest() == made.contents.tokenizer.sha256


def test_every_bundled_runtime_but_null_can_be_packed() -> None:
    from dataplane.config import RUNTIMES

    assert set(pack.RECIPES) == set(RUNTIMES) - {"none", "null"}
    assert bundle.SETTLED == ("runtime", "slots", "context", "max_output", "vocab_size")
