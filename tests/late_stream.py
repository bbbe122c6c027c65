"""A device for tests without one that runs as late as CUDA may: only when it is waited for."""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from dataplane.runtime.smollm2_torch import TorchBatcher
from dataplane.runtime.torch_stream import Step, Stream


class LateStream(Stream):
    """Work is queued, copies too, and runs in its order at `wait`, on what is there by then.

    Attributes:
        pending: What was launched and has not run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pending: deque[Step] = deque()

    def host_side(self, device: Tensor) -> Tensor:
        return torch.zeros_like(device)

    def launch(self, step: Step) -> None:
        super().launch(lambda: self.pending.append(step))

    def _synchronise(self) -> None:
        while self.pending:
            self.pending.popleft()()


def reads_of(batcher: TorchBatcher) -> list[list[int]]:
    """The ids of each chunk as the device finds them, in a list that grows as it reads."""
    reads: list[list[int]] = []
    network: Any = batcher.network
    embed = network.embed

    def note(ids: Tensor) -> None:
        reads.append(ids.tolist())
        embed(ids)

    network.embed = note
    return reads
