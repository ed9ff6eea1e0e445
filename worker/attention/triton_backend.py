"""Attention with Triton kernels, which read keys and values in place through the block table.

A step of decodes reads everything that changes from step to step on the device, so graphs can
replay it. Prefill chunks of a step are computed in one launch.
"""

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionInputs
from longshore.worker.attention.chunk_table import chunk_table
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.attention.reach import Reach
from longshore.worker.kernels.cascade_attention import cascade_attention, num_shared_splits
from longshore.worker.kernels.decode_attention import decode_attention, num_splits
from longshore.worker.kernels.prefill_attention import prefill_attention
from longshore.worker.kernels.scoring import Scoring
from longshore.worker.kernels.write_kv import write_kv
from longshore.worker.kv_cache.buffer import PagedKV
from longshore.worker.kv_cache.fp8 import KVScales

if TYPE_CHECKING:
    from longshore.worker.attention.kind import PagedAttentionKind

MAX_HEAD_DIM: Final = 576
"""The tiles of larger heads do not fit into a multiprocessor."""


class TritonAttention:
    """Bound to one cache and one kind of layer."""

    is_replayable = True
    shares_blocks = True

    def __init__(self, cache: PagedKV, kind: "PagedAttentionKind") -> None:
        self.cache = cache
        self.num_heads = kind.num_heads
        self.value_dim = kind.value_dim or cache.head_dim
        self.scale = cache.head_dim**-0.5 if kind.scale is None else kind.scale
        self.softcap = kind.softcap
        self.reach = Reach(window=kind.window, chunk=kind.chunk)
        self._description = f"Triton kernels, {kind}"

    def __str__(self) -> str:
        return self._description

    def begin_step(self, metadata: AttentionMetadata) -> "TritonAttentionStep":
        return TritonAttentionStep(self, metadata)


class TritonAttentionStep:
    """One step, all layers: `write`, then `attend`."""

    native_steps: tuple[bytes, ...] = ()

    def __init__(self, attention: TritonAttention, metadata: AttentionMetadata) -> None:
        self._attention = attention
        self._metadata = metadata
        cache, table = attention.cache, metadata.block_table
        self._num_decodes = len(metadata.decode_rows)
        max_tokens = table.shape[1] * cache.block_size
        if attention.reach.max_tokens is not None:
            max_tokens = min(max_tokens, attention.reach.max_tokens)
        self._num_splits = num_splits(self._num_decodes, cache.num_kv_heads, max_tokens)
        self._shared = metadata.shared_tokens if attention.reach == Reach() else None
        self._num_shared_splits = num_shared_splits(
            self._num_decodes, attention.num_heads, cache.num_kv_heads, max_tokens
        )
        self._max_chunk_tokens = max((c.num_tokens for c in metadata.prefill_chunks), default=0)
        self._chunks: Tensor | None = None
        if metadata.prefill_chunks:
            self._chunks = chunk_table(metadata)

    def forward(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """See AttentionStep.forward."""
        if len(inputs.k):  # else cross attention: a graph would repeat a launch that writes nothing
            self.write(layer, inputs)
        return self.attend(layer, inputs.q, inputs.sinks)

    def write(self, layer: int, inputs: AttentionInputs) -> None:
        """Store the keys and values of the step's tokens, after rotating keys and queries."""
        q, k, v, rotation, _ = inputs
        keys, values = self._planes(layer)
        slots, scales = self._metadata.slot_mapping, self._scales(layer)
        write_kv(q, k, v, keys, values, slots, scales, rotation)

    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Compute the layer, whose keys and values have been written. See AttentionStep.forward."""
        n, (keys, values) = self._num_decodes, self._planes(layer)
        values = values[..., : self._attention.value_dim]
        parts = []
        if n:
            parts.append(self._decode(layer, q[:n], keys, values, sinks))
        if self._metadata.prefill_chunks:
            parts.append(self._prefill(layer, q[n:], keys, values, sinks))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.flatten(1)

    def _decode(
        self, layer: int, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        metadata, scoring = self._metadata, self._scoring(layer, sinks)
        sequences = (metadata.block_table, metadata.decode_rows, metadata.decode_lens)
        num_splits = self._num_splits
        if self._shared is None:
            return decode_attention(q, keys, values, *sequences, scoring, num_splits=num_splits)[0]
        return cascade_attention(
            q,
            keys,
            values,
            *sequences,
            self._shared,
            scoring,
            num_splits=num_splits,
            num_shared_splits=self._num_shared_splits,
        )[0]

    def _prefill(
        self, layer: int, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        assert self._chunks is not None
        return prefill_attention(
            q,
            keys,
            values,
            self._metadata.block_table,
            self._chunks,
            self._scoring(layer, sinks),
            max_tokens=self._max_chunk_tokens,
        )[0]

    def _scoring(self, layer: int, sinks: Tensor | None) -> Scoring:
        attention, scales = self._attention, self._scales(layer)
        return Scoring(
            attention.scale,
            attention.reach,
            attention.softcap,
            sinks,
            key_scale=scales.keys,
            value_scale=scales.values,
        )

    def _planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """(num_blocks, num_kv_heads, block_size, head_dim) each."""
        keys, values = self._attention.cache.planes[:, :, layer].unbind(2)
        return keys, values

    def _scales(self, layer: int) -> KVScales:
        fp8 = self._attention.cache.fp8
        return KVScales() if fp8 is None else fp8.scales[layer]
