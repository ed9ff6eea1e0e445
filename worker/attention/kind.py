"""What a layer computes from what it keeps: the other half of its KVCacheSpec.

A spec says what lies in a block, for the scheduler and the plan of the cache; a kind says what is
done with it, and makes the backend. Kinds are frozen dataclasses: layers of one group with equal
kinds share a backend, and what it plans of a step.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from longshore.worker.attention.backend import AttentionBackend
from longshore.worker.attention.selector import make_attention
from longshore.worker.kv_cache.buffer import PagedKV


class Kind(Hashable, Protocol):
    """Equal kinds compute the same."""

    def make_backend(self, view: Any) -> AttentionBackend:
        """view: what the layers' group sees of the cache, of the class that belongs to its spec."""
        ...


@dataclass(frozen=True)
class CachedLayer:
    """A layer of this rank that keeps something.

    name: by which the model's config knows its spec.
    """

    name: str
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class PagedAttentionKind:
    """Attention over paged keys and values.

    num_heads: this rank's query heads.
    scale:     of the scores; None: head_dim ** -0.5.
    window:    tokens attended to, the token itself included.
    chunk:     a token attends to those before it in its chunk; chunks of so many tokens follow each
               other from the first token on. At most one of window and chunk is set.
    softcap:   c * tanh(score / c) instead of the (scaled) score.
    """

    num_heads: int
    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None

    def make_backend(self, view: PagedKV) -> AttentionBackend:
        return make_attention(view, self)
