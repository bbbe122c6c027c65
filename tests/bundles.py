"""Bundles for several test files: what is ordered, what one may state, what one may hold."""

from pathlib import Path
from typing import Any

from fatbins import MACHINE, PTX, entry, fatbin

from dataplane import __version__
from dataplane.bundle import Contents
from dataplane.manifest import ABI
from dataplane.pack import Order

TOKENIZER = b'{"version": "1.0"}'
IMAGE = fatbin(entry(MACHINE, 90), entry(PTX, 80))


def order(**changes: Any) -> Order:
    values = {"runtime": "echo", "slots": 2, "context": 64, "max_output": 16, **changes}
    return Order(**values)


def quiet(line: str) -> None:
    pass


def stated(**changes: Any) -> Contents:
    """What the manifest of a bundle states."""
    values: dict[str, Any] = {
        "format": 1, "dataplane": __version__, "abi": ABI, "runtime": "echo", "model": "echo",
        "slots": 2, "context": 64, "max_output": 16, "vocab_size": 100, "stop_ids": (),
        "chat_template": None, "targets": ("cpu",), "needs": (), "tokenizer": None,
        "kernels": None, "weights": None, **changes,
    }  # fmt: skip
    return Contents(**values)


def written(directory: Path, contents: Contents | bytes) -> Path:
    """Make a directory that holds this manifest."""
    directory.mkdir(exist_ok=True)
    data = contents if isinstance(contents, bytes) else contents.encode()
    (directory / "bundle.json").write_bytes(data)
    return directory
