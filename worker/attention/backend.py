"""The interface behind which attention is computed."""

from typing import Protocol

from torch import Tensor

from longshore.worker.attention.metadata import AttentionMetadata


class AttentionStep(Protocol):
    """Attention of one step; what all layers share has been computed once."""

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v of every token of the step into the cache, then attend.

        q: (num_tokens, num_heads, head_dim); k, v: (num_tokens, num_kv_heads, head_dim).
        Returns (num_tokens, num_heads * head_dim).

        Every token's KV is written before any token attends: a request may have hit blocks that
        another request fills in this same step.
        """
        ...


class AttentionBackend(Protocol):
    """One way to compute causal attention over the paged cache. Bound to a cache when built."""

    def begin_step(self, metadata: AttentionMetadata) -> AttentionStep:
        """Called once per step on the compute queue; must not wait for the device."""
        ...
