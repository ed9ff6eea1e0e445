"""Attention of encoders: a token attends to all tokens of its prompt, also to later ones.

A prompt is computed in one step, so its keys and values are the step's own: the cache is neither
written nor read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.attention.backend import AttentionInputs
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.kernels.rotary import rotary_
from longshore.worker.kv_cache.buffer import PagedKV


@dataclass(frozen=True, kw_only=True)
class BidirectionalAttentionKind:
    """It has as many KV heads as query heads, and scales scores by head_dim ** -0.5."""

    def make_backend(self, view: PagedKV) -> "BidirectionalAttention":
        return BidirectionalAttention()


class BidirectionalAttention:
    def __str__(self) -> str:
        return "bidirectional attention, torch"

    def begin_step(self, metadata: AttentionMetadata) -> "BidirectionalAttentionStep":
        return BidirectionalAttentionStep(metadata)


class BidirectionalAttentionStep:
    """One step, all layers."""

    native_steps: Sequence[bytes] = ()

    def __init__(self, metadata: AttentionMetadata) -> None:
        self._num_single = len(metadata.decode_rows)
        self._prompts = [
            slice(chunk.first_token, chunk.first_token + chunk.num_tokens)
            for chunk in metadata.prefill_chunks
        ]

    def forward(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """See AttentionStep.forward; there are as many heads of keys as of queries."""
        q, k, v, rotation, _ = inputs
        if rotation is not None:
            rotary_(q, k, rotation)
        out = torch.empty_like(q)
        single = slice(self._num_single)  # prompts of one token, which only attends to itself
        out[single] = v[single]
        for prompt in self._prompts:
            queries, keys, values = (x[prompt].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
            out[prompt] = F.scaled_dot_product_attention(queries, keys, values)[0].transpose(0, 1)
        return out.flatten(1)
