"""Root mean square normalisation over all heads of a token, one program for its queries and one
for its keys. See `worker/kernels/wide_norm.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.gpu.rms_norm import normal, num_warps
from longshore.worker.kernels.operators import operator


@triton.jit
def _squares(q_ptr, k_ptr, out_ptr, q_size, k_size, q_stride, k_stride, BLOCK: tl.constexpr):
    """out: (n, 2)."""
    line, is_key = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    if is_key == 0:
        x = tl.load(q_ptr + line * q_stride + columns, mask=columns < q_size, other=0.0)
    else:
        x = tl.load(k_ptr + line * k_stride + columns, mask=columns < k_size, other=0.0)
    wide = x.to(tl.float32)
    tl.store(out_ptr + line * 2 + is_key, tl.sum(wide * wide, axis=0))


@triton.jit
def _scale_line(
    line_ptr,
    weight_ptr,
    squares_ptr,
    size,
    whole_size,
    eps,
    HAS_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    is_inside = columns < size
    x = tl.load(line_ptr + columns, mask=is_inside, other=0.0)
    wide = x.to(tl.float32)
    squares = tl.load(squares_ptr) if HAS_SQUARES else tl.sum(wide * wide, axis=0)
    scale = tl.rsqrt(squares / whole_size + eps)
    out = normal(wide, scale, weight_ptr, columns, is_inside).to(x.dtype)
    tl.store(line_ptr + columns, out, mask=is_inside)


@triton.jit
def _wide_norm(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    squares_ptr,
    q_size,
    k_size,
    q_stride,
    k_stride,
    q_whole_size,
    k_whole_size,
    eps,
    HAS_SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line, is_key = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if HAS_SQUARES:
        squares_ptr += line * 2 + is_key
    if is_key == 0:
        _scale_line(
            q_ptr + line * q_stride,
            q_weight_ptr,
            squares_ptr,
            q_size,
            q_whole_size,
            eps,
            HAS_SQUARES,
            BLOCK,
        )
    else:
        _scale_line(
            k_ptr + line * k_stride,
            k_weight_ptr,
            squares_ptr,
            k_size,
            k_whole_size,
            eps,
            HAS_SQUARES,
            BLOCK,
        )


def _fake_squares(q: Tensor, k: Tensor) -> Tensor:
    return torch.empty((len(q), 2), dtype=torch.float32, device=q.device)


@operator("sums_of_squares(Tensor q, Tensor k) -> Tensor", fake=_fake_squares)
def sums_of_squares(q: Tensor, k: Tensor) -> Tensor:
    """q, k: (n, size), each line contiguous -> (n, 2) float32."""
    out = _fake_squares(q, k)
    if len(q) == 0:
        return out
    block = triton.next_power_of_2(max(q.shape[1], k.shape[1]))
    _squares[(len(q), 2)](
        q,
        k,
        out,
        q.shape[1],
        k.shape[1],
        q.stride(0),
        k.stride(0),
        BLOCK=block,
        num_warps=num_warps(block),
    )
    return out


def _fake_nothing(*_: object) -> None:
    return None


@operator(
    "wide_norm(Tensor(a!) q, Tensor(b!) k, Tensor q_weight, Tensor k_weight, Tensor? squares, "
    "int q_size, int k_size, float eps) -> ()",
    fake=_fake_nothing,
)
def wide_norm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    squares: Tensor | None,
    q_size: int,
    k_size: int,
    eps: float,
) -> None:
    """See `worker/kernels/wide_norm.py`."""
    if len(q) == 0:
        return
    block = triton.next_power_of_2(max(q.shape[1], k.shape[1]))
    _wide_norm[(len(q), 2)](
        q,
        k,
        q_weight,
        k_weight,
        squares,
        q.shape[1],
        k.shape[1],
        q.stride(0),
        k.stride(0),
        q_size,
        k_size,
        eps,
        HAS_SQUARES=squares is not None,
        BLOCK=block,
        num_warps=num_warps(block),
    )
