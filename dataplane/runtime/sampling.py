"""The next id from logits, by llama.cpp's rules: all rows at once, no value looked at on the host.

The rules, in their order (those of a chain of top-k, top-p, temperature, distribution):

- A temperature near zero is greedy: the largest logit, and of equals the first.
- top-k keeps the k largest logits; 0, or the vocabulary and more, keeps all.
- top-p keeps the fewest of these whose probabilities, before the temperature, add up to p; 0 or 1
  keeps all, and one always stays.
  llama.cpp adds probabilities up in float32, and where hundreds are kept it keeps one in fifty
  fewer; here they are added up in float64.
- What is kept is divided by the temperature, and one of it drawn: the first in order whose
  cumulated probability reaches the drawn number. The order is the logits' where top-k or top-p
  sorted them, and the vocabulary's otherwise.

A request's numbers come from a Mersenne twister of its seed, two words each, as the C++ library
that llama.cpp is built with makes them. So one seed gives one answer in whichever slot, on
whichever device, and the same that llama.cpp gives as far as the logits agree.
"""

import secrets
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

COLDEST = 1e-5
"""Below this temperature only a tie would be left to chance, and the division may overflow."""

# What llama.cpp takes for "random". A client's zero says that, so zero stands for this one.
_LAST_SEED = 0xFFFFFFFF
_WORD = 2.0**32


class Draws:
    """A request's random numbers in [0, 1)."""

    __slots__ = ("_words",)

    def __init__(self, seed: int) -> None:
        if seed == 0:
            seed = 1 + secrets.randbelow(_LAST_SEED - 1)
        elif seed == _LAST_SEED:
            seed = 0
        # The class's own seeding hashes; the old one is the twister's reference.
        state: Any = np.random.RandomState(seed).get_state(legacy=False)
        self._words = np.random.MT19937()
        self._words.state = state

    def next(self) -> float:
        low, high = (self._words.random_raw() for _ in range(2))
        return min((low + high * _WORD) / (_WORD * _WORD), 1.0 - 2.0**-53)


class Choice:
    """How each of some rows samples, as tensors of that length: the inputs of `choose`."""

    def __init__(self, rows: int, device: torch.device) -> None:
        def make(kind: torch.dtype) -> Tensor:
            return torch.zeros(rows, dtype=kind, device=device)

        self.temperature = make(torch.float32)
        self.top_p = make(torch.float32)
        self.top_k = make(torch.int64)
        self.drawn = make(torch.float64)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.temperature, self.top_p, self.top_k, self.drawn

    def of(self, rows: Tensor) -> "Choice":
        """The same for some of the rows."""
        chosen = copy(self)
        for name, tensor in vars(self).items():
            setattr(chosen, name, tensor[rows])
        return chosen


def choose(logits: Tensor, choice: Choice) -> Tensor:
    """The next id of each row of `logits` [rows, vocabulary]."""
    vocabulary = logits.shape[-1]
    top_k, top_p = choice.top_k[:, None], choice.top_p[:, None]
    narrow_k = (top_k > 0) & (top_k < vocabulary)
    narrow_p = (top_p > 0) & (top_p < 1)
    sorted_logits, order = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocabulary, device=logits.device)
    kept = ~narrow_k | (ranks < top_k)
    before_heat = sorted_logits.masked_fill(~kept, float("-inf")).softmax(-1, torch.float64)
    # One stays that the sum of those before it has not yet reached p.
    kept &= ~narrow_p | (before_heat.cumsum(-1) - before_heat < top_p)
    kept[:, 0] = True
    in_order = narrow_k | narrow_p
    ranked = torch.where(in_order, sorted_logits, logits)
    hot = ranked / choice.temperature[:, None].clamp_min(COLDEST)
    hot = hot.masked_fill(in_order & ~kept, float("-inf"))
    reached = hot.softmax(-1, torch.float64).cumsum(-1)
    # The last number may fall short of 1 by rounding: what is drawn is a share of it.
    place = torch.searchsorted(reached, choice.drawn[:, None] * reached[:, -1:], right=True)
    place = place.clamp_max(vocabulary - 1)
    found = torch.where(in_order, order.gather(-1, place), place).squeeze(-1)
    return torch.where(choice.temperature < COLDEST, logits.argmax(-1), found)
