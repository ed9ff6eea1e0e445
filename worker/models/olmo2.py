"""OLMo 2: norms after attention and MLP, and over all query heads and all key heads of a token."""

from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.layers.attention import WideNormAttention
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.rms_norm import RMSNorm
from longshore.worker.layers.stored_tensor import StoredTensors, whole
from longshore.worker.models.decoder_config import DecoderConfig
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel


class PostNormLayer:
    """x + norm(attention(x)), then x + norm(mlp(x))."""

    def __init__(self, config: DecoderConfig, placement: Placement) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention = WideNormAttention(config, placement)
        self.post_attention_norm = RMSNorm(size, eps, placement)
        self.mlp = GatedMLP(config, placement)
        self.post_mlp_norm = RMSNorm(size, eps, placement)

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        layer: int,
        rotation: Rotation,
        attention: AttentionStep,
    ) -> tuple[Tensor, None]:
        assert residual is None, "layers of this family return no residual"
        x = self.post_attention_norm(self.attention(x, layer, rotation, attention), added=x)
        return self.post_mlp_norm(self.mlp(x), added=x), None

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            f"{name}.post_attention_layernorm.weight": whole(self.post_attention_norm.weight),
            f"{name}.post_feedforward_layernorm.weight": whole(self.post_mlp_norm.weight),
            **self.attention.checkpoint_tensors(f"{name}.self_attn"),
            **self.mlp.checkpoint_tensors(f"{name}.mlp"),
        }


class Olmo2(DecoderModel):
    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        return PostNormLayer(self.config, placement)
