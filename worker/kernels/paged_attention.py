"""Causal attention over a paged KV cache on the CPU, without gathering keys or values.

Handles decodes and chunks of any length in one call per layer. The reference in plain torch is
`worker/attention/torch_backend.py`.
"""

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionInputs
from longshore.worker.kernels.native import ATTENTION_LAYER, ATTENTION_STEP, DTYPES, Native, empty
from longshore.worker.kernels.rotary import rotary_
from longshore.worker.kv_cache.buffer import PagedKV
from longshore.worker.kv_cache.fp8 import KVScales

MAX_HEAD_DIM = 576  # of DeepSeek's latents
_PLAN_COLUMNS = 5  # of SequencePlan in native/calls.h
_UNSCALED = KVScales()


def supports(cache: PagedKV) -> bool:
    """Whether the kernel supports the cache's device, dtype and head size."""
    return cache.device.type == "cpu" and cache.dtype in DTYPES and cache.head_dim <= MAX_HEAD_DIM


class PagedAttention:
    """The kernel over one cache, with its workspace. Only one step can be in use at a time."""

    def __init__(
        self,
        kernels: Native,
        cache: PagedKV,
        *,
        num_heads: int,
        scale: float,
        window: int = 0,
        chunk: int = 0,
        softcap: float = 0.0,
    ) -> None:
        """num_heads: query heads, a multiple of the KV heads. scale: factor on scores.
        window, chunk, softcap: as in PagedAttentionKind; 0 is none."""
        has_lines = cache.planes.stride()[4:] == (cache.head_dim, 1)
        if not supports(cache) or num_heads % cache.num_kv_heads or not has_lines:
            raise ValueError(
                f"{num_heads} heads over a cache of {cache.dtype} {tuple(cache.planes.shape)} on "
                f"{cache.device} are not supported: the kernel needs float32 or bfloat16 on the "
                f"CPU, a head size of at most {MAX_HEAD_DIM}, a multiple of the KV heads, and "
                "contiguous tokens in a block"
            )
        self._kernels = kernels
        self._cache = cache
        self._num_heads = num_heads
        self._window, self._chunk = window, chunk
        self._scale, self._softcap = scale, softcap
        self._workspace = torch.empty(0, dtype=torch.float32)

    def plan(
        self, block_table: Tensor, slots: Tensor, sequences: npt.NDArray[np.int64]
    ) -> "PagedAttentionStep":
        """Prepare a step for all layers. The previous step must be complete.

        block_table: (max_num_seqs, max_blocks) int32; of each sequence, only entries with tokens
                     that its new tokens attend to are read.
        slots:       (num_tokens,) int64, block_id * block_size + offset of each new token;
                     negative: it is not stored.
        sequences:   (num_seqs, 4): row of the table, index of the first new token in the step,
                     number of new tokens, and total number of tokens, new ones included.
        """
        cache, num_seqs, threads = self._cache, len(sequences), torch.get_num_threads()
        sequences = np.ascontiguousarray(sequences)
        plans = np.empty((num_seqs + 1, _PLAN_COLUMNS), np.int64)
        scratch = ctypes.c_int64()
        num_floats = self._kernels.plan_attention(
            sequences.ctypes.data,
            num_seqs,
            self._window,
            self._chunk,
            self._num_heads,
            cache.num_kv_heads,
            cache.head_dim,
            cache.fp8 is not None,
            threads,
            plans.ctypes.data,
            ctypes.byref(scratch),
        )
        if len(self._workspace) < num_floats:
            self._workspace = torch.empty(num_floats, dtype=torch.float32)
        step = ATTENTION_STEP.pack(
            self._window,
            self._chunk,
            num_seqs,
            len(slots),
            self._num_heads,
            cache.num_kv_heads,
            cache.head_dim,
            cache.block_size,
            cache.planes.stride(0),
            cache.planes.stride(1),
            block_table.stride(0),
            block_table.data_ptr(),
            sequences.ctypes.data,
            slots.data_ptr(),
            plans.ctypes.data,
            self._workspace.data_ptr(),
            scratch.value,
            self._scale,
            self._softcap,
            threads,
            cache.fp8 is not None,
        )
        alive = (block_table, sequences, slots, plans, self._workspace)
        return PagedAttentionStep(self._kernels, cache, self._num_heads, step, alive)


class PagedAttentionStep:
    """The AttentionStep of a planned step."""

    def __init__(
        self,
        kernels: Native,
        cache: PagedKV,
        num_heads: int,
        step: bytes,
        alive: tuple[object, ...],
    ) -> None:
        self._kernels = kernels
        self._num_heads = num_heads
        self._num_kv_heads = cache.num_kv_heads
        self._head_dim = cache.head_dim
        self._dtype = cache.dtype
        self._planes = cache.planes.data_ptr()
        self._scales = None if cache.fp8 is None else cache.fp8.scales
        itemsize = cache.planes.dtype.itemsize
        self._layer_bytes = cache.planes.stride(2) * itemsize
        self._values_bytes = cache.planes.stride(3) * itemsize  # offset of values after keys
        self.native_steps = (step,)
        self._alive = alive  # `step` holds addresses of these

    def forward(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """See AttentionStep.forward."""
        q, k, v, rotation, sinks = inputs
        if rotation is not None:
            rotary_(q, k, rotation)
        head_dim = self._head_dim
        out = empty((len(q), self._num_heads * head_dim), self._dtype)
        if sinks is not None:
            sinks = self._checked_sinks(sinks)
        q = self._checked(q, self._num_heads)
        k, v = self._checked(k, self._num_kv_heads), self._checked(v, self._num_kv_heads)
        keys = self._planes + layer * self._layer_bytes
        scales = _UNSCALED if self._scales is None else self._scales[layer]
        self._kernels.run(
            "paged_attention",
            self._dtype,
            self.native_steps[0],
            ATTENTION_LAYER.pack(
                keys,
                keys + self._values_bytes,
                q.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                q.stride(0),
                k.stride(0),
                v.stride(0),
                0 if sinks is None else sinks.data_ptr(),
                out.data_ptr(),
                *scales,
            ),
        )
        return out

    def _checked(self, heads: Tensor, num_heads: int) -> Tensor:
        """`heads` with the heads of a token contiguous. Raises ValueError for another shape or
        dtype."""
        head_dim = self._head_dim
        if heads.dtype != self._dtype or heads.shape[1:] != (num_heads, head_dim):
            raise ValueError(
                f"heads are {heads.dtype} {tuple(heads.shape)}, but the cache needs "
                f"{self._dtype} (num_tokens, {num_heads}, {head_dim})"
            )
        if heads.stride(2) == 1 and heads.stride(1) == head_dim:
            return heads
        return heads.contiguous()

    def _checked_sinks(self, sinks: Tensor) -> Tensor:
        if sinks.dtype != torch.float32 or sinks.shape != (self._num_heads,):
            raise ValueError(
                f"sinks are {sinks.dtype} {tuple(sinks.shape)}, but must be torch.float32 "
                f"({self._num_heads},), one per query head"
            )
        return sinks.contiguous()
