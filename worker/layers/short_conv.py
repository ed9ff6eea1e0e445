"""The short convolution of LFM2 (Liquid AI, 2025): C * conv(B * x), with B, C and x projected from
the hidden states.

The attention backend computes the convolution, which has a state. Channels are divided among the
shards.
"""

from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.attention.conv_backend import ConvInputs
from longshore.worker.kernels.conv_step import ConvWeights
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.layers.linear import (
    ColumnParallelLinear,
    Columns,
    RowParallelLinear,
    stacked,
)
from longshore.worker.layers.mamba2 import float32_weights
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors
from longshore.worker.models.lfm2_config import ConvShape


class ShortConvolution:
    """Replaces attention in a decoder layer.

    weights: of this shard's channels.
    """

    def __init__(self, shape: ConvShape, placement: Placement) -> None:
        size, bias = shape.num_channels, shape.bias
        self._channels = Columns(size, placement.parallel.share(size))
        num_channels = self._channels.num_local
        self.project = ColumnParallelLinear(
            size, (self._channels,) * 3, bias=bias, placement=placement
        )
        self.weights = ConvWeights(
            weight=float32_weights(placement, shape.width, num_channels),
            bias=float32_weights(placement, num_channels) if bias else None,
        )
        self.out = RowParallelLinear(size, size, bias=bias, placement=placement)

    def __call__(
        self, x: Tensor, layer: int, rotation: Rotation, attention: AttentionStep
    ) -> Tensor:
        """x: (n, hidden_size) -> the same shape. layer: index among the layers of this rank. There
        are no positions, so `rotation` is unused."""
        before, after, channels = self.project(x).chunk(3, dim=1)
        y = attention.forward(layer, ConvInputs(before * channels, self.weights))
        return self.out(y.mul_(after).to(x.dtype))

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        channels = (self._channels,)
        tensors = {
            **self.project.checkpoint_tensors([f"{name}.in_proj"]),
            **self.out.checkpoint_tensors(f"{name}.out_proj"),
            f"{name}.conv.weight": stacked(self.weights.weight.T.unsqueeze(1), channels),
        }
        if self.weights.bias is not None:
            tensors[f"{name}.conv.bias"] = stacked(self.weights.bias, channels)
        return tensors
