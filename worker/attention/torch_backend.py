"""Attention in plain torch operations, the same on a CPU and on CUDA.

Decodes are batched: their blocks are gathered into padded keys and values, and the query heads
that share a KV head act as the rows of one small product. Prefill chunks run one by one, without
copying keys per query head. What padding reads is finite (the runner clears a block before its
first use), so a masked position cannot turn a result into NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.attention.metadata import AttentionMetadata, DecodeSegment, PrefillChunk
from longshore.worker.kv_cache import KVCache


class TorchAttention:
    """Scaled dot product attention over gathered blocks."""

    def __init__(self, cache: KVCache, *, num_heads: int) -> None:
        self.cache = cache
        self.num_heads = num_heads

    def begin_step(self, metadata: AttentionMetadata) -> "TorchAttentionStep":
        return TorchAttentionStep(self.cache, self.num_heads, metadata)


class _PaddedSegment:
    """Decodes computed together: where their blocks are, and what to mask."""

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, segment: DecodeSegment) -> None:
        seqs = slice(segment.first_seq, segment.first_seq + segment.num_seqs)
        self.tokens = seqs
        rows = metadata.decode_rows[seqs]
        table = metadata.block_table[:, : segment.num_blocks].index_select(0, rows)
        # Stale ids beyond a sequence's own blocks are replaced by the null block: those blocks may
        # be anybody's now, and null is always finite.
        lens = metadata.decode_lens[seqs].unsqueeze(1)
        block_starts = torch.arange(
            0, segment.num_blocks * cache.block_size, cache.block_size, device=table.device
        )
        table = table.long() * (block_starts < lens)
        self.block_index = table.view(-1) * (cache.num_layers * 2)
        positions = torch.arange(segment.num_blocks * cache.block_size, device=table.device)
        mask = torch.zeros(
            (segment.num_seqs, len(positions)), dtype=cache.buffer.dtype, device=table.device
        )
        mask.masked_fill_(positions >= lens, float("-inf"))
        self.mask = mask[:, None, None, :]


class _PagedChunk:
    """One prefill chunk: its tokens, and where the blocks of its sequence are.

    A chunk that starts its sequence needs no cache: its keys are the step's own.
    """

    def __init__(self, cache: KVCache, metadata: AttentionMetadata, chunk: PrefillChunk) -> None:
        self.tokens = slice(chunk.first_token, chunk.first_token + chunk.num_tokens)
        self.seq_len = chunk.seq_len
        self.block_index: Tensor | None = None
        self.mask: Tensor | None = None
        num_earlier = chunk.seq_len - chunk.num_tokens
        if num_earlier == 0:
            return
        device = metadata.block_table.device
        num_blocks = -(-chunk.seq_len // cache.block_size)
        table = metadata.block_table[chunk.row, :num_blocks]
        self.block_index = table.long() * (cache.num_layers * 2)
        positions = torch.arange(chunk.seq_len, device=device)
        mask = torch.zeros(
            (chunk.num_tokens, chunk.seq_len), dtype=cache.buffer.dtype, device=device
        )
        self.mask = mask.masked_fill_(positions > positions[num_earlier:, None], float("-inf"))


class TorchAttentionStep:
    """One step, all layers."""

    def __init__(self, cache: KVCache, num_heads: int, metadata: AttentionMetadata) -> None:
        self._cache = cache
        self._num_heads = num_heads
        self._token_vectors = cache.token_vectors()
        self._block_vectors = cache.block_vectors()
        slots = metadata.slot_mapping
        block_ids = slots.div(cache.block_size, rounding_mode="floor")
        lines_per_block = (cache.num_layers * 2 - 1) * cache.block_size
        self._token_index = slots + block_ids * lines_per_block
        self._segments = [_PaddedSegment(cache, metadata, s) for s in metadata.decode_segments]
        self._chunks = [_PagedChunk(cache, metadata, c) for c in metadata.prefill_chunks]

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See AttentionStep.forward."""
        self._write(2 * layer, k)
        self._write(2 * layer + 1, v)
        num_tokens, _, head_dim = q.shape
        kv_heads = self._cache.num_kv_heads
        q = q.view(num_tokens, kv_heads, self._num_heads // kv_heads, head_dim)
        out = torch.empty_like(q)
        for segment in self._segments:
            out[segment.tokens] = self._attend_decodes(layer, q[segment.tokens], segment)
        for chunk in self._chunks:
            out[chunk.tokens] = self._attend_chunk(
                layer, q[chunk.tokens], k[chunk.tokens], v[chunk.tokens], chunk
            )
        return out.view(num_tokens, -1)

    def _write(self, plane: int, vectors: Tensor) -> None:
        """plane: 2 * layer for keys, one more for values."""
        index = self._token_index + plane * self._cache.block_size
        self._token_vectors.index_copy_(0, index, vectors.reshape(len(vectors), -1))

    def _read(self, plane: int, block_index: Tensor) -> Tensor:
        """(n blocks) -> (n * block_size, num_kv_heads, head_dim), contiguous."""
        cache = self._cache
        blocks = self._block_vectors.index_select(0, block_index + plane)
        return blocks.view(-1, cache.num_kv_heads, cache.head_dim)

    def _attend_decodes(self, layer: int, q: Tensor, segment: _PaddedSegment) -> Tensor:
        """q: (n, num_kv_heads, group, head_dim); the group is the query dimension."""
        shape = (len(q), -1, self._cache.num_kv_heads, self._cache.head_dim)
        keys = self._read(2 * layer, segment.block_index).view(shape)
        values = self._read(2 * layer + 1, segment.block_index).view(shape)
        return F.scaled_dot_product_attention(
            q, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=segment.mask
        )

    def _attend_chunk(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, chunk: _PagedChunk
    ) -> Tensor:
        """q: (n, num_kv_heads, group, head_dim); KV heads are the batch, the group the heads."""
        if chunk.block_index is not None:
            k = self._read(2 * layer, chunk.block_index)[: chunk.seq_len]
            v = self._read(2 * layer + 1, chunk.block_index)[: chunk.seq_len]
        group = q.shape[2]
        out = F.scaled_dot_product_attention(
            q.permute(1, 2, 0, 3),
            k.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1),
            v.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        return out.permute(2, 0, 1, 3)
