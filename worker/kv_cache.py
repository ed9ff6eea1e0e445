"""The KV cache of one rank: one buffer, allocated once, in which a block is contiguous.

`buffer` is (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim). A block's bytes lie
together over all layers, so a transfer moves a block with one copy: it starts at
`block_id * block_size_bytes`. Paged as in PagedAttention (Kwon et al., 2023, section 4).
"""

import logging
import math
from collections.abc import Iterable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from longshore.protocol.kv_cache_spec import (
    NULL_BLOCK,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
)
from longshore.worker.device import available_bytes, dtype_name
from longshore.worker.errors import KVCacheTooSmall

logger = logging.getLogger(__name__)

DEFAULT_MEMORY_FRACTION: Final = {"cpu": 0.25, "cuda": 0.85}
"""Share of the memory left after loading the weights. The rest is for activations, which on a GPU
are all that remains, and on a CPU share the machine with everybody else."""

MAX_DEFAULT_CPU_BYTES: Final = 4 << 30
"""What a CPU rank takes at most without being asked to."""

_ALIGNMENT_BYTES: Final = 64  # of torch's own CPU memory


class KVCache:
    """Keys and values of every layer. Blocks start as zeros; the null block stays so."""

    def __init__(
        self,
        num_blocks: int,
        *,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_layers = num_layers
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.buffer = _zeros(
            (num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim), dtype, device
        )

    @property
    def block_size_bytes(self) -> int:
        """Bytes from one block to the next."""
        return self.buffer.stride(0) * self.buffer.element_size()

    def token_vectors(self) -> Tensor:
        """(num_blocks * num_layers * 2 * block_size, num_kv_heads * head_dim): a view with one line
        per token, layer, and key or value."""
        return self.buffer.view(-1, self.num_kv_heads * self.head_dim)

    def block_vectors(self) -> Tensor:
        """(num_blocks * num_layers * 2, block_size * num_kv_heads * head_dim): a view with one line
        per block, layer, and keys or values."""
        return self.buffer.view(self.num_blocks * self.num_layers * 2, -1)

    def clear(self, block_ids: Tensor) -> None:
        """Zero whole blocks. block_ids: (n,) int64, on the cache's device."""
        self.buffer.index_fill_(0, block_ids, 0)

    def copy_blocks(self, source_ids: Tensor, target_ids: Tensor, num_tokens: Tensor) -> None:
        """The first `num_tokens[i]` tokens of block `source_ids[i]`, keys and values of all layers,
        into `target_ids[i]`, and zeros behind them: what the source's owner writes there meanwhile
        must not be read, not even masked. All are read before any is written. (n,) int64 each, on
        the cache's device; targets are all different."""
        blocks = self.buffer.index_select(0, source_ids)
        positions = torch.arange(self.block_size, device=blocks.device)
        is_behind = positions >= num_tokens[:, None]
        blocks.masked_fill_(is_behind[:, None, None, :, None, None], 0)
        self.buffer.index_copy_(0, target_ids, blocks)


def measure_num_blocks(
    group: KVCacheGroup,
    *,
    device: torch.device,
    kv_cache_bytes: int | None,
    memory_fraction: float | None,
    max_useful_blocks: int,
    num_ranks_on_device: int = 1,
) -> int:
    """Blocks that fit into `kv_cache_bytes`, or else into a share of the memory that is left.

    num_ranks_on_device: all of them measure the same memory, and each takes a part.
    max_useful_blocks: what running requests can fill at most. A CPU rank takes no more unasked; a
                       GPU has no better use for its memory than to remember prefixes.
    Call it when the weights are loaded: what they take is no longer available.
    """
    if kv_cache_bytes is not None:
        return kv_cache_bytes // group.block_size_bytes
    left_bytes = available_bytes(device) // num_ranks_on_device
    logger.info("%.2f GiB of memory are left on %s for this rank", left_bytes / 2**30, device)
    if memory_fraction is not None:
        return int(left_bytes * memory_fraction) // group.block_size_bytes
    default_bytes = int(left_bytes * DEFAULT_MEMORY_FRACTION[device.type])
    if device.type != "cpu":
        return default_bytes // group.block_size_bytes
    default_bytes = min(default_bytes, MAX_DEFAULT_CPU_BYTES)
    return min(default_bytes // group.block_size_bytes, max_useful_blocks)


def check_holds_one_request(num_blocks: int, spec: KVCacheSpec, max_model_len: int) -> None:
    """Raise KVCacheTooSmall unless an empty cache can hold one request of `max_model_len` tokens.

    Otherwise such a request would be admitted and could never finish, whatever gave way to it.
    """
    needed = spec.max_blocks(max_model_len) + 1  # the null block holds nothing
    if num_blocks < needed:
        longest = max(0, num_blocks - 1) * spec.block_size
        raise KVCacheTooSmall(
            f"num_blocks={num_blocks} of {spec.block_size} tokens hold at most {longest} tokens, "
            f"but max_model_len={max_model_len} needs {needed} blocks (one is the null block). "
            "Give the cache more memory or lower max_model_len."
        )


def attention_group(
    *,
    layers: Iterable[int],
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> KVCacheGroup:
    """The one group of a model whose layers all have full attention.

    layers:       numbers of those that this rank computes.
    num_kv_heads: of this rank's shard.
    """
    spec = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_dim,
        dtype_bytes=dtype.itemsize,
    )
    names = tuple(f"model.layers.{layer}.self_attn" for layer in layers)
    return KVCacheGroup(layer_names=names, spec=spec)


def cache_config(group: KVCacheGroup, num_blocks: int, dtype: torch.dtype) -> KVCacheConfig:
    """What this rank tells the scheduler about its cache."""
    return KVCacheConfig(num_blocks=num_blocks, groups=(group,), dtype=dtype_name(dtype))


def allocate(config: KVCacheConfig, *, dtype: torch.dtype, device: torch.device) -> KVCache:
    """The buffer that `config` describes. Called once, at start."""
    (group,) = config.groups
    spec = group.spec
    assert isinstance(spec, FullAttentionSpec), "no other layers are computed here"
    cache = KVCache(
        config.num_blocks,
        num_layers=len(group.layer_names),
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=dtype,
        device=device,
    )
    assert cache.block_size_bytes == group.block_size_bytes
    assert NULL_BLOCK == 0
    return cache


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU the system provides each page, as zeros, when it is first touched: gigabytes of
    cache do not delay the start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(memory[start : start + size_bytes]).view(dtype).view(shape)
