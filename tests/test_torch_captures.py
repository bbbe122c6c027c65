"""What a capture of a CUDA graph forbids, which shows without a GPU: on tensors without memory."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="no PyTorch: pip install -e '.[torch]'")
pytest.importorskip("gguf", reason="no gguf: pip install -e '.[torch]'")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch_bench import SMALL, small_weights  # noqa: E402

from dataplane.runtime import sampling  # noqa: E402
from dataplane.runtime.transformer import Transformer  # noqa: E402


class _Devices(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Notes where the tensors lie that operations take and give."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.elsewhere: list[str] = []

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = call(*args, **(kwargs or {}))
        self.operations += 1
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.elsewhere.append(f"{call}: {tensor.device}")
        return out


@pytest.mark.parametrize("step", ["prefill", "decode", "greedy", "choose"])
def test_a_captured_step_takes_nothing_of_the_host(step: str) -> None:
    """A copy from there waits for the device, which a capture forbids; reading a value does, too,
    and is impossible of a tensor without memory."""
    meta = torch.device("meta")
    network = Transformer(SMALL, small_weights(SMALL), 3, 100, 8, meta, torch.bfloat16)
    ids, choice = torch.zeros(3, dtype=torch.int64, device=meta), sampling.Choice(3, meta)
    steps: dict[str, Callable[[], object]] = {
        "prefill": lambda: network.prefill(network.length),
        "decode": lambda: network.decode(network.length),
        "greedy": lambda: ids.copy_(network.logits.argmax(-1)),
        "choose": lambda: ids.copy_(sampling.choose(network.logits, choice)),
    }
    with _Devices() as seen:
        steps[step]()
    assert seen.operations > 1
    assert seen.elsewhere == []
