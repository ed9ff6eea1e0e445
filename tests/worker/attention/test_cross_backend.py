"""Cross attention against a softmax over all pairs of tokens, in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.attention.cross_backend import CrossAttentionKind
from longshore.worker.kernels import native
from longshore.worker.step.step_batch import make_batch
from tests.worker.caches import paged_kv
from tests.worker.forward import cross_metadata

HEAD_DIM = 24
NUM_LAYERS = 2


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(n, num_heads * head_dim) float64; q: (n, num_heads, d); k, v: (m, num_kv_heads, d)."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) * HEAD_DIM**-0.5
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values).flatten(1)


@pytest.mark.parametrize("use_native", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.integers(1, 40) | st.sampled_from([511, 512, 513, 1500]), min_size=1),
    block_size=st.sampled_from([4, 16]),
    num_kv_heads=st.sampled_from([1, 3]),
    data=st.data(),
)
def test_every_token_of_a_step_attends_to_all_that_its_row_was_given(
    use_native: bool,
    dtype: torch.dtype,
    lens: list[int],
    block_size: int,
    num_kv_heads: int,
    data: st.DataObject,
) -> None:
    """For any former contents of the blocks, and any steps in which rows are written and read."""
    lens = lens[:4]
    generator = torch.Generator().manual_seed(len(lens) + sum(lens))
    num_heads = 2 * num_kv_heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, HEAD_DIM, generator=generator).to(dtype)

    widths = [-(-length // block_size) for length in lens]
    block_ids = 1 + torch.randperm(sum(widths), generator=generator)
    table = np.zeros((len(lens), max(widths)), np.int32)
    for row, own in enumerate(block_ids.split(widths)):
        table[row, : len(own)] = own
    cache = paged_kv(
        sum(widths) + 1,
        num_layers=NUM_LAYERS,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        dtype=dtype,
    )
    cache.planes[1:] = math.nan
    native.select(use_native=use_native)
    try:
        attention = CrossAttentionKind(num_heads=num_heads).make_backend(cache)
    finally:
        native.select(use_native=True)
    kv = [draw(NUM_LAYERS, 2, length, num_kv_heads) for length in lens]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    num_written = 0
    computed = np.zeros(len(lens), np.int64)
    while num_written < len(lens):
        begun = range(num_written, data.draw(st.integers(num_written + 1, len(lens))))
        num_written = begun.stop
        counts = np.zeros(len(lens), np.int64)
        counts[:num_written] = data.draw(
            st.lists(st.integers(1, 5), min_size=num_written, max_size=num_written)
        )
        computed += counts
        batch = make_batch(counts, computed, block_size)
        rows = batch.token_rows()
        step = attention.begin_step(cross_metadata(batch, table, block_size, np.array(lens)[rows]))
        q = draw(NUM_LAYERS, len(rows), num_heads)
        for layer in range(NUM_LAYERS):
            for row in begun:
                step.write(layer, row, *kv[row][layer])
            got = step.forward(layer, q[layer]).double()
            wanted = torch.cat(
                [
                    attended(token[None], *kv[row][layer])
                    for token, row in zip(q[layer], rows.tolist(), strict=True)
                ]
            )
            torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
    assert not cache.planes[0].any(), "the null block holds data"


def test_blocks_are_zero_after_the_last_token_of_a_row() -> None:
    cache = paged_kv(4, num_layers=1, block_size=4, num_kv_heads=1, head_dim=HEAD_DIM)
    cache.planes[1:] = math.nan
    attention = CrossAttentionKind(num_heads=1).make_backend(cache)
    batch = make_batch(np.ones(1, np.int64), np.ones(1, np.int64), 4)
    table = np.array([[3, 1]], np.int32)
    step = attention.begin_step(cross_metadata(batch, table, 4, np.array([6])))
    step.write(0, 0, torch.ones(6, 1, HEAD_DIM), torch.full((6, 1, HEAD_DIM), 2.0))
    for plane, value in enumerate((1.0, 2.0)):
        kept = cache.planes[[3, 1], 0, 0, plane, :, 0].flatten()
        assert kept.tolist() == [value] * 6 + [0.0] * 2
    assert cache.planes[2].isnan().all()
