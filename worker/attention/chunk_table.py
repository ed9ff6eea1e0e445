"""The prefill chunks of a step as the Triton kernels read them, on the device."""

import numpy as np
import torch
from torch import Tensor

from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.kv_cache.context_share import ContextShare


def chunk_table(metadata: AttentionMetadata) -> Tensor:
    """(num_chunks, 4) int64: row, first token after the decodes, number of tokens, and length of
    the sequence."""
    num_decodes = len(metadata.decode_rows)
    table = torch.tensor(
        [
            (chunk.row, chunk.first_token - num_decodes, chunk.num_tokens, chunk.seq_len)
            for chunk in metadata.prefill_chunks
        ],
        dtype=torch.int64,
    )
    return _on_device(table, metadata)


def kept_keys(metadata: AttentionMetadata, share: ContextShare) -> Tensor:
    """(n,) int64: how many of the tokens that a rank stores each token of the chunks attends to."""
    lens = [
        np.arange(chunk.seq_len - chunk.num_tokens + 1, chunk.seq_len + 1)
        for chunk in metadata.prefill_chunks
    ]
    return _on_device(torch.from_numpy(share.num_kept(np.concatenate(lens))), metadata)


def _on_device(table: Tensor, metadata: AttentionMetadata) -> Tensor:
    device = metadata.block_table.device
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
