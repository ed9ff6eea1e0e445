"""The kind of a cached layer: how it is computed from what its KVCacheSpec stores.

A spec describes the contents of a block, for the scheduler and the KV cache plan. A kind describes
the computation and makes the backend. Kinds are frozen dataclasses: layers of one group with equal
kinds share a backend, and its per-step preparation.
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
        """view: the group's view of the cache, of the class for its spec."""
        ...


@dataclass(frozen=True)
class CachedLayer:
    """A layer of this rank with an entry in the KV cache.

    name: its key in `config.cache_specs`.
    """

    name: str
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class PagedAttentionKind:
    """Attention over paged keys and values.

    num_heads: this rank's query heads.
    scale:     factor on scores; None: head_dim ** -0.5.
    window:    tokens attended to, the token itself included.
    chunk:     chunk size: a token attends only to tokens of its own chunk. Chunks are counted from
               the first token. At most one of window and chunk is set.
    softcap:   c, if scaled scores are replaced by c * tanh(score / c).
    value_dim: leading elements of a value that are needed; None: all. A backend may compute more.
    """

    num_heads: int
    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    value_dim: int | None = None

    def make_backend(self, view: PagedKV) -> AttentionBackend:
        return make_attention(view, self)
