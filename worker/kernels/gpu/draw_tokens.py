"""Random tokens without a sort, from rows of logits that several programs share. See
`worker/kernels/draw_tokens.py`.

Weights are integers, so sums do not depend on how a row is divided. `_measure` adds up, for each
split of the vocabulary, the tokens within each of NUM_EDGES distances from the most likely one.
From this follows the range of distances where top_k and top_p may cut a row off. `_collect` copies
the candidates in it, often a small part of the vocabulary. `_draw` finds by bisection which of
them are kept, the split in which the token is, and the token.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

NUM_EDGES: tl.constexpr = tl.constexpr(32)
EDGE_UNIT: tl.constexpr = tl.constexpr(36 / 1024)
"""Edge e is at e * e * EDGE_UNIT, exactly: distances near the most likely token are finer."""

ONE: tl.constexpr = tl.constexpr(float(1 << 36))
"""The weight of the most likely token; what weighs less than 1 cannot be drawn."""

COUNT_BITS: tl.constexpr = tl.constexpr(13)
COUNT_MASK: tl.constexpr = tl.constexpr((1 << 13) - 1)
"""A sum of at most 4096 weights is packed in an int64 above the number of tokens in it."""

TILE: tl.constexpr = tl.constexpr(32)
"""Candidates of each split that are processed at once."""

SMALLEST_KEY: tl.constexpr = tl.constexpr(-(1 << 31))
LARGEST_KEY: tl.constexpr = tl.constexpr((1 << 31) - 1)
WHOLE: tl.constexpr = tl.constexpr(1 << 62)

COLUMNS: Final = ("rows_ptr", "top_k_ptr", "top_p_ptr", "u_ptr", "temperature_ptr", "min_p_ptr")
"""Anywhere in the packed inputs of a step; another alignment must not be another compilation."""


@triton.jit
def _row(logits_ptr, stride, best_ptr, rows_ptr, temperature_ptr, draw):
    """The logits of a drawn row, the largest of them, and its factor from logits to distances."""
    row = tl.load(rows_ptr + draw)
    line_ptr = logits_ptr + row * stride
    top = tl.load(line_ptr + tl.load(best_ptr + row))
    top = tl.where(tl.abs(top) < float("inf"), top, 0.0)  # else any token will do
    return line_ptr, top, 1.4426950408889634 / tl.load(temperature_ptr + draw)


@triton.jit
def _weigh(logits, top, per_unit, min_p):
    """Distances from the largest logit, as powers of 2, and weights as integers: 0 for tokens that
    cannot be drawn."""
    is_possible = (logits <= top) & (logits > float("-inf"))
    distances = (top - tl.where(is_possible, logits, top)) * per_unit
    weights = tl.exp2(-distances)
    is_possible &= weights >= min_p
    return distances, tl.where(is_possible, (weights * ONE).to(tl.int64), 0)


@triton.jit
def _weight(key, top, per_unit):
    """The weight of a token that can be drawn."""
    return _weigh(_logits(key.to(tl.int32)), top, per_unit, 0.0)[1]


@triton.jit
def _load_split(line_ptr, split, vocab_size, SPLIT: tl.constexpr):
    ids = split * SPLIT + tl.arange(0, SPLIT)
    return tl.load(line_ptr + ids, mask=ids < vocab_size, other=float("-inf"))


@triton.jit
def _keys(logits):
    """int32, in the order of the logits."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # -0 equals 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logits(keys):
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _part(mass, fraction):
    """floor(mass * fraction / 2**62); mass: below 2**61."""
    return tl.umulhi(mass << 2, fraction)


@triton.jit
def _limit(mass, top_p):
    """A token is kept if the mass before it is below this. So the most likely one is."""
    return tl.maximum(_part(mass, top_p), 1)


@triton.jit
def _load_sums(sums_ptr, draw, num_splits, SPLITS: tl.constexpr):
    """Numbers and weights of tokens up to each edge, (SPLITS, NUM_EDGES)."""
    splits, edges = tl.arange(0, SPLITS)[:, None], tl.arange(0, NUM_EDGES)[None, :]
    places = (draw * num_splits + splits) * NUM_EDGES + edges
    packed = tl.load(sums_ptr + places, mask=splits < num_splits, other=0)
    return packed & COUNT_MASK, packed >> COUNT_BITS


@triton.jit
def _before(sums, edge, axis: tl.constexpr):
    """The entry before `edge` in sums that grow from edge to edge, 0 before the first."""
    edges = tl.arange(0, NUM_EDGES)
    if axis == 1:
        edges = edges[None, :]
    return tl.max(tl.where(edges < edge, sums, 0), axis=axis)


@triton.jit
def _cut(counts, masses, top_k, top_p):
    """Where a row may be cut off, from the sums of its splits: whether it is at all, and by top_k,
    and the first and the last bin of tokens of which it may keep only a part. A bin is what an
    edge adds to the edge before it."""
    counts, masses = tl.sum(counts, axis=0), tl.sum(masses, axis=0)
    has_k = (top_k > 0) & (top_k < tl.max(counts, axis=0))
    last = tl.sum((counts < top_k).to(tl.int32), axis=0)
    # The least mass that top_k may leave decides where top_p begins to cut.
    mass = tl.where(has_k, _before(masses, last, 0) + 1, tl.max(masses, axis=0))
    first = tl.sum((masses < _limit(mass, top_p)).to(tl.int32), axis=0)
    return has_k | (top_p < WHOLE), has_k, first, tl.where(has_k, last, first)


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _measure(
    logits_ptr,
    best_ptr,
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    temperature_ptr,
    min_p_ptr,
    sums_ptr,
    stride,
    vocab_size,
    SPLIT: tl.constexpr,
):
    split, draw = tl.program_id(0), tl.program_id(1).to(tl.int64)
    line_ptr, top, per_unit = _row(logits_ptr, stride, best_ptr, rows_ptr, temperature_ptr, draw)
    logits = _load_split(line_ptr, split, vocab_size, SPLIT)
    distances, masses = _weigh(logits, top, per_unit, tl.load(min_p_ptr + draw))
    packed = tl.where(masses > 0, (masses << COUNT_BITS) + 1, 0)
    sums_ptr += (draw * tl.num_programs(0) + split) * NUM_EDGES
    if (tl.load(top_k_ptr + draw) > 0) | (tl.load(top_p_ptr + draw) < WHOLE):
        for index in tl.static_range(NUM_EDGES - 1):
            is_before = distances < (index + 1) * (index + 1) * EDGE_UNIT
            tl.store(sums_ptr + index, tl.sum(tl.where(is_before, packed, 0), axis=0))
    tl.store(sums_ptr + NUM_EDGES - 1, tl.sum(packed, axis=0))


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _collect(
    logits_ptr,
    best_ptr,
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    temperature_ptr,
    min_p_ptr,
    sums_ptr,
    keys_ptr,
    stride,
    vocab_size,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    split, draw = tl.program_id(0), tl.program_id(1).to(tl.int64)
    top_k, top_p = tl.load(top_k_ptr + draw), tl.load(top_p_ptr + draw)
    if (top_k == 0) & (top_p == WHOLE):
        return
    counts, masses = _load_sums(sums_ptr, draw, tl.num_programs(0), SPLITS)
    is_cut, _, first, last = _cut(counts, masses, top_k, top_p)
    if not is_cut:
        return
    line_ptr, top, per_unit = _row(logits_ptr, stride, best_ptr, rows_ptr, temperature_ptr, draw)
    logits = _load_split(line_ptr, split, vocab_size, SPLIT)
    distances, masses = _weigh(logits, top, per_unit, tl.load(min_p_ptr + draw))
    near, far = first * first * EDGE_UNIT, (last + 1) * (last + 1) * EDGE_UNIT
    far = tl.where(last < NUM_EDGES - 1, far, float("inf"))  # beyond it, nothing has a weight
    is_candidate = (masses > 0) & (distances >= near) & (distances < far)
    places = tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
    keys_ptr += (draw * tl.num_programs(0) + split) * SPLIT
    tl.store(keys_ptr + places, _keys(logits), mask=is_candidate)


@triton.jit
def _load_keys(keys_ptr, counts, start, SPLIT: tl.constexpr, SPLITS: tl.constexpr):
    """Some candidates of every split, (SPLITS, TILE), and which of them there are."""
    places = start + tl.arange(0, TILE)[None, :]
    is_candidate = places < counts[:, None]
    splits = tl.arange(0, SPLITS)[:, None]
    return tl.load(keys_ptr + splits * SPLIT + places, mask=is_candidate, other=0), is_candidate


@triton.jit
def _range(keys_ptr, counts, SPLIT: tl.constexpr, SPLITS: tl.constexpr):
    """The smallest and the largest candidate, int64."""
    smallest = tl.full([SPLITS, TILE], LARGEST_KEY, tl.int32)
    largest = tl.full([SPLITS, TILE], SMALLEST_KEY, tl.int32)
    for start in range(0, tl.max(counts, axis=0), TILE):
        keys, is_candidate = _load_keys(keys_ptr, counts, start, SPLIT, SPLITS)
        smallest = tl.where(is_candidate, tl.minimum(smallest, keys), smallest)
        largest = tl.where(is_candidate, tl.maximum(largest, keys), largest)
    return tl.min(smallest).to(tl.int64), tl.max(largest).to(tl.int64)


@triton.jit
def _above(keys_ptr, counts, key, top, per_unit, SPLIT: tl.constexpr, SPLITS: tl.constexpr):
    """The number and the mass of each split's candidates that are larger than `key`."""
    numbers = tl.zeros([SPLITS, TILE], tl.int64)
    masses = tl.zeros([SPLITS, TILE], tl.int64)
    for start in range(0, tl.max(counts, axis=0), TILE):
        keys, is_candidate = _load_keys(keys_ptr, counts, start, SPLIT, SPLITS)
        is_above = is_candidate & (keys > key)
        numbers += is_above.to(tl.int64)
        masses += tl.where(is_above, _weigh(_logits(keys), top, per_unit, 0.0)[1], 0)
    return tl.sum(numbers, axis=1), tl.sum(masses, axis=1)


@triton.jit
def _find(
    keys_ptr,
    counts,
    smallest,
    largest,
    number,
    mass,
    top,
    per_unit,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The smallest key from `smallest` to `largest` above which there are fewer candidates than
    `number`, with less than `mass`."""
    below = smallest - 1
    while largest - below > 1:
        middle = (below + largest) >> 1
        numbers, masses = _above(keys_ptr, counts, middle, top, per_unit, SPLIT, SPLITS)
        is_kept = (tl.sum(numbers, axis=0) < number) & (tl.sum(masses, axis=0) < mass)
        largest = tl.where(is_kept, middle, largest)
        below = tl.where(is_kept, below, middle)
    return largest


@triton.jit(do_not_specialize_on_alignment=COLUMNS)
def _draw(
    logits_ptr,
    best_ptr,
    rows_ptr,
    top_k_ptr,
    top_p_ptr,
    u_ptr,
    temperature_ptr,
    min_p_ptr,
    sums_ptr,
    keys_ptr,
    stride,
    vocab_size,
    num_splits,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
):
    draw = tl.program_id(0).to(tl.int64)
    top_k, top_p = tl.load(top_k_ptr + draw), tl.load(top_p_ptr + draw)
    line_ptr, top, per_unit = _row(logits_ptr, stride, best_ptr, rows_ptr, temperature_ptr, draw)
    counts, sums = _load_sums(sums_ptr, draw, num_splits, SPLITS)
    is_last_edge = tl.arange(0, NUM_EDGES)[None, :] == NUM_EDGES - 1
    kept = tl.sum(tl.where(is_last_edge, sums, 0), axis=1)  # by split
    total = tl.sum(kept, axis=0)
    if total == 0:  # of no finite logits
        return
    # Kept are keys above `lowest`, and of those equal to it, the first num_ties of each split.
    lowest = tl.full((), SMALLEST_KEY, tl.int64)
    num_ties = tl.zeros([SPLITS], tl.int64)
    if (top_k > 0) | (top_p < WHOLE):
        is_cut, has_k, first, last = _cut(counts, sums, top_k, top_p)
        if is_cut:
            keys_ptr += draw * num_splits * SPLIT
            before, kept = _before(counts, first, 1), _before(sums, first, 1)
            num_keys = _before(counts, last + 1, 1) - before  # candidates
            mass = tl.sum(kept, axis=0)
            smallest, largest = _range(keys_ptr, num_keys, SPLIT, SPLITS)
            if has_k:
                number = top_k - tl.sum(before, axis=0)
                smallest = _find(
                    keys_ptr,
                    num_keys,
                    smallest,
                    largest,
                    number,
                    WHOLE,
                    top,
                    per_unit,
                    SPLIT,
                    SPLITS,
                )
                num_above, mass_above = _above(
                    keys_ptr, num_keys, smallest, top, per_unit, SPLIT, SPLITS
                )
                above = mass + tl.sum(mass_above, axis=0)
                num_equal = number - tl.sum(num_above, axis=0)
                total = above + num_equal * _weight(smallest, top, per_unit)
                if above < _limit(total, top_p):  # top_p cuts nothing more off
                    largest = smallest
            limit = _limit(total, top_p) - mass
            lowest = _find(
                keys_ptr,
                num_keys,
                smallest,
                largest,
                WHOLE,
                limit,
                top,
                per_unit,
                SPLIT,
                SPLITS,
            )
            num_above, mass_above = _above(keys_ptr, num_keys, lowest, top, per_unit, SPLIT, SPLITS)
            at_least, _ = _above(keys_ptr, num_keys, lowest - 1, top, per_unit, SPLIT, SPLITS)
            weight = _weight(lowest, top, per_unit)
            ties = at_least - num_above
            num_equal = tl.cdiv(limit - tl.sum(mass_above, axis=0), weight)  # of all splits
            num_ties = num_equal - (tl.cumsum(ties, axis=0) - ties)
            num_ties = tl.minimum(tl.maximum(num_ties, 0), ties)
            kept += mass_above + num_ties * weight
            total = tl.sum(kept, axis=0)
    # The token at which the kept mass, in the order of ids, exceeds u times all of it.
    target = _part(total, tl.load(u_ptr + draw))
    sums = tl.cumsum(kept, axis=0)
    split = tl.sum((sums <= target).to(tl.int32), axis=0)
    splits = tl.arange(0, SPLITS)
    target -= tl.sum(tl.where(splits < split, kept, 0), axis=0)
    num_ties = tl.sum(tl.where(splits == split, num_ties, 0), axis=0)
    logits = _load_split(line_ptr, split, vocab_size, SPLIT)
    _, masses = _weigh(logits, top, per_unit, tl.load(min_p_ptr + draw))
    keys = _keys(logits)
    is_tie = (keys == lowest) & (masses > 0)
    is_kept = (keys > lowest) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) <= num_ties))
    sums = tl.cumsum(tl.where(is_kept, masses, 0), axis=0)
    index = tl.sum((sums <= target).to(tl.int32), axis=0)
    tl.store(best_ptr + tl.load(rows_ptr + draw), (split * SPLIT + index).to(tl.int64))


def _fake(*_: object) -> None:
    return None


@operator(
    "draw_tokens(Tensor logits, Tensor(a!) best, Tensor rows, Tensor top_k, Tensor top_p, "
    "Tensor u, Tensor temperature, Tensor min_p, int split) -> ()",
    fake=_fake,
    launches=3,
)
def draw_tokens(
    logits: Tensor,
    best: Tensor,
    rows: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    u: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    split: int,
) -> None:
    """See the wrapper. split: tokens of a row per program, a power of two, at most 4096."""
    vocab_size, num_draws = logits.shape[1], len(rows)
    if num_draws == 0:
        return
    num_splits = triton.cdiv(vocab_size, split)
    splits = triton.next_power_of_2(num_splits)
    sums = logits.new_empty((num_draws, num_splits, NUM_EDGES.value), dtype=torch.int64)
    keys = logits.new_empty((num_draws, num_splits * split), dtype=torch.int32)
    inputs, stride = (logits, best, rows, top_k, top_p), logits.stride(0)
    _measure[(num_splits, num_draws)](
        *inputs,
        temperature,
        min_p,
        sums,
        stride,
        vocab_size,
        SPLIT=split,
        num_warps=8,
    )
    _collect[(num_splits, num_draws)](
        *inputs,
        temperature,
        min_p,
        sums,
        keys,
        stride,
        vocab_size,
        SPLIT=split,
        SPLITS=splits,
        num_warps=8,
    )
    _draw[(num_draws,)](
        *inputs,
        u,
        temperature,
        min_p,
        sums,
        keys,
        stride,
        vocab_size,
        num_splits,
        SPLIT=split,
        SPLITS=splits,
        num_warps=8,
    )
