"""silu(gate) * up of the gated feed-forward layer (Shazeer, 2020), from the halves of a product."""

import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.native import SILU_AND_MUL, empty, kernels_for, num_threads


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up: (n, 2 * size), a line's elements adjacent, gates first -> (n, size), contiguous.

    silu is rounded to the dtype before the product, as where the two are computed apart.
    Raises ValueError for another shape.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
        raise ValueError(
            f"gate_up {tuple(gate_up.shape)} with strides {gate_up.stride()} must be "
            "(n, 2 * size), and contiguous within each line"
        )
    kernels = kernels_for(gate_up)
    if kernels is None:
        return reference(gate_up)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = empty((num_rows, size), gate_up.dtype)
    kernels.run(
        "silu_and_mul",
        gate_up.dtype,
        SILU_AND_MUL.pack(
            gate_up.data_ptr(),
            out.data_ptr(),
            num_rows,
            size,
            gate_up.stride(0),
            num_threads(2 * num_rows * size * gate_up.element_size()),
        ),
    )
    return out


def reference(gate_up: Tensor) -> Tensor:
    """The same in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
