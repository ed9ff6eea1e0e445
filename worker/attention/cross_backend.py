"""Cross attention: the step's tokens attend to encoder tokens, whose KV is in blocks of the row.

That KV is written once, in the row's first step, and read by every later token. Each token is
computed as a decode over all of it, so the backends of paged attention are used unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.attention.backend import AttentionInputs, AttentionStep
from longshore.worker.attention.kind import PagedAttentionKind
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.kv_cache.buffer import PagedKV


@dataclass(frozen=True, kw_only=True)
class CrossAttentionKind:
    """num_heads: this rank's query heads."""

    num_heads: int

    def make_backend(self, view: PagedKV) -> "PagedCrossAttention":
        return PagedCrossAttention(view, self)


class PagedCrossAttention:
    """The backend of cross attention, bound to a group's view of the cache."""

    def __init__(self, cache: PagedKV, kind: CrossAttentionKind) -> None:
        self._cache = cache
        self._paged = PagedAttentionKind(num_heads=kind.num_heads).make_backend(cache)

    def __str__(self) -> str:
        return f"cross attention, {self._paged}"

    def begin_step(self, metadata: AttentionMetadata) -> "CrossAttentionStep":
        step = self._paged.begin_step(metadata)
        return CrossAttentionStep(self._cache, step, metadata.block_table)


class CrossAttentionStep:
    """One step, all layers. block_table: (max_num_seqs, max_blocks), of the encoder's tokens."""

    def __init__(self, cache: PagedKV, step: AttentionStep, block_table: Tensor) -> None:
        self._planes = cache.planes
        self._step = step
        self._block_table = block_table
        shape = (0, cache.num_kv_heads, cache.head_dim)
        self._no_new_kv = torch.empty(shape, dtype=cache.dtype, device=cache.device)
        self.native_steps: Sequence[bytes] = step.native_steps

    def forward(self, layer: int, q: Tensor) -> Tensor:
        """q: (num_tokens, num_heads, head_dim) -> (num_tokens, num_heads * head_dim)."""
        return self._step.forward(layer, AttentionInputs(q, self._no_new_kv, self._no_new_kv))

    def write(self, layer: int, row: int, k: Tensor, v: Tensor) -> None:
        """See EncodingStep.write. Writes whole blocks, with zeros after the last token, because
        torch's attention reads, though masks, what an earlier owner left there."""
        block_size = self._planes.shape[4]
        num_blocks = -(-len(k) // block_size)
        padding = (0, 0, 0, 0, 0, num_blocks * block_size - len(k))
        pages = F.pad(torch.stack((k, v)), padding).unflatten(1, (num_blocks, block_size))
        block_ids = self._block_table[row, :num_blocks].long()
        self._planes[:, :, layer].index_copy_(0, block_ids, pages.permute(1, 3, 0, 2, 4))
