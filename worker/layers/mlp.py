"""The gated feed-forward layer of Llama: down(silu(gate(x)) * up(x)) (Shazeer, 2020), or with
another activation in place of silu."""

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from longshore.worker.kernels.gate import Gate
from longshore.worker.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors
from longshore.worker.models.decoder_config import DecoderConfig

SPLIT_GATE_UP: Final = ("gate_proj", "up_proj")


class GatedMLP:
    """Gate and up are one product over the same input.

    gate_up_names: what the checkpoint calls gate and up, or the two in one.
    """

    def __init__(
        self,
        config: DecoderConfig,
        placement: Placement,
        *,
        gate_up_names: Sequence[str] = SPLIT_GATE_UP,
    ) -> None:
        size, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        half = Columns(width, placement.parallel.share(width))
        self._gate_up_names = gate_up_names
        self._gate = Gate(activation=config.activation)
        self.gate_up = ColumnParallelLinear(size, (half, half), bias=bias, placement=placement)
        self.down = RowParallelLinear(width, size, bias=bias, placement=placement)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, hidden_size) -> the same shape."""
        return self.down(self._gate(self.gate_up(x)))

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            **self.gate_up.checkpoint_tensors([f"{name}.{part}" for part in self._gate_up_names]),
            **self.down.checkpoint_tensors(f"{name}.down_proj"),
        }
