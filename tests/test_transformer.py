"""The network on PyTorch, against plain arithmetic."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="no PyTorch: pip install -e '.[torch]'")
pytest.importorskip("gguf", reason="no gguf: pip install -e '.[torch]'")

import torch
from torch_bench import CPU, SMALL, plainly, small_weights

from dataplane.runtime import sampling
from dataplane.runtime.gguf_weights import Shape
from dataplane.runtime.transformer import Transformer, planned_bytes

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Floats = npt.NDArray[np.float32]


class _Network:
    """A small network whose slots are fed as a batcher would."""

    def __init__(
        self, shape: Shape = SMALL, slots: int = 3, room: int = 40, dtype: Any = torch.float32
    ) -> None:
        self.shape, self.weights = shape, small_weights(shape)
        self.tolerance = 2e-4 if dtype == torch.float32 else 0.3
        self.net = Transformer(shape, dict(self.weights), slots, room, 8, CPU, dtype)
        self.held: list[list[int]] = [[] for _ in range(slots)]

    def prompt(self, slot: int, ids: list[int]) -> Floats:
        self.held[slot] = list(ids)
        for start in range(0, len(ids), self.net.chunk):
            part = ids[start : start + self.net.chunk]
            self.net.row[0], self.net.start[0], self.net.count[0] = slot, start, len(part)
            self.net.embed(torch.tensor(part, dtype=torch.int32))
            self.net.prefill(self.net.length)
        return self.logits(slot)

    def step(self, **tokens: int) -> None:
        self.net.tokens.zero_()
        self.net.positions.fill_(self.net.spare)
        for name, token in tokens.items():
            slot = int(name[1:])
            self.net.tokens[slot], self.net.positions[slot] = token, len(self.held[slot])
            self.held[slot].append(token)
        self.net.decode(self.net.length)

    def logits(self, slot: int) -> Floats:
        return np.asarray(self.net.logits[slot].numpy().copy())

    def check(self, slot: int) -> None:
        """This slot's logits are those of all that it holds."""
        expected = plainly(self.shape, self.weights, self.held[slot])
        assert np.ptp(expected) > 1
        np.testing.assert_allclose(self.logits(slot), expected, atol=self.tolerance)


@pytest.mark.parametrize(
    "shape",
    [
        SMALL,
        replace(SMALL, rotary=8),
        replace(SMALL, kv_heads=6),
        replace(SMALL, heads=4, kv_heads=1, rotary_base=500.0, epsilon=1e-2),
    ],
    ids=["grouped", "half turned", "a key a head", "one key"],
)
def test_chunks_and_steps_are_plain_arithmetic(shape: Shape) -> None:
    network = _Network(shape)
    network.prompt(1, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9])
    network.check(1)
    for token in (7, 0, 49):
        network.step(s1=token)
        network.check(1)


def test_half_precision_is_the_same_network() -> None:
    network = _Network(dtype=torch.bfloat16)
    network.prompt(1, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3])
    network.check(1)
    network.step(s1=7)
    network.check(1)
    assert network.net.logits.dtype == torch.float32


def test_slots_neither_see_nor_disturb_each_other() -> None:
    network = _Network()
    network.prompt(0, [1, 2, 3])
    network.prompt(2, list(range(20)))
    network.step(s0=4, s2=5)
    network.check(0)
    network.check(2)
    network.prompt(1, [9] * 11)  # while the others stand
    network.check(1)
    network.step(s2=6)  # alone: slot 0 and 1 run along, at the spare position
    network.check(2)
    network.step(s0=7, s1=8)
    network.check(0)
    network.check(1)


def test_a_slot_forgets_its_last_request() -> None:
    network = _Network()
    network.prompt(0, list(range(33)))
    network.prompt(0, [5, 6])
    network.check(0)
    for token in range(10):
        network.step(s0=token)
    network.check(0)


def test_a_slot_may_be_filled_to_its_last_position() -> None:
    network = _Network(room=24)
    network.prompt(1, [8] * 5)
    network.prompt(0, list(range(23)))  # its padded last chunk would end behind the room
    network.step(s0=1)
    network.check(0)
    network.step(s1=2)
    network.check(1)


def test_no_step_looks_at_a_value_on_the_host() -> None:
    """What a capture needs: tensors that have no values at all go through."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        net = Transformer(SMALL, small_weights(SMALL), 3, 40, 8, CPU, torch.bfloat16)
        net.prefill(net.length)
        net.decode(net.length)
        ids = sampling.choose(net.logits, sampling.Choice(3, CPU))
        assert ids.shape == (3,)
        with pytest.raises(Exception, match="local_scalar"):
            ids[0].item()


def test_every_tensor_of_a_step_lies_on_its_device() -> None:
    """A tensor made elsewhere would not mix with those of a device that has no memory."""
    meta = torch.device("meta")
    net = Transformer(SMALL, small_weights(SMALL), 3, 40, 8, meta, torch.bfloat16)
    net.embed(torch.zeros(5, dtype=torch.int32, device=meta))
    net.prefill(net.length)
    net.decode(net.length)
    assert sampling.choose(net.logits, sampling.Choice(3, meta)).device == meta


@pytest.mark.parametrize("span", [16, 24, 63])
def test_a_shorter_span_changes_nothing(span: int) -> None:
    network = _Network()
    network.prompt(0, list(range(14)))
    network.net.tokens[0], network.net.positions[0] = 7, 14
    network.net.decode(network.net.length)
    whole = network.logits(0)
    network.net.decode(span)
    np.testing.assert_allclose(network.logits(0), whole, atol=1e-5)


def test_an_id_outside_of_the_vocabulary_is_looked_up_as_the_nearest_inside() -> None:
    net = _Network().net
    net.embed(torch.tensor([-(2**31), 50, 2**31 - 1, 3], dtype=torch.int32))
    found = net.rows[:4].clone()
    net.embed(torch.tensor([0, 49, 49, 3], dtype=torch.int32))
    assert torch.equal(found, net.rows[:4])


def test_what_is_held_was_planned() -> None:
    net = _Network(slots=5, room=100).net
    planned = planned_bytes(SMALL, 5, 100, torch.float32)
    assert planned <= net.held_bytes < planned * 1.1


def test_an_untied_output_is_used() -> None:
    network = _Network()
    weights = {**network.weights, "output.weight": network.weights["token_embd.weight"] * -1.0}
    net = Transformer(SMALL, dict(weights), 1, 8, 4, CPU, torch.float32)
    net.count[0] = 2
    net.embed(torch.tensor([1, 2], dtype=torch.int32))
    net.prefill(net.length)
    np.testing.assert_allclose(net.logits[0].numpy(), plainly(SMALL, weights, [1, 2]), atol=2e-4)
