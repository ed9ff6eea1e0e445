"""Qwen3: a Llama that normalises each head of queries and keys."""

from longshore.worker.layers.attention import HeadNormAttention
from longshore.worker.layers.mlp import GatedMLP
from longshore.worker.layers.placement import Placement
from longshore.worker.models.decoder_model import DecoderLayer, DecoderModel
from longshore.worker.models.llama import PreNormLayer


class Qwen3(DecoderModel):
    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        config = self.config
        attention = HeadNormAttention(config, placement)
        return PreNormLayer(config, placement, attention=attention, mlp=GatedMLP(config, placement))
