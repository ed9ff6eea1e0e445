"""Phi-3: a Llama whose checkpoints stack q, k and v, and gate and up."""

from longshore.worker.layers.attention import SelfAttention
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.placement import Placement
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.llama import PreNormLayer


class Phi3(DecoderModel):
    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        config = self.config
        attention = SelfAttention(config, placement, qkv_names=("qkv_proj",))
        mlp = GatedMLP(config, placement, gate_up_names=("gate_up_proj",))
        return PreNormLayer(config, placement, attention=attention, mlp=mlp)
