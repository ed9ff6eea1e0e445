"""Gemma 3, text: a Gemma 2 that normalises each head of queries and keys."""

from longshore.worker.layers.attention import OffsetHeadNormAttention
from longshore.worker.layers.placement import Placement
from longshore.worker.models.decoder_model import DecoderLayer
from longshore.worker.models.gemma2 import Gemma2, SandwichNormLayer


class Gemma3(Gemma2):
    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        attention = OffsetHeadNormAttention(self.config, placement)
        return SandwichNormLayer(self.config, placement, attention=attention)
