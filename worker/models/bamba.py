"""Bamba: a Llama in which Mamba 2 mixers replace attention in most layers."""

from longshore.worker.attention.kind import Kind
from longshore.worker.layers.attention import SelfAttention
from longshore.worker.layers.mamba2 import Mamba2Mixer, mamba_kind
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.placement import Placement
from longshore.worker.layers.stored_tensor import StoredTensors, whole
from longshore.worker.models.bamba_config import HybridConfig
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.llama import Attention, PreNormLayer


class HybridDecoder(DecoderModel):
    """A decoder with attention in some layers and Mamba in the others."""

    config: HybridConfig

    def attention_kind(self, layer: int) -> Kind:
        if layer in self.config.attention_layers:
            return super().attention_kind(layer)
        return mamba_kind(self.config.mamba, self.parallel.num_shards)

    def make_mixer(self, placement: Placement, layer: int) -> SelfAttention | Mamba2Mixer:
        """The attention or Mamba mixer of a layer. layer: index in the whole model."""
        config = self.config
        if layer in config.attention_layers:
            return SelfAttention(config, placement)
        return Mamba2Mixer(config.mamba, config.hidden_size, config.rms_norm_eps, placement)


def mixer_tensors(mixer: Attention, layer_name: str) -> StoredTensors:
    """layer_name: checkpoint name of the layer."""
    name = "mamba" if isinstance(mixer, Mamba2Mixer) else "self_attn"
    return mixer.checkpoint_tensors(f"{layer_name}.{name}")


class BambaLayer(PreNormLayer):
    def checkpoint_tensors(self, name: str) -> StoredTensors:
        return {
            f"{name}.input_layernorm.weight": whole(self.input_norm.weight),
            f"{name}.pre_ff_layernorm.weight": whole(self.post_attention_norm.weight),
            **mixer_tensors(self.attention, name),
            **self.mlp.checkpoint_tensors(f"{name}.feed_forward"),
        }


class Bamba(HybridDecoder):
    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        return BambaLayer(
            self.config,
            placement,
            attention=self.make_mixer(placement, layer),
            mlp=GatedMLP(self.config, placement),
        )
