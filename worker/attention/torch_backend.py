"""Attention in plain torch operations, the same on a CPU and on CUDA.

Decodes are batched: their blocks are gathered into padded keys and values, and the query heads that
share a KV head are the rows of one small product. Prefill chunks run one by one, without copying
keys per query head. With a window or chunks they are cut into tiles, so that few keys of a tile are
masked for all of its tokens. Padding is always finite (the null block is zeros, and the runner
clears a block before its first use), so a masked position cannot make a result NaN. An fp8 cache is
read in the model's dtype, and the step's own keys and values are rounded to fp8 too, so results do
not depend on how a prompt is cut into chunks.
"""

import math
from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.attention.backend import AttentionInputs
from longshore.worker.attention.metadata import AttentionMetadata, DecodeSegment, PrefillChunk
from longshore.worker.attention.reach import Reach
from longshore.worker.attention.segments import capped_segments
from longshore.worker.kernels.rotary import rotary_
from longshore.worker.kv_cache.buffer import PagedKV
from longshore.worker.kv_cache.fp8 import (
    KVScales,
    from_fp8,
    to_fp8,
)

if TYPE_CHECKING:
    from longshore.worker.attention.kind import PagedAttentionKind

MIN_TILE_TOKENS: Final = 256
"""Minimum tile size of a chunk, even for a short reach; smaller tiles need too many calls."""

MAX_SCORES: Final = 1 << 25
"""Scores over all heads in memory at once, where torch has no fused operation."""


class TorchAttention:
    """Softmax attention over gathered blocks. Bound to one cache and one kind of layer."""

    def __init__(self, cache: PagedKV, kind: "PagedAttentionKind") -> None:
        self.cache = cache
        self.blocks = _GatheredBlocks(cache)
        self.num_heads = kind.num_heads
        self.scale = cache.head_dim**-0.5 if kind.scale is None else kind.scale
        self.softcap = kind.softcap
        self.reach = Reach(window=kind.window, chunk=kind.chunk)
        self._description = f"torch, over gathered blocks, {kind}"

    def __str__(self) -> str:
        return self._description

    def begin_step(self, metadata: AttentionMetadata) -> "TorchAttentionStep":
        return TorchAttentionStep(self, metadata)

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key_scale: float
    ) -> Tensor:
        """q: (..., num_queries, head_dim); k, v: (..., num_keys, head_dim). No mask: causal."""
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale * key_scale
        )

    def composed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        key_scale: float,
    ) -> Tensor:
        """Attention with softcap or sinks, which no fused operation supports. Computed in float32,
        some queries at a time.

        q: (n, num_kv_heads, group, num_queries, head_dim); k, v: (n, num_kv_heads, num_keys,
        head_dim). mask: broadcasts to the scores, (n, num_kv_heads, group, num_queries, num_keys);
        None: causal. sinks: None, or (num_heads,). Returns the shape of q.
        """
        n, kv_heads, group, num_queries, _ = q.shape
        if mask is None:
            positions = torch.arange(num_queries, device=q.device)
            mask = _mask(positions > positions[:, None], q.dtype)
        num_rows = max(1, MAX_SCORES // (n * self.num_heads * k.shape[2]))
        keys, values = (x.to(torch.float32, memory_format=torch.contiguous_format) for x in (k, v))
        results = []
        for part, part_mask in zip(q.split(num_rows, 3), mask.split(num_rows, -2), strict=True):
            scores = (part.float().flatten(2, 3) @ keys.transpose(2, 3)).mul_(
                self.scale * key_scale
            )
            if self.softcap is not None:
                scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
            scores = scores.unflatten(2, (group, -1)).add_(part_mask)
            if sinks is not None:
                column = sinks.view(kv_heads, group, 1, 1).expand(*scores.shape[:-1], 1)
                scores = torch.cat([scores, column], -1)
            weights = scores.softmax(-1)[..., : k.shape[2]]
            results.append((weights.flatten(2, 3) @ values).unflatten(2, (group, -1)))
        return torch.cat(results, 3).to(q.dtype)


class _GatheredBlocks:
    """Copies blocks of one layer out of the cache, head by head.

    The keys, or values, of a block, head and layer are a line of contiguous elements. In the result
    a head's lines follow each other, which they do not in the cache. They are gathered as rows of
    one matrix over the cache's memory: in one call, and without another copy to reorder them. A row
    is a line, or the largest part of it that divides every stride of the cache.
    """

    def __init__(self, cache: PagedKV) -> None:
        self._cache = cache
        planes = cache.planes if cache.fp8 is None else cache.planes.view(torch.uint8)
        strides, line = planes.stride()[:4], cache.block_size * cache.head_dim
        row = math.gcd(line, *strides)
        last = sum((n - 1) * stride for n, stride in zip(planes.shape[:4], strides, strict=True))
        self._rows = planes.as_strided(((last + line) // row, row), (row, 1))
        self._block, self._head, self._layer, self._plane = (stride // row for stride in strides)
        # (num_kv_heads, 1, rows per line)
        heads = torch.arange(cache.num_kv_heads, device=cache.device)[:, None, None] * self._head
        self._of_head = heads + torch.arange(line // row, device=cache.device)

    def rows(self, block_ids: Tensor) -> Tensor:
        """The rows of these blocks, for `read` of any layer. block_ids: (..., n) int64."""
        return (block_ids[..., None, :, None] * self._block + self._of_head).flatten()

    def read(self, layer: int, plane: int, rows: Tensor) -> Tensor:
        """(..., num_kv_heads, n * block_size, head_dim), contiguous, with the leading dimensions
        flattened. plane: 0 for keys, 1 for values. An fp8 cache is converted."""
        cache = self._cache
        first = layer * self._layer + plane * self._plane
        gathered = self._rows[first:].index_select(0, rows)
        return gathered if cache.fp8 is None else from_fp8(gathered, cache.dtype)


class _PaddedSegment:
    """Decodes computed together: the blocks that they attend to, and their mask."""

    def __init__(
        self, attention: TorchAttention, metadata: AttentionMetadata, segment: DecodeSegment
    ) -> None:
        cache, reach = attention.cache, attention.reach
        block_size = cache.block_size
        self.tokens = slice(segment.first_seq, segment.first_seq + segment.num_seqs)
        rows = metadata.decode_rows[self.tokens].unsqueeze(1)
        lens = metadata.decode_lens[self.tokens].unsqueeze(1)
        firsts = reach.first_key(lens - 1)
        columns = torch.arange(segment.num_blocks, device=rows.device)
        columns = columns + firsts.clamp(min=0) // block_size
        # Stale ids after a sequence's own blocks are replaced by the null block, which is always
        # finite; the stale ones may belong to other rows.
        is_own = columns * block_size < lens
        block_ids = metadata.block_table[rows, columns * is_own].long() * is_own
        self.rows = attention.blocks.rows(block_ids)
        offsets = torch.arange(block_size, device=rows.device)
        positions = (columns.unsqueeze(2) * block_size + offsets).flatten(1)
        mask = _mask((positions >= lens) | (positions < firsts), cache.dtype)
        self.mask = mask[:, None, None, :]


class _Tile:
    """Consecutive tokens of a chunk, and the keys that they attend to.

    tokens: slice of the step's tokens.
    keys:   slice of the keys that the chunk reads.
    mask:   (tokens, keys); None: causal, with as many keys as tokens.
    """

    def __init__(self, tokens: slice, keys: slice, mask: Tensor | None) -> None:
        self.tokens = tokens
        self.keys = keys
        self.mask = mask


class _PagedChunk:
    """One prefill chunk: its tiles, and the blocks that they attend to.

    A chunk at the start of its sequence does not read the cache: its keys are the step's own. If
    the step has none, because they have been written before, all chunks read the cache.
    """

    def __init__(
        self, attention: TorchAttention, metadata: AttentionMetadata, chunk: PrefillChunk
    ) -> None:
        cache, reach = attention.cache, attention.reach
        self.tokens = slice(chunk.first_token, chunk.first_token + chunk.num_tokens)
        self.rows: Tensor | None = None
        num_earlier = chunk.seq_len - chunk.num_tokens
        first_block = max(0, reach.first_key(num_earlier)) // cache.block_size
        if num_earlier > 0 or len(metadata.slot_mapping) == 0:
            end_block = -(-chunk.seq_len // cache.block_size)
            block_ids = metadata.block_table[chunk.row, first_block:end_block].long()
            self.rows = attention.blocks.rows(block_ids)
        first_read = first_block * cache.block_size
        positions = torch.arange(first_read, chunk.seq_len, device=metadata.block_table.device)
        limit = reach.max_tokens
        step = chunk.num_tokens if limit is None else max(limit, MIN_TILE_TOKENS)
        self.tiles = []
        for start in range(num_earlier, chunk.seq_len, step):
            end = min(start + step, chunk.seq_len)
            first = max(0, reach.first_key(start))
            read = slice(first - first_read, end - first_read)
            mask = None
            if start > 0 or reach.first_key(end - 1) > 0:
                keys = positions[read]
                queries = keys[start - first :].unsqueeze(1)
                is_hidden = (keys > queries) | (keys < reach.first_key(queries))
                mask = _mask(is_hidden, cache.dtype)
            first_token = chunk.first_token - num_earlier
            tokens = slice(first_token + start, first_token + end)
            self.tiles.append(_Tile(tokens, read, mask))


class TorchAttentionStep:
    """One step, all layers."""

    native_steps: tuple[bytes, ...] = ()

    def __init__(self, attention: TorchAttention, metadata: AttentionMetadata) -> None:
        self._attention = attention
        cache, reach = attention.cache, attention.reach
        self._num_kv_heads, self._head_dim = cache.num_kv_heads, cache.head_dim
        self._planes = cache.planes if cache.fp8 is None else cache.planes.view(torch.uint8)
        slots = metadata.slot_mapping
        # Tokens without a slot write what is there in the null block.
        self._unstored: Tensor | None = None
        if slots.device.type != "cpu" or bool((slots < 0).any()):
            self._unstored = (slots < 0).view(-1, 1, 1)
            slots = slots.clamp(min=0)
        self._blocks = slots.div(cache.block_size, rounding_mode="floor")
        self._offsets = slots - self._blocks * cache.block_size
        segments, max_blocks = metadata.decode_segments, reach.max_blocks(cache.block_size)
        if max_blocks is not None:
            segments = capped_segments(segments, max_blocks, cache.block_size)
        self._segments = [_PaddedSegment(attention, metadata, s) for s in segments]
        self._chunks = [_PagedChunk(attention, metadata, c) for c in metadata.prefill_chunks]

    def forward(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """See AttentionStep.forward."""
        q, k, v, rotation, sinks = inputs
        if rotation is not None:
            rotary_(q, k, rotation)
        fp8 = self._attention.cache.fp8
        scales = KVScales() if fp8 is None else fp8.scales[layer]
        if fp8 is not None:
            k, v = to_fp8(k, scales.keys), to_fp8(v, scales.values)
        for plane, stored in enumerate((k, v)):
            memory = self._planes[:, :, layer, plane]
            if self._unstored is not None:
                there = memory[self._blocks, :, self._offsets]
                stored = torch.where(self._unstored, there, stored)
            memory[self._blocks, :, self._offsets] = stored
        q = q.unflatten(1, (self._num_kv_heads, -1))
        out = torch.empty_like(q)
        for segment in self._segments:
            out[segment.tokens] = self._attend_decodes(
                layer, q[segment.tokens], segment, sinks, scales.keys
            )
        for chunk in self._chunks:
            if chunk.rows is None:
                keys, values = (self._computable(x[chunk.tokens]).transpose(0, 1) for x in (k, v))
            else:
                shape = (self._num_kv_heads, -1, self._head_dim)
                keys, values = self._read(layer, chunk.rows, shape)
            for tile in chunk.tiles:
                out[tile.tokens] = self._attend_tile(
                    q[tile.tokens],
                    keys[:, tile.keys],
                    values[:, tile.keys],
                    tile.mask,
                    sinks,
                    scales.keys,
                )
        if scales.values != 1.0:
            out.mul_(scales.values)
        return out.view(len(q), -1)

    def _computable(self, stored: Tensor) -> Tensor:
        """Stored keys or values in the dtype of the queries."""
        cache = self._attention.cache
        return stored if cache.fp8 is None else from_fp8(stored, cache.dtype)

    def _read(self, layer: int, rows: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values of gathered blocks, in this shape."""
        blocks = self._attention.blocks
        return blocks.read(layer, 0, rows).view(shape), blocks.read(layer, 1, rows).view(shape)

    def _attend_decodes(
        self,
        layer: int,
        q: Tensor,
        segment: _PaddedSegment,
        sinks: Tensor | None,
        key_scale: float,
    ) -> Tensor:
        """q: (n, num_kv_heads, group, head_dim); the group acts as the query dimension."""
        shape = (len(q), self._num_kv_heads, -1, self._head_dim)
        keys, values = self._read(layer, segment.rows, shape)
        if sinks is None and self._attention.softcap is None:
            return self._attention.fused(q, keys, values, segment.mask, key_scale)
        mask = segment.mask.unsqueeze(1)
        return self._attention.composed(
            q.unsqueeze(3), keys, values, mask, sinks, key_scale
        ).squeeze(3)

    def _attend_tile(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        key_scale: float,
    ) -> Tensor:
        """q: (n, num_kv_heads, group, head_dim); k, v: (num_kv_heads, num_keys, head_dim). KV heads
        act as the batch, the group as heads."""
        q = q.permute(1, 2, 0, 3)
        if sinks is None and self._attention.softcap is None:
            k, v = (x.unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
            return self._attention.fused(q, k, v, mask, key_scale).permute(2, 0, 1, 3)
        out = self._attention.composed(q[None], k[None], v[None], mask, sinks, key_scale)
        return out[0].permute(2, 0, 1, 3)


def _mask(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask: -infinity where `is_hidden`, else 0."""
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return mask.masked_fill_(is_hidden, float("-inf"))
