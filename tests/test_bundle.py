"""Bundles read: refused where they are broken or do not fit, else they decide what is served."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from bundles import order, quiet, stated, written
from fake_nvml import OTHER_CARD, FakeNvml, card

from dataplane import model
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
from dataplane.config import load
from dataplane.errors import UsageError
from dataplane.gpus import Gpus, look
from dataplane.manifest import ABI
from dataplane.model import ModelFiles
from dataplane.pack import build

# Reading.


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
def test_a_changed_file_is_refused_by_name(tmp_path: Path, tiny_runtime: str, name: str) -> None:
    made = build(order(runtime=tiny_runtime, copy_weights=True), tmp_path / "b", quiet)
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
    tmp_path: Path, tiny_runtime: str, tiny_weights: Path
) -> None:
    made = build(order(runtime=tiny_runtime), tmp_path / "b", quiet)
    tiny_weights.write_bytes(tiny_weights.read_bytes()[:-1] + b"x")
    with pytest.raises(BundleError, match=f"{tiny_weights} has changed"):
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
    tmp_path: Path, tiny_runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "_bundled", None)
    monkeypatch.setattr(model, "_find_library", lambda: Path("/engine.so"))
    made = build(order(runtime=tiny_runtime, copy_weights=True), tmp_path / "b", quiet)
    values = take(made.directory, "tiny", {"slots": 2, "socket": "/s"})
    assert values == {
        "socket": "/s", "runtime": "tiny", "slots": 2, "context": 64, "max_output": 16,
        "vocab_size": 100,
    }  # fmt: skip
    files = model.locate()
    assert files == ModelFiles(made.directory / "tiny.gguf", Path("/engine.so"))
    assert model.tokenizer_json(files.gguf, tmp_path / "cache") == made.tokenizer
    assert not (tmp_path / "cache").exists()


def test_a_runtime_refuses_what_is_not_for_it_or_changed(tmp_path: Path, tiny_runtime: str) -> None:
    made = build(order(runtime=tiny_runtime), tmp_path / "b", quiet)
    with pytest.raises(UsageError, match="is for the runtime tiny, not for echo"):
        take(made.directory, "echo", {})
    (made.directory / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json has changed"):
        take(made.directory, "tiny", {})
