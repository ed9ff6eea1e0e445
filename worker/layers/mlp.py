"""The gated feed-forward layer of Llama: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.layers.linear import FusedLinear, Linear


class GatedMLP:
    """Gate and up are one product over the same input."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.gate_up = FusedLinear(
            hidden_size,
            (intermediate_size, intermediate_size),
            bias=bias,
            dtype=dtype,
            device=device,
        )
        self.down = Linear(intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, hidden_size) -> the same shape."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

    def checkpoint_tensors(self, name: str) -> dict[str, Tensor]:
        return {
            **self.gate_up.parts((f"{name}.gate_proj", f"{name}.up_proj")),
            **self.down.checkpoint_tensors(f"{name}.down_proj"),
        }
