"""LFM2: pre-norm layers of short convolutions or attention, with an MLP or a mixture of experts."""

from longshore.worker.attention.conv_backend import ConvKind
from longshore.worker.attention.kind import Kind
from longshore.worker.layers.attention import HeadNormAttention
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.moe import ExpertForm, MixtureOfExperts, SplitExperts
from longshore.worker.layers.moe_router import Routing
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.short_conv import ShortConvolution
from longshore.worker.layers.stored_tensor import StoredTensors, whole
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.lfm2_config import MLP_NAMES, NORM_NAMES, Lfm2Config, Mixture
from longshore.worker.models.llama import Attention, FeedForward, PreNormLayer


class Lfm2Layer(PreNormLayer):
    def checkpoint_tensors(self, name: str) -> StoredTensors:
        mixer = "conv" if isinstance(self.attention, ShortConvolution) else "self_attn"
        return {
            f"{name}.operator_norm.weight": whole(self.input_norm.weight),
            f"{name}.ffn_norm.weight": whole(self.post_attention_norm.weight),
            **self.attention.checkpoint_tensors(f"{name}.{mixer}"),
            **self.mlp.checkpoint_tensors(f"{name}.feed_forward"),
        }


class Lfm2Mixture(MixtureOfExperts):
    def __init__(self, mixture: Mixture, hidden_size: int, placement: Placement) -> None:
        routing = Routing(
            num_experts=mixture.num_experts,
            top_k=mixture.top_k,
            scoring="sigmoid",
            renormalise=mixture.renormalise,
            scale=mixture.scale,
            has_correction=mixture.has_correction,
        )
        gate, up, down = MLP_NAMES
        form = ExpertForm(stored=SplitExperts(gate, up, down))
        super().__init__(hidden_size, mixture.expert_width, routing, form, placement)

    def checkpoint_tensors(self, name: str) -> StoredTensors:
        tensors = super().checkpoint_tensors(name)
        if self.router.correction is not None:
            tensors[f"{name}.expert_bias"] = tensors.pop(f"{name}.gate.e_score_correction_bias")
        return tensors


class Lfm2(DecoderModel):
    config: Lfm2Config

    def attention_kind(self, layer: int) -> Kind:
        if layer in self.config.attention_layers:
            return super().attention_kind(layer)
        return ConvKind(self.config.convolution.width)

    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        config = self.config
        mixer: Attention
        if layer in config.attention_layers:
            mixer = HeadNormAttention(config, placement, out_name="out_proj", norm_names=NORM_NAMES)
        else:
            mixer = ShortConvolution(config.convolution, placement)
        mlp: FeedForward
        if config.mixture is not None and config.has_experts(layer):
            mlp = Lfm2Mixture(config.mixture, config.hidden_size, placement)
        else:
            gate, up, down = MLP_NAMES
            mlp = GatedMLP(config, placement, gate_up_names=(gate, up), down_name=down)
        return Lfm2Layer(config, placement, attention=mixer, mlp=mlp)
