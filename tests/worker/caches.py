"""KV caches of one group, for tests without a model."""

import torch

from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from longshore.worker.kv_cache.buffer import KVCache, PagedKV
from longshore.worker.kv_cache.fp8 import (
    FP8,
    Fp8Layers,
    KVScales,
)
from longshore.worker.process.device import dtype_name


def attention_group(
    num_layers: int, num_kv_heads: int, head_dim: int, *, block_size: int, dtype_bytes: int
) -> KVCacheGroup:
    spec = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_dim,
        dtype_bytes=dtype_bytes,
    )
    return KVCacheGroup(tuple(f"layer {layer}" for layer in range(num_layers)), spec)


def attention_cache(
    num_blocks: int,
    *,
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> KVCache:
    group = attention_group(
        num_layers, num_kv_heads, head_dim, block_size=block_size, dtype_bytes=dtype.itemsize
    )
    config = KVCacheConfig(num_blocks, (group,), dtype_name(dtype))
    return KVCache(config, dtype=dtype, device=torch.device(device))


def paged_kv(
    num_blocks: int,
    *,
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    padding: int = 8,
    scales: KVScales | None = None,
) -> PagedKV:
    """padding: additional elements per block. scales: scales of all layers, which are then stored
    in fp8."""
    shape = (num_kv_heads, num_layers, 2, block_size, head_dim)
    size = num_kv_heads * num_layers * 2 * block_size * head_dim
    kept = dtype if scales is None else FP8
    buffer = torch.zeros((num_blocks, size + padding), dtype=kept, device=device)
    fp8 = None if scales is None else Fp8Layers(dtype, (scales,) * num_layers)
    return PagedKV(buffer[:, :size].unflatten(1, shape), fp8)
