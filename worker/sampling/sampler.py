"""From logits to tokens, for all sampling rows of a step at once, on the device.

Each drawn row brings one uniform number and takes the token at which the cumulative probability
passes it. Rows do not see each other, so a token depends on the row's logits, settings and number
alone. Nothing here waits for the device.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from longshore.worker.kernels.argmax import argmax

MAX_DRAW_ELEMENTS: Final = 1 << 25
"""Logits that are drawn from at once; bounds the float64 temporaries to a few hundred MiB."""


NUM_CANDIDATES: Final = 256
"""Most likely tokens that are looked at first; with the usual settings no more are needed."""


PART_SIZE: Final = 512
"""Tokens of the vocabulary whose mass is summed in float32, before float64 adds up the parts."""

MIN_TEMPERATURE: Final = 1e-30


@dataclass(frozen=True)
class Draws:
    """Rows that are not greedy. Tensors are (n,), on the device.

    rows:        int64, indices into the step's sampling rows.
    temperature: float64, above 0.
    top_k:       int64; 0 keeps every token. Of equal logits the lower ids are kept first.
    top_p:       float64; the most likely tokens are kept until their mass (after top_k) reaches it.
    u:           float64, uniform in [0, 1).
    min_p:       float64; tokens less than min_p times as likely as the most likely one are dropped
                 before anything else. None drops none.
    """

    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    u: Tensor
    min_p: Tensor | None = None

    def some(self, rows: slice | Tensor) -> "Draws":
        """Those at `rows`: a slice, or (m,) int64."""
        return Draws(
            self.rows[rows],
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.u[rows],
            None if self.min_p is None else self.min_p[rows],
        )


def sample(
    logits: Tensor, whole: Draws | None, cut: Draws | None, *, best: Tensor | None = None
) -> Tensor:
    """logits: (n, vocab_size) float32 -> (n,) int32 token ids.

    whole: rows with top_k = 0 and top_p = 1; they need no sort.
    cut:   rows drawn from their most likely tokens.
    All others are greedy: the lowest id among the largest logits.
    best:  those ids, (n,), where they are known; overwritten.

    A row with logits that are not finite gets a valid id that means nothing.
    """
    token_ids = argmax(logits)[0] if best is None else best
    for draws, draw in ((whole, _draw_from_all), (cut, _draw_from_best)):
        if draws is None:
            continue
        step = max(1, MAX_DRAW_ELEMENTS // logits.shape[1])
        for start in range(0, len(draws.rows), step):
            part = draws.some(slice(start, start + step))
            drawn = draw(logits.index_select(0, part.rows), part)
            token_ids.index_copy_(0, part.rows, drawn)
    return token_ids.int()


def _draw_from_all(logits: Tensor, draws: Draws) -> Tensor:
    """(n, vocab_size), unordered -> (n,) int64 token ids: first a part of the vocabulary is drawn,
    then a token of it, so that only a part needs more than one pass."""
    vocab_size = logits.shape[1]
    weights = _weights(logits, draws, torch.float32)
    mass = _part_masses(weights)
    target = draws.u * mass[:, -1]
    part = _first_beyond(mass, target, mass[:, -1]).unsqueeze(1)
    before = torch.where(part > 0, mass.gather(1, (part - 1).clamp_min(0)), 0.0).squeeze(1)
    ids = part * PART_SIZE + torch.arange(PART_SIZE, device=logits.device)
    inner = weights.gather(1, ids.clamp_max(vocab_size - 1)).double()
    inner = inner.masked_fill_(ids >= vocab_size, 0.0).cumsum_(dim=-1)
    return part.squeeze(1) * PART_SIZE + _first_beyond(inner, target - before, inner[:, -1])


def _part_masses(weights: Tensor) -> Tensor:
    """(n, vocab_size) float32 -> (n, parts) float64, cumulative over parts of PART_SIZE tokens."""
    num_full = weights.shape[1] // PART_SIZE
    full = weights[:, : num_full * PART_SIZE].unflatten(1, (num_full, PART_SIZE)).sum(dim=-1)
    rest = weights[:, num_full * PART_SIZE :].sum(dim=-1, keepdim=True)
    return torch.cat((full, rest), dim=-1).double().cumsum_(dim=-1)


def _draw_from_best(logits: Tensor, draws: Draws) -> Tensor:
    """(n, vocab_size) -> (n,) int64 token ids, from the tokens that top_k and top_p keep."""
    if logits.device.type == "cpu" and logits.shape[1] > NUM_CANDIDATES:
        return _draw_from_candidates(logits, draws)
    return _draw_from_sorted(logits, draws)


def _draw_from_sorted(logits: Tensor, draws: Draws) -> Tensor:
    # Stable: which of two equal logits comes first must not depend on the batch or the device.
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    kept = _keep(ordered, draws, None)
    return _draw_kept(kept, ids, draws)


def _draw_from_candidates(logits: Tensor, draws: Draws) -> Tensor:
    """The same, sorting the most likely tokens alone: on a CPU a whole vocabulary takes 20 ms a
    row. A row that may keep more than these is sorted whole. Which way a row goes depends on the
    row alone; looking at a result to choose is for devices that need not be waited for.
    """
    best, ids = logits.topk(NUM_CANDIDATES, dim=-1)
    ids, order = ids.sort(dim=-1)  # equal logits by rising id, as a stable sort of all leaves them
    best, order = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    total = torch.zeros(len(logits), 1, dtype=torch.float64)
    without_k = (draws.top_k == 0).nonzero().squeeze(1)
    if len(without_k):
        some = draws.some(without_k)
        total[without_k] = _part_masses(_weights(logits[without_k], some, torch.float32))[:, -1:]
    kept = _keep(best, draws, total)
    token_ids = _draw_kept(kept, ids, draws)
    # Of logits equal to the last candidate's some are no candidates.
    is_among = best.gather(1, kept.num_kept - 1) > best[:, -1:]
    rest = (~is_among.squeeze(1) | (draws.top_k >= NUM_CANDIDATES)).nonzero().squeeze(1)
    if len(rest):
        token_ids[rest] = _draw_from_sorted(logits[rest], draws.some(rest))
    return token_ids


@dataclass(frozen=True)
class _Kept:
    """mass: (n, m), cumulative over the most likely tokens; num_kept: (n, 1), at least 1."""

    mass: Tensor
    num_kept: Tensor


def _keep(ordered: Tensor, draws: Draws, total: Tensor | None) -> _Kept:
    """ordered: (n, m) falling logits, the m most likely of each row. total: (n, 1) weights of the
    whole vocabulary, of rows without top_k; None if `ordered` is the whole."""
    num_tokens = ordered.shape[1]
    ranks = torch.arange(num_tokens, device=ordered.device)
    top_k = torch.where(draws.top_k > 0, draws.top_k, num_tokens).unsqueeze(1)
    mass = _weights(ordered, draws, torch.float64).masked_fill_(ranks >= top_k, 0.0).cumsum_(dim=-1)
    whole = mass[:, -1:]
    if total is not None:
        whole = torch.where(draws.top_k.unsqueeze(1) > 0, whole, total)
    # A token is kept if what lies before it does not reach top_p: at least the first always is.
    num_kept = 1 + (mass[:, :-1] < draws.top_p.unsqueeze(1) * whole).sum(dim=-1, keepdim=True)
    return _Kept(mass, num_kept)


def _draw_kept(kept: _Kept, ids: Tensor, draws: Draws) -> Tensor:
    """ids: (n, m), of the tokens in `kept` -> (n,) token ids."""
    kept_mass = kept.mass.gather(1, kept.num_kept - 1).squeeze(1)
    rank = _first_beyond(kept.mass, draws.u * kept_mass, kept_mass)
    return ids.gather(1, rank.unsqueeze(1)).squeeze(1)


def _weights(logits: Tensor, draws: Draws, dtype: torch.dtype) -> Tensor:
    """(n, vocab_size) probabilities up to a factor per row; the largest is 1. 0 for what min_p
    drops."""
    wide = logits.to(dtype)
    # A smaller temperature is greedy already, and must not become 0 in float32.
    temperature = draws.temperature.to(dtype).clamp_min(MIN_TEMPERATURE).unsqueeze(1)
    weights = (wide - wide.amax(dim=-1, keepdim=True)).div_(temperature).exp_()
    if draws.min_p is not None:
        weights.masked_fill_(weights < draws.min_p.to(dtype).unsqueeze(1), 0.0)
    return weights


def _first_beyond(mass: Tensor, target: Tensor, total: Tensor) -> Tensor:
    """mass: (n, m), cumulative; target, total: (n,) -> (n,) index of the first entry above the
    target. Where rounding has brought that up to the total: of the first that reaches the total."""
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return (mass <= target.unsqueeze(1)).sum(dim=-1)
