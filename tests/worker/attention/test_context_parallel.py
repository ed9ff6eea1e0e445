"""Context parallel attention, with ranks as threads, against attention over all tokens."""

import math
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.attention import context_parallel
from longshore.worker.attention.backend import AttentionInputs
from longshore.worker.attention.context_parallel import (
    KeptContext,
    KeptKeysAndValues,
    KeptLatents,
    KeptMemory,
    attend,
    kept_context,
    merge,
    shared_backend,
)
from longshore.worker.attention.grouped import GroupedAttention
from longshore.worker.attention.kept_attention import KeptAttention
from longshore.worker.attention.kind import CachedLayer, PagedAttentionKind
from longshore.worker.attention.latent_backend import (
    LatentAttentionKind,
    LatentInputs,
    LatentProjections,
)
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kv_cache.buffer import PagedKV, PagedLatents
from longshore.worker.kv_cache.context_share import ContextShare
from longshore.worker.kv_cache.fp8 import KVScales
from longshore.worker.ranks.parallel import Parallel
from longshore.worker.step.step_batch import (
    StepBatch,
    blocks_to_clear,
    make_batch,
)
from tests.worker import attention_oracle
from tests.worker.caches import attention_cache, paged_kv
from tests.worker.forward import metadata
from tests.worker.fp8_oracle import kept
from tests.worker.kernels.variants import in_triton
from tests.worker.live_memory import peak_bytes
from tests.worker.models.thread_ranks import ThreadParallel, on_every_rank

NUM_LAYERS, HEADS, HEAD_DIM = 2, 3, 8
LATENT = LatentAttentionKind(
    num_heads=HEADS, latent_dim=12, rope_dim=4, nope_dim=6, value_dim=5, scale=0.4
)
FP8_SCALES = KVScales(0.02, 0.5)


class SharedSequences:
    """Sequences with random queries, keys and values on shuffled blocks. On every rank, cache
    memory that belongs to no sequence is NaN: other blocks, and the former contents of blocks that
    were not cleared. A rank has HEADS of `size` times as many heads."""

    def __init__(
        self, lens: list[int], *, size: int, interleave: int, block_size: int, seed: int
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.size, self.interleave, self.block_size = size, interleave, block_size
        widths = [-(-n // (block_size * size)) for n in lens]
        self.num_blocks = sum(widths) + 4
        block_ids = list(range(1, self.num_blocks))
        random.Random(seed).shuffle(block_ids)
        # Entries after a sequence's own are stale: they refer to blocks of other sequences.
        self.table = np.full((len(lens), max(widths) + 1), block_ids.pop(), np.int32)
        for row, width in enumerate(widths):
            self.table[row, :width] = [block_ids.pop() for _ in range(width)]
        self.computed = [0] * len(lens)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def batch(self, counts: list[int]) -> tuple[StepBatch, Tensor, list[tuple[int, slice]]]:
        """The next step, the blocks to clear before it, and the tokens of each sequence in it."""
        self.computed = [done + n for done, n in zip(self.computed, counts, strict=True)]
        all_ranks = self.block_size * self.size
        batch = make_batch(np.array(counts), np.array(self.computed), all_ranks)
        begun = torch.from_numpy(blocks_to_clear(batch, self.table, all_ranks))
        ends = zip(batch.rows.tolist(), batch.starts.tolist(), batch.ends.tolist(), strict=True)
        return batch, begun, [(row, slice(start, end)) for row, start, end in ends]

    def on_every_rank(self, compute: Any, batch: StepBatch) -> list[list[Tensor]]:
        """The results of `compute(place, metadata)`, by rank and layer."""

        def run(places: list[ThreadParallel]) -> list[Tensor]:
            (place,) = places
            share = place.context_share
            return compute(place, metadata(batch, self.table, self.block_size, share))

        return on_every_rank(self.size, 1, run, num_sharing=self.size, interleave=self.interleave)


class AttentionSequences(SharedSequences):
    """Sequences of layers with keys and values."""

    def __init__(
        self,
        lens: list[int],
        scales: KVScales | None = None,
        *,
        kind: PagedAttentionKind | None = None,
        has_sinks: bool = False,
        **settings: int,
    ) -> None:
        super().__init__(lens, **settings)
        self.kind = replace(kind or PagedAttentionKind(num_heads=0), num_heads=HEADS)
        self.q = [self.draw(n, self.size, HEADS, HEAD_DIM) for n in lens]
        self.kv = [self.draw(NUM_LAYERS, 2, n, 1, HEAD_DIM) for n in lens]
        self.sinks = self.draw(self.size, HEADS) if has_sinks else None
        self.scales = scales
        self.caches = [self.cache() for _ in range(self.size)]

    def cache(self) -> PagedKV:
        cache = paged_kv(
            self.num_blocks,
            num_layers=NUM_LAYERS,
            block_size=self.block_size,
            num_kv_heads=1,
            head_dim=HEAD_DIM,
            scales=self.scales,
        )
        cache.planes[1:].fill_(math.nan)
        return cache

    def step(self, counts: list[int]) -> None:
        """Compute `counts[row]` more tokens of each sequence and compare every result."""
        batch, begun, spans = self.batch(counts)
        for cache in self.caches:
            cache.planes.view(torch.uint8).index_fill_(0, begun, 0)

        def compute(place: ThreadParallel, of_rank: Any) -> list[Tensor]:
            backend = shared_backend(self.kind, self.caches[place.shard], place)
            step = backend.begin_step(of_rank)
            return [
                step.forward(
                    layer,
                    AttentionInputs(
                        torch.cat([self.q[row][span, place.shard] for row, span in spans]),
                        torch.cat([self.kv[row][layer, 0, span] for row, span in spans]),
                        torch.cat([self.kv[row][layer, 1, span] for row, span in spans]),
                        sinks=None if self.sinks is None else self.sinks[place.shard],
                    ),
                )
                for layer in range(NUM_LAYERS)
            ]

        for rank, layers in enumerate(self.on_every_rank(compute, batch)):
            for layer, out in enumerate(layers):
                wanted = torch.cat([self.reference(rank, layer, *span) for span in spans])
                torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)
        assert not any(cache.planes.view(torch.uint8)[0].any() for cache in self.caches)

    def reference(self, rank: int, layer: int, row: int, span: slice) -> Tensor:
        k, v = kept(self.kv[row][layer, :, : span.stop], self.scales)
        sinks = None if self.sinks is None else self.sinks[rank]
        return attention_oracle.attention(self.kind, self.q[row][span, rank], k, v, sinks).flatten(
            1
        )


class LatentSequences(SharedSequences):
    """Sequences of layers with latents."""

    def __init__(self, lens: list[int], **settings: int) -> None:
        super().__init__(lens, **settings)
        kind = LATENT
        self.q = [self.draw(n, self.size, HEADS, kind.nope_dim + kind.rope_dim) for n in lens]
        self.vectors = [self.draw(NUM_LAYERS, n, kind.latent_dim + kind.rope_dim) for n in lens]
        heads = (NUM_LAYERS, self.size, HEADS)
        self.to_keys = self.draw(*heads, kind.nope_dim, kind.latent_dim) * 0.3
        self.to_values = self.draw(*heads, kind.latent_dim, kind.value_dim) * 0.3
        shape = (self.num_blocks, NUM_LAYERS, self.block_size, kind.latent_dim + kind.rope_dim)
        self.views = [PagedLatents(torch.full(shape, math.nan)) for _ in range(self.size)]
        for view in self.views:
            view.latents[0] = 0

    def step(self, counts: list[int]) -> None:
        """As of AttentionSequences."""
        batch, begun, spans = self.batch(counts)
        for view in self.views:
            view.latents[begun] = 0

        def compute(place: ThreadParallel, of_rank: Any) -> list[Tensor]:
            rank = place.shard
            step = shared_backend(LATENT, self.views[rank], place).begin_step(of_rank)
            q = torch.cat([self.q[row][span, rank] for row, span in spans])
            return [
                step.forward(
                    layer,
                    LatentInputs(
                        *q.split((LATENT.nope_dim, LATENT.rope_dim), dim=-1),
                        torch.cat([self.vectors[row][layer, span] for row, span in spans]),
                        LatentProjections(self.to_keys[layer, rank], self.to_values[layer, rank]),
                    ),
                )
                for layer in range(NUM_LAYERS)
            ]

        for rank, layers in enumerate(self.on_every_rank(compute, batch)):
            for layer, out in enumerate(layers):
                wanted = torch.cat([self.reference(rank, layer, *span) for span in spans])
                torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=2e-5)

    def reference(self, rank: int, layer: int, row: int, span: slice) -> Tensor:
        """Computed with a key and a value of every head for every token."""
        vectors = self.vectors[row][layer, : span.stop].double()
        latents, rope = vectors.split((LATENT.latent_dim, LATENT.rope_dim), dim=-1)
        to_keys, to_values = (x[layer, rank].double() for x in (self.to_keys, self.to_values))
        keys = torch.einsum("sl,hnl->shn", latents, to_keys)
        keys = torch.cat((keys, rope.unsqueeze(1).expand(-1, HEADS, -1)), dim=-1)
        values = torch.einsum("sl,hlv->shv", latents, to_values)
        scores = torch.einsum("nhd,shd->hns", self.q[row][span, rank].double(), keys) * LATENT.scale
        is_later = torch.arange(span.stop) > torch.arange(span.start, span.stop)[:, None]
        weights = scores.masked_fill_(is_later, -math.inf).softmax(-1)
        return torch.einsum("hns,shv->nhv", weights, values).flatten(1)


def shares() -> st.SearchStrategy[dict[str, int]]:
    return st.fixed_dictionaries(
        {"size": st.sampled_from([2, 4]), "interleave": st.sampled_from([1, 2, 4])}
    )


def runs() -> st.SearchStrategy[list[list[int]]]:
    """Tokens of up to three sequences in each of up to five steps: none, one, or a chunk."""
    counts = st.one_of(st.integers(0, 1), st.integers(2, 40))
    return st.integers(1, 3).flatmap(
        lambda n: st.lists(st.lists(counts, min_size=n, max_size=n), min_size=1, max_size=5)
    )


def lens_of(steps: list[list[int]]) -> list[int]:
    return [max(1, sum(counts)) for counts in zip(*steps, strict=True)]


def compute(sequences: AttentionSequences | LatentSequences, steps: list[list[int]]) -> None:
    for counts in steps:
        if any(counts):
            sequences.step(counts)


@pytest.mark.req("FEA-06")
@settings(deadline=None, max_examples=40)
@given(runs(), shares(), st.booleans(), st.sampled_from([None, 2.0]), st.booleans(), st.data())
def test_chunks_and_decodes_over_shared_tokens_equal_attention_to_all(
    steps: list[list[int]],
    share: dict[str, int],
    has_sinks: bool,
    softcap: float | None,
    is_fp8: bool,
    data: st.DataObject,
) -> None:
    sequences = AttentionSequences(
        lens_of(steps),
        kind=PagedAttentionKind(num_heads=0, softcap=softcap),
        has_sinks=has_sinks,
        scales=FP8_SCALES if is_fp8 else None,
        block_size=data.draw(st.sampled_from([4, 8])),
        seed=data.draw(st.integers(0, 100)),
        **share,
    )
    compute(sequences, steps)


@pytest.mark.req("FEA-06")
@settings(deadline=None, max_examples=30)
@given(runs(), shares(), st.data())
def test_latents_over_shared_tokens_equal_attention_to_all(
    steps: list[list[int]], share: dict[str, int], data: st.DataObject
) -> None:
    sequences = LatentSequences(
        lens_of(steps), block_size=4, seed=data.draw(st.integers(0, 100)), **share
    )
    compute(sequences, steps)


def test_the_tiles_of_a_chunk_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(context_parallel.MAX_SCORES, "cpu", 7 * 2 * HEADS * 40)
    for make in (AttentionSequences, LatentSequences):
        sequences = make([150], size=2, interleave=2, block_size=8, seed=0)
        compute(sequences, [[70], [1], [79]])


class Echo(Parallel):
    """A Parallel whose other ranks have the same tensors as this one."""

    def gather_context(self, part: Tensor) -> Tensor:
        return torch.stack([part] * self.context_share.size)

    def exchange_context(self, parts: Tensor) -> Tensor:
        return parts


def test_the_host_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors raise if a value is read."""
    monkeypatch.setitem(context_parallel.MAX_SCORES, "meta", 1 << 10)
    share, counts = ContextShare(1, 2), np.array([1, 1, 40, 3])
    batch = make_batch(counts, counts + 30, 16)
    on_host = metadata(batch, np.zeros((4, 9), np.int32), 8, share)
    tensors = {name: x.to("meta") for name, x in vars(on_host).items() if isinstance(x, Tensor)}
    cache = paged_kv(
        9, num_layers=1, block_size=8, num_kv_heads=1, head_dim=HEAD_DIM, device="meta"
    )
    backend = shared_backend(PagedAttentionKind(num_heads=HEADS), cache, Echo(context_share=share))
    step = backend.begin_step(replace(on_host, **tensors))
    q = torch.empty(counts.sum(), HEADS, HEAD_DIM, device="meta")
    out = step.forward(0, AttentionInputs(q, q[:, :1], q[:, :1]))
    assert out.shape == (counts.sum(), HEADS * HEAD_DIM)


class Ones:
    """A context with the attributes that `attend` needs."""

    def attend(self, layer: int, q: Tensor) -> Tensor:
        return torch.ones(*q.shape[:3], q.shape[3] + 1)


class Copying(Echo):
    """A Parallel that receives into new memory."""

    def exchange_context(self, parts: Tensor) -> Tensor:
        return parts.clone()


def test_only_the_sent_and_the_received_part_are_in_memory_at_once() -> None:
    place, context = Copying(context_share=ContextShare(0, 4)), cast(KeptContext, Ones())
    q = torch.zeros(50, HEADS, 127)
    part_bytes = 4 * 50 * HEADS * 128 * 4
    peak = peak_bytes(lambda: attend(place, context, 0, q, torch.zeros(HEADS)))
    assert 2 * part_bytes <= peak < 2.1 * part_bytes


def test_parts_are_merged_in_the_memory_in_which_they_were_received() -> None:
    parts = torch.randn(4, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    merged = merge(parts)
    torch.testing.assert_close(parts[..., :-1].sum(0), merged, rtol=0, atol=0)


def test_the_log_says_once_that_context_parallelism_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = Parallel(num_shards=2, context_share=ContextShare(0, 2))
    cache = attention_cache(3, num_layers=2, block_size=4, num_kv_heads=1, head_dim=HEAD_DIM)
    kind = PagedAttentionKind(num_heads=HEADS)
    layers = [CachedLayer(name, kind) for name in cache.groups[0].layer_names]
    with caplog.at_level("DEBUG"):
        GroupedAttention(cache, layers, place)
    assert caplog.messages == [f"attention: torch, context parallel over 2 ranks, {kind}"]
    latents = PagedLatents(torch.zeros(2, 1, 4, LATENT.latent_dim + LATENT.rope_dim))
    assert (
        str(shared_backend(LATENT, latents, place))
        == f"torch, context parallel over 2 ranks, {LATENT}"
    )


def test_a_rank_without_visible_tokens_does_not_affect_the_result() -> None:
    nothing = torch.cat((torch.zeros(1, 2, 3, 4), torch.full((1, 2, 3, 1), -math.inf)), -1)
    found = torch.randn(1, 2, 3, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(merge(torch.cat((nothing, found))), found[0, ..., :-1])


def test_parts_are_merged_by_the_sum_of_their_weights() -> None:
    logs = torch.tensor([math.log(1.0), math.log(3.0)]).view(2, 1, 1, 1)
    values = torch.tensor([2.0, 6.0]).view(2, 1, 1, 1)
    assert merge(torch.cat((values, logs), -1)).item() == pytest.approx((2 + 3 * 6) / 4)
    sinks = torch.tensor([math.log(4.0)])
    assert merge(torch.cat((values, logs), -1), sinks).item() == pytest.approx((2 + 3 * 6) / 8)


def test_a_nan_on_one_rank_reaches_the_result_of_all() -> None:
    parts = torch.zeros(2, 1, 1, 2)
    parts[1] = math.nan
    assert merge(parts).isnan().all()


@pytest.mark.parametrize(
    "kind",
    [
        PagedAttentionKind(num_heads=2, window=8),
        PagedAttentionKind(num_heads=2, chunk=8),
        "states",
    ],
)
def test_layers_with_windows_or_states_do_not_support_context_parallelism(kind: object) -> None:
    place = Parallel(num_shards=2, context_share=ContextShare(0, 2))
    with pytest.raises(UnsupportedModel, match=r"_size=2.*do not support context parallelism"):
        shared_backend(kind, None, place)


def test_several_kv_heads_of_a_rank_are_rejected() -> None:
    place = Parallel(num_shards=2, context_share=ContextShare(0, 2))
    cache = paged_kv(2, num_layers=1, block_size=4, num_kv_heads=2, head_dim=8)
    with pytest.raises(UnsupportedModel, match="2 KV heads per rank"):
        shared_backend(PagedAttentionKind(num_heads=2), cache, place)


def as_memory(view: PagedKV | PagedLatents) -> KeptMemory:
    if isinstance(view, PagedLatents):
        return KeptLatents(view, LATENT.latent_dim)
    return KeptKeysAndValues(view)


@pytest.mark.req("FEA-06")
@pytest.mark.parametrize("share", [ContextShare(0, 2), ContextShare(2, 4, interleave=2)], ids=str)
@pytest.mark.parametrize("memory", ["plain", "fp8", "latents"])
def test_the_kernels_compute_the_part_of_a_rank_as_torch_does(
    share: ContextShare, memory: str
) -> None:
    """Decodes and chunks; a query that sees none of the rank's tokens gives zeros and -infinity.
    Memory of nobody is NaN, and tokens of other ranks are not written."""
    lens, scales = [30, 75, 9, 1], FP8_SCALES if memory == "fp8" else None
    sizes = {"size": share.size, "interleave": share.interleave, "block_size": 4, "seed": 3}
    latents, heads = LatentSequences(lens, **sizes), AttentionSequences(lens, scales, **sizes)
    sequences: SharedSequences = latents if memory == "latents" else heads
    of_torch, of_kernels = map(
        as_memory, (latents.views if memory == "latents" else heads.caches)[:2]
    )
    for counts in ([29, 40, 2, 1], [1, 35, 1, 0], [0, 0, 6, 0]):
        batch, begun, spans = sequences.batch(counts)
        if memory == "latents":
            new = [torch.cat([latents.vectors[row][1, span] for row, span in spans])]
        else:
            new = [
                torch.cat([heads.kv[row][1, plane, span] for row, span in spans])
                for plane in (0, 1)
            ]
        dim = of_torch.planes(1)[0].shape[3]
        q = sequences.draw(share.size, int(batch.counts.sum()), HEADS, dim)
        found = []
        for of_memory in (of_torch, of_kernels):
            for plane in of_memory.planes(1):
                plane.view(torch.uint8)[begun] = 0
            with in_triton() if of_memory is of_kernels else nullcontext():
                context = kept_context(
                    of_memory,
                    share,
                    metadata(batch, sequences.table, 4, share),
                    num_heads=HEADS,
                    scale=0.3,
                )
                assert isinstance(context, KeptAttention) is (of_memory is of_kernels)
                context.write(1, *new)
                found.append(context.attend(1, q))
        for one, other in zip(of_torch.planes(1), of_kernels.planes(1), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        torch.testing.assert_close(found[1], found[0], atol=2e-5, rtol=2e-5)
