"""The gated activation between the products of an MLP (Shazeer, 2020): activation(gate) * up."""

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.native import GATE, empty, kernels_for, num_threads
from longshore.worker.kernels.operators import uses_triton

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]

_ACTIVATIONS: Final[tuple[Activation, ...]] = ("silu", "gelu", "gelu_tanh", "clamped_swiglu")
"""In the order of native/calls.h."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """gelu: Hendrycks and Gimpel, 2016. clamped_swiglu: the activation of GPT-OSS, gate *
    sigmoid(alpha * gate) * (up + 1), with gate clamped to at most `limit` and up to +- `limit`.

    alpha, limit:   used by clamped_swiglu only.
    is_interleaved: gate and up elements alternate; otherwise all gates come first.
    """

    activation: Activation
    alpha: float = 1.0
    limit: float = float("inf")
    is_interleaved: bool = False

    @property
    def native(self) -> tuple[int, float, float]:
        """The fields of Gate in native/calls.h."""
        return _ACTIVATIONS.index(self.activation), self.alpha, self.limit

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: (n, 2 * size), contiguous within each line -> (n, size), contiguous.

        The activation is rounded to the dtype before the product, as in two separate operations.
        Raises ValueError for another shape.
        """
        if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.stride(1) != 1:
            raise ValueError(
                f"gate_up {tuple(gate_up.shape)} with strides {gate_up.stride()} must be "
                "(n, 2 * size), and contiguous within each line"
            )
        if uses_triton(gate_up):
            from longshore.worker.kernels.gpu import gate as gpu

            gated: Tensor = gpu.gate(gate_up, *self.native, self.is_interleaved)
            return gated
        kernels = kernels_for(gate_up)
        if kernels is None or self.is_interleaved:
            return self.reference(gate_up)
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = empty((num_rows, size), gate_up.dtype)
        kernels.run(
            "gate",
            gate_up.dtype,
            GATE.pack(
                gate_up.data_ptr(),
                out.data_ptr(),
                num_rows,
                size,
                gate_up.stride(0),
                *self.native,
                num_threads(2 * num_rows * size * gate_up.element_size()),
            ),
        )
        return out

    def reference(self, gate_up: Tensor) -> Tensor:
        """Compute the same in plain torch."""
        if self.is_interleaved:
            gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
        else:
            gate, up = gate_up.chunk(2, dim=-1)
        match self.activation:
            case "silu":
                return F.silu(gate).mul_(up)
            case "gelu":
                return F.gelu(gate).mul_(up)
            case "gelu_tanh":
                return F.gelu(gate, approximate="tanh").mul_(up)
            case "clamped_swiglu":
                gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
                return torch.sigmoid(gate * self.alpha).mul_(gate).mul_(up.add_(1))


SILU: Final = Gate(activation="silu")
