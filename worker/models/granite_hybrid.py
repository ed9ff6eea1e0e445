"""Granite 4 hybrid: pre-norm layers of Mamba 2 or attention, with several multipliers."""

from torch import Tensor

from longshore.worker.attention.backend import AttentionStep
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.layers.attention import NoPEAttention, SelfAttention
from longshore.worker.layers.linear import ColumnParallelLinear, RowParallelLinear
from longshore.worker.layers.mamba2 import Mamba2Mixer
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.moe import ExpertForm, MixtureOfExperts, SplitExperts
from longshore.worker.layers.moe_router import Routing
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensor, StoredTensors, whole
from longshore.worker.models.bamba import HybridDecoder, mixer_tensors
from longshore.worker.models.decoder_model import DecoderLayer
from longshore.worker.models.granite_hybrid_config import GraniteHybridConfig
from longshore.worker.models.llama import PreNormLayer


class SharedMLP(GatedMLP):
    """The MLP that computes every token, alone or in addition to a mixture of experts."""

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        """name: checkpoint name of the layer."""
        return _shared_tensors(name, self.gate_up, self.down)


class GraniteMixture(MixtureOfExperts):
    """The best `top_k` experts, and a shared expert that computes every token."""

    def __init__(self, config: GraniteHybridConfig, placement: Placement) -> None:
        routing = Routing(num_experts=config.num_experts, top_k=config.top_k, renormalise=True)
        super().__init__(
            config.hidden_size,
            config.expert_width,
            routing,
            ExpertForm(stored=SplitExperts()),
            placement,
            shared_width=config.intermediate_size,
        )
        self._sizes = (config.num_experts, config.hidden_size, config.expert_width)

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        """name: checkpoint name of the layer. Experts are stacked in it, as (outputs, inputs),
        gates first."""
        assert self.shared is not None
        num_experts, size, width = self._sizes
        share = self._parallel.share(width)
        into, back = [], []
        for expert in range(num_experts):
            this = slice(expert, expert + 1)
            gate, up = self.experts.gate_up.stored(expert).unsqueeze(0).chunk(2, dim=1)
            into += [
                (gate, (this, share)),
                (up, (this, slice(width + share.start, width + share.stop))),
            ]
            back.append((self.experts.down.stored(expert).unsqueeze(0), (this, slice(None), share)))
        module = f"{name}.block_sparse_moe"
        return {
            **self.router.checkpoint_tensors(f"{module}.router.layer"),
            f"{module}.input_linear.weight": StoredTensor((num_experts, 2 * width, size), into),
            f"{module}.output_linear.weight": StoredTensor((num_experts, size, width), back),
            **_shared_tensors(name, self.shared.gate_up, self.shared.down),
        }


def _shared_tensors(
    layer_name: str, gate_up: ColumnParallelLinear, down: RowParallelLinear
) -> StoredTensors:
    return {
        **gate_up.checkpoint_tensors([f"{layer_name}.shared_mlp.input_linear"]),
        **down.checkpoint_tensors(f"{layer_name}.shared_mlp.output_linear"),
    }


class GraniteHybridLayer(PreNormLayer):
    """A pre-norm layer that multiplies the outputs of mixer and MLP by a factor."""

    def __init__(
        self,
        config: GraniteHybridConfig,
        placement: Placement,
        mixer: SelfAttention | Mamba2Mixer,
    ) -> None:
        mlp = (GraniteMixture if config.num_experts else SharedMLP)(config, placement)
        super().__init__(config, placement, attention=mixer, mlp=mlp)
        self._multiplier = config.residual_multiplier

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        layer: int,
        rotation: Rotation,
        attention: AttentionStep,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.input_norm.after_add(x, residual)
        x = self.attention(x, layer, rotation, attention).mul_(self._multiplier)
        x, residual = self.post_attention_norm.after_add(x, residual)
        return self.mlp(x).mul_(self._multiplier), residual

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            f"{name}.input_layernorm.weight": whole(self.input_norm.weight),
            f"{name}.post_attention_layernorm.weight": whole(self.post_attention_norm.weight),
            **mixer_tensors(self.attention, name),
            **self.mlp.checkpoint_tensors(name),
        }


class GraniteHybrid(HybridDecoder):
    config: GraniteHybridConfig

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        return GraniteHybridLayer(self.config, placement, self.make_mixer(placement, layer))

    def make_mixer(self, placement: Placement, layer: int) -> SelfAttention | Mamba2Mixer:
        if layer in self.config.attention_layers and not self.config.has_rope:
            return NoPEAttention(self.config, placement)
        return super().make_mixer(placement, layer)

    def embed(self, token_ids: Tensor) -> Tensor:
        return super().embed(token_ids).mul_(self.config.embedding_multiplier)
