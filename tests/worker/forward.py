"""Runs a loaded model over a paged cache without a runner: what tests of models compare."""

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longshore.worker import kv_cache
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.attention.segments import decode_segments
from longshore.worker.attention.torch_backend import TorchAttention
from longshore.worker.slot_mapping import slot_mapping
from longshore.worker.step_batch import StepBatch
from longshore.worker.worker import Worker


def paged_logits(worker: Worker, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """(num_tokens, vocab_size): one sequence, computed in chunks on shuffled blocks."""
    assert sum(chunks) == len(token_ids)
    (group,) = worker.kv_cache.groups
    dtype = worker.model.embedding.weight.dtype
    cache = kv_cache.allocate(worker.kv_cache, dtype=dtype, device=torch.device("cpu"))
    block_ids = list(range(1, cache.num_blocks))
    random.Random(0).shuffle(block_ids)
    table = np.zeros((1, group.spec.max_blocks(worker.max_model_len)), np.int32)
    table[0] = block_ids[: table.shape[1]]
    attention = TorchAttention(cache, num_heads=worker.model_config.num_heads)
    rows, start, logits = np.zeros(1, np.int64), 0, []
    for count in chunks:
        batch = StepBatch(rows, np.array([start]), np.array([count]), num_decodes=int(count == 1))
        positions = batch.positions()
        step = attention.begin_step(metadata(batch, table, cache.block_size))
        with torch.inference_mode():
            ids = torch.tensor(token_ids[start : start + count], dtype=torch.int32)
            hidden = worker.model.forward(ids, torch.from_numpy(positions), step)
            logits.append(worker.model.logits(hidden))
        start += count
    return torch.cat(logits)


def metadata(batch: StepBatch, table: np.ndarray, block_size: int) -> AttentionMetadata:
    """What the runner would say about `batch`, on the CPU."""
    slots = slot_mapping(table, batch.token_rows(), batch.positions(), block_size)
    return AttentionMetadata(
        slot_mapping=torch.from_numpy(slots),
        block_table=torch.from_numpy(table),
        decode_rows=torch.from_numpy(batch.rows[: batch.num_decodes]),
        decode_lens=torch.from_numpy(batch.ends[: batch.num_decodes]),
        decode_segments=decode_segments(batch.decode_blocks(block_size), block_size),
        prefill_chunks=batch.prefill_chunks(),
    )
