"""Attention to the tokens that this rank stores, with the Triton kernels: what
`context_parallel.KeptContext` computes in torch.

A rank stores its tokens in order, so each query sees the first n of them: n is its length for the
decode kernel, and a number per token for the prefill kernel.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longshore.worker.attention.chunk_table import chunk_table, kept_keys
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.kernels.decode_attention import decode_attention, num_splits
from longshore.worker.kernels.prefill_attention import prefill_attention
from longshore.worker.kernels.scoring import Scoring
from longshore.worker.kernels.write_kv import write_kv
from longshore.worker.kv_cache.context_share import ContextShare

if TYPE_CHECKING:
    from longshore.worker.attention.context_parallel import KeptMemory


class KeptAttention:
    """One step; shared by all layers. See KeptContext for the arguments and methods."""

    def __init__(
        self,
        memory: "KeptMemory",
        share: ContextShare,
        metadata: AttentionMetadata,
        *,
        num_heads: int,
        scale: float,
        softcap: float | None = None,
    ) -> None:
        self._memory = memory
        self._metadata = metadata
        self._scoring = Scoring(scale, softcap=softcap)
        self._num_decodes = len(metadata.decode_rows)
        self._decode_lens = share.num_kept(metadata.decode_lens)
        max_tokens = metadata.block_table.shape[1] * memory.block_size
        self._num_splits = num_splits(self._num_decodes, 1, max_tokens)
        self._chunks: Tensor | None = None
        if metadata.prefill_chunks:
            self._chunks = chunk_table(metadata)
            self._kept_keys = kept_keys(metadata, share)
            self._max_tokens = max(chunk.num_tokens for chunk in metadata.prefill_chunks)

    def write(self, layer: int, *of_tokens: Tensor) -> None:
        """Store this rank's part of the KV of the step's tokens: those with a slot."""
        memory = self._memory
        keys, values = memory.planes(layer)
        k, v = (of_tokens[0], of_tokens[-1])
        if k.dim() == 2:  # latents, whose values are a part of them
            k = v = k.unsqueeze(1)
            values = keys
        write_kv(k, k, v, keys, values, self._metadata.slot_mapping, memory.scales(layer))

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """See KeptContext.attend."""
        metadata, n = self._metadata, self._num_decodes
        keys, values = self._memory.planes(layer)
        scales = self._memory.scales(layer)
        scoring = self._scoring._replace(key_scale=scales.keys, value_scale=scales.values)
        out = q.new_empty(*q.shape[:3], values.shape[3] + 1, dtype=torch.float32)
        heads = q.transpose(0, 1).flatten(1, 2)  # of all ranks: (num_tokens, heads, dim)
        if n:
            decoded = decode_attention(
                heads[:n],
                keys,
                values,
                metadata.block_table,
                metadata.decode_rows,
                self._decode_lens,
                scoring,
                num_splits=self._num_splits,
            )
            _store(out[:, :n], *decoded)
        if self._chunks is not None:
            prefilled = prefill_attention(
                heads[n:],
                keys,
                values,
                metadata.block_table,
                self._chunks,
                scoring,
                max_tokens=self._max_tokens,
                seen=self._kept_keys,
            )
            _store(out[:, n:], *prefilled)
        return out


def _store(out: Tensor, means: Tensor, logs: Tensor) -> None:
    """out: (ranks, n, num_heads, value_dim + 1); means and logs: of (n, ranks * num_heads)."""
    ranks = (len(out), out.shape[2])
    out[..., :-1] = means.unflatten(1, ranks).transpose(0, 1)
    out[..., -1] = logs.unflatten(1, ranks).transpose(0, 1)
