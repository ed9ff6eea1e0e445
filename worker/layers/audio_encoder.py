"""The encoder of Whisper (Radford et al., 2022): two convolutions over a log-mel spectrogram, then
pre-norm layers in which every token attends to all others."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.layers.layer_norm import LayerNorm
from longshore.worker.layers.linear import ColumnParallelLinear, Columns, RowParallelLinear
from longshore.worker.layers.mlp import MLP
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors, whole
from longshore.worker.models.decoder_config import Activation
from longshore.worker.models.whisper_config import KERNEL_WIDTH


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """num_channels: channels of the spectrogram. num_tokens: half its number of frames."""

    num_channels: int
    num_tokens: int
    size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: Activation
    norm_eps: float


class BidirectionalAttention:
    """Every token attends to all. Heads are divided among the shards; keys have no bias."""

    def __init__(self, size: int, num_heads: int, placement: Placement) -> None:
        self._head_dim = size // num_heads
        heads = Columns.of_heads(placement.parallel.share(num_heads), num_heads, self._head_dim)
        self.qkv = ColumnParallelLinear(
            size, (heads,) * 3, bias=(True, False, True), placement=placement
        )
        self.out = RowParallelLinear(size, size, bias=True, placement=placement)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, size), one sequence -> the same shape."""
        heads = self.qkv(x).view(len(x), 3, -1, self._head_dim)
        q, k, v = heads.permute(1, 2, 0, 3).unsqueeze(1)
        return self.out(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            **self.qkv.checkpoint_tensors([f"{name}.{part}_proj" for part in "qkv"]),
            **self.out.checkpoint_tensors(f"{name}.out_proj"),
        }


class EncoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: EncoderShape, placement: Placement) -> None:
        size = shape.size
        self.attention_norm = LayerNorm(size, shape.norm_eps, placement)
        self.attention = BidirectionalAttention(size, shape.num_heads, placement)
        self.mlp_norm = LayerNorm(size, shape.norm_eps, placement)
        self.mlp = MLP(size, shape.intermediate_size, shape.activation, placement)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, size), overwritten -> the same shape."""
        x = x.add_(self.attention(self.attention_norm(x)))
        x = x.add_(self.mlp(self.mlp_norm(x)))
        if x.dtype == torch.float16:  # clamped as in training, because values could overflow
            limit = torch.finfo(x.dtype).max - 1000
            x = x.clamp_(-limit, limit)
        return x

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            **self.attention_norm.checkpoint_tensors(f"{name}.self_attn_layer_norm"),
            **self.attention.checkpoint_tensors(f"{name}.self_attn"),
            **self.mlp_norm.checkpoint_tensors(f"{name}.final_layer_norm"),
            **self.mlp.checkpoint_tensors(name),
        }


class Convolution:
    """A convolution over the frames of a sequence, zero-padded at both ends.

    weight: (out_channels, in_channels, KERNEL_WIDTH); bias: (out_channels,). Every shard holds the
    whole weights.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, stride: int, placement: Placement
    ) -> None:
        self._stride = stride
        self.weight = placement.empty(out_channels, in_channels, KERNEL_WIDTH)
        self.bias = placement.empty(out_channels)

    def __call__(self, x: Tensor) -> Tensor:
        """x: (in_channels, n) -> (out_channels, n / stride)."""
        return F.conv1d(x, self.weight, self.bias, stride=self._stride, padding=KERNEL_WIDTH // 2)

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {f"{name}.weight": whole(self.weight), f"{name}.bias": whole(self.bias)}


class AudioEncoder:
    """positions: (num_tokens, size), added to the output of the convolutions."""

    def __init__(self, shape: EncoderShape, placement: Placement) -> None:
        size = shape.size
        self.first = Convolution(shape.num_channels, size, stride=1, placement=placement)
        self.second = Convolution(size, size, stride=2, placement=placement)
        self.positions = placement.empty(shape.num_tokens, size)
        self.layers = [EncoderLayer(shape, placement) for _ in range(shape.num_layers)]
        self.norm = LayerNorm(size, shape.norm_eps, placement)

    def __call__(self, spectrogram: Tensor) -> Tensor:
        """spectrogram: (num_channels, 2 * num_tokens) -> (num_tokens, size)."""
        channels = F.gelu(self.second(F.gelu(self.first(spectrogram))))
        x = channels.t().contiguous().add_(self.positions)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        tensors = {
            **self.first.checkpoint_tensors(f"{name}.conv1"),
            **self.second.checkpoint_tensors(f"{name}.conv2"),
            f"{name}.embed_positions.weight": whole(self.positions),
            **self.norm.checkpoint_tensors(f"{name}.layer_norm"),
        }
        for index, layer in enumerate(self.layers):
            tensors |= layer.checkpoint_tensors(f"{name}.layers.{index}")
        return tensors
