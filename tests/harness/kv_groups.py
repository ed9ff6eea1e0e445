"""Small KV cache groups of each kind, and which tokens a layer of each kind reads."""

from typing import Final

from longshore.protocol.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
)

BLOCK_SIZE: Final = 4
"""Tokens per block where a test gives no other number."""


def full(block_size: int = BLOCK_SIZE) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, num_kv_heads=1, head_size=8, dtype_bytes=4)


def latent(block_size: int = BLOCK_SIZE) -> MLAAttentionSpec:
    return MLAAttentionSpec(block_size, 16, 4)


def window(size: int, block_size: int = BLOCK_SIZE) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, 1, 8, 4, sliding_window=size)


def chunked(size: int, block_size: int = BLOCK_SIZE) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size, 1, 8, 4, attention_chunk_size=size)


def state(num_pages: int = 3, block_size: int = BLOCK_SIZE) -> StateSpec:
    return StateSpec(block_size=block_size, shapes=((2, 8),), dtype_bytes=(4,), num_pages=num_pages)


def cross(max_encoder_tokens: int = 12, block_size: int = BLOCK_SIZE) -> CrossAttentionSpec:
    return CrossAttentionSpec(block_size, 1, 8, 4, max_encoder_tokens=max_encoder_tokens)


def config_of(num_blocks: int, *specs: KVCacheSpec) -> KVCacheConfig:
    """One layer per group."""
    groups = tuple(KVCacheGroup((f"layer.{index}",), spec) for index, spec in enumerate(specs))
    return KVCacheConfig(num_blocks, groups, "float32")


def kv_cache_config(
    num_blocks: int, block_size: int = BLOCK_SIZE, num_groups: int = 1
) -> KVCacheConfig:
    """The smallest model with `num_groups` groups of full attention."""
    return config_of(num_blocks, *[full(block_size)] * num_groups)


def first_seen(spec: KVCacheSpec, position: int) -> int:
    """The first token that the token at `position` attends to, itself at the latest. Follows from
    the definition of the layer, not from how blocks are kept."""
    match spec:
        case SlidingWindowSpec():
            return max(position + 1 - spec.sliding_window, 0)
        case ChunkedLocalAttentionSpec():
            return position - position % spec.attention_chunk_size
        case _:
            return 0
