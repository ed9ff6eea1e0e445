"""The sampler: from logits to tokens, for all sampling rows of a step at once, on the device.

Each randomly drawn row has one uniform number and takes the token at which the cumulative
probability, in the order of token ids, exceeds it. A token depends only on its row's logits,
settings and number. Nothing here waits for the device. On a GPU, `kernels/draw_tokens.py` draws;
the rest of this module draws on a CPU, and on a GPU without Triton.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from longshore.worker.kernels.argmax import argmax
from longshore.worker.kernels.draw_tokens import FRACTION_BITS, draw_tokens
from longshore.worker.kernels.operators import uses_triton

MAX_DRAW_ELEMENTS: Final = 1 << 25
"""Logits that are processed at once; limits temporaries to a few hundred MiB."""


NUM_CANDIDATES: Final = 256
"""Most likely tokens that are sorted first; usual settings need no more."""


PART_SIZE: Final = 512
"""Tokens of the vocabulary whose mass is summed in float32; the parts are summed in float64."""

MIN_TEMPERATURE: Final = 1e-30
"""Smaller ones are greedy anyway, and must not become 0 in float32."""

MAX_TEMPERATURE: Final = 1e30


@dataclass(frozen=True)
class Draws:
    """Rows that draw at random. Tensors are (n,), on the device.

    rows:        int64, indices into the step's sampling rows.
    top_k:       int64; 0 keeps every token. Among equal logits, lower ids are kept first.
    top_p:       int64, a multiple of 2**-FRACTION_BITS; the most likely tokens are kept until their
                 mass (after top_k) reaches it.
    u:           int64, a multiple of 2**-FRACTION_BITS, uniform in [0, 1).
    temperature: float32, from MIN_TEMPERATURE to MAX_TEMPERATURE.
    min_p:       float32; tokens less than min_p times as likely as the most likely one are excluded
                 before anything else.
    has_min_p:   whether any min_p is above 0.
    """

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    u: Tensor
    temperature: Tensor
    min_p: Tensor
    has_min_p: bool

    def some(self, rows: slice | Tensor) -> "Draws":
        """The subset at `rows`: a slice, or (m,) int64."""
        return Draws(
            self.rows[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.u[rows],
            self.temperature[rows],
            self.min_p[rows],
            self.has_min_p,
        )


def sample(
    logits: Tensor, draws: Draws | None, *, num_whole: int = 0, best: Tensor | None = None
) -> Tensor:
    """logits: (n, vocab_size) float32 -> (n,) int32 token ids.

    draws:     all other rows are greedy: the lowest id among the largest logits.
    num_whole: of `draws`, the first rows, which have top_k = 0 and top_p = 1 and need no sort.
    best:      the largest logits' ids, (n,), if already computed; overwritten.

    A row with non-finite logits gets an arbitrary valid id.
    """
    token_ids = argmax(logits)[0] if best is None else best
    if draws is not None:
        step = max(1, MAX_DRAW_ELEMENTS // logits.shape[1])
        if uses_triton(logits):
            for start in range(0, len(draws.rows), step):
                part = draws.some(slice(start, start + step))
                draw_tokens(
                    logits,
                    token_ids,
                    rows=part.rows,
                    top_k=part.top_k,
                    top_p=part.top_p,
                    u=part.u,
                    temperature=part.temperature,
                    min_p=part.min_p,
                )
        else:
            whole, cut = draws.some(slice(num_whole)), draws.some(slice(num_whole, None))
            for kind, draw in ((whole, _draw_from_all), (cut, _draw_from_best)):
                for start in range(0, len(kind.rows), step):
                    part = kind.some(slice(start, start + step))
                    drawn = draw(logits.index_select(0, part.rows), part)
                    token_ids.index_copy_(0, part.rows, drawn)
    return token_ids.int()


def _draw_from_all(logits: Tensor, draws: Draws) -> Tensor:
    """(n, vocab_size) -> (n,) int64 token ids. First a part of the vocabulary is drawn, then a
    token in it, so that only that part needs a second pass."""
    vocab_size = logits.shape[1]
    weights = _weights(logits, draws, torch.float32)
    mass = _part_masses(weights)
    target = _fractions(draws.u) * mass[:, -1]
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
    """(n, vocab_size) -> (n,) int64 token ids, drawn from the tokens that top_k and top_p keep."""
    if logits.device.type == "cpu" and logits.shape[1] > NUM_CANDIDATES:
        return _draw_from_candidates(logits, draws)
    return _draw_from_sorted(logits, draws)


def _draw_from_sorted(logits: Tensor, draws: Draws) -> Tensor:
    # Stable: the order of equal logits must not depend on the batch or the device.
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    return _draw_in_order(_keep(ordered, draws, None).weights, ids, draws)


def _draw_from_candidates(logits: Tensor, draws: Draws) -> Tensor:
    """The same, but sorts only the most likely tokens: on a CPU, sorting a whole vocabulary takes
    20 ms per row. A row that may keep more tokens is sorted completely; that depends on the row
    alone. CPU only, because the choice reads results, which on a GPU would wait for the device.
    """
    best, ids = logits.topk(NUM_CANDIDATES, dim=-1)
    ids, order = ids.sort(dim=-1)  # equal logits by ascending id, as in a stable sort
    best, order = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
    total = torch.zeros(len(logits), 1, dtype=torch.float64)
    without_k = (draws.top_k == 0).nonzero().squeeze(1)
    if len(without_k):
        some = draws.some(without_k)
        total[without_k] = _part_masses(_weights(logits[without_k], some, torch.float32))[:, -1:]
    kept = _keep(best, draws, total)
    place = _draw_in_order(kept.weights, order, draws)
    token_ids = ids.gather(1, place.unsqueeze(1)).squeeze(1)
    # Tokens whose logit equals the last candidate's may be missing among the candidates.
    is_among = best.gather(1, kept.num_kept - 1) > best[:, -1:]
    rest = (~is_among.squeeze(1) | (draws.top_k >= NUM_CANDIDATES)).nonzero().squeeze(1)
    if len(rest):
        token_ids[rest] = _draw_from_sorted(logits[rest], draws.some(rest))
    return token_ids


@dataclass(frozen=True)
class _Kept:
    """weights: (n, m), 0 for tokens that are not kept; num_kept: (n, 1), at least 1."""

    weights: Tensor
    num_kept: Tensor


def _keep(ordered: Tensor, draws: Draws, total: Tensor | None) -> _Kept:
    """ordered: (n, m) the m largest logits of each row, descending. total: (n, 1) sum of weights of
    the whole vocabulary, for rows without top_k; None if `ordered` is the whole vocabulary."""
    num_tokens = ordered.shape[1]
    ranks = torch.arange(num_tokens, device=ordered.device)
    top_k = torch.where(draws.top_k > 0, draws.top_k, num_tokens).unsqueeze(1)
    weights = _weights(ordered, draws, torch.float64).masked_fill_(ranks >= top_k, 0.0)
    mass = weights.cumsum(dim=-1)
    whole = mass[:, -1:]
    if total is not None:
        whole = torch.where(draws.top_k.unsqueeze(1) > 0, whole, total)
    # A token is kept if the mass before it is below top_p; so the first is always kept.
    top_p = _fractions(draws.top_p).unsqueeze(1)
    num_kept = 1 + (mass[:, :-1] < top_p * whole).sum(dim=-1, keepdim=True)
    return _Kept(weights.masked_fill_(ranks >= num_kept, 0.0), num_kept)


def _draw_in_order(weights: Tensor, places: Tensor, draws: Draws) -> Tensor:
    """weights, places: (n, m), each row's places a permutation -> (n,) places, drawn in ascending
    order of places."""
    mass = torch.empty_like(weights).scatter_(1, places, weights).cumsum_(dim=-1)
    return _first_beyond(mass, _fractions(draws.u) * mass[:, -1], mass[:, -1])


def _fractions(values: Tensor) -> Tensor:
    return values.double() * 2.0**-FRACTION_BITS


def _weights(logits: Tensor, draws: Draws, dtype: torch.dtype) -> Tensor:
    """(n, vocab_size) probabilities up to a factor per row; the largest is 1. Tokens that min_p
    drops get 0."""
    wide = logits.to(dtype)
    weights = (wide - wide.amax(dim=-1, keepdim=True)).div_(draws.temperature.unsqueeze(1)).exp_()
    if draws.has_min_p:
        weights.masked_fill_(weights < draws.min_p.to(dtype).unsqueeze(1), 0.0)
    return weights


def _first_beyond(mass: Tensor, target: Tensor, total: Tensor) -> Tensor:
    """mass: (n, m), cumulative; target, total: (n,) -> (n,) index of the first entry above the
    target. If rounding has raised the target to the total, the first entry that reaches the
    total."""
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return (mass <= target.unsqueeze(1)).sum(dim=-1)
