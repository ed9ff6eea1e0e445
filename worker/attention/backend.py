"""The interface behind which attention, and whatever stands in its place, is computed."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from longshore.worker.attention.metadata import AttentionMetadata


class AttentionStep(Protocol):
    """Attention of one step; what all layers share has been computed once.

    native_steps: those of its parts that the CPU kernel computes, as it takes them; for graphs.
    """

    @property
    def native_steps(self) -> Sequence[bytes]: ...

    def forward(self, layer: int, *inputs: Any, **parameters: Any) -> Tensor:
        """Write what every token of the step leaves in the cache, then compute the layer.

        Layers and backends of one kind agree on inputs and result. Those of PagedAttentionKind:
        q: (num_tokens, num_heads, head_dim); k, v: (num_tokens, num_kv_heads, head_dim);
        sinks: None, or (num_heads,) float32, logits that take part in the softmax of each head and
        have no value. Returns (num_tokens, num_heads * head_dim).

        Every token's KV is written before any token attends: a request may have hit blocks that
        another request fills in this same step.
        """
        ...


class EncodingStep(AttentionStep, Protocol):
    """A step of layers of which some attend to an encoder's tokens."""

    def write(self, layer: int, row: int, k: Tensor, v: Tensor) -> None:
        """Put down the keys and values that the tokens of a row attend to, from this step on;
        before that layer is computed. k, v: (num_encoder_tokens, num_kv_heads, head_dim)."""
        ...


class AttentionBackend(Protocol):
    """One way to compute layers of one kind. Bound to a group's view of the cache when built; its
    string says which way, for the log.

    Entries of a block table that no token of the step has a use for (outside its window, chunk or
    last state) may name blocks of anybody by now: they are not read, not even to be masked.
    """

    def begin_step(self, metadata: AttentionMetadata) -> AttentionStep:
        """Called once per step on the compute queue; must not wait for the device."""
        ...
