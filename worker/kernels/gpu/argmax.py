"""The largest logit of each line and its non-finite ones: a program per line and span of the
vocabulary, then one per line. See `worker/kernels/argmax.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

BLOCK = 2048
NUM_PROGRAMS = 1056
"""That keep a large GPU busy: eight for each of an H100's 132 multiprocessors."""

NOWHERE: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def _first_of(values, places):
    """The largest value, and the lowest of its places."""
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, places, NOWHERE), axis=0)


@triton.jit
def _spans(
    logits_ptr, values_ptr, places_ptr, counts_ptr, vocab_size, stride, span, BLOCK: tl.constexpr
):
    """values, places, counts: (n, spans), the largest logit, its place, and the number of logits
    that are not finite. NaN is never the largest."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = part * span
    end = tl.minimum(first + span, vocab_size)
    columns = tl.arange(0, BLOCK)
    line = logits_ptr + row * stride
    values = tl.full((BLOCK,), float("-inf"), tl.float32)
    places = tl.where(first + columns < end, first + columns, NOWHERE)
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, end, BLOCK):
        at = start + columns
        x = tl.load(line + at, mask=at < end, other=0.0)
        counts += (tl.abs(x) < float("inf")).to(tl.int32) ^ 1
        is_larger = (at < end) & (x > values)
        values = tl.where(is_larger, x, values)
        places = tl.where(is_larger, at, places)
    best, place = _first_of(values, places)
    out = row * tl.num_programs(1) + part
    tl.store(values_ptr + out, best)
    tl.store(places_ptr + out, place)
    tl.store(counts_ptr + out, tl.sum(counts, axis=0))


@triton.jit
def _merge(
    values_ptr, places_ptr, counts_ptr, best_ptr, num_non_finite_ptr, num_spans, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    spans = tl.arange(0, BLOCK)
    is_span, at = spans < num_spans, row * num_spans + spans
    values = tl.load(values_ptr + at, mask=is_span, other=float("-inf"))
    places = tl.load(places_ptr + at, mask=is_span, other=NOWHERE)
    counts = tl.load(counts_ptr + at, mask=is_span, other=0)
    _, place = _first_of(values, places)
    tl.store(best_ptr + row, place.to(tl.int64))
    tl.store(num_non_finite_ptr + row, tl.sum(counts, axis=0))


def _fake(logits: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, device = len(logits), logits.device
    return (
        torch.empty(num_rows, dtype=torch.int64, device=device),
        torch.empty(num_rows, dtype=torch.int32, device=device),
    )


@operator("argmax(Tensor logits) -> (Tensor, Tensor)", fake=_fake, launches=2)
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See the wrapper."""
    best, num_non_finite = _fake(logits)
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return best, num_non_finite
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    span = BLOCK * triton.cdiv(num_blocks, min(triton.cdiv(NUM_PROGRAMS, num_rows), num_blocks))
    num_spans = triton.cdiv(vocab_size, span)
    shape, device = (num_rows, num_spans), logits.device
    values = torch.empty(shape, dtype=torch.float32, device=device)
    places = torch.empty(shape, dtype=torch.int32, device=device)
    counts = torch.empty(shape, dtype=torch.int32, device=device)
    _spans[shape](
        logits, values, places, counts, vocab_size, logits.stride(0), span, BLOCK=BLOCK, num_warps=8
    )
    _merge[(num_rows,)](
        values,
        places,
        counts,
        best,
        num_non_finite,
        num_spans,
        BLOCK=triton.next_power_of_2(num_spans),
        num_warps=1,
    )
    return best, num_non_finite
