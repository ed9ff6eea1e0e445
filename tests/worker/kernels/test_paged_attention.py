"""Attention over a paged cache: every instruction set against a float64 softmax."""

import math
import random
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.attention.backend import AttentionInputs
from longshore.worker.attention.kind import PagedAttentionKind
from longshore.worker.kernels.native import Native
from longshore.worker.kernels.paged_attention import MAX_HEAD_DIM, PagedAttention, supports
from longshore.worker.kv_cache.fp8 import KVScales, to_fp8
from tests.worker import attention_oracle
from tests.worker.attention_oracle import first_seen, kinds
from tests.worker.caches import paged_kv
from tests.worker.fp8_oracle import kept, kv_scales
from tests.worker.kernels.variants import native_only

LAYER, NUM_LAYERS = 1, 2
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 1e-2}


class Step:
    """Sequences of (total tokens, new tokens). Cache and block table entries that new tokens do not
    attend to are NaN or refer to NaN."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        *,
        head_dim: int,
        num_kv_heads: int = 1,
        group: int = 1,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        has_sinks: bool = False,
        seed: int = 0,
        scales: KVScales | None = None,
        **kind: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sequences = sequences
        self.num_heads = num_kv_heads * group
        self.kind = PagedAttentionKind(num_heads=self.num_heads, **kind)
        widths = [-(-length // block_size) for length, _ in sequences]
        num_blocks = sum(widths) + 3
        self.cache = paged_kv(
            num_blocks,
            num_layers=NUM_LAYERS,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            padding=seed % 7,
            scales=scales,
        )
        self.scales = scales
        self.cache.planes[1:] = math.nan
        ids = list(range(1, num_blocks))
        random.Random(seed).shuffle(ids)
        nowhere = ids.pop()
        self.table = torch.full((len(sequences), max(widths) + 2), nowhere, dtype=torch.int32)

        def draw(tokens: int, heads: int) -> Tensor:
            return torch.randn(tokens, heads, head_dim, generator=generator).to(dtype)

        self.q = [draw(new, self.num_heads) for _, new in sequences]
        self.k = [draw(length, num_kv_heads) for length, _ in sequences]
        self.v = [draw(length, num_kv_heads) for length, _ in sequences]
        self.sinks = torch.randn(self.num_heads, generator=generator) if has_sinks else None
        self.slots = []
        for row, (length, new) in enumerate(sequences):
            blocks = torch.tensor([ids.pop() for _ in range(widths[row])])
            first = first_seen(self.kind, length - new)
            self.table[row, first // block_size : widths[row]] = blocks[first // block_size :]
            positions = torch.arange(length)
            slots = blocks[positions // block_size] * block_size + positions % block_size
            self.slots.append(slots[length - new :])
            earlier = slice(first, length - new)
            self.write(slots[earlier], self.k[row][earlier], self.v[row][earlier])

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        blocks, offsets = slots // self.cache.block_size, slots % self.cache.block_size
        planes = self.cache.planes
        if self.scales is not None:
            planes = planes.view(torch.uint8)
            k, v = to_fp8(k, self.scales.keys), to_fp8(v, self.scales.values)
        planes[blocks, :, LAYER, 0, offsets] = k
        planes[blocks, :, LAYER, 1, offsets] = v

    def attend(self, kernels: Native, rows: list[int] | None = None) -> list[Tensor]:
        """Per sequence (new tokens, num_heads, head_dim), computed in one step."""
        rows = list(range(len(self.sequences))) if rows is None else rows
        counts = [self.sequences[row][1] for row in rows]
        firsts = np.cumsum([0, *counts[:-1]])
        kind, head_dim = self.kind, self.cache.head_dim
        attention = PagedAttention(
            kernels,
            self.cache,
            num_heads=self.num_heads,
            scale=head_dim**-0.5 if kind.scale is None else kind.scale,
            window=kind.window or 0,
            chunk=kind.chunk or 0,
            softcap=kind.softcap or 0.0,
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
        q = torch.cat([self.q[row] for row in rows])
        out = step.forward(LAYER, AttentionInputs(q, k, v, sinks=self.sinks))
        return list(out.view(-1, self.num_heads, head_dim).split(counts))

    def expected(self, row: int) -> Tensor:
        """(new tokens, num_heads, head_dim) float64."""
        k, v = kept((self.k[row], self.v[row]), self.scales)
        return attention_oracle.attention(self.kind, self.q[row], k, v, self.sinks)

    def check(self, kernels: Native, expected: list[Tensor] | None = None) -> None:
        """expected: per sequence, if it is known."""
        # The error of a score grows with its size, and causes the same relative error in the
        # weights.
        excess = max(1.0, (self.kind.scale or 0.0) * self.cache.head_dim**0.5)
        for row, actual in enumerate(self.attend(kernels)):
            tolerance = TOLERANCES[actual.dtype] * excess
            wanted = self.expected(row) if expected is None else expected[row]
            torch.testing.assert_close(actual.double(), wanted, rtol=tolerance, atol=tolerance)
        assert self.cache.planes[1:, :, 1 - LAYER].isnan().all(), "another layer was written"
        assert not self.cache.planes[0].any(), "the null block was written"


def check_again(kernels: Native, sequences: tuple[tuple[int, int], ...], **shape: Any) -> None:
    """As `Step.check`, and keeps the results that are expected for other instruction sets."""
    Step(list(sequences), **shape).check(kernels, _expected(sequences, tuple(shape.items())))


@lru_cache(maxsize=2)
def _expected(
    sequences: tuple[tuple[int, int], ...], shape: tuple[tuple[str, Any], ...]
) -> list[Tensor]:
    step = Step(list(sequences), **dict(shape))
    return [step.expected(row) for row in range(len(sequences))]


def lengths_and_counts(max_len: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(1, max_len).flatmap(
        lambda length: (
            st.tuples(st.just(length), st.sampled_from([1, 2, 16]).map(lambda n: min(n, length)))
            | st.tuples(st.just(length), st.integers(1, length))
        )
    )


def drawn_kind(data: st.DataObject, max_tokens: int) -> dict[str, Any]:
    """Fields of a PagedAttentionKind, without the number of heads."""
    fields = dict(vars(data.draw(kinds(1, max_tokens), "kind")))
    del fields["num_heads"]
    return fields


@native_only
@settings(max_examples=40)
@given(
    sequences=st.lists(lengths_and_counts(200), min_size=1, max_size=6),
    head_dim=st.sampled_from([1, 8, 16, 20, 32, 64, 80, 96, 128, 256, 576]),
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
@settings(max_examples=50)
@given(
    data=st.data(),
    sequences=st.lists(lengths_and_counts(200), min_size=1, max_size=6),
    head_dim=st.sampled_from([8, 20, 32, 64, 128, 256]),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 8, 16]),
    block_size=st.sampled_from([1, 4, 16, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    has_sinks=st.booleans(),
    scales=st.none() | kv_scales,
    seed=st.integers(0, 2**31),
)
def test_windows_chunks_soft_caps_and_sinks_equal_the_reference_and_see_no_other_block(
    kernels: Native, data: st.DataObject, sequences: list[tuple[int, int]], **shape: Any
) -> None:
    Step(sequences, **shape, **drawn_kind(data, 210)).check(kernels)


@native_only
@pytest.mark.parametrize("limit", [{"window": 1024}, {"window": 1000}, {"chunk": 1024}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_of_limited_reach_equal_the_reference(
    kernels: Native, dtype: torch.dtype, limit: dict[str, int]
) -> None:
    sequences = [(length, new) for length in (1023, 1025, 1540, 2060) for new in (1, 2, 16, 40)]
    sequences += [(2100, 70)]
    for has_sinks in (False, True):
        shape = {"head_dim": 64, "num_kv_heads": 2, "group": 8, "dtype": dtype}
        check_again(kernels, tuple(sequences), has_sinks=has_sinks, **shape, **limit)


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 128])
@pytest.mark.parametrize("scales", [None, KVScales(0.5, 3.0)], ids=["auto", "fp8"])
def test_contexts_around_the_borders_of_parts_and_tiles_equal_the_reference(
    kernels: Native, scales: KVScales | None, head_dim: int, dtype: torch.dtype
) -> None:
    lengths = [511, 512, 513, 1024, 1025, 1600]
    sequences = [(length, new) for length in lengths for new in (1, 2, 15, 16, 17)]
    sequences += [(new, new) for new in (31, 32, 33, 64, 65, 128, 129)]
    shape = {"head_dim": head_dim, "num_kv_heads": 2, "group": 4}
    check_again(kernels, tuple(sequences), dtype=dtype, scales=scales, **shape)


@native_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    data=st.data(),
    sequences=st.lists(lengths_and_counts(1200), min_size=2, max_size=5),
    head_dim=st.sampled_from([32, 80, 128]),
    group=st.sampled_from([1, 2, 4]),
    has_sinks=st.booleans(),
    scales=st.none() | kv_scales,
    seed=st.integers(0, 2**31),
)
@settings(max_examples=20)
def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch_on_any_threads(
    kernels: Native,
    dtype: torch.dtype,
    data: st.DataObject,
    sequences: list[tuple[int, int]],
    **shape: Any,
) -> None:
    kind = drawn_kind(data, 1200)
    step = Step(sequences, num_kv_heads=2, dtype=dtype, **shape, **kind)
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
@pytest.mark.parametrize("scales", [None, KVScales()], ids=["auto", "fp8"])
def test_nan_reaches_the_sequence_that_has_it_and_no_other(
    kernels: Native, scales: KVScales | None
) -> None:
    sequences = [(40, 1), (40, 1), (600, 2)]
    step = Step(sequences, head_dim=32, num_kv_heads=2, group=2, scales=scales)
    first, *others = step.attend(kernels, [0, 1, 2])
    step.k[1][-1, 1, 5] = math.nan
    poisoned = step.attend(kernels)
    assert torch.equal(poisoned[0], first)
    assert torch.equal(poisoned[2], others[1])
    assert poisoned[1][:, 2:].isnan().all()  # the query heads of the second KV head
    assert torch.equal(poisoned[1][:, :2], others[0][:, :2])


@native_only
@pytest.mark.parametrize("factor", [0.0, 1e3, 1e18])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_scores_of_any_size_weigh_values_within_their_range(
    kernels: Native, softcap: float | None, factor: float
) -> None:
    step = Step([(150, 1), (1100, 1), (150, 40)], head_dim=64, group=2, softcap=softcap)
    step.q = [q * factor for q in step.q]
    for out, values in zip(step.attend(kernels), step.v, strict=True):
        assert out.isfinite().all()
        assert out.abs().max() <= values.abs().max() * (1 + 1e-5)


@native_only
def test_what_the_kernel_cannot_compute_is_rejected(kernels: Native) -> None:
    step = Step([(4, 1)], head_dim=8, num_kv_heads=2, group=2)
    with pytest.raises(ValueError, match="5 heads over a cache"):
        PagedAttention(kernels, step.cache, num_heads=5, scale=1.0)
    for dtype, head_dim in ((torch.float16, 8), (torch.float32, MAX_HEAD_DIM + 8)):
        cache = paged_kv(
            2, num_layers=1, block_size=4, num_kv_heads=1, head_dim=head_dim, dtype=dtype
        )
        assert not supports(cache)
        with pytest.raises(ValueError, match="are not supported"):
            PagedAttention(kernels, cache, num_heads=1, scale=1.0)
    step.sinks = torch.zeros(3)
    with pytest.raises(ValueError, match=r"sinks are torch.float32 \(3,\)"):
        step.attend(kernels)
    step.sinks = None
    step.q = [q.bfloat16() for q in step.q]
    with pytest.raises(ValueError, match=r"heads are torch.bfloat16"):
        step.attend(kernels)


@native_only
def test_a_sink_takes_weight_but_has_no_value(kernels: Native) -> None:
    step = Step([(20, 1), (1600, 2)], head_dim=32, num_kv_heads=2, group=2, has_sinks=True)
    assert step.sinks is not None
    step.sinks[:] = torch.tensor([-math.inf, 1e4, -1e4, 0.0])
    with_sinks = step.attend(kernels)
    step.sinks = None
    for out, plain in zip(with_sinks, step.attend(kernels), strict=True):
        torch.testing.assert_close(out[:, [0, 2]], plain[:, [0, 2]], rtol=1e-6, atol=1e-6)
        assert not out[:, 1].any()
        assert (out[:, 3].abs() < plain[:, 3].abs()).all()
