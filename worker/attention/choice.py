"""Which backend computes attention over a cache."""

import logging

from longshore.worker.attention.backend import AttentionBackend
from longshore.worker.attention.native_backend import NativeAttention
from longshore.worker.attention.torch_backend import TorchAttention
from longshore.worker.kernels import paged_attention
from longshore.worker.kernels.native import native
from longshore.worker.kv_cache import KVCache

logger = logging.getLogger(__name__)


def make_attention(cache: KVCache, *, num_heads: int) -> AttentionBackend:
    """The compiled kernel where it was built and knows the cache's device, dtype and head size;
    torch elsewhere. num_heads: this rank's query heads."""
    kernels = native()
    if kernels is None or not paged_attention.supports(cache):
        logger.info("attention: torch, over gathered blocks")
        return TorchAttention(cache, num_heads=num_heads)
    logger.info("attention: paged CPU kernel (%s)", kernels.instruction_set)
    return NativeAttention(kernels, cache, num_heads=num_heads)
