"""Llama, and the families that differ from it in sizes and biases only: Mistral, Qwen2."""

from typing import Protocol

from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.layers.attention import SelfAttention
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rms_norm import RMSNorm
from longshore.worker.layers.stored_tensor import StoredTensors, whole
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel


class Attention(Protocol):
    """The part of a layer that combines the tokens of a sequence."""

    def __call__(
        self, x: Tensor, layer: int, rotation: Rotation, attention: AttentionStep
    ) -> Tensor:
        """x: (n, hidden_size) -> the same shape. layer: index among the layers of this rank."""
        ...

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        """name: of the module in the checkpoint."""
        ...


class FeedForward(Protocol):
    """The part of a layer that computes each token separately."""

    def __call__(self, x: Tensor) -> Tensor:
        """x: (n, hidden_size) -> the same shape."""
        ...

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        """name: of the module in the checkpoint."""
        ...


class PreNormLayer:
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        config: DecoderConfig,
        placement: Placement,
        *,
        attention: Attention,
        mlp: FeedForward,
        attention_name: str = "self_attn",
        mlp_name: str = "mlp",
        norm_type: type[RMSNorm] = RMSNorm,
    ) -> None:
        """attention_name, mlp_name: checkpoint names."""
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = norm_type(size, eps, placement)
        self.attention = attention
        self.post_attention_norm = norm_type(size, eps, placement)
        self.mlp = mlp
        self._attention_name, self._mlp_name = attention_name, mlp_name

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        layer: int,
        rotation: Rotation,
        attention: AttentionStep,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_norm.after_add(x, residual)
        x = self.attention(x, layer, rotation, attention)
        x, residual = self.post_attention_norm.after_add(x, residual)
        return self.mlp(x), residual

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            f"{name}.input_layernorm.weight": whole(self.input_norm.weight),
            f"{name}.post_attention_layernorm.weight": whole(self.post_attention_norm.weight),
            **self.attention.checkpoint_tensors(f"{name}.{self._attention_name}"),
            **self.mlp.checkpoint_tensors(f"{name}.{self._mlp_name}"),
        }


class Llama(DecoderModel):
    """Pre-norm layers with rotary positions, grouped-query attention and a gated MLP."""

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        config = self.config
        attention = SelfAttention(config, placement)
        return PreNormLayer(config, placement, attention=attention, mlp=GatedMLP(config, placement))
