"""The experts that a mixture of experts has chosen for each token: rank 0 writes them into memory
that it shares with the scheduler, which reads those of a request when its output ends.

The memory has a line per slot of one KV cache group, the first one that keeps all blocks of a
request. So tokens found in the prefix cache have their experts, as long as their blocks live.
"""

import mmap
import os
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from longshore.protocol.arrays import UInt8Array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MLAAttentionSpec,
)

MAX_REQUEST_BYTES: Final = 128 << 20
"""Limit for the experts of one request, far below that of a message."""

SlotLines = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]
"""(num_blocks, block_size, bytes of a token's experts)"""


class RoutedExpertsShape(msgspec.Struct, frozen=True, array_like=True):
    """The shape of the experts of one token. num_layers: those with experts, in order."""

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint8, if the ids fit, else int16."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else "<i2")

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.top_k * self.dtype.itemsize


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True):
    """The experts of successive tokens. data: (num_tokens * shape.token_bytes,)."""

    shape: RoutedExpertsShape
    data: UInt8Array

    def array(self) -> npt.NDArray[Any]:
        """(num_tokens, num_layers, top_k), the ids of each token's experts, best first."""
        shape = self.shape
        return self.data.view(shape.dtype).reshape(-1, shape.num_layers, shape.top_k)


def group_with_experts(groups: Sequence[KVCacheGroup]) -> int:
    """The index of the group by whose slots experts are stored. Raises ConfigError."""
    for index, group in enumerate(groups):
        if isinstance(group.spec, FullAttentionSpec | MLAAttentionSpec):
            return index
    raise ConfigError(
        "enable_return_routed_experts needs a layer that attends to all tokens: the blocks of this "
        "model's windows are freed before a request ends. Remove enable_return_routed_experts"
    )


def check_longest(shape: RoutedExpertsShape, max_model_len: int) -> None:
    """Raise ConfigError if the experts of the longest request are too large for a message."""
    num_bytes = max_model_len * shape.token_bytes
    if num_bytes > MAX_REQUEST_BYTES:
        raise ConfigError(
            f"enable_return_routed_experts: the experts of a request of max_model_len="
            f"{max_model_len} tokens have {num_bytes >> 20} MiB; the limit is "
            f"{MAX_REQUEST_BYTES >> 20} MiB. Use a max_model_len of at most "
            f"{MAX_REQUEST_BYTES // shape.token_bytes}"
        )


def map_slots(fd: int, shape: RoutedExpertsShape, kv_cache: KVCacheConfig) -> SlotLines:
    """The shared memory `fd`, which gets its size with the first call and keeps its content."""
    block_size = kv_cache.groups[group_with_experts(kv_cache.groups)].spec.block_size
    size = (kv_cache.num_blocks, block_size, shape.token_bytes)
    num_bytes = kv_cache.num_blocks * block_size * shape.token_bytes
    if os.fstat(fd).st_size != num_bytes:
        os.ftruncate(fd, num_bytes)
    return np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8).reshape(size)
