"""Gemma 3, text: a Gemma 2 that normalises each head of queries and keys."""

from typing import ClassVar, Final

from longshore.worker.layers.attention import OffsetHeadNormAttention
from longshore.worker.layers.placement import Placement
from longshore.worker.models.decoder_model import DecoderLayer
from longshore.worker.models.gemma2 import Gemma2, SandwichNormLayer
from longshore.worker.models.renamed_decoder import RenamedDecoder

OTHER_PARTS: Final = ("vision_tower.", "multi_modal_projector.")


class Gemma3(Gemma2):
    def make_layer(self, placement: Placement, layer: int) -> DecoderLayer:
        attention = OffsetHeadNormAttention(self.config, placement)
        return SandwichNormLayer(self.config, placement, attention=attention)


class Gemma3Images(RenamedDecoder, Gemma3):
    """The text part of a checkpoint with images and text."""

    names: ClassVar[dict[str, str]] = {"": "language_model."}

    def is_redundant(self, name: str) -> bool:
        return name.startswith(OTHER_PARTS) or super().is_redundant(name)
