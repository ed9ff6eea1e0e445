"""Rotary positions (Su et al., 2021), in place, after the per-head norms of some families."""

from typing import NamedTuple

import torch
from torch import Tensor

from longshore.worker.kernels import rms_norm
from longshore.worker.kernels.native import ROTARY, kernels_for, num_threads
from longshore.worker.kernels.operators import uses_triton


class Rotation(NamedTuple):
    """What a layer does to its queries and keys before attention.

    positions: (n,) int64, below max_positions.
    table:     (max_positions, 2, num_pairs) float32, cosines and sines, times the rope's amplitude.
               Elements (i, i + num_pairs) of a head are a pair; elements from 2 * num_pairs on are
               not rotated.
    q_norm, k_norm: (head_dim,), weights of an RMS norm of each head before the rotation, both in
               the dtype of the heads or both float32: see `rms_norm`.
    """

    positions: Tensor
    table: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0

    def with_norms(self, q_norm: Tensor | None, k_norm: Tensor | None, eps: float) -> "Rotation":
        """This rotation, applied after these norms of q and k (None: no norm)."""
        return self._replace(q_norm=q_norm, k_norm=k_norm, eps=eps)


def rotary_(q: Tensor, k: Tensor, rotation: Rotation) -> None:
    """Normalise and rotate queries and keys, in place.

    q, k: (n, num_heads, head_dim) and (n, num_kv_heads, head_dim); contiguous within a token, with
          any stride between tokens, so both may be views of one product.
    Computed in float32 and rounded once. Raises ValueError for arguments of a wrong shape or dtype.
    """
    check(q, k, rotation)
    positions, table, q_norm, k_norm, eps = rotation
    if uses_triton(q):
        from longshore.worker.kernels.gpu import rotary as gpu

        gpu.rotary(q, k, *rotation)
        return
    head_dim, num_pairs = q.shape[2], table.shape[2]
    kernels = kernels_for(q)
    if kernels is None:
        for heads, norm in ((q, q_norm), (k, k_norm)):
            reference(heads, positions, table, norm, eps)
        return
    norm = k_norm if q_norm is None else q_norm
    size_bytes = len(q) * (q.shape[1] + k.shape[1]) * head_dim * q.element_size()
    kernels.run(
        "rotary",
        q.dtype,
        ROTARY.pack(
            q.data_ptr(),
            q.shape[1],
            q.stride(0),
            0 if q_norm is None else q_norm.data_ptr(),
            k.data_ptr(),
            k.shape[1],
            k.stride(0),
            0 if k_norm is None else k_norm.data_ptr(),
            positions.data_ptr(),
            table.data_ptr(),
            len(q),
            head_dim,
            num_pairs,
            eps,
            norm is not None and norm.dtype == torch.float32,
            num_threads(size_bytes),
        ),
    )


def reference(
    heads: Tensor, positions: Tensor, table: Tensor, norm: Tensor | None, eps: float
) -> None:
    """Compute the same in plain torch, for queries or for keys."""
    if norm is not None:
        rms_norm.reference(heads, None, norm, eps, heads)
    num_pairs = table.shape[2]
    cos, sin = table.index_select(0, positions).unsqueeze(1).unbind(2)
    first = heads[..., :num_pairs].float()
    second = heads[..., num_pairs : 2 * num_pairs].float()
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    heads[..., : 2 * num_pairs] = rotated.to(heads.dtype)


def check(q: Tensor, k: Tensor, rotation: Rotation) -> None:
    """Raises ValueError for arguments of a wrong shape or dtype; see `rotary_`."""
    positions, table, q_norm, k_norm, _ = rotation
    head_dim = q.shape[2]
    for heads, norm in ((q, q_norm), (k, k_norm)):
        if (
            heads.dtype != q.dtype
            or heads.shape[0] != len(positions)
            or heads.shape[2] != head_dim
            or heads.stride(2) != 1
            or heads.stride(1) != head_dim
        ):
            raise ValueError(
                f"heads {heads.dtype} {tuple(heads.shape)} with strides {heads.stride()} must be "
                f"{q.dtype} ({len(positions)}, heads, {head_dim}), each token contiguous"
            )
        if norm is not None and (
            norm.shape != (head_dim,) or norm.dtype not in (q.dtype, torch.float32)
        ):
            raise ValueError(
                f"q_norm or k_norm is {norm.dtype} {tuple(norm.shape)}; it must be {q.dtype} or "
                f"torch.float32 ({head_dim},)"
            )
    if q_norm is not None and k_norm is not None and q_norm.dtype != k_norm.dtype:
        raise ValueError(f"q_norm is {q_norm.dtype}, but k_norm is {k_norm.dtype}; use one dtype")
    if (
        table.dtype != torch.float32
        or not table.is_contiguous()
        or table.shape[1] != 2
        or 2 * table.shape[2] > head_dim
    ):
        raise ValueError(
            f"the table is {table.dtype} {tuple(table.shape)}; it must be contiguous float32 "
            f"(max_positions, 2, at most {head_dim // 2})"
        )
    if positions.dtype != torch.int64:
        raise ValueError(f"positions are {positions.dtype}; they must be torch.int64")
