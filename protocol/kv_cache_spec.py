"""What a block of the KV cache is: sizes per kind of attention, and the groups of one model.

The worker derives the groups from the model; the scheduler plans blocks from them and never learns
what a tensor is.
"""

from typing import Final, TypeAlias

import msgspec

NULL_BLOCK: Final = 0
"""Placeholder in block tables, padding target of kernels: never holds data, never handed out."""

CROSS_LAYER_LAYOUT: Final = "num_blocks,num_layers,2,block_size,num_kv_heads,head_size"
"""A block's bytes are contiguous over all layers of its group, so one copy moves one block."""


class FullAttentionSpec(msgspec.Struct, frozen=True, tag="full", forbid_unknown_fields=True):
    """Layers whose every token attends to all earlier ones. Sizes in tokens, heads, elements."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values."""
        return self.block_size * self.num_kv_heads * 2 * self.head_size * self.dtype_bytes

    def max_blocks(self, max_model_len: int) -> int:
        """Blocks that one request of `max_model_len` tokens can hold at most."""
        return -(-max_model_len // self.block_size)


class CrossAttentionSpec(msgspec.Struct, frozen=True, tag="cross", forbid_unknown_fields=True):
    """Layers whose tokens attend to the encoder's, of which a request has at most
    `max_encoder_tokens`; their KV is computed once. Sizes in tokens, heads, elements."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int
    max_encoder_tokens: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values."""
        return self.block_size * self.num_kv_heads * 2 * self.head_size * self.dtype_bytes

    def max_blocks(self, max_model_len: int) -> int:
        """Blocks that one request can hold at most, however long it is."""
        return -(-self.max_encoder_tokens // self.block_size)


KVCacheSpec: TypeAlias = FullAttentionSpec | CrossAttentionSpec


class KVCacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share one block table because they have the same kind of attention."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return len(self.layer_names) * self.spec.page_size_bytes


class KVCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV cache of one rank: every group takes its blocks from one pool of `num_blocks`."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    dtype: str
    layout: str = CROSS_LAYER_LAYOUT
