"""Attention with the compiled CPU kernel, which reads keys and values in place."""

from typing import TYPE_CHECKING

import numpy as np

from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.kernels.native import Native
from longshore.worker.kernels.paged_attention import PagedAttention, PagedAttentionStep
from longshore.worker.kv_cache.buffer import PagedKV

if TYPE_CHECKING:
    from longshore.worker.attention.kind import PagedAttentionKind


class NativeAttention:
    """One kernel for decodes and chunks. A row's result depends only on its own sequence."""

    def __init__(self, kernels: Native, cache: PagedKV, kind: "PagedAttentionKind") -> None:
        self._kernel = PagedAttention(
            kernels,
            cache,
            num_heads=kind.num_heads,
            scale=cache.head_dim**-0.5 if kind.scale is None else kind.scale,
            window=kind.window or 0,
            chunk=kind.chunk or 0,
            softcap=kind.softcap or 0.0,
        )
        self._description = f"paged CPU kernel ({kernels.instruction_set}), {kind}"

    def __str__(self) -> str:
        return self._description

    def begin_step(self, metadata: AttentionMetadata) -> PagedAttentionStep:
        num_decodes = len(metadata.decode_rows)
        sequences = np.empty((num_decodes + len(metadata.prefill_chunks), 4), np.int64)
        decodes = sequences[:num_decodes]
        decodes[:, 0] = metadata.decode_rows.numpy()
        decodes[:, 1] = np.arange(num_decodes)
        decodes[:, 2] = 1
        decodes[:, 3] = metadata.decode_lens.numpy()
        for line, chunk in zip(sequences[num_decodes:], metadata.prefill_chunks, strict=True):
            line[:] = (chunk.row, chunk.first_token, chunk.num_tokens, chunk.seq_len)
        return self._kernel.plan(metadata.block_table, metadata.slot_mapping, sequences)
