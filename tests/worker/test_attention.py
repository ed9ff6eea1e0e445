"""Paged attention against a reference that loops over every query, head and position."""

import math
import random
from functools import partial
from typing import Protocol

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.attention import segments
from longshore.worker.attention.backend import AttentionBackend
from longshore.worker.attention.choice import make_attention
from longshore.worker.attention.native_backend import NativeAttention
from longshore.worker.attention.segments import decode_segments, length_classes
from longshore.worker.attention.torch_backend import TorchAttention
from longshore.worker.kernels.native import Native
from longshore.worker.kv_cache import KVCache
from longshore.worker.step_batch import StepBatch, blocks_to_clear, make_batch
from tests.worker.forward import metadata
from tests.worker.kernels.variants import NATIVE, native_only, using

NUM_LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8


class MakeBackend(Protocol):
    def __call__(self, cache: KVCache, *, num_heads: int) -> AttentionBackend: ...


every_backend = pytest.mark.parametrize(
    "make",
    [pytest.param(TorchAttention, id="torch")]
    + [
        pytest.param(partial(NativeAttention, kernels), id=name) for name, kernels in NATIVE.items()
    ],
)


class PagedSequences:
    """Sequences with random keys and values, of which the cache holds what was computed."""

    def __init__(
        self, make: MakeBackend, lens: list[int], *, block_size: int, group: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.group = group
        self.q = [torch.randn(n, KV_HEADS * group, HEAD_DIM, generator=generator) for n in lens]
        self.kv = [
            torch.randn(NUM_LAYERS, 2, n, KV_HEADS, HEAD_DIM, generator=generator) for n in lens
        ]
        widths = [-(-n // block_size) for n in lens]
        block_ids = list(range(1, sum(widths) + 1))
        random.Random(seed).shuffle(block_ids)
        self.cache = KVCache(
            len(block_ids) + 1,
            num_layers=NUM_LAYERS,
            block_size=block_size,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.table = np.zeros((len(lens), max(widths)), np.int32)
        for row, width in enumerate(widths):
            self.table[row, :width] = [block_ids.pop() for _ in range(width)]
        self.computed = [0] * len(lens)
        self.attention = make(self.cache, num_heads=KV_HEADS * group)

    def step(self, counts: list[int]) -> None:
        """Compute `counts[row]` more tokens of each sequence and compare every result."""
        num_scheduled = np.array(counts)
        self.computed = [done + n for done, n in zip(self.computed, counts, strict=True)]
        batch = make_batch(num_scheduled, np.array(self.computed), self.cache.block_size)
        self.cache.clear(
            torch.from_numpy(blocks_to_clear(batch, self.table, self.cache.block_size))
        )
        step = self.attention.begin_step(metadata(batch, self.table, self.cache.block_size))
        spans = [
            (row, slice(start, end))
            for row, start, end in zip(
                batch.rows.tolist(), batch.starts.tolist(), batch.ends.tolist(), strict=True
            )
        ]
        for layer in range(NUM_LAYERS):
            out = step.forward(
                layer,
                torch.cat([self.q[row][span] for row, span in spans]),
                torch.cat([self.kv[row][layer, 0, span] for row, span in spans]),
                torch.cat([self.kv[row][layer, 1, span] for row, span in spans]),
            )
            wanted = torch.cat([self.reference(layer, row, span) for row, span in spans])
            torch.testing.assert_close(out, wanted, atol=2e-5, rtol=1e-5)
        assert not self.cache.buffer[0].any(), "the null block holds data"

    def reference(self, layer: int, row: int, span: slice) -> Tensor:
        keys, values = self.kv[row][layer]
        results = []
        for position in range(span.start, span.stop):
            heads = []
            for head in range(KV_HEADS * self.group):
                seen_keys = keys[: position + 1, head // self.group]
                seen_values = values[: position + 1, head // self.group]
                scores = seen_keys @ self.q[row][position, head] / math.sqrt(HEAD_DIM)
                heads.append(scores.softmax(-1) @ seen_values)
            results.append(torch.cat(heads))
        return torch.stack(results)


@every_backend
@settings(deadline=None, max_examples=40)
@given(st.data(), st.sampled_from([1, 4, 16, 64]), st.sampled_from([1, 3]))
def test_ragged_batches_of_chunks_and_decodes_equal_the_reference(
    make: MakeBackend, data: st.DataObject, block_size: int, group: int
) -> None:
    lens = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))
    sequences = PagedSequences(
        make, lens, block_size=block_size, group=group, seed=data.draw(st.integers(0, 2**31))
    )
    kinds = st.lists(st.sampled_from(["none", "one", "half", "rest"]), min_size=5, max_size=5)
    for step in data.draw(st.lists(kinds, max_size=4), "steps"):
        left = [n - done for n, done in zip(lens, sequences.computed, strict=True)]
        counts = [
            {"none": 0, "one": min(1, n), "half": n // 2, "rest": n}[kind]
            for kind, n in zip(step, left, strict=False)
        ]
        if any(counts):
            sequences.step(counts)
    for _ in range(2):  # a whole chunk that ends one token early, then a decode
        left = [n - done for n, done in zip(lens, sequences.computed, strict=True)]
        counts = [max(n - 1, min(n, 1)) for n in left]
        if any(counts):
            sequences.step(counts)


@every_backend
def test_a_chunk_may_read_blocks_that_another_fills_in_the_same_step(make: MakeBackend) -> None:
    sequences = PagedSequences(make, [40, 40], block_size=16, group=2, seed=0)
    shared = sequences.kv[0][:, :, :32]
    sequences.kv[1][:, :, :32] = shared
    sequences.table[1, :2] = sequences.table[0, :2]  # hit blocks, to be filled by row 0
    sequences.computed[1] = 32
    sequences.step([40, 8])


@every_backend
def test_what_a_block_held_before_cannot_reach_a_result_even_if_it_is_nan(
    make: MakeBackend,
) -> None:
    sequences = PagedSequences(make, [50, 7, 20], block_size=16, group=2, seed=1)
    sequences.cache.buffer[1:] = math.nan
    sequences.step([33, 1, 18])
    for _ in range(2):
        sequences.step([1, 1, 1])
    sequences.step([5, 4, 0])


@every_backend
def test_entries_beyond_a_sequence_are_not_read(make: MakeBackend) -> None:
    sequences = PagedSequences(make, [300, 4], block_size=4, group=1, seed=2)
    sequences.step([299, 3])
    sequences.table[1, 1:] = sequences.table[0, 1:75]  # stale ids of blocks that others hold
    sequences.cache.buffer[int(sequences.table[0, 60])] = math.nan
    batch = StepBatch(np.array([1]), np.array([3]), np.array([1]), num_decodes=1)
    whole = metadata(batch, sequences.table, 4)
    padded = segments.DecodeSegment(0, 1, num_blocks=75)
    step = sequences.attention.begin_step(
        type(whole)(**(vars(whole) | {"decode_segments": [padded]}))
    )
    out = step.forward(0, sequences.q[1][3:], *sequences.kv[1][0, :, 3:])
    torch.testing.assert_close(out, sequences.reference(0, 1, slice(3, 4)), atol=2e-5, rtol=1e-5)


def cache_of(dtype: torch.dtype, device: str = "cpu") -> KVCache:
    return KVCache(
        2,
        num_layers=1,
        block_size=4,
        num_kv_heads=1,
        head_dim=8,
        dtype=dtype,
        device=torch.device(device),
    )


@native_only
def test_the_kernel_is_chosen_where_it_can_compute_and_torch_elsewhere(kernels: Native) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(make_attention(cache_of(dtype), num_heads=2), NativeAttention)
    assert isinstance(make_attention(cache_of(torch.float16), num_heads=2), TorchAttention)
    on_meta = cache_of(torch.float32, device="meta")
    assert isinstance(make_attention(on_meta, num_heads=2), TorchAttention)
    with using("torch"):
        assert isinstance(make_attention(cache_of(torch.float32), num_heads=2), TorchAttention)


@given(st.lists(st.integers(1, 5000), max_size=60), st.sampled_from([1, 16, 64]))
def test_segments_cover_every_decode_once_and_waste_less_than_half(
    lens: list[int], block_size: int
) -> None:
    num_blocks = np.array(lens, np.int64)
    num_blocks = num_blocks[np.argsort(length_classes(num_blocks), kind="stable")]
    cut = decode_segments(num_blocks, block_size)
    covered = [seq for part in cut for seq in range(part.first_seq, part.first_seq + part.num_seqs)]
    assert covered == list(range(len(lens)))
    for part in cut:
        own = num_blocks[part.first_seq : part.first_seq + part.num_seqs]
        assert own.max() <= part.num_blocks
        assert part.num_blocks <= max(2 * own.min(), segments.MIN_SEGMENT_BLOCKS)
        padded_tokens = part.num_seqs * part.num_blocks * block_size
        assert part.num_seqs == 1 or padded_tokens <= segments.MAX_SEGMENT_TOKENS


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_the_blocks_to_clear_are_those_begun_and_left_unfilled(block_size: int) -> None:
    table = np.arange(1, 401, dtype=np.int32).reshape(4, 100)
    for start in range(2 * block_size + 1):
        for count in range(1, 2 * block_size + 2):
            batch = StepBatch(np.array([2]), np.array([start]), np.array([count]), num_decodes=0)
            begun = {p // block_size for p in range(start, start + count) if p % block_size == 0}
            filled = {p // block_size for p in range(start + count) if (p + 1) % block_size == 0}
            wanted = sorted(int(table[2, column]) for column in begun - filled)
            assert blocks_to_clear(batch, table, block_size).tolist() == wanted
