"""Shape and weights from a GGUF: those of a small one, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.model import ModelError

pytest.importorskip("torch", reason="no PyTorch: pip install -e '.[torch]'")
pytest.importorskip("gguf", reason="no gguf: pip install -e '.[torch]'")

import gguf
from torch_bench import SMALL, small_weights

from dataplane.runtime import gguf_weights
from dataplane.runtime.gguf_weights import Weights


def _write(path: Path, weights: Weights, without: str = "", **changes: Any) -> Path:
    """A GGUF of the small shape. Its embedding is quantised."""
    fields: dict[str, Any] = {
        "block_count": SMALL.layers,
        "context_length": SMALL.trained_context,
        "embedding_length": SMALL.width,
        "feed_forward_length": SMALL.hidden,
        "attention.head_count": SMALL.heads,
        "attention.head_count_kv": SMALL.kv_heads,
        "attention.key_length": SMALL.head_size,
        "attention.layer_norm_rms_epsilon": SMALL.epsilon,
        "rope.dimension_count": SMALL.rotary,
        "rope.freq_base": SMALL.rotary_base,
        "vocab_size": SMALL.vocab_size,
    }
    architecture = changes.pop("architecture", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**fields, **changes}.items():
        if key == without:
            continue
        put = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        put[type(value)](f"{architecture}.{key}", value)
    for name, tensor in weights.items():
        if name == without:
            continue
        kind = gguf.GGMLQuantizationType.Q8_0 if "embd" in name else None
        data = gguf.quants.quantize(tensor, kind) if kind else tensor
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_gives_shape_and_weights(tmp_path: Path) -> None:
    weights = small_weights(SMALL)
    shape, found = gguf_weights.load(_write(tmp_path / "small.gguf", weights))
    assert shape == replace(SMALL, epsilon=float(np.float32(SMALL.epsilon)))
    assert found.keys() == weights.keys()
    for name, tensor in found.items():
        assert tensor.dtype == np.float32
        exact = "embd" not in name
        np.testing.assert_allclose(tensor, weights[name], atol=0 if exact else 0.02)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architecture": "gemma"}, "of the architecture 'gemma'"),
        ({"rope.scaling.type": "yarn"}, "'yarn', which is not done here"),
        ({"attention.head_count": 5}, "contradict each other"),
        ({"embedding_length": 32}, r"token_embd.weight is of shape \(50, 64\) instead of"),
        ({"without": "attention.layer_norm_rms_epsilon"}, "state no llama.attention.layer_norm"),
        ({"without": "blk.1.ffn_up.weight"}, "lack blk.1.ffn_up.weight"),
        ({"block_count": 1}, "hold an unknown blk.1."),
    ],
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    path = _write(tmp_path / "odd.gguf", small_weights(SMALL), **changes)
    with pytest.raises(ModelError, match=says):
        gguf_weights.load(path)


@pytest.mark.parametrize("size", [0, 3, 100, 600, 4000, -2000])
def test_a_damaged_file_is_refused(tmp_path: Path, size: int) -> None:
    path = _write(tmp_path / "cut.gguf", small_weights(SMALL))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"damaged or no GGUF.*`dataplane model install`"):
        gguf_weights.load(path)
    with pytest.raises(ModelError, match="cannot be read"):
        gguf_weights.load(tmp_path / "none.gguf")
