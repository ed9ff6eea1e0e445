"""Falcon-H1: pre-norm layers whose mixer is the sum of attention and Mamba 2, with multipliers."""

from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.attention.kind import CachedLayer
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.kv_cache.plan import cache_name
from longshore.worker.layers.attention import SelfAttention
from longshore.worker.layers.mamba2 import Mamba2Mixer, mamba_kind
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors, whole
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.falcon_h1_config import FalconH1Config, mamba_name
from longshore.worker.models.llama import PreNormLayer


class ScaledMLP(GatedMLP):
    """A gated MLP with a factor on its gates and one on its outputs."""

    def __init__(self, config: FalconH1Config, placement: Placement) -> None:
        super().__init__(config, placement)
        self._scales = (config.gate_multiplier, config.down_multiplier)

    def __call__(self, x: Tensor) -> Tensor:
        of_gate, of_output = self._scales
        gate_up = self.gate_up(x)
        gate_up[:, : gate_up.shape[1] // 2].mul_(of_gate)
        return self.down(self._gate(gate_up)).mul_(of_output)


class FalconH1Layer(PreNormLayer):
    def __init__(self, config: FalconH1Config, placement: Placement) -> None:
        super().__init__(
            config,
            placement,
            attention=SelfAttention(config, placement),
            mlp=ScaledMLP(config, placement),
        )
        size, eps = config.hidden_size, config.rms_norm_eps
        self.mamba = Mamba2Mixer(config.mamba, size, eps, placement)
        self._config = config

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        layer: int,
        rotation: Rotation,
        attention: AttentionStep,
    ) -> tuple[Tensor, Tensor]:
        """A layer has two entries in the cache, as in `FalconH1.cached_layers`."""
        config = self._config
        x, residual = self.input_norm.after_add(x, residual)
        mixed = self.attention(x * config.attention_in, 2 * layer, rotation, attention)
        of_mamba = self.mamba(x.mul_(config.mamba_in), 2 * layer + 1, rotation, attention)
        mixed.mul_(config.attention_out).add_(of_mamba, alpha=config.mamba_out)
        x, residual = self.post_attention_norm.after_add(mixed, residual)
        return self.mlp(x), residual

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            f"{name}.input_layernorm.weight": whole(self.input_norm.weight),
            f"{name}.pre_ff_layernorm.weight": whole(self.post_attention_norm.weight),
            **self.attention.checkpoint_tensors(f"{name}.self_attn"),
            **self.mamba.checkpoint_tensors(f"{name}.mamba"),
            **self.mlp.checkpoint_tensors(f"{name}.feed_forward"),
        }


class FalconH1(DecoderModel):
    config: FalconH1Config

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        return FalconH1Layer(self.config, placement)

    def cached_layers(self) -> tuple[CachedLayer, ...]:
        """Of each layer, the attention, then the state."""
        states = mamba_kind(self.config.mamba, self.parallel.num_shards)
        return tuple(
            cached
            for layer in self._layer_indices
            for cached in (
                CachedLayer(cache_name(layer), self.attention_kind(layer)),
                CachedLayer(mamba_name(layer), states),
            )
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(token_ids).mul_(self.config.embedding_multiplier)
