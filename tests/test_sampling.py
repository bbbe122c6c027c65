"""The choice of an id on PyTorch: which are kept, and which of them a draw takes."""

import secrets
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="no PyTorch: pip install -e '.[torch]'")
pytest.importorskip("gguf", reason="no gguf: pip install -e '.[torch]'")

from torch_bench import chosen

from dataplane.runtime import sampling

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_a_request_draws_the_reference_twisters_numbers() -> None:
    # The C++ standard states the 10,000th word of the twister seeded with 5489: 4123659995.
    draws = sampling.Draws(5489)
    numbers = [draws.next() for _ in range(5000)]
    assert int(numbers[-1] * 2**32) == 4123659995
    assert min(numbers) >= 0
    assert max(numbers) < 1


def test_seeds_zero_and_last(monkeypatch: pytest.MonkeyPatch) -> None:
    first = sampling.Draws(7).next()
    monkeypatch.setattr(secrets, "randbelow", lambda _: 6)
    assert sampling.Draws(0).next() == first
    assert sampling.Draws(0xFFFFFFFF).next() == sampling.Draws(0xFFFFFFFF).next() != first


def test_greedy_takes_the_first_of_equals() -> None:
    assert chosen([0.5, 2.0, 2.0, -1.0], drawn=0.99) == [1]
    assert chosen([0.5, 2.0, 2.0, -1.0], drawn=0.99, temperature=1e-30) == [1]


def test_what_is_drawn_follows_the_rules() -> None:
    logits = np.log([0.1, 0.4, 0.2, 0.3])
    hot: dict[str, Any] = {"temperature": 1.0}
    # Nothing narrowed: the vocabulary's order.
    drawn = (0, 0.09, 0.11, 0.49, 0.51, 0.71, 0.999)
    assert [chosen(logits, drawn=u, **hot)[0] for u in drawn] == [0, 0, 1, 1, 2, 3, 3]
    # Sorted: 1, 3, 2, 0 with 0.4, 0.3, 0.2, 0.1. Of the first two a draw's share is 4 to 3.
    two = {**hot, "top_k": 2}
    assert [chosen(logits, drawn=u, **two)[0] for u in (0, 0.57, 0.58, 0.999)] == [1, 1, 3, 3]
    assert [chosen(logits, drawn=u, top_p=0.69, **hot)[0] for u in (0.57, 0.58)] == [1, 3]
    assert chosen(logits, drawn=0.999, top_p=0.71, **hot) == [2]
    assert chosen(logits, drawn=0.999, top_p=1e-9, **hot) == [1]
    # top-p comes after top-k (0.4 of 0.7 is over half) and before the temperature.
    assert chosen(logits, drawn=0.999, top_p=0.5, **two) == [1]
    assert chosen(logits, drawn=0.999, top_p=0.69, top_k=0, temperature=50.0) == [3]
    assert chosen(logits, drawn=0.51, top_p=1.0, top_k=4, **hot) == [2]


def test_rows_sample_each_in_its_way() -> None:
    logits = np.tile(np.log([0.1, 0.4, 0.2, 0.3]), (4, 1))
    found = chosen(
        logits,
        temperature=[0.0, 1.0, 1.0, 1.0],
        top_k=[0, 0, 2, 0],
        top_p=[0.0, 0.0, 0.0, 0.71],
        drawn=[0.999, 0.05, 0.999, 0.999],
    )
    assert found == [1, 0, 3, 2]
