"""Reference attention over all pairs of tokens in float64."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from longshore.worker.attention.kind import PagedAttentionKind


def seen(kind: PagedAttentionKind, num_earlier: int, length: int) -> Tensor:
    """(length - num_earlier, length) bool: whether each of the last tokens attends to each."""
    position, key = torch.arange(num_earlier, length)[:, None], torch.arange(length)
    is_seen = key <= position
    if kind.window is not None:
        is_seen &= position - key < kind.window
    if kind.chunk is not None:
        is_seen &= position // kind.chunk == key // kind.chunk
    return is_seen


def first_seen(kind: PagedAttentionKind, position: int) -> int:
    """The first position that the token at `position` attends to."""
    return int(seen(kind, position, position + 1).nonzero()[0, 1])


def attention(
    kind: PagedAttentionKind, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> Tensor:
    """(num_queries, num_heads, head_dim) float64, of the last tokens of a sequence.

    q: (num_queries, num_heads, head_dim); k, v: (num_tokens, num_kv_heads, head_dim).
    """
    num_queries, num_heads, head_dim = q.shape
    keys, values = (x.double().repeat_interleave(num_heads // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,shd->hns", q.double(), keys)
    scores *= head_dim**-0.5 if kind.scale is None else kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    weights = scores.exp().where(seen(kind, len(k) - num_queries, len(k)), 0.0)
    total = weights.sum(-1)
    if sinks is not None:
        total += sinks.double().exp()[:, None]
    return torch.einsum("hns,shd->nhd", weights / total[..., None], values)


def kinds(num_heads: int, max_tokens: int) -> st.SearchStrategy[PagedAttentionKind]:
    """Kinds of attention with limits of up to `max_tokens`."""
    tokens = st.integers(1, max_tokens)
    none: st.SearchStrategy[dict[str, Any]] = st.just({})
    limits = st.one_of(
        none, st.fixed_dictionaries({"window": tokens}), st.fixed_dictionaries({"chunk": tokens})
    )
    caps = none | st.fixed_dictionaries({"softcap": st.sampled_from([0.5, 5.0, 50.0])})
    scales = none | st.fixed_dictionaries({"scale": st.sampled_from([0.05, 0.2])})
    return st.tuples(limits, caps, scales).map(
        lambda parts: PagedAttentionKind(num_heads=num_heads, **parts[0] | parts[1] | parts[2])
    )
