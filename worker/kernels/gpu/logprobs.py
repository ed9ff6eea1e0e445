"""Ranks and log probabilities, from parts of the vocabulary that are added up. See
`worker/kernels/logprobs.py`."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

SPLIT: Final = 4096


@triton.jit
def _measure(
    logits_ptr,
    token_ids_ptr,
    above_ptr,
    most_ptr,
    total_ptr,
    stride,
    vocab_size,
    SPLIT: tl.constexpr,
):
    split, index = tl.program_id(0), tl.program_id(1).to(tl.int64)
    line_ptr = logits_ptr + index * stride
    ids = split * SPLIT + tl.arange(0, SPLIT)
    logits = tl.load(line_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    chosen = tl.load(line_ptr + tl.load(token_ids_ptr + index))
    most = tl.max(logits, axis=0)
    base = tl.where(most > float("-inf"), most, 0.0)
    place = index * tl.num_programs(0) + split
    tl.store(above_ptr + place, tl.sum((logits > chosen).to(tl.int32), axis=0))
    tl.store(most_ptr + place, most)
    tl.store(total_ptr + place, tl.sum(tl.exp(logits - base), axis=0))


@triton.jit
def _add_up(
    logits_ptr,
    token_ids_ptr,
    best_ptr,
    above_ptr,
    most_ptr,
    total_ptr,
    ranks_ptr,
    listed_ptr,
    logprobs_ptr,
    stride,
    num_splits,
    NUM_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    places, is_split = index * num_splits + splits, splits < num_splits
    above = tl.load(above_ptr + places, mask=is_split, other=0)
    tl.store(ranks_ptr + index, 1 + tl.sum(above, axis=0))
    most = tl.load(most_ptr + places, mask=is_split, other=float("-inf"))
    base = tl.max(most, axis=0)
    base = tl.where(base > float("-inf"), base, 0.0)
    totals = tl.load(total_ptr + places, mask=is_split, other=0.0)
    total = base + tl.log(tl.sum(totals * tl.exp(most - base), axis=0))
    line_ptr = logits_ptr + index * stride
    listed_ptr += index * (1 + NUM_BEST)
    logprobs_ptr += index * (1 + NUM_BEST)
    chosen = tl.load(token_ids_ptr + index)
    tl.store(listed_ptr, chosen)
    tl.store(logprobs_ptr, tl.load(line_ptr + chosen) - total)
    if NUM_BEST > 0:
        columns = tl.arange(0, BLOCK)
        is_best = columns < NUM_BEST
        best = tl.load(best_ptr + index * NUM_BEST + columns, mask=is_best, other=0)
        logits = tl.load(line_ptr + best, mask=is_best, other=0.0)
        tl.store(listed_ptr + 1 + columns, best.to(tl.int32), mask=is_best)
        tl.store(logprobs_ptr + 1 + columns, logits - total, mask=is_best)


def _fake(logits: Tensor, token_ids: Tensor, best: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, device = len(logits), logits.device
    shape = (num_rows, 1 if best is None else 1 + best.shape[1])
    return (
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=torch.float32, device=device),
    )


@operator(
    "score(Tensor logits, Tensor token_ids, Tensor? best) -> (Tensor, Tensor, Tensor)",
    fake=_fake,
    launches=2,
)
def score(logits: Tensor, token_ids: Tensor, best: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """See the wrapper."""
    ranks, listed, logprobs = _fake(logits, token_ids, best)
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return ranks, listed, logprobs
    num_splits = triton.cdiv(vocab_size, SPLIT)
    above = ranks.new_empty((num_rows, num_splits))
    most, total = logprobs.new_empty((2, num_rows, num_splits))
    stride, num_best = logits.stride(0), listed.shape[1] - 1
    _measure[(num_splits, num_rows)](
        logits,
        token_ids,
        above,
        most,
        total,
        stride,
        vocab_size,
        SPLIT=SPLIT,
        num_warps=8,
    )
    _add_up[(num_rows,)](
        logits,
        token_ids,
        best,
        above,
        most,
        total,
        ranks,
        listed,
        logprobs,
        stride,
        num_splits,
        NUM_BEST=num_best,
        BLOCK=triton.next_power_of_2(max(num_best, 1)),
        SPLITS=triton.next_power_of_2(num_splits),
        num_warps=1,
    )
    return ranks, listed, logprobs
