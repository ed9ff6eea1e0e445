"""Every backend of paged attention against a float64 softmax over all pairs, step after step."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longshore.worker.attention import segments, torch_backend
from longshore.worker.attention.backend import AttentionBackend, AttentionInputs
from longshore.worker.attention.kind import PagedAttentionKind
from longshore.worker.attention.native_backend import NativeAttention
from longshore.worker.attention.segments import capped_segments, decode_segments, length_classes
from longshore.worker.attention.selector import make_attention
from longshore.worker.attention.torch_backend import TorchAttention
from longshore.worker.kernels.native import Native
from longshore.worker.kv_cache.buffer import PagedKV
from longshore.worker.kv_cache.fp8 import KVScales
from longshore.worker.step.step_batch import (
    StepBatch,
    blocks_to_clear,
    make_batch,
)
from tests.worker import attention_oracle
from tests.worker.attention_oracle import first_seen, kinds
from tests.worker.caches import paged_kv
from tests.worker.forward import metadata
from tests.worker.fp8_oracle import kept, kv_scales
from tests.worker.kernels.variants import NATIVE, native_only, using

NUM_LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 8
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
KIND = PagedAttentionKind(num_heads=2)


MakeBackend: TypeAlias = Callable[[PagedKV, PagedAttentionKind], AttentionBackend]

every_backend = pytest.mark.parametrize(
    "make",
    [pytest.param(TorchAttention, id="torch")]
    + [
        pytest.param(partial(NativeAttention, kernels), id=name) for name, kernels in NATIVE.items()
    ],
)


class PagedSequences:
    """Sequences with random keys and values; the cache holds those of the computed tokens."""

    def __init__(
        self,
        make: MakeBackend,
        lens: list[int],
        *,
        block_size: int,
        group: int,
        seed: int,
        kind: PagedAttentionKind | None = None,
        has_sinks: bool = False,
        dtype: torch.dtype = torch.float32,
        scales: KVScales | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_heads = KV_HEADS * group
        self.kind = replace(kind or PagedAttentionKind(num_heads=0), num_heads=num_heads)
        self.sinks = torch.randn(num_heads, generator=generator) if has_sinks else None

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, HEAD_DIM, generator=generator).to(dtype)

        self.q = [draw(n, num_heads) for n in lens]
        self.kv = [draw(NUM_LAYERS, 2, n, KV_HEADS) for n in lens]
        widths = [-(-n // block_size) for n in lens]
        self.nobodys = sum(widths) + 1
        block_ids = list(range(1, self.nobodys))
        random.Random(seed).shuffle(block_ids)
        self.cache = paged_kv(
            self.nobodys + 1,
            num_layers=NUM_LAYERS,
            block_size=block_size,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=dtype,
            scales=scales,
        )
        self.scales = scales
        self.cache.planes[self.nobodys] = math.nan
        self.table = np.zeros((len(lens), max(widths)), np.int32)
        for row, width in enumerate(widths):
            self.table[row, :width] = [block_ids.pop() for _ in range(width)]
        self.computed = [0] * len(lens)
        self.attention = make(self.cache, self.kind)

    def step(self, counts: list[int]) -> None:
        """Compute `counts[row]` more tokens of each sequence and compare every result."""
        num_scheduled = np.array(counts)
        self.computed = [done + n for done, n in zip(self.computed, counts, strict=True)]
        batch = make_batch(num_scheduled, np.array(self.computed), self.cache.block_size)
        begun = torch.from_numpy(blocks_to_clear(batch, self.table, self.cache.block_size))
        self.cache.planes.view(torch.uint8).index_fill_(0, begun, 0)
        step = self.attention.begin_step(metadata(batch, self.table, self.cache.block_size))
        spans = [
            (row, slice(start, end))
            for row, start, end in zip(
                batch.rows.tolist(), batch.starts.tolist(), batch.ends.tolist(), strict=True
            )
        ]
        tolerance = TOLERANCES[self.cache.dtype]
        for layer in range(NUM_LAYERS):
            out = step.forward(
                layer,
                AttentionInputs(
                    torch.cat([self.q[row][span] for row, span in spans]),
                    torch.cat([self.kv[row][layer, 0, span] for row, span in spans]),
                    torch.cat([self.kv[row][layer, 1, span] for row, span in spans]),
                    sinks=self.sinks,
                ),
            )
            wanted = torch.cat([self.reference(layer, row, span) for row, span in spans])
            torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
        assert not self.cache.planes[0].any(), "the null block holds data"

    def reference(self, layer: int, row: int, span: slice) -> Tensor:
        k, v = kept(self.kv[row][layer, :, : span.stop], self.scales)
        return attention_oracle.attention(self.kind, self.q[row][span], k, v, self.sinks).flatten(1)

    def take_back(self) -> None:
        """Give blocks that no later token attends to to other sequences."""
        for row, num_computed in enumerate(self.computed):
            if num_computed < len(self.q[row]):
                first_block = first_seen(self.kind, num_computed) // self.cache.block_size
                self.table[row, :first_block] = self.nobodys


@every_backend
@pytest.mark.parametrize("scales", [None, KVScales(0.5, 2.0)])
def test_tokens_without_a_slot_are_not_stored(make: MakeBackend, scales: KVScales | None) -> None:
    """They attend to what is in the cache, of their own positions too."""
    lens = [5, 12, 33]
    sequences = PagedSequences(make, lens, block_size=4, group=2, seed=0, scales=scales)
    sequences.step(lens)
    planes = sequences.cache.planes.view(torch.uint8)
    before = planes.clone()
    batch = make_batch(np.ones(3, np.int64), np.array(lens), 4)
    no_slots = torch.full((3,), -1)
    step = sequences.attention.begin_step(
        replace(metadata(batch, sequences.table, 4), slot_mapping=no_slots)
    )
    last = [(row, slice(lens[row] - 1, lens[row])) for row in batch.rows.tolist()]
    other = torch.full((3, KV_HEADS, HEAD_DIM), 7.0)
    for layer in range(NUM_LAYERS):
        q = torch.cat([sequences.q[row][span] for row, span in last])
        out = step.forward(layer, AttentionInputs(q, other, other.clone()))
        wanted = torch.cat([sequences.reference(layer, row, span) for row, span in last])
        torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)
    assert torch.equal(planes, before)


@every_backend
@settings(deadline=None, max_examples=40)
@given(st.data(), st.sampled_from([1, 4, 16, 64]), st.sampled_from([1, 3]))
def test_ragged_batches_of_chunks_and_decodes_equal_the_reference(
    make: MakeBackend, data: st.DataObject, block_size: int, group: int
) -> None:
    lens = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))
    sequences = PagedSequences(
        make,
        lens,
        block_size=block_size,
        group=group,
        seed=data.draw(st.integers(0, 2**31)),
        kind=data.draw(kinds(KV_HEADS * group, 80)),
        has_sinks=data.draw(st.booleans()),
        dtype=data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        scales=data.draw(st.none() | kv_scales),
    )
    choices = st.lists(st.sampled_from(["none", "one", "half", "rest"]), min_size=5, max_size=5)
    for step in data.draw(st.lists(choices, max_size=4), "steps"):
        left = [n - done for n, done in zip(lens, sequences.computed, strict=True)]
        counts = [
            {"none": 0, "one": min(1, n), "half": n // 2, "rest": n}[kind]
            for kind, n in zip(step, left, strict=False)
        ]
        if any(counts):
            sequences.step(counts)
            sequences.take_back()
    for _ in range(2):  # a whole chunk that ends one token early, then a decode
        left = [n - done for n, done in zip(lens, sequences.computed, strict=True)]
        counts = [max(n - 1, min(n, 1)) for n in left]
        if any(counts):
            sequences.step(counts)
            sequences.take_back()


@every_backend
def test_a_chunk_may_read_blocks_that_another_fills_in_the_same_step(make: MakeBackend) -> None:
    sequences = PagedSequences(make, [40, 40], block_size=16, group=2, seed=0)
    shared = sequences.kv[0][:, :, :32]
    sequences.kv[1][:, :, :32] = shared
    sequences.table[1, :2] = sequences.table[0, :2]  # hit blocks, to be filled by row 0
    sequences.computed[1] = 32
    sequences.step([40, 8])


@every_backend
@pytest.mark.parametrize("limit", [{"window": 40}, {"window": 300}, {"chunk": 64}], ids=str)
def test_chunks_of_many_tiles_equal_the_reference(
    make: MakeBackend, limit: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "MAX_SCORES", 1 << 15)  # several tiles of queries, too
    kinds = [PagedAttentionKind(num_heads=0, softcap=cap, **limit) for cap in (None, 5.0)]
    for kind in kinds:
        sequences = PagedSequences(
            make, [1100, 90], block_size=16, group=2, seed=3, kind=kind, has_sinks=kind is kinds[1]
        )
        for counts in ([600, 60], [450, 1], [50, 29]):
            sequences.step(counts)
            sequences.take_back()


@every_backend
@pytest.mark.parametrize("scales", [None, KVScales()], ids=["auto", "fp8"])
def test_what_a_block_held_before_cannot_reach_a_result_even_if_it_is_nan(
    make: MakeBackend, scales: KVScales | None
) -> None:
    sequences = PagedSequences(make, [50, 7, 20], block_size=16, group=2, seed=1, scales=scales)
    sequences.cache.planes[1:] = math.nan
    sequences.step([33, 1, 18])
    for _ in range(2):
        sequences.step([1, 1, 1])
    sequences.step([5, 4, 0])


@every_backend
def test_entries_beyond_a_sequence_are_not_read(make: MakeBackend) -> None:
    sequences = PagedSequences(make, [300, 4], block_size=4, group=1, seed=2)
    sequences.step([299, 3])
    sequences.table[1, 1:] = sequences.table[0, 1:75]  # stale ids of blocks that others hold
    sequences.cache.planes[int(sequences.table[0, 60])] = math.nan
    batch = StepBatch(np.array([1]), np.array([3]), np.array([1]), num_decodes=1)
    whole = metadata(batch, sequences.table, 4)
    padded = segments.DecodeSegment(0, 1, num_blocks=75)
    step = sequences.attention.begin_step(
        type(whole)(**(vars(whole) | {"decode_segments": [padded]}))
    )
    out = step.forward(0, AttentionInputs(sequences.q[1][3:], *sequences.kv[1][0, :, 3:]))
    wanted = sequences.reference(0, 1, slice(3, 4)).float()
    torch.testing.assert_close(out, wanted, atol=2e-5, rtol=1e-5)


class Operations(TorchDispatchMode):
    """Records torch operations and the shapes of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen += [(str(func), x.shape) for x in tree_leaves(out) if isinstance(x, Tensor)]
        return out


@pytest.mark.parametrize("limit", [{"window": 40}, {"chunk": 64}], ids=str)
@pytest.mark.parametrize("counts", [[1, 1], [1, 50], [300, 7]], ids=str)
def test_torch_does_the_same_for_a_window_or_chunk_however_long_the_context(
    counts: list[int], limit: dict[str, int]
) -> None:
    kind = PagedAttentionKind(num_heads=KV_HEADS, **limit)
    cache = paged_kv(8, num_layers=1, block_size=16, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    table = np.ones((2, 400), np.int32)
    heads = torch.zeros(sum(counts), KV_HEADS, HEAD_DIM)
    traces = []
    for context in (128, 128 + 64 * 80):
        batch = make_batch(np.array(counts), np.array(counts) + context, 16)
        with Operations() as operations:
            step = TorchAttention(cache, kind).begin_step(metadata(batch, table, 16))
            step.forward(0, AttentionInputs(heads, heads, heads))
        traces.append(operations.seen)
    assert traces[0] == traces[1]


def cache_of(dtype: torch.dtype, device: str = "cpu") -> PagedKV:
    return paged_kv(
        2,
        num_layers=1,
        block_size=4,
        num_kv_heads=1,
        head_dim=8,
        dtype=dtype,
        device=device,
    )


@native_only
def test_the_kernel_is_chosen_where_it_can_compute_and_torch_elsewhere(kernels: Native) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(make_attention(cache_of(dtype), KIND), NativeAttention)
    assert isinstance(make_attention(cache_of(torch.float16), KIND), TorchAttention)
    on_meta = cache_of(torch.float32, device="meta")
    assert isinstance(make_attention(on_meta, KIND), TorchAttention)
    with using("torch"):
        assert isinstance(make_attention(cache_of(torch.float32), KIND), TorchAttention)


@given(st.lists(st.integers(1, 5000), max_size=60), st.sampled_from([1, 16, 64]))
def test_segments_cover_every_decode_once_with_less_than_half_padding(
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


@given(st.lists(st.integers(1, 5000), max_size=60), st.integers(1, 400))
def test_capped_segments_cover_the_same_decodes_and_gather_at_most_the_cap(
    lens: list[int], max_blocks: int
) -> None:
    num_blocks = np.sort(np.array(lens, np.int64))
    whole = decode_segments(num_blocks, 16)
    capped = capped_segments(whole, max_blocks, 16)
    covered = [
        seq for part in capped for seq in range(part.first_seq, part.first_seq + part.num_seqs)
    ]
    assert covered == list(range(len(lens)))
    assert len(capped) <= len(whole)
    for part in capped:
        own = num_blocks[part.first_seq : part.first_seq + part.num_seqs]
        assert min(own.max(), max_blocks) <= part.num_blocks <= max_blocks


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
