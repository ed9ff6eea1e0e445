"""Runs a loaded model over a paged cache without a model runner, for tests of models."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from longshore.protocol.kv_cache_spec import (
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    StateSpec,
)
from longshore.worker.attention.grouped import GroupedAttention, GroupedStep
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.attention.segments import decode_segments
from longshore.worker.kv_cache.buffer import KVCache
from longshore.worker.kv_cache.context_share import WHOLE_CONTEXT, ContextShare
from longshore.worker.kv_cache.fp8 import KVScales
from longshore.worker.kv_cache.slot_mapping import slots_at
from longshore.worker.models.decoder_model import DecoderModel
from longshore.worker.step.step_batch import StepBatch
from longshore.worker.worker import Worker


class PagedSequence:
    """One sequence at a time on a model's cache; every group has its own shuffled blocks."""

    def __init__(
        self,
        model: DecoderModel,
        config: KVCacheConfig,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        scales: Mapping[str, KVScales] | None = None,
    ) -> None:
        self.model = model
        self._groups = config.groups
        cache = KVCache(config, dtype=dtype, device=torch.device("cpu"), scales=scales)
        self._attention = GroupedAttention(cache, model.cached_layers())
        block_ids = list(range(1, cache.num_blocks))
        random.Random(0).shuffle(block_ids)
        self._tables = [
            np.array([[block_ids.pop() for _ in range(num_entries)]]).astype(np.int32)
            for num_entries in (
                group.spec.num_pages
                if isinstance(group.spec, StateSpec)
                else -(-max_model_len // group.spec.block_size)
                for group in config.groups
            )
        ]

    def begin_step(self, start: int, count: int) -> tuple[Tensor, GroupedStep]:
        """The `count` positions from `start` on, and their attention step."""
        rows, starts, counts = np.zeros(1, np.int64), np.array([start]), np.array([count])
        batch = StepBatch(rows, starts, counts, num_decodes=int(count == 1))
        step = self._attention.begin_step(
            [
                _group_metadata(batch, table, group.spec)
                for table, group in zip(self._tables, self._groups, strict=True)
            ]
        )
        return torch.from_numpy(batch.positions()), step

    def hear(self, samples: Tensor) -> None:
        """Encode the audio of the sequence, if the model has an encoder."""
        _, step = self.begin_step(0, 1)
        with torch.inference_mode():
            self.model.write_encoded(self.model.encode(samples), 0, step)

    def forward(self, inputs: Tensor, start: int) -> Tensor:
        """Compute the positions from `start` on. inputs: token ids, or hidden states of the
        previous stage."""
        positions, step = self.begin_step(start, len(inputs))
        with torch.inference_mode():
            return self.model.forward(inputs, positions, step)

    def logits(self, hidden: Tensor) -> Tensor:
        with torch.inference_mode():
            return self.model.logits(hidden)


def paged_logits(worker: Worker, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """(num_tokens, vocab_size): one sequence, computed in chunks on shuffled blocks."""
    assert sum(chunks) == len(token_ids)
    dtype = worker.model.embedding.weight.dtype
    sequence = PagedSequence(
        worker.model,
        worker.kv_cache,
        max_model_len=worker.max_model_len,
        dtype=dtype,
        scales=worker.kv_scales,
    )
    start, logits = 0, []
    for count in chunks:
        ids = torch.tensor(token_ids[start : start + count], dtype=torch.int32)
        logits.append(sequence.logits(sequence.forward(ids, start)))
        start += count
    return torch.cat(logits)


def _group_metadata(batch: StepBatch, table: np.ndarray, spec: KVCacheSpec) -> AttentionMetadata:
    if isinstance(spec, CrossAttentionSpec):
        lens = np.full(batch.counts.sum(), spec.max_encoder_tokens)
        return cross_metadata(batch, table, spec.block_size, lens)
    if isinstance(spec, StateSpec):
        return state_metadata(batch, table)
    return metadata(batch, table, spec.block_size)


def state_metadata(batch: StepBatch, table: np.ndarray) -> AttentionMetadata:
    """The same for a group of states. table: pages by row."""
    no_slots = np.zeros((len(table), 1), np.int32)
    return replace(metadata(batch, no_slots, 1 << 30), block_table=torch.from_numpy(table))


def metadata(
    batch: StepBatch, table: np.ndarray, block_size: int, share: ContextShare = WHOLE_CONTEXT
) -> AttentionMetadata:
    """The attention metadata of `batch`, as the runner would make it, on the CPU. block_size:
    tokens of a block that a rank stores."""
    positions, all_ranks = batch.positions(), block_size * share.size
    places = np.divmod(positions, all_ranks)
    slots = slots_at(table, batch.token_rows(), places, block_size, share)
    kept = torch.from_numpy(np.flatnonzero(share.keeps(positions)))
    return AttentionMetadata(
        slot_mapping=torch.from_numpy(slots),
        block_table=torch.from_numpy(table),
        decode_rows=torch.from_numpy(batch.rows[: batch.num_decodes]),
        decode_lens=torch.from_numpy(batch.ends[: batch.num_decodes]),
        decode_segments=decode_segments(batch.decode_blocks(all_ranks), all_ranks),
        prefill_chunks=batch.prefill_chunks(),
        kept_tokens=None if share.size == 1 else kept,
    )


def cross_metadata(
    batch: StepBatch, table: np.ndarray, block_size: int, lens: np.ndarray
) -> AttentionMetadata:
    """The same for a group of cross attention. lens: encoder tokens that each token of the step
    attends to."""
    return AttentionMetadata(
        slot_mapping=torch.empty(0, dtype=torch.int64),
        block_table=torch.from_numpy(table),
        decode_rows=torch.from_numpy(batch.token_rows()),
        decode_lens=torch.from_numpy(lens),
        decode_segments=decode_segments(-(-lens // block_size), block_size),
        prefill_chunks=(),
    )
