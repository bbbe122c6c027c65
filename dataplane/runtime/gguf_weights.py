"""A GGUF's weights as float32 arrays, and the shape of the network that they belong to.

The file states everything: no number of this model stands here. What is not understood (another
architecture, scaled rotary positions, a tensor too many or of another shape) is refused, because a
network that lacks a part still answers, and answers nonsense.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.installing import pip_install
from dataplane.model import REMEDY, ModelError

Weights = dict[str, npt.NDArray[np.float32]]

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
OUTPUT_NORM = "output_norm.weight"
_ARCHITECTURE = "llama"
# What that architecture may state and this network does not do; llama.cpp's converters leave these
# out, or say "none", where plain rotary positions are meant.
_SCALING = "llama.rope.scaling.type"

GGUF_MISSING = f"reading the weights needs gguf: {pip_install('torch')}"


@dataclass(frozen=True, slots=True)
class Shape:
    """The network's measures, by their names in the metadata."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    rotary: int
    rotary_base: float
    epsilon: float
    vocab_size: int
    trained_context: int

    def check(self) -> None:
        """Raise `ModelError` when the measures contradict each other."""
        wrong = (
            min(self.layers, self.width, self.hidden, self.heads, self.kv_heads) < 1
            or self.heads % self.kv_heads
            or self.rotary % 2
            or not 2 <= self.rotary <= self.head_size
            or self.epsilon <= 0
            or self.rotary_base <= 0
        )
        if wrong:
            raise ModelError(f"the model's measures contradict each other: {self}; {REMEDY}")

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor that a network of this shape has, save an untied output matrix."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        yield EMBEDDING, (self.vocab_size, self.width)
        yield OUTPUT_NORM, (self.width,)
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_norm.weight", (self.width,)
            yield f"blk.{layer}.attn_q.weight", (queries, self.width)
            yield f"blk.{layer}.attn_k.weight", (keys, self.width)
            yield f"blk.{layer}.attn_v.weight", (keys, self.width)
            yield f"blk.{layer}.attn_output.weight", (self.width, queries)
            yield f"blk.{layer}.ffn_norm.weight", (self.width,)
            yield f"blk.{layer}.ffn_gate.weight", (self.hidden, self.width)
            yield f"blk.{layer}.ffn_up.weight", (self.hidden, self.width)
            yield f"blk.{layer}.ffn_down.weight", (self.width, self.hidden)


def _shape(fields: dict[str, Any]) -> Shape:
    def number(key: str) -> Any:
        if key not in fields:
            raise ModelError(f"the weights state no {key}; {REMEDY}")
        return fields[key].contents()

    architecture = number("general.architecture")
    if architecture != _ARCHITECTURE:
        raise ModelError(f"the weights are of the architecture {architecture!r}, not 'llama'")
    if _SCALING in fields and number(_SCALING) != "none":
        raise ModelError(
            f"the weights want {_SCALING} {number(_SCALING)!r}, which is not done here"
        )
    width, heads = int(number("llama.embedding_length")), int(number("llama.attention.head_count"))
    own_size = "llama.attention.key_length"
    head_size = int(number(own_size)) if own_size in fields else width // max(1, heads)
    rotary, kv_heads = "llama.rope.dimension_count", "llama.attention.head_count_kv"
    base = "llama.rope.freq_base"
    shape = Shape(
        layers=int(number("llama.block_count")),
        width=width,
        hidden=int(number("llama.feed_forward_length")),
        heads=heads,
        kv_heads=int(number(kv_heads)) if kv_heads in fields else heads,
        head_size=head_size,
        rotary=int(number(rotary)) if rotary in fields else head_size,
        # The format's own default, from before it was stated.
        rotary_base=float(number(base)) if base in fields else 10_000.0,
        epsilon=float(number("llama.attention.layer_norm_rms_epsilon")),
        vocab_size=int(number("llama.vocab_size")),
        trained_context=int(number("llama.context_length")),
    )
    shape.check()
    return shape


def _check_tensors(shape: Shape, weights: Weights) -> None:
    expected = dict(shape.tensors())
    if OUTPUT in weights:
        expected[OUTPUT] = (shape.vocab_size, shape.width)
    for name in sorted(expected.keys() ^ weights.keys()):
        what = "lack" if name in expected else "hold an unknown"
        raise ModelError(f"the weights {what} {name}; {REMEDY}")
    for name, wanted in expected.items():
        if weights[name].shape != wanted:
            raise ModelError(
                f"{name} is of shape {weights[name].shape} instead of {wanted}; {REMEDY}"
            )


def load(path: Path) -> tuple[Shape, Weights]:
    """Read and dequantise a GGUF.

    An output matrix that is not there is the embedding's (the weights are tied).

    Raises:
        ModelError: The library is missing, the file cannot be read, or is not understood.
    """
    try:
        import gguf
    except ImportError as error:
        raise ModelError(GGUF_MISSING) from error
    try:
        reader = gguf.GGUFReader(path)
        weights = {
            tensor.name: np.ascontiguousarray(
                gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32
            )
            for tensor in reader.tensors
        }
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}; {REMEDY}") from error
    # The library has no error of its own: a damaged file fails wherever it is first believed.
    except (ValueError, IndexError, KeyError, NotImplementedError, OverflowError) as error:
        raise ModelError(f"{path} is damaged or no GGUF: {error}; {REMEDY}") from error
    shape = _shape(reader.fields)
    _check_tensors(shape, weights)
    return shape, weights
