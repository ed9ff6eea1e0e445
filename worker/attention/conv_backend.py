"""Short convolutions (LFM2; Liquid AI, 2025) over stored states.

The only state of such a layer is the last inputs of its convolution, so it is small, and the other
tensor of a state is empty. `state_backend.py` says how the tokens of a step are divided.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.attention.state_backend import StateBackend, StepParts
from longshore.worker.kernels.conv_step import ConvWeights, conv_step
from longshore.worker.kv_cache.state_pages import StatePages


@dataclass(frozen=True)
class ConvKind:
    """A short convolution. conv_width: tokens that it covers, the newest included."""

    conv_width: int

    def make_backend(self, view: StatePages) -> "ConvBackend":
        """view: per layer, (channels, 0) float32 and (conv_width - 1, channels) in the model's
        dtype, of this rank's channels."""
        return ConvBackend(self, view)


class ConvInputs(NamedTuple):
    """What a layer gives to its backend. inputs: (n, channels)."""

    inputs: Tensor
    weights: ConvWeights

    def before(self, num_tokens: int) -> "ConvInputs":
        """The first tokens alone."""
        return self._replace(inputs=self.inputs[:num_tokens])

    def after(self, num_tokens: int) -> "ConvInputs":
        """Without the first tokens."""
        return self._replace(inputs=self.inputs[num_tokens:])


class ConvBackend(StateBackend[ConvInputs]):
    """Computes a causal convolution without an activation."""

    def __init__(self, kind: ConvKind, view: StatePages) -> None:
        super().__init__(kind, view)
        self.kind = kind

    @property
    def has_kernel(self) -> bool:
        return False

    def decode(self, layer: int, inputs: ConvInputs, metadata: AttentionMetadata) -> Tensor:
        return conv_step(
            inputs.inputs,
            self.view,
            layer,
            metadata.block_table,
            metadata.decode_rows,
            metadata.decode_lens,
            inputs.weights,
        )

    def other_tokens(self, metadata: AttentionMetadata) -> Callable[[int, ConvInputs], Tensor]:
        parts = StepParts(self.kind.conv_width, self.view, metadata, has_pieces=False)

        def forward(layer: int, inputs: ConvInputs) -> Tensor:
            return parts.convolve(layer, inputs.inputs, *inputs.weights, has_silu=False)

        return forward
