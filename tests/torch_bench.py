"""The engine on PyTorch at work: a small network, the same in plain arithmetic, what is chosen."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from engine_bench import Bench, Request

from dataplane.runtime import sampling
from dataplane.runtime.gguf_weights import Shape, Weights
from dataplane.runtime.smollm2_torch import TorchBatcher
from dataplane.runtime.torch_stream import Stream

CPU = torch.device("cpu")

SMALL = Shape(
    layers=2, width=64, hidden=96, heads=6, kv_heads=2, head_size=16, rotary=16,
    rotary_base=10_000.0, epsilon=1e-5, vocab_size=50, trained_context=128,
)  # fmt: skip


def small_weights(shape: Shape, seed: int = 1) -> Weights:
    numbers = np.random.default_rng(seed)
    return {
        name: (numbers.normal(0, 0.4, size) + (len(size) == 1)).astype(np.float32)
        for name, size in shape.tensors()
    }


def plainly(shape: Shape, weights: Weights, ids: list[int]) -> npt.NDArray[np.float64]:
    """The logits after `ids`: all at once, in double precision, one head at a time."""

    def norm(x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + shape.epsilon) * weights[name]

    def turn(x: Any, position: int) -> Any:
        turned = x.copy()
        for pair in range(shape.rotary // 2):
            angle = position * shape.rotary_base ** (-2 * pair / shape.rotary)
            a, b = x[2 * pair], x[2 * pair + 1]
            turned[2 * pair] = a * np.cos(angle) - b * np.sin(angle)
            turned[2 * pair + 1] = a * np.sin(angle) + b * np.cos(angle)
        return turned

    x = weights["token_embd.weight"][ids].astype(np.float64)
    for layer in range(shape.layers):
        at = f"blk.{layer}."
        inner = norm(x, at + "attn_norm.weight")
        size, share = shape.head_size, shape.heads // shape.kv_heads
        q, k, v = (inner @ weights[f"{at}attn_{which}.weight"].T for which in "qkv")
        found = np.zeros_like(q)
        for head in range(shape.heads):
            mine, shared = slice(head * size, (head + 1) * size), head // share * size
            theirs = slice(shared, shared + size)
            keys = np.array([turn(k[i, theirs], i) for i in range(len(ids))])
            for i in range(len(ids)):
                scores = keys[: i + 1] @ turn(q[i, mine], i) / np.sqrt(size)
                odds = np.exp(scores - scores.max())
                found[i, mine] = odds @ v[: i + 1, theirs] / odds.sum()
        x = x + found @ weights[at + "attn_output.weight"].T
        inner = norm(x, at + "ffn_norm.weight")
        gate = inner @ weights[at + "ffn_gate.weight"].T
        up = inner @ weights[at + "ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[at + "ffn_down.weight"].T
    output = weights.get("output.weight", weights["token_embd.weight"])
    return np.asarray(norm(x, "output_norm.weight")[-1] @ output.T)


def small_batcher(
    slots: int = 3, per_slot: int = 40, chunk: int = 8, stream: Stream | None = None
) -> TorchBatcher:
    return TorchBatcher(SMALL, small_weights(SMALL), slots, per_slot, chunk, CPU, stream)


def chosen(logits: Any, **how: Any) -> list[int]:
    """The id of each row of logits, sampled `how` a `Choice` may say."""
    rows = torch.tensor(np.atleast_2d(logits), dtype=torch.float32)
    choice = sampling.Choice(rows.shape[0], CPU)
    for name, value in how.items():
        getattr(choice, name)[:] = torch.tensor(value, dtype=getattr(choice, name).dtype)
    ids: list[int] = sampling.choose(rows, choice).tolist()
    return ids


def serve(batcher: TorchBatcher, count: int, prompt: list[int], stops: Any = ()) -> None:
    """So many requests for two ids, all slots at once, some of them sampling."""
    left = count
    while left:
        requests = [
            Request(slot, prompt, 2, temperature=float(slot % 3 == 0), top_p=0.9, seed=5)
            for slot in range(min(left, batcher.slots))
        ]
        Bench(*requests, batcher=batcher, stop_ids=stops).until_done(*requests)
        left -= len(requests)


def resident_bytes() -> int:
    """What this process has in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096
