"""Attention over a paged cache: every instruction set against a float64 softmax."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.kernels.native import Native
from longshore.worker.kernels.paged_attention import PagedAttention, supports
from longshore.worker.kv_cache import KVCache
from tests.worker.kernels.variants import native_only

LAYER, NUM_LAYERS = 1, 2
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 1e-2}


class Step:
    """Sequences of (tokens in all, new tokens). Whatever of the cache and of the block table is not
    theirs is NaN, or leads there."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        *,
        head_dim: int,
        num_kv_heads: int = 1,
        group: int = 1,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sequences = sequences
        self.num_heads = num_kv_heads * group
        self.group = group
        widths = [-(-length // block_size) for length, _ in sequences]
        num_blocks = sum(widths) + 3
        self.cache = KVCache(
            num_blocks,
            num_layers=NUM_LAYERS,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        self.cache.buffer.fill_(math.nan)
        ids = list(range(1, num_blocks))
        random.Random(seed).shuffle(ids)
        self.table = torch.full((len(sequences), max(widths) + 2), ids.pop(), dtype=torch.int32)

        def draw(tokens: int, heads: int) -> Tensor:
            return torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)

        self.q = [draw(new, self.num_heads) for _, new in sequences]
        self.k = [draw(length, num_kv_heads) for length, _ in sequences]
        self.v = [draw(length, num_kv_heads) for length, _ in sequences]
        self.slots = []
        for row, (length, new) in enumerate(sequences):
            blocks = torch.tensor([ids.pop() for _ in range(widths[row])])
            self.table[row, : widths[row]] = blocks
            positions = torch.arange(length)
            slots = blocks[positions // block_size] * block_size + positions % block_size
            self.slots.append(slots[length - new :])
            self.write(slots[: length - new], self.k[row], self.v[row])

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        blocks, offsets = slots // self.cache.block_size, slots % self.cache.block_size
        self.cache.buffer[blocks, LAYER, 0, offsets] = k[: len(slots)]
        self.cache.buffer[blocks, LAYER, 1, offsets] = v[: len(slots)]

    def attend(self, kernels: Native, rows: list[int] | None = None) -> list[Tensor]:
        """Per sequence (new tokens, num_heads, head_dim), computed in one step."""
        rows = list(range(len(self.sequences))) if rows is None else rows
        counts = [self.sequences[row][1] for row in rows]
        firsts = np.cumsum([0, *counts[:-1]])
        attention = PagedAttention(
            kernels, self.cache, num_heads=self.num_heads, scale=self.cache.head_dim**-0.5
        )
        step = attention.plan(
            self.table,
            torch.cat([self.slots[row] for row in rows]),
            np.array(
                [
                    (row, first, count, self.sequences[row][0])
                    for row, first, count in zip(rows, firsts, counts, strict=True)
                ]
            ),
        )
        k, v = (
            torch.cat([vectors[row][-self.sequences[row][1] :] for row in rows])
            for vectors in (self.k, self.v)
        )
        out = step.forward(LAYER, torch.cat([self.q[row] for row in rows]), k, v)
        return list(out.view(-1, self.num_heads, self.cache.head_dim).split(counts))

    def expected(self, row: int) -> Tensor:
        length, new = self.sequences[row]
        keys, values = (
            vectors[row].double().repeat_interleave(self.group, 1) for vectors in (self.k, self.v)
        )
        scores = torch.einsum("nhd,shd->hns", self.q[row].double(), keys)
        later = torch.arange(length) > torch.arange(length - new, length)[:, None]
        scores = scores.mul(self.cache.head_dim**-0.5).masked_fill(later, -math.inf)
        return torch.einsum("hns,shd->nhd", scores.softmax(-1), values)

    def check(self, kernels: Native) -> None:
        for row, actual in enumerate(self.attend(kernels)):
            tolerance = TOLERANCES[actual.dtype]
            torch.testing.assert_close(
                actual.double(), self.expected(row), rtol=tolerance, atol=tolerance
            )
        untouched = self.cache.buffer[:, 1 - LAYER]
        assert untouched.isnan().all(), "another layer was written"


def lengths_and_counts(max_len: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(1, max_len).flatmap(
        lambda length: (
            st.tuples(st.just(length), st.sampled_from([1, 2, 16]).map(lambda n: min(n, length)))
            | st.tuples(st.just(length), st.integers(1, length))
        )
    )


@native_only
@settings(max_examples=60)
@given(
    sequences=st.lists(lengths_and_counts(200), min_size=1, max_size=6),
    head_dim=st.sampled_from([1, 8, 16, 20, 32, 64, 80, 96, 128, 256]),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 16]),
    block_size=st.sampled_from([1, 4, 16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_ragged_steps_equal_the_reference_and_see_no_other_block(
    kernels: Native, sequences: list[tuple[int, int]], **shape: Any
) -> None:
    Step(sequences, **shape).check(kernels)


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_contexts_around_the_borders_of_parts_and_tiles_equal_the_reference(
    kernels: Native, head_dim: int, dtype: torch.dtype
) -> None:
    lengths = [511, 512, 513, 1024, 1025, 1600]
    sequences = [(length, new) for length in lengths for new in (1, 2, 15, 16, 17)]
    sequences += [(new, new) for new in (31, 32, 33, 64, 65, 128, 129)]
    Step(sequences, head_dim=head_dim, num_kv_heads=2, group=4, dtype=dtype).check(kernels)


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    sequences=st.lists(lengths_and_counts(1200), min_size=2, max_size=5),
    head_dim=st.sampled_from([32, 80, 128]),
    group=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=15)
def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch_on_any_threads(
    kernels: Native,
    dtype: torch.dtype,
    sequences: list[tuple[int, int]],
    head_dim: int,
    group: int,
    seed: int,
) -> None:
    step = Step(sequences, head_dim=head_dim, num_kv_heads=2, group=group, dtype=dtype, seed=seed)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = step.attend(kernels)
    finally:
        torch.set_num_threads(threads)
    rows = list(range(len(sequences)))
    backwards = step.attend(kernels, rows[::-1])[::-1]
    alone = [step.attend(kernels, [row])[0] for row in rows]
    for row in rows:
        assert torch.equal(together[row], alone[row])
        assert torch.equal(backwards[row], alone[row])


@native_only
def test_nan_reaches_the_sequence_that_has_it_and_no_other(kernels: Native) -> None:
    step = Step([(40, 1), (40, 1), (600, 2)], head_dim=32, num_kv_heads=2, group=2)
    first, *others = step.attend(kernels, [0, 1, 2])
    step.k[1][-1, 1, 5] = math.nan
    poisoned = step.attend(kernels)
    assert torch.equal(poisoned[0], first)
    assert torch.equal(poisoned[2], others[1])
    assert poisoned[1][:, 2:].isnan().all()  # the query heads of the second KV head
    assert torch.equal(poisoned[1][:, :2], others[0][:, :2])


@native_only
@pytest.mark.parametrize("factor", [0.0, 1e3, 1e18])
def test_scores_of_any_size_weigh_values_within_their_range(kernels: Native, factor: float) -> None:
    step = Step([(150, 1), (1100, 1), (150, 40)], head_dim=64, group=2)
    step.q = [q * factor for q in step.q]
    for out, values in zip(step.attend(kernels), step.v, strict=True):
        assert out.isfinite().all()
        assert out.abs().max() <= values.abs().max() * (1 + 1e-5)


@native_only
def test_what_the_kernel_cannot_compute_is_refused(kernels: Native) -> None:
    step = Step([(4, 1)], head_dim=8, num_kv_heads=2, group=2)
    with pytest.raises(ValueError, match="5 heads over a cache"):
        PagedAttention(kernels, step.cache, num_heads=5, scale=1.0)
    for dtype, head_dim in ((torch.float16, 8), (torch.float32, 264)):
        cache = KVCache(
            2,
            num_layers=1,
            block_size=4,
            num_kv_heads=1,
            head_dim=head_dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        assert not supports(cache)
        with pytest.raises(ValueError, match="are not supported"):
            PagedAttention(kernels, cache, num_heads=1, scale=1.0)
    step.q = [q.bfloat16() for q in step.q]
    with pytest.raises(ValueError, match=r"heads are torch.bfloat16"):
        step.attend(kernels)
