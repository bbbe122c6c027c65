"""A bundle: what a runtime needs, packed ahead of time: its start compiles and fetches nothing.

A bundle is a directory: `bundle.json`, which says all there is to say, and the files that it names
(a tokenizer.json, a fatbin, copied weights). The rules that hold here:

- `bundle.json` is read strictly, and nothing that it names is used before its hash was compared. A
  file inside the directory is named without a directory.
- Weights that were not copied are named by path, and by hash all the same.
- What does not fit is refused before anything starts: another format, another version's bundle, a
  package that is missing, a device that it was not built for, a flag that says otherwise.

`pack.py` makes them.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dataplane import __version__, model
from dataplane.errors import AttachError, DataplaneError, UsageError
from dataplane.fatbin import CPU, fit, is_compiled_at_load, is_target, say_target
from dataplane.gpus import Gpus, look, visible
from dataplane.manifest import ABI, Manifest

_log = logging.getLogger("dataplane.bundle")

FORMAT = 1
MANIFEST_NAME = "bundle.json"
SETTLED = ("runtime", "slots", "context", "max_output", "vocab_size")
"""The settings that a bundle decides."""

_MANIFEST_MAX = 1 << 20
_REBUILD = "`dataplane bundle build` makes it anew"


class BundleError(DataplaneError):
    """A bundle is damaged, or does not fit this machine or this version; the text says which."""


class Packed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the bundle's directory."""

    file: str
    sha256: str
    bytes: int


class Weights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model's weights: `file` in the bundle, or `path` elsewhere; `source`: where from."""

    sha256: str
    bytes: int
    source: str
    file: str | None = None
    path: str | None = None


class Contents(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `bundle.json` holds, in this order.

    Attributes:
        abi: Of the attachment, which kernels share.
        targets: `cpu` where it runs without a GPU; else what its kernels were built for.
        needs: Installed packages, `name==version`.
    """

    format: int
    dataplane: str
    abi: int
    runtime: str
    model: str
    slots: int
    context: int
    max_output: int
    vocab_size: int
    stop_ids: tuple[int, ...]
    chat_template: str | None
    targets: tuple[str, ...]
    needs: tuple[str, ...]
    tokenizer: Packed | None
    kernels: Packed | None
    weights: Weights | None

    def check(self) -> None:
        """Raise `AttachError` or ValueError with the first rule that it breaks."""
        Manifest(
            model=self.model,
            slots=self.slots,
            context=self.context,
            max_output=self.max_output,
            vocab_size=self.vocab_size,
            stop_ids=self.stop_ids,
        ).check()
        if not self.targets or not all(is_target(target) for target in self.targets):
            raise ValueError(f"the targets {list(self.targets)} are none")
        if self.weights and (self.weights.file is None) == (self.weights.path is None):
            raise ValueError("the weights have to have either a file or a path")
        if self.weights and self.weights.path and not os.path.isabs(self.weights.path):
            raise ValueError(f"the path of the weights, {self.weights.path!r}, is not absolute")
        names = [name for name in self._names() if name is not None]
        for name in names:
            if name in ("", ".", "..", MANIFEST_NAME) or "/" in name or "\0" in name:
                raise ValueError(f"{name!r} is no name of a file")
        if len(set(names)) != len(names):
            raise ValueError("two files have one name")

    def _names(self) -> Iterator[str | None]:
        for packed in (self.tokenizer, self.kernels, self.weights):
            yield packed.file if packed else None

    def encode(self) -> bytes:
        """Return the text of `bundle.json`: the same bytes for the same contents."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle that was read; `verify` says whether its files are as they were.

    Attributes:
        sha256: Of `bundle.json`, and by that of everything in it.
    """

    directory: Path
    contents: Contents
    sha256: str

    def _path(self, packed: Packed | None) -> Path | None:
        return self.directory / packed.file if packed else None

    @property
    def tokenizer(self) -> Path | None:
        return self._path(self.contents.tokenizer)

    @property
    def kernels(self) -> Path | None:
        """The fatbin."""
        return self._path(self.contents.kernels)

    @property
    def weights(self) -> Path | None:
        """Where the weights lie, in the bundle or elsewhere."""
        weights = self.contents.weights
        if weights is None:
            return None
        return Path(weights.path) if weights.path else self.directory / str(weights.file)

    def files(self) -> Iterator[tuple[Path, Packed | Weights]]:
        """Every file, and what is stated of it."""
        contents = self.contents
        for path, packed in (
            (self.tokenizer, contents.tokenizer),
            (self.kernels, contents.kernels),
            (self.weights, contents.weights),
        ):
            if path is not None and packed is not None:
                yield path, packed


# ---------------------------------------------------------------- reading and checking


def read(directory: Path) -> Bundle:
    """Read a bundle's manifest; its files are not looked at.

    Raises:
        BundleError: There is none, or it is of another format or breaks a rule.
    """
    path = directory / MANIFEST_NAME
    try:
        with path.open("rb") as file:
            data = file.read(_MANIFEST_MAX + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BundleError(
            f"{directory} is no bundle: it holds no {MANIFEST_NAME}; {_REBUILD}"
        ) from error
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) > _MANIFEST_MAX:
        raise BundleError(f"{path} is over {_MANIFEST_MAX >> 20} MiB, which no bundle's is")
    return Bundle(directory, _decode(path, data), hashlib.sha256(data).hexdigest())


class _Version(msgspec.Struct):
    format: int


def _decode(path: Path, data: bytes) -> Contents:
    try:
        found = msgspec.json.decode(data, type=_Version).format
        if found != FORMAT:
            raise BundleError(
                f"{path} is of format {found}, this dataplane ({__version__}) reads {FORMAT};"
                f" {_REBUILD}"
            )
        contents = msgspec.json.decode(data, type=Contents)
        contents.check()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
    except (AttachError, ValueError) as error:
        raise BundleError(f"{path} breaks a rule: {error}") from error
    return contents


def verify(bundle: Bundle) -> None:
    """Compare every file's hash.

    Raises:
        BundleError: A file is missing or changed; the text names it.
    """
    for path, stated in bundle.files():
        problem = _problem(path, stated)
        if problem:
            raise BundleError(f"the bundle {bundle.directory}: {path} {problem}; {_REBUILD}")


def _problem(path: Path, stated: Packed | Weights) -> str | None:
    try:
        with path.open("rb") as file:
            found_size = os.fstat(file.fileno()).st_size
            if found_size != stated.bytes:
                return f"has changed: it has {found_size} bytes, not {stated.bytes}"
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return "is not there"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if found != stated.sha256:
        return f"has changed: its sha256 is {found}, not {stated.sha256}"
    return None


def check_version(bundle: Bundle) -> None:
    """Hold what was packed against this dataplane and what is installed beside it.

    Raises:
        BundleError: It is another version's, whose kernels, stop ids or template may differ; or it
        needs a package that is not here.
    """
    contents = bundle.contents
    if (contents.dataplane, contents.abi) != (__version__, ABI):
        raise BundleError(
            f"the bundle {bundle.directory} was made by dataplane {contents.dataplane}"
            f" (ABI {contents.abi}), this is {__version__} (ABI {ABI}); {_REBUILD}"
        )
    for need in contents.needs:
        name, _, version = need.partition("==")
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = None
        if found != version:
            has = f"{name} {found} is installed" if found else f"{name} is not installed"
            raise BundleError(
                f"the bundle {bundle.directory} needs {need}, and {has}: install it, or build the"
                " bundle with what is here"
            )


def check_device(
    bundle: Bundle, list_gpus: Callable[[], Gpus], environ: Mapping[str, str]
) -> str | None:
    """Hold what it was built for against the device that it would get.

    Args:
        bundle: The bundle.
        list_gpus: Lists the devices; not called where none is needed.
        environ: Of the runtime, for CUDA_VISIBLE_DEVICES.

    Returns:
        What a person should know of it, if anything.

    Raises:
        BundleError: It was not built for it, or there is none.
        UsageError: CUDA_VISIBLE_DEVICES leaves none.
    """
    targets = bundle.contents.targets
    if CPU in targets:
        return None
    built = f"the bundle {bundle.directory} was built for {_listed(targets)}"
    gpus = list_gpus()
    if gpus.missing or not gpus.devices:
        missing = gpus.missing or "the driver lists no device"
        raise BundleError(f"{built}, so it needs an NVIDIA GPU; {missing}: {_help(gpus)}")
    devices = visible(gpus, environ)
    taken = [fit(targets, device.capability) for device in devices]
    if not any(taken):
        there = ", ".join(f"{device.name} is {device.architecture}" for device in devices)
        wanted = " and ".join(sorted({device.architecture for device in devices}))
        raise BundleError(
            f"{built}, and {there}: build it with kernels for {wanted}, or use a device that it"
            " was built for"
        )
    if all(target is None or is_compiled_at_load(target) for target in taken):
        return (
            f"{built}: there is no machine code for {devices[0].architecture}, so the driver"
            " compiles its PTX at the start"
        )
    return None


def _help(gpus: Gpus) -> str:
    return gpus.remedy or "`nvidia-smi -L` has to list one"


def _listed(targets: tuple[str, ...]) -> str:
    return ", ".join(say_target(target) for target in targets)


# ---------------------------------------------------------------- a bundle's settings


def settle(values: Mapping[str, Any], bundle: Bundle) -> dict[str, Any]:
    """Return `values` and what the bundle decides of them.

    Args:
        values: Parsed settings that somebody gave, without defaults.
        bundle: The bundle.

    Raises:
        UsageError: One of them says otherwise.
    """
    decided = {name: getattr(bundle.contents, name) for name in SETTLED}
    for name, value in decided.items():
        if values.get(name, value) != value:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} {values[name]} contradicts the bundle {bundle.directory}, which was built"
                f" for {value}: leave {flag} out, or build a bundle for {values[name]}"
            )
    return {**values, **decided}


def admit(directory: Path, environs: Iterable[Mapping[str, str]]) -> None:
    """Check everything of a bundle before a daemon serves it.

    Args:
        directory: The bundle's.
        environs: Of each runtime that will start from it.

    Raises:
        DataplaneError: It is not whole, or does not fit; the text says what to change.
    """
    bundle = read(directory)
    verify(bundle)
    check_version(bundle)
    for environ in environs:
        note = check_device(bundle, look, environ)
        if note:
            _log.warning("%s", note)
    _log.info("the bundle %s (%s) is as it was built", directory, bundle.sha256[:16])


def take(directory: Path, runtime: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check a bundle in the runtime's process, and have this process use its files.

    The daemon checked it as well; but a runtime is started again when it ended, perhaps much later.

    Returns:
        `values` and what the bundle decides.
    """
    bundle = read(directory)
    if bundle.contents.runtime != runtime:
        raise UsageError(
            f"--bundle {directory} is for the runtime {bundle.contents.runtime}, not for {runtime}"
        )
    settled = settle(values, bundle)
    verify(bundle)
    check_version(bundle)
    if bundle.weights is not None and bundle.tokenizer is not None:
        model.use(bundle.weights, bundle.tokenizer)
    return settled


# ---------------------------------------------------------------- showing


def describe(bundle: Bundle) -> str:
    """A bundle for people, with what is wrong with its files."""
    contents = bundle.contents
    rows = [
        ("bundle", f"{bundle.directory}"),
        ("sha256", bundle.sha256),
        ("made by", f"dataplane {contents.dataplane}, format {contents.format}"),
        ("runtime", contents.runtime),
        ("model", contents.model),
        ("slots", f"{contents.slots} of {contents.context} + {contents.max_output} ids"),
        ("vocabulary", f"{contents.vocab_size} ids, stop {_ids(contents.stop_ids)}"),
        ("targets", _listed(contents.targets)),
        ("needs", ", ".join(contents.needs) or "nothing else"),
    ]
    for what, packed in (("tokeniser", contents.tokenizer), ("kernels", contents.kernels)):
        rows.append((what, f"{packed.file}, {_size(packed.bytes)}" if packed else "none"))
    weights = contents.weights
    if weights:
        rows.append(("weights", f"{weights.file or weights.path}, {_size(weights.bytes)}"))
        rows.append(("", f"from {weights.source}"))
    else:
        rows.append(("weights", "none"))
    problems = [
        f"{path} {problem}"
        for path, stated in bundle.files()
        if (problem := _problem(path, stated))
    ]
    rows.append(("files", "; ".join(problems) or "as they were built"))
    return "\n".join(f"{name:<12}{value}" for name, value in rows)


def to_json(bundle: Bundle) -> str:
    """The same for programs, on one line."""
    return json.dumps({"sha256": bundle.sha256, **msgspec.to_builtins(bundle.contents)})


def _ids(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) if ids else "at none"


def _size(count: int) -> str:
    return f"{count} bytes" if count < 10_000 else f"{count / 1e6:.1f} MB"
