"""From logits to tokens, for all sampling rows of a step at once, on the device.

Each drawn row brings one uniform number and takes the token at which the cumulative probability
passes it. Rows do not see each other, so a token depends on the row's logits, settings and number
alone. Nothing here waits for the device.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

MAX_DRAW_ELEMENTS: Final = 1 << 25
"""Logits that are drawn from at once; bounds the float64 temporaries to a few hundred MiB."""


@dataclass(frozen=True)
class Draws:
    """Rows that are not greedy. Tensors are (n,), on the device.

    rows:        int64, indices into the step's sampling rows.
    temperature: float64, above 0.
    top_k:       int64; 0 keeps every token. Of equal logits the lower ids are kept first.
    top_p:       float64; the most likely tokens are kept until their mass (after top_k) reaches it.
    u:           float64, uniform in [0, 1).
    """

    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    u: Tensor

    def part(self, start: int, end: int) -> "Draws":
        rows = slice(start, end)
        return Draws(
            self.rows[rows],
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.u[rows],
        )


def sample(logits: Tensor, whole: Draws | None, cut: Draws | None) -> Tensor:
    """logits: (n, vocab_size) float32 -> (n,) int32 token ids.

    whole: rows drawn from the whole vocabulary (top_k = 0, top_p = 1); they need no sort.
    cut:   rows drawn from their most likely tokens.
    All others are greedy: the lowest id among the largest logits.

    A row with logits that are not finite gets a valid id that means nothing (`count_non_finite`).
    """
    token_ids = logits.argmax(dim=-1)
    for draws, draw in ((whole, _draw_from_all), (cut, _draw_from_best)):
        if draws is None:
            continue
        step = max(1, MAX_DRAW_ELEMENTS // logits.shape[1])
        for start in range(0, len(draws.rows), step):
            part = draws.part(start, start + step)
            drawn = draw(logits.index_select(0, part.rows), part)
            token_ids.index_copy_(0, part.rows, drawn)
    return token_ids.int()


def count_non_finite(logits: Tensor) -> Tensor:
    """logits: (n, vocab_size) -> (n,) int32, how many of a row are NaN or infinite."""
    return logits.isfinite().logical_not_().sum(dim=-1, dtype=torch.int32)


def _draw_from_all(logits: Tensor, draws: Draws) -> Tensor:
    """(n, vocab_size), unordered -> (n,) int64 token ids."""
    mass = _unnormalised(logits, draws.temperature).cumsum_(dim=-1)
    return _first_beyond(mass, draws.u, mass[:, -1])


def _draw_from_best(logits: Tensor, draws: Draws) -> Tensor:
    """(n, vocab_size) -> (n,) int64 token ids, from the tokens that top_k and top_p keep."""
    vocab_size = logits.shape[1]
    # Stable: which of two equal logits comes first must not depend on the batch or the device.
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    weights = _unnormalised(ordered, draws.temperature)
    ranks = torch.arange(vocab_size, device=logits.device)
    top_k = torch.where(draws.top_k > 0, draws.top_k, vocab_size).unsqueeze(1)
    mass = weights.masked_fill_(ranks >= top_k, 0.0).cumsum_(dim=-1)
    # A token is kept if what lies before it does not reach top_p: at least the first always is.
    wanted = draws.top_p.unsqueeze(1) * mass[:, -1:]
    num_kept = 1 + (mass[:, :-1] < wanted).sum(dim=-1, keepdim=True)
    kept_mass = mass.gather(1, num_kept - 1).squeeze(1)
    rank = _first_beyond(mass, draws.u, kept_mass)
    return ids.gather(1, rank.unsqueeze(1)).squeeze(1)


def _unnormalised(logits: Tensor, temperature: Tensor) -> Tensor:
    """(n, vocab_size) float64 probabilities up to a factor per row; the largest is 1."""
    wide = logits.double()
    wide = wide - wide.amax(dim=-1, keepdim=True)
    return wide.div_(temperature.unsqueeze(1)).exp_()


def _first_beyond(mass: Tensor, u: Tensor, total: Tensor) -> Tensor:
    """mass: (n, m), cumulative; u, total: (n,) -> (n,) index of the first entry above u * total."""
    # Rounded up to the total itself, the target would lie beyond every token.
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    return (mass <= target.unsqueeze(1)).sum(dim=-1)
