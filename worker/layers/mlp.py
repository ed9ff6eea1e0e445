"""Feed-forward layers: the gated MLP, down(activation(gate(x)) * up(x)) (Shazeer, 2020), and the
MLP without a gate."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Literal, TypeAlias

import torch.nn.functional as F
from torch import Tensor

from longshore.worker.kernels.gate import Gate
from longshore.worker.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors
from longshore.worker.models.decoder_config import Activation, DecoderConfig

SPLIT_GATE_UP: Final = ("gate_proj", "up_proj")

UngatedActivation: TypeAlias = Activation | Literal["relu2"]


def squared_relu(x: Tensor) -> Tensor:
    """Primer's activation (So et al., 2021)."""
    return F.relu(x).square_()


ACTIVATIONS: Final[dict[UngatedActivation, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": squared_relu,
}


class GatedMLP:
    """The gated MLP. Gate and up projections are one product.

    gate_up_names: checkpoint names of gate and up, or of the tensor that stacks them.
    down_name:     checkpoint name of the third projection.
    """

    def __init__(
        self,
        config: DecoderConfig,
        placement: Placement,
        *,
        gate_up_names: Sequence[str] = SPLIT_GATE_UP,
        down_name: str = "down_proj",
    ) -> None:
        size, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        half = Columns(width, placement.parallel.share(width))
        self._gate_up_names, self._down_name = gate_up_names, down_name
        self._gate = Gate(activation=config.activation)
        self.gate_up = ColumnParallelLinear(size, (half, half), bias=bias, placement=placement)
        self.down = RowParallelLinear(width, size, bias=bias, placement=placement)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, hidden_size) -> the same shape."""
        return self.down(self._gate(self.gate_up(x)))

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            **self.gate_up.checkpoint_tensors([f"{name}.{part}" for part in self._gate_up_names]),
            **self.down.checkpoint_tensors(f"{name}.{self._down_name}"),
        }


class MLP:
    """fc2(activation(fc1(x))), with biases or without."""

    def __init__(
        self,
        size: int,
        width: int,
        activation: UngatedActivation,
        placement: Placement,
        *,
        names: tuple[str, str] = ("fc1", "fc2"),
        bias: bool = True,
    ) -> None:
        """names: checkpoint names of the two maps."""
        self._names = names
        self._activation = ACTIVATIONS[activation]
        columns = Columns(width, placement.parallel.share(width))
        self.up = ColumnParallelLinear(size, (columns,), bias=bias, placement=placement)
        self.down = RowParallelLinear(width, size, bias=bias, placement=placement)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, size) -> the same shape."""
        return self.down(self._activation(self.up(x)))

    def part(self, x: Tensor) -> Tensor:
        """This shard's part of the result."""
        return self.down.weight.product(self._activation(self.up(x)), self.down.bias)

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        """name: checkpoint name of the layer that contains the two maps."""
        up, down = self._names
        return {
            **self.up.checkpoint_tensors([f"{name}.{up}"]),
            **self.down.checkpoint_tensors(f"{name}.{down}"),
        }
