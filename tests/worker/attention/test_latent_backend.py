"""Latent attention against a reference that expands every key and value."""

import math
import random
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.attention import latent_backend
from longshore.worker.attention.latent_backend import (
    LatentAttentionKind,
    LatentInputs,
    LatentProjections,
)
from longshore.worker.kv_cache.buffer import PagedLatents
from longshore.worker.step.step_batch import (
    StepBatch,
    blocks_to_clear,
    make_batch,
)
from tests.worker.forward import metadata
from tests.worker.kernels.variants import TRITON, every_variant, using

NUM_LAYERS = 2
KIND = LatentAttentionKind(
    num_heads=3, latent_dim=20, rope_dim=4, nope_dim=6, value_dim=5, scale=0.4
)
WIDE = LatentAttentionKind(
    num_heads=2, latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128, scale=192**-0.5
)
NARROW = LatentAttentionKind(  # fewer products with latents than with keys: never expanded
    num_heads=3, latent_dim=4, rope_dim=2, nope_dim=12, value_dim=16, scale=0.3
)


class PagedSequences:
    """Sequences of random tokens on shuffled blocks of a strided cache. Memory that belongs to no
    sequence is NaN: other blocks, the padding of blocks, the former contents of blocks that were
    not cleared, and the expansion buffer."""

    def __init__(
        self,
        lens: list[int],
        *,
        block_size: int,
        seed: int,
        kind: LatentAttentionKind = KIND,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        heads = (NUM_LAYERS, kind.num_heads)
        head_size = kind.latent_dim + kind.rope_dim
        self.kind = kind
        self.q = [normal(n, kind.num_heads, kind.nope_dim + kind.rope_dim) for n in lens]
        self.vectors = [normal(NUM_LAYERS, n, head_size) for n in lens]
        width = kind.latent_dim**-0.5
        self.to_keys = normal(*heads, kind.nope_dim, kind.latent_dim) * width
        self.to_values = normal(*heads, kind.latent_dim, kind.value_dim) * width
        widths = [-(-n // block_size) for n in lens]
        num_blocks = sum(widths) + 4
        block_ids = list(range(1, num_blocks))
        random.Random(seed).shuffle(block_ids)
        size = NUM_LAYERS * block_size * head_size
        buffer = torch.full((num_blocks, size + 24), math.nan, dtype=dtype)
        self.view = PagedLatents(buffer[:, :size].unflatten(1, (NUM_LAYERS, block_size, head_size)))
        self.view.latents[0] = 0  # the null block
        # Entries after a sequence's own are stale: they refer to blocks of other sequences.
        self.table = np.full((len(lens), max(widths) + 1), block_ids.pop(), np.int32)
        for row, width in enumerate(widths):
            self.table[row, :width] = [block_ids.pop() for _ in range(width)]
        self.computed = [0] * len(lens)
        self.backend = kind.make_backend(self.view)

    def step(self, counts: list[int]) -> None:
        """Compute `counts[row]` more tokens of each sequence and compare every result."""
        self.computed = [done + n for done, n in zip(self.computed, counts, strict=True)]
        block_size = self.view.block_size
        batch = make_batch(np.array(counts), np.array(self.computed), block_size)
        self.view.latents[torch.from_numpy(blocks_to_clear(batch, self.table, block_size))] = 0
        for layer, out in enumerate(self.compute(batch)):
            wanted = torch.cat([self.reference(layer, *span) for span in spans(batch)])
            torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=1e-5)

    def compute(self, batch: StepBatch) -> list[Tensor]:
        """The results of all layers, (num_tokens, num_heads * value_dim) each."""
        for memory in self.backend._expanded.values():
            memory.keys[:1024], memory.values[:1024] = math.nan, math.nan
        step = self.backend.begin_step(metadata(batch, self.table, self.view.block_size))
        q = torch.cat([self.q[row][span] for row, span in spans(batch)])
        q_nope, q_rope = q.split((self.kind.nope_dim, self.kind.rope_dim), dim=-1)
        return [
            step.forward(
                layer,
                LatentInputs(
                    q_nope,
                    q_rope,
                    torch.cat([self.vectors[row][layer, span] for row, span in spans(batch)]),
                    LatentProjections(self.to_keys[layer], self.to_values[layer]),
                ),
            )
            for layer in range(NUM_LAYERS)
        ]

    def reference(self, layer: int, row: int, span: slice) -> Tensor:
        """In float64, with a key and a value of every head for every token."""
        vectors = self.vectors[row][layer, : span.stop].double()
        latents, rope = vectors.split((self.kind.latent_dim, self.kind.rope_dim), dim=-1)
        results = []
        for head in range(self.kind.num_heads):
            keys = torch.cat((latents @ self.to_keys[layer, head].double().t(), rope), dim=-1)
            values = latents @ self.to_values[layer, head].double()
            scores = self.q[row][span, head].double() @ keys.t() * self.kind.scale
            for position, line in zip(range(span.start, span.stop), scores, strict=True):
                line[position + 1 :] = -math.inf
            results.append(scores.softmax(-1) @ values)
        return torch.cat(results, dim=-1)


def spans(batch: StepBatch) -> list[tuple[int, slice]]:
    return [
        (row, slice(start, end))
        for row, start, end in zip(
            batch.rows.tolist(), batch.starts.tolist(), batch.ends.tolist(), strict=True
        )
    ]


@every_variant
@settings(deadline=None, max_examples=25)
@given(st.data(), st.sampled_from([1, 4, 16]), st.sampled_from([KIND, NARROW]))
def test_ragged_batches_of_chunks_and_decodes_equal_the_reference(
    variant: str, data: st.DataObject, block_size: int, kind: LatentAttentionKind
) -> None:
    lens = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=5))
    seed = data.draw(st.integers(0, 2**31))
    with using(variant):
        sequences = PagedSequences(lens, block_size=block_size, seed=seed, kind=kind)
        kinds = st.lists(st.sampled_from(["none", "one", "half", "rest"]), min_size=5, max_size=5)
        for step in data.draw(st.lists(kinds, min_size=1, max_size=4), "steps"):
            left = [n - done for n, done in zip(lens, sequences.computed, strict=True)]
            counts = [
                {"none": 0, "one": min(1, n), "half": n // 2, "rest": n}[kind]
                for kind, n in zip(step, left, strict=False)
            ]
            if any(counts):
                sequences.step(counts)


@every_variant
@pytest.mark.parametrize("count", [1, 3, 30], ids=["decode", "absorbed", "expanded"])
def test_a_chunk_may_read_blocks_that_another_fills_in_the_same_step(
    variant: str, count: int
) -> None:
    assert KIND.expands(40, 40)
    assert KIND.expands(count, 32 + count) == (count == 30)
    with using(variant):
        sequences = PagedSequences([40, 32 + count], block_size=16, seed=0)
        sequences.vectors[1][:, :32] = sequences.vectors[0][:, :32]
        sequences.table[1, :2] = sequences.table[0, :2]  # hit blocks, to be filled by row 0
        sequences.computed[1] = 32
        sequences.step([40, count])


def test_chunks_and_decodes_in_triton_equal_the_reference() -> None:
    with using(TRITON):
        sequences = PagedSequences([6, 2], block_size=4, seed=5)
        for counts in ([5, 1], [1, 1]):
            sequences.step(counts)


@every_variant
def test_vectors_of_the_size_of_deepseek_s_are_attended_to(variant: str) -> None:
    with using(variant):
        sequences = PagedSequences([660, 40], block_size=16, seed=3, kind=WIDE)
        for counts in ([600, 38], [57, 1], [1, 1]):
            sequences.step(counts)


def test_heads_that_are_expanded_one_after_the_other_give_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latent_backend, "MAX_EXPANDED_ELEMENTS", 2 * 64 * 10)
    sequences = PagedSequences([50, 20], block_size=16, seed=1)
    sequences.step([30, 20])
    sequences.step([20, 0])


@every_variant
def test_bfloat16_stays_near_the_reference(variant: str) -> None:
    with using(variant):
        sequences = PagedSequences([60, 33], block_size=16, seed=2, dtype=torch.bfloat16)
        for starts, counts in (([0, 0], [40, 30]), ([40, 30], [19, 2]), ([59, 32], [1, 1])):
            batch = make_batch(np.array(counts), np.array(starts) + np.array(counts), 16)
            cleared = blocks_to_clear(batch, sequences.table, 16)
            sequences.view.latents[torch.from_numpy(cleared)] = 0
            for layer, out in enumerate(sequences.compute(batch)):
                wanted = torch.cat([sequences.reference(layer, *s) for s in spans(batch)])
                assert (out.double() - wanted).abs().mean() < 0.01 * wanted.abs().mean()


@given(st.integers(1, 4096), st.integers(0, 1 << 16))
def test_whether_a_chunk_is_expanded_depends_on_what_it_costs(num_new: int, num_old: int) -> None:
    def products(tokens: int, per_pair: int) -> int:
        pairs = sum(num_old + i + 1 for i in range(num_new))
        return tokens * 512 * (128 + 128) + pairs * per_pair

    expanded = products(num_old + num_new + 64, 3 * 192)
    absorbed = products(num_new, 2 * 576)
    assert WIDE.expands(num_new, num_old + num_new) == (expanded < absorbed)
    assert not NARROW.expands(num_new, num_old + num_new)


class Undecided(LatentAttentionKind):
    def expands(self, num_tokens: int, seq_len: int) -> bool:
        raise AssertionError("whether to expand is a question about chunks")


def test_no_decode_is_expanded_however_short_its_sequence() -> None:
    sequences = PagedSequences([2, 1], block_size=4, seed=4, kind=Undecided(**asdict(KIND)))
    sequences.step([1, 1])
    sequences.step([1, 0])
