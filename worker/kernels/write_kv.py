"""Rotary positions and the KV write of a layer, in one call: queries are rotated in place, keys are
rotated and stored in the cache, values are stored."""

import torch
from torch import Tensor

from longshore.worker.kernels import rotary
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kv_cache.fp8 import FP8, KVScales, to_fp8


def write_kv(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scales: KVScales,
    *,
    q: Tensor | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """k, v:    (n, num_kv_heads, head_dim), contiguous within a head, of the step's n tokens.
    keys, values: (num_blocks, num_kv_heads, block_size, head_dim), contiguous within a token; fp8
                if scales apply.
    slots:    (n,) int64, block_id * block_size + offset; negative: the token is not stored.
    q:        (n, num_heads, head_dim), as `rotary_` needs it; None: nothing is rotated.
    rotation: positions and table of `rotary_`; None: no rotation.
    q_norm, k_norm, eps: see `rotary_`.
    k is unchanged or rotated.
    """
    if not uses_triton(k):
        if q is not None and rotation is not None:
            rotary.rotary_(q, k, *rotation, q_norm=q_norm, k_norm=k_norm, eps=eps)
        reference(k, v, keys, values, slots, scales)
        return
    from longshore.worker.kernels.gpu import write_kv as gpu

    positions, table = (None, None) if rotation is None else rotation
    gpu.write_kv(
        k,
        v,
        keys,
        values,
        slots,
        *scales,
        q,
        positions,
        table,
        q_norm,
        k_norm,
        eps,
    )


def reference(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scales: KVScales
) -> None:
    """The write in plain torch."""
    stored = slots >= 0
    blocks, offsets = slots[stored] // keys.shape[2], slots[stored] % keys.shape[2]
    for heads, cache, scale in ((k, keys, scales.keys), (v, values, scales.values)):
        new = heads[stored]
        if cache.dtype == FP8:
            cache.view(torch.uint8)[blocks, :, offsets] = to_fp8(new, scale)
        else:
            cache[blocks, :, offsets] = new
