"""Rotary positions and the KV write of a layer, in one call: queries are rotated in place, keys are
rotated and stored in the cache, values are stored."""

import torch
from torch import Tensor

from longshore.worker.kernels import rotary
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.kv_cache.fp8 import FP8, KVScales, to_fp8


def write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scales: KVScales,
    rotation: Rotation | None = None,
) -> None:
    """q, k, v: (n, num_heads or num_kv_heads, head_dim), contiguous within a head, of the step's n
              tokens. q and k are rotated, as by `rotary_`, q in place; None: they are not.
              Afterwards k is unchanged or rotated.
    keys, values: (num_blocks, num_kv_heads, block_size, head_dim), contiguous within a token; fp8
              if scales apply.
    slots:    (n,) int64, block_id * block_size + offset; negative: the token is not stored.
    """
    if rotation is not None:
        rotary.check(q, k, rotation)
    if uses_triton(k):
        from longshore.worker.kernels.gpu import write_kv as gpu

        rotated = (None,) * 5 + (0.0,) if rotation is None else (q, *rotation)
        gpu.write_kv(k, v, keys, values, slots, *scales, *rotated)
        return
    if rotation is not None:
        rotary.rotary_(q, k, rotation)
    reference(k, v, keys, values, slots, scales)


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
