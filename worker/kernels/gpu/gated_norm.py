"""RMS normalisation of gated groups, one program per token and group. See
`worker/kernels/gated_norm.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator


@triton.jit
def _kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    group_size,
    gate_stride,
    weight_stride,
    eps,
    IS_NORM_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line, group, num_groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    columns = tl.arange(0, BLOCK)
    is_column = columns < group_size
    weights = weight_ptr + group * weight_stride + columns
    columns += group * group_size
    places = line * num_groups * group_size + columns
    gate = tl.load(gate_ptr + line * gate_stride + columns, mask=is_column, other=0.0)
    gate = gate.to(tl.float32)
    factor = gate / (1.0 + tl.exp(-gate))
    x = tl.load(x_ptr + places, mask=is_column, other=0.0)
    if not IS_NORM_FIRST:
        x *= factor
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / group_size + eps)
    out = x * scale * tl.load(weights, mask=is_column, other=0.0)
    if IS_NORM_FIRST:
        out *= factor
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=is_column)


def _fake(
    x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float, is_norm_first: bool
) -> Tensor:
    return torch.empty(x.shape, dtype=gate.dtype, device=x.device)


@operator(
    "gated_norm(Tensor x, Tensor gate, Tensor weight, int num_groups, float eps, "
    "bool is_norm_first) -> Tensor",
    fake=_fake,
)
def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, num_groups: int, eps: float, is_norm_first: bool
) -> Tensor:
    """See the wrapper."""
    out = _fake(x, gate, weight, num_groups, eps, is_norm_first)
    if len(x) == 0:
        return out
    size = x.shape[1] // num_groups
    block = triton.next_power_of_2(size)
    _kernel[(len(x), num_groups)](
        x,
        gate,
        weight,
        out,
        size,
        gate.stride(0),
        size if len(weight) == x.shape[1] else 0,
        eps,
        IS_NORM_FIRST=is_norm_first,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )
    return out
