"""`dataplane runtime NAME`: attach a bundled runtime, by hand or as the daemon's child.

Nothing of a runtime is imported before it is to run: PyTorch and CuPy take seconds.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dataplane.config import BY_NAME, flag_values, state_dir_of, with_defaults
from dataplane.errors import UsageError
from dataplane.installing import pip_install
from dataplane.manifest import DEFAULT_PARTITION

Flags = Mapping[str, str | None]
Say = Callable[[str], None]
Run = Callable[[Flags, Say], int]

_COMMON_FLAGS = ("socket", "partition", "bundle", "slots", "context", "max_output")
_ECHO_FLAGS = (*_COMMON_FLAGS, "vocab_size", "token_delay_ms")
_CUDA_FLAGS = (*_COMMON_FLAGS, "vocab_size", "admission")
_MODEL_FLAGS = (*_COMMON_FLAGS, "state_dir")


def _settings(flags: Flags, runtime: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the settings of a runtime, of which `partition` is a name by then."""
    if flags["socket"] is None:
        raise UsageError("--socket is required: the Unix socket that the daemon's --socket names")
    values = flag_values(flags, names)
    values["partition"] = _use_partition(values.get("partition", ()))
    if "bundle" in values:
        from dataplane.bundle import take

        values = take(values["bundle"], runtime, values)
    return with_defaults(values, names)


def _use_partition(partitions: Sequence[Any]) -> str:
    """Have CUDA see a partition's device alone, before anything asks CUDA; the partition's name."""
    if not partitions:
        return DEFAULT_PARTITION
    partition, *others = partitions
    if others:
        raise UsageError(
            f"{BY_NAME['partition'].flag}: a runtime serves one partition, not {partition} and"
            f" {others[0]}: start one for each"
        )
    os.environ.update(partition.environ())
    name: str = partition.name
    return name


def _echo(flags: Flags, say: Say) -> int:
    values = _settings(flags, "echo", _ECHO_FLAGS)
    from dataplane.runtime.echo import main as echo

    return echo(
        values["socket"],
        values["slots"],
        values["context"],
        values["max_output"],
        values["vocab_size"],
        values["token_delay_ms"],
        say,
        partition=values["partition"],
    )


def _cuda_echo(flags: Flags, say: Say) -> int:
    values = _settings(flags, "cuda-echo", _CUDA_FLAGS)
    from dataplane.runtime.cuda import CupyGpu
    from dataplane.runtime.cuda_echo import main as cuda_echo

    return cuda_echo(
        values["socket"],
        values["slots"],
        values["context"],
        values["max_output"],
        values["vocab_size"],
        say,
        CupyGpu(kernels=_kernels(values)),
        values["admission"],
        partition=values["partition"],
    )


def _kernels(values: Mapping[str, Any]) -> Path:
    """Return the image of this project's kernels: the bundle's, or this installation's."""
    from dataplane.runtime.cuda import KERNELS

    if values["bundle"] is None:
        return KERNELS
    from dataplane.bundle import read

    return read(values["bundle"]).kernels or KERNELS


def _smollm2(flags: Flags, say: Say) -> int:
    from dataplane.runtime.smollm2 import main as smollm2

    return _run_model(_settings(flags, "smollm2", _MODEL_FLAGS), say, smollm2)


def _smollm2_torch(flags: Flags, say: Say) -> int:
    values = _settings(flags, "smollm2-torch", _MODEL_FLAGS)
    try:
        from dataplane.runtime.smollm2_torch import main as smollm2_torch
    except ImportError as error:
        raise UsageError(f"{error}: {pip_install('torch')}") from error

    run = functools.partial(
        smollm2_torch, kernels=_kernels(values), needs_device=flags["partition"] is not None
    )
    return _run_model(values, say, run)


def _run_model(values: Mapping[str, Any], say: Say, run: Callable[..., object]) -> int:
    state_dir = values["state_dir"] or state_dir_of(None, os.environ)
    from dataplane.identity import make_state_dir

    make_state_dir(state_dir)
    run(
        values["socket"],
        values["slots"],
        values["context"],
        values["max_output"],
        say,
        cache_dir=state_dir,
        partition=values["partition"],
    )
    return 0


class Bundled(NamedTuple):
    """A runtime that comes with dataplane, as a command."""

    help: str
    flags: tuple[str, ...]
    run: Run


RUNTIMES = {
    "echo": Bundled("give each prompt back", _ECHO_FLAGS, _echo),
    "cuda-echo": Bundled(
        "give each prompt back, all in kernels on a CUDA device", _CUDA_FLAGS, _cuda_echo
    ),
    "smollm2": Bundled("the small model on the CPU", _MODEL_FLAGS, _smollm2),
    "smollm2-torch": Bundled(
        "the small model on PyTorch: on a GPU where there is one", _MODEL_FLAGS, _smollm2_torch
    ),
}
