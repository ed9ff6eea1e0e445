"""The gated activation, one program per line and span of columns. See `worker/kernels/gate.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longshore.worker.kernels.operators import operator

BLOCK = 1024


@triton.jit
def _logistic(x):
    small = tl.exp(-tl.abs(x))  # never infinite
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@triton.jit
def activated(gate, alpha, limit, ACTIVATION: tl.constexpr):
    """float32; ACTIVATION is the index of an `Activation`. The comparison keeps NaN."""
    if ACTIVATION == 0:
        return gate * _logistic(gate)
    elif ACTIVATION == 1:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == 2:
        x = tl.where(gate > 20.0, 20.0, tl.where(gate < -20.0, -20.0, gate))  # its cube is finite
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return gate * _logistic(2.0 * inner)
    else:
        gate = tl.where(gate > limit, limit, gate)
        return gate * _logistic(alpha * gate)


@triton.jit
def factor(up, limit, ACTIVATION: tl.constexpr):
    """What the activated gate is multiplied by, in float32."""
    if ACTIVATION == 3:
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up) + 1.0
    return up


@triton.jit
def _kernel(
    gate_up_ptr,
    out_ptr,
    size,
    stride,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < size
    line = gate_up_ptr + row * stride
    if IS_INTERLEAVED:
        places = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        both = tl.load(line + places, mask=places < 2 * size, other=0.0)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        gate = tl.load(line + columns, mask=is_inside, other=0.0)
        up = tl.load(line + size + columns, mask=is_inside, other=0.0)
    dtype = gate.dtype
    # Rounded as in two operations.
    gate = activated(gate.to(tl.float32), alpha, limit, ACTIVATION).to(dtype).to(tl.float32)
    up = factor(up.to(tl.float32), limit, ACTIVATION).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * size + columns, (gate * up).to(dtype), mask=is_inside)


def _fake(
    gate_up: Tensor, activation: int, alpha: float, limit: float, is_interleaved: bool
) -> Tensor:
    num_rows, width = gate_up.shape
    return torch.empty((num_rows, width // 2), dtype=gate_up.dtype, device=gate_up.device)


@operator(
    "gate(Tensor gate_up, int activation, float alpha, float limit, bool is_interleaved) -> Tensor",
    fake=_fake,
)
def gate(
    gate_up: Tensor, activation: int, alpha: float, limit: float, is_interleaved: bool
) -> Tensor:
    """gate_up: (n, 2 * size), each line contiguous -> (n, size)."""
    out = _fake(gate_up, activation, alpha, limit, is_interleaved)
    num_rows, size = out.shape
    if num_rows == 0:
        return out
    block = min(BLOCK, max(triton.next_power_of_2(size), 32))
    _kernel[(num_rows, triton.cdiv(size, block))](
        gate_up,
        out,
        size,
        gate_up.stride(0),
        alpha,
        limit,
        ACTIVATION=activation,
        IS_INTERLEAVED=is_interleaved,
        BLOCK=block,
        num_warps=max(block // 256, 1),
    )
    return out
