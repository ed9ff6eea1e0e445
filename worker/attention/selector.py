"""The choice of a backend for paged attention."""

from typing import TYPE_CHECKING

from longshore.worker.attention.backend import AttentionBackend
from longshore.worker.attention.native_backend import NativeAttention
from longshore.worker.attention.torch_backend import TorchAttention
from longshore.worker.attention.triton_backend import MAX_HEAD_DIM, TritonAttention
from longshore.worker.kernels import paged_attention
from longshore.worker.kernels.native import native
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kv_cache.buffer import PagedKV

if TYPE_CHECKING:
    from longshore.worker.attention.kind import PagedAttentionKind


def make_attention(cache: PagedKV, kind: "PagedAttentionKind") -> AttentionBackend:
    """On a GPU the Triton kernels, for heads of up to MAX_HEAD_DIM. On a CPU the compiled kernel if
    it was built and supports the cache's dtype and head size. Otherwise torch."""
    if uses_triton(cache.planes) and cache.head_dim <= MAX_HEAD_DIM:
        return TritonAttention(cache, kind)
    kernels = native()
    if kernels is None or not paged_attention.supports(cache):
        return TorchAttention(cache, kind)
    return NativeAttention(kernels, cache, kind)
