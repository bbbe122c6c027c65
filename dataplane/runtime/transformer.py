"""A llama-shaped network over all slots at once, in steps whose shapes never change.

Why fixed shapes: a CUDA graph replays the same kernels on the same addresses, and what is never
allocated can neither run out nor grow. The rules that hold here:

- Row s of the pool is slot s. It has room for every position of the slot and one more, the spare,
  where a row that has nothing to compute writes; nobody's mask admits it.
- A step's inputs and outputs are buffers made with the network. `decode` runs one id of every slot,
  wanted or not; `prefill` runs one chunk of one slot, padded to its full length. Neither looks at a
  value on the host: both can be captured.
- A step looks at the first `span` positions of each row, a number known beforehand: all of them in
  a captured step, on the CPU the smallest of a few powers of two that holds what is there.
- A prompt's ids are read once, where they lie, for the look-up of their embeddings (`embed`).
- Between the blocks, and into the logits, numbers are float32, so that the largest logit is not a
  tie made by rounding; within a block they are what its matrices are.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor

from dataplane.runtime.gguf_weights import EMBEDDING, OUTPUT, OUTPUT_NORM, Shape, Weights

# Positions in a row of the pool come in so many, for kernels that load several at a time.
_ALIGNED = 64


class _Layer:
    """One block's matrices. What reads the same input is one matrix, for one launch instead of two
    or three."""

    __slots__ = ("attn_norm", "down", "ffn_norm", "gate_up", "out", "qkv")

    def __init__(
        self, weights: Weights, number: int, place: Callable[..., Tensor], dtype: torch.dtype
    ) -> None:
        def taken(name: str) -> npt.NDArray[np.float32]:
            return weights.pop(f"blk.{number}.{name}.weight")

        def joined(*names: str) -> Tensor:
            return place(np.concatenate([taken(name) for name in names]), dtype)

        self.attn_norm = place(taken("attn_norm"))
        self.qkv = joined("attn_q", "attn_k", "attn_v")
        self.out = joined("attn_output")
        self.ffn_norm = place(taken("ffn_norm"))
        self.gate_up = joined("ffn_gate", "ffn_up")
        self.down = joined("ffn_down")


def planned_bytes(shape: Shape, slots: int, room: int, dtype: torch.dtype) -> int:
    """About how many bytes a `Transformer` will hold, known before any of them is asked for."""
    size: int = torch.zeros(0, dtype=dtype).element_size()
    sizes = {name: math.prod(extents) for name, extents in shape.tensors()}
    embedding = sizes.pop(EMBEDDING)
    kept = shape.kv_heads * shape.head_size
    pool = 2 * shape.layers * slots * _padded(room) * kept
    logits = slots * shape.vocab_size
    return 4 * (embedding + logits) + size * (sum(sizes.values()) + pool)


def _padded(room: int) -> int:
    """The length of a row of the pool: room, the spare position, and up to a round number."""
    return -(-(room + 1) // _ALIGNED) * _ALIGNED


class Transformer:
    """The network, its pool of keys and values, and the buffers of its steps.

    Args:
        shape: The network's measures.
        weights: Its tensors, which are taken out of the dictionary as they are placed.
        slots: How many sequences run side by side.
        room: How many positions each has.
        chunk: How many ids of a prompt run in one go.
        device: Where all of it lies.
        dtype: Of the blocks' matrices and the pool.

    Attributes:
        tokens, positions: Inputs of `decode`, [slots].
        row, start, count: Inputs of `prefill`, [1]: whose chunk, from which position, how many ids.
        rows: The chunk's embeddings, which `embed` fills: [chunk, width].
        logits: Output, [slots, vocabulary]: `decode` writes all of it, `prefill` the row of its
            slot, for the chunk's last id.
        spare: The position at which a slot without work runs.
        length: Positions in a row of the pool: the widest span.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        slots: int,
        room: int,
        chunk: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.shape, self.slots, self.chunk = shape, slots, chunk
        self.spare = room
        self.length = _padded(room)
        self._dtype = dtype

        def place(array: npt.NDArray[np.float32], kind: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(array, dtype=kind, device=device)

        def make(*size: int, kind: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=kind, device=device)

        self._embedding = place(weights.pop(EMBEDDING))
        untied = weights.pop(OUTPUT, None)
        self._output = self._embedding if untied is None else place(untied)
        self._output_norm = place(weights.pop(OUTPUT_NORM))
        self._layers = [_Layer(weights, number, place, dtype) for number in range(shape.layers)]

        kept = shape.kv_heads * shape.head_size
        self._keys = make(shape.layers, slots * self.length, kept, kind=dtype)
        self._values = make(shape.layers, slots * self.length, kept, kind=dtype)
        self._cos, self._sin = _rotations(shape, self.length, device)
        self._columns = torch.arange(self.length, device=device)
        self._bases = torch.arange(slots, device=device) * self.length
        self._places = torch.arange(chunk, device=device)

        self.tokens, self.positions = make(slots), torch.full((slots,), room, device=device)
        self.row, self.start, self.count = make(1), make(1), make(1)
        self._inside = make(chunk, kind=torch.int32)
        self.rows = make(chunk, shape.width, kind=torch.float32)
        self.logits = make(slots, shape.vocab_size, kind=torch.float32)

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights, the pool and the buffers: all that is ever allocated to stay."""
        held: list[Tensor] = [value for value in vars(self).values() if isinstance(value, Tensor)]
        for layer in self._layers:
            held += [getattr(layer, name) for name in layer.__slots__]
        # Tied weights are one tensor under two names.
        return sum({int(tensor.data_ptr()): int(tensor.nbytes) for tensor in held}.values())

    # ------------------------------------------------------------ steps

    def embed(self, ids: Tensor) -> None:
        """Look up a chunk's embeddings: the only reading of the ids, wherever they lie.

        An id outside of the vocabulary, which whoever runs this should have refused, becomes the
        nearest inside: others may write where prompts lie, and an index outside of a matrix would
        cost the process its GPU.

        Args:
            ids: [1 to `chunk`], int32.
        """
        count = ids.shape[0]
        inside = torch.clamp(ids, 0, self.shape.vocab_size - 1, out=self._inside[:count])
        torch.index_select(self._embedding, 0, inside, out=self.rows[:count])

    def prefill(self, span: int) -> None:
        """Run the chunk in `rows` as positions `start`... of slot `row`."""
        wanted = self._places < self.count
        positions = torch.where(wanted, self.start + self._places, self.spare)
        at = self.row * self.length + positions
        x = self._blocks(self.rows, positions, at, span, self.row)
        x = x.index_select(0, self.count - 1)
        self.logits.index_copy_(0, self.row, self._to_logits(x))

    def decode(self, span: int) -> None:
        """Run `tokens` at `positions`, one of each slot."""
        x = self._embedding.index_select(0, self.tokens)
        at = self._bases + self.positions
        x = self._blocks(x, self.positions, at, span, None)
        self.logits.copy_(self._to_logits(x))

    # ------------------------------------------------------------ parts of a step

    def _blocks(
        self,
        x: Tensor,
        positions: Tensor,
        at: Tensor,
        span: int,
        row: Tensor | None,
    ) -> Tensor:
        """Run every block.

        Args:
            x: Embeddings, one an id.
            positions: Of the ids.
            at: Where their keys and values go in the pool.
            span: How many positions of a row are looked at.
            row: The one row that all ids belong to, known on the device only; None: one id a row.
        """
        shape = self.shape
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        mask = self._mask(positions, span, self.slots if row is None else 1)
        queries = shape.heads * shape.head_size
        kept = shape.kv_heads * shape.head_size
        for number, layer in enumerate(self._layers):
            inner = _norm(x, layer.attn_norm, shape.epsilon).to(self._dtype)
            q, k, v = _times(inner, layer.qkv).split([queries, kept, kept], dim=-1)
            q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
            self._keys[number].index_copy_(0, at, k)
            self._values[number].index_copy_(0, at, v)
            keys, values = (
                pool[number].view(self.slots, self.length, kept)[:, :span]
                for pool in (self._keys, self._values)
            )
            if row is not None:
                keys, values = keys.index_select(0, row), values.index_select(0, row)
            x = x + _times(self._attend(q, keys, values, mask), layer.out)
            inner = _norm(x, layer.ffn_norm, shape.epsilon).to(self._dtype)
            gate, up = _times(inner, layer.gate_up).chunk(2, dim=-1)
            x = x + _times(F.silu(gate) * up, layer.down)
        return x

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn neighbouring pairs of each head: llama.cpp's converters order the rows of the query
        and key matrices so that neighbours belong together."""
        rotary = self.shape.rotary
        heads = x.unflatten(-1, (-1, self.shape.head_size)).float()
        even, odd = heads[..., 0:rotary:2], heads[..., 1:rotary:2]
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
        if rotary < self.shape.head_size:
            turned = torch.cat((turned, heads[..., rotary:]), dim=-1)
        return turned.flatten(-2).to(x.dtype)

    def _mask(self, positions: Tensor, span: int, rows: int) -> Tensor:
        """What each query sees, added to its scores: [rows, 1, queries of a key head, span]."""
        share = self.shape.heads // self.shape.kv_heads
        hidden = self._columns[:span] > positions.repeat_interleave(share)[:, None]
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=hidden.device)
        return mask.masked_fill(hidden, float("-inf")).view(rows, 1, -1, span)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Attention of `q` [ids, heads x size] to rows of the pool [rows, positions, kept].

        The ids of a row, and the heads that share a key, are queries of one key head: so nothing is
        repeated, and decode (one id in each row) is the same as prefill (all ids in one row).
        """
        shape = self.shape
        rows = keys.shape[0]
        share = shape.heads // shape.kv_heads
        q = q.view(rows, -1, shape.kv_heads, share, shape.head_size)
        count = q.shape[1]
        q = q.permute(0, 2, 1, 3, 4).flatten(2, 3)
        keys = keys.unflatten(-1, (shape.kv_heads, -1)).transpose(1, 2)
        values = values.unflatten(-1, (shape.kv_heads, -1)).transpose(1, 2)
        found = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        found = found.unflatten(2, (count, share)).permute(0, 2, 1, 3, 4)
        return found.reshape(rows * count, -1)

    def _to_logits(self, x: Tensor) -> Tensor:
        return _times(_norm(x, self._output_norm, self.shape.epsilon), self._output)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """`F.linear`, with the large matrix on the left: for a few rows that is twice as fast on the
    CPU, and the same to a GPU."""
    return (matrix @ x.t()).t()


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def _rotations(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines by position, [length, 1, half]; made in double precision, once."""
    exponents = torch.arange(0, shape.rotary, 2, dtype=torch.float64) / shape.rotary
    angles = torch.arange(length, dtype=torch.float64)[:, None] * shape.rotary_base**-exponents
    return (
        angles.cos()[:, None].to(device, torch.float32),
        angles.sin()[:, None].to(device, torch.float32),
    )
