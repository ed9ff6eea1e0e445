"""Causal attention over a paged cache on the CPU, without gathering keys or values.

Decodes and chunks of any lengths, one call per layer. The reference in plain torch is
`worker/attention/torch_backend.py`.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.worker.kernels.native import ATTENTION_LAYER, ATTENTION_STEP, DTYPES, Native
from longshore.worker.kv_cache import KVCache

MAX_HEAD_DIM = 256
_PLAN_COLUMNS = 5  # of SequencePlan in native/calls.h


def supports(cache: KVCache) -> bool:
    """Whether the kernel can compute on such a cache."""
    buffer = cache.buffer
    return buffer.device.type == "cpu" and buffer.dtype in DTYPES and cache.head_dim <= MAX_HEAD_DIM


class PagedAttention:
    """The kernel over one cache, with the memory it works in: one step at a time."""

    def __init__(self, kernels: Native, cache: KVCache, *, num_heads: int, scale: float) -> None:
        """num_heads: query heads, a multiple of the KV heads. scale: of the scores."""
        if not supports(cache) or num_heads % cache.num_kv_heads:
            raise ValueError(
                f"{num_heads} heads over a cache of {cache.buffer.dtype} "
                f"{tuple(cache.buffer.shape)} on {cache.buffer.device} are not supported: it takes "
                f"float32 or bfloat16 on the CPU, vectors of at most {MAX_HEAD_DIM}, and as many "
                "query heads per KV head"
            )
        self._kernels = kernels
        self._kernel = kernels.paged_attention[DTYPES[cache.buffer.dtype]]
        self._cache = cache
        self._num_heads = num_heads
        self._scale = scale
        self._workspace = torch.empty(0, dtype=torch.float32)

    def plan(
        self, block_table: Tensor, slots: Tensor, sequences: npt.NDArray[np.int64]
    ) -> "PagedAttentionStep":
        """What all layers of a step share. The step before must have been computed.

        block_table: (max_num_seqs, max_blocks) int32; a sequence's own entries alone are read.
        slots:       (num_tokens,) int64, block_id * block_size + offset of each new token.
        sequences:   (num_seqs, 4): row of the table, first token in the step, new tokens, and
                     tokens in all, of which the new ones are the last.
        """
        cache, num_seqs, threads = self._cache, len(sequences), torch.get_num_threads()
        sequences = np.ascontiguousarray(sequences)
        plans = np.empty((num_seqs + 1, _PLAN_COLUMNS), np.int64)
        scratch = ctypes.c_int64()
        num_floats = self._kernels.plan_attention(
            sequences.ctypes.data,
            num_seqs,
            self._num_heads,
            cache.num_kv_heads,
            cache.head_dim,
            threads,
            plans.ctypes.data,
            ctypes.byref(scratch),
        )
        if len(self._workspace) < num_floats:
            self._workspace = torch.empty(num_floats, dtype=torch.float32)
        step = ATTENTION_STEP.pack(
            num_seqs,
            len(slots),
            self._num_heads,
            cache.num_kv_heads,
            cache.head_dim,
            cache.block_size,
            cache.buffer.stride(0),
            cache.buffer.stride(3),
            block_table.stride(0),
            block_table.data_ptr(),
            sequences.ctypes.data,
            slots.data_ptr(),
            plans.ctypes.data,
            self._workspace.data_ptr(),
            scratch.value,
            self._scale,
            threads,
        )
        alive = (block_table, sequences, slots, plans, self._workspace)
        return PagedAttentionStep(self._kernel, cache, self._num_heads, step, alive)


class PagedAttentionStep:
    """An AttentionStep, planned."""

    def __init__(
        self, kernel: Any, cache: KVCache, num_heads: int, step: bytes, alive: tuple[object, ...]
    ) -> None:
        self._kernel = kernel
        self._num_heads = num_heads
        self._num_kv_heads = cache.num_kv_heads
        self._head_dim = cache.head_dim
        self._dtype = cache.buffer.dtype
        self._planes = cache.buffer.data_ptr()
        self._plane_bytes = cache.buffer.stride(2) * cache.buffer.element_size()
        self._step = step
        self._alive = alive  # what `step` holds the addresses of

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See AttentionStep.forward."""
        head_dim = self._head_dim
        out = torch.empty((len(q), self._num_heads * head_dim), dtype=self._dtype)
        q = self._checked(q, self._num_heads)
        k, v = self._checked(k, self._num_kv_heads), self._checked(v, self._num_kv_heads)
        keys = self._planes + 2 * layer * self._plane_bytes
        self._kernel(
            self._step,
            ATTENTION_LAYER.pack(
                keys,
                keys + self._plane_bytes,
                q.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                q.stride(0),
                k.stride(0),
                v.stride(0),
                out.data_ptr(),
            ),
        )
        return out

    def _checked(self, heads: Tensor, num_heads: int) -> Tensor:
        """Neighbouring heads are adjacent. Raises ValueError for another shape or dtype."""
        head_dim = self._head_dim
        if heads.dtype != self._dtype or heads.shape[1:] != (num_heads, head_dim):
            raise ValueError(
                f"heads are {heads.dtype} {tuple(heads.shape)}, but the cache needs "
                f"{self._dtype} (num_tokens, {num_heads}, {head_dim})"
            )
        if heads.stride(2) == 1 and heads.stride(1) == head_dim:
            return heads
        return heads.contiguous()
