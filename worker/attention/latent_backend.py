"""Multi-head latent attention (DeepSeek-V2, 2024): one cached vector per token for all heads.

The vector consists of a latent, from which the keys and values of every head are projected, and a
rotary key that all heads share. The same attention can be computed in two ways:

- absorbed: queries are projected into the space of the latents, and weighted sums are projected out
  of it. The heads are then queries of one KV head whose values are part of its keys, and cached
  tokens need no projection. Decodes are always absorbed.
- expanded: keys and values of all heads are projected from the latents of the context. Each pair of
  tokens costs less, so it is faster for a chunk that is long enough to amortise the projections.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longshore.worker.attention.backend import AttentionInputs, AttentionStep
from longshore.worker.attention.kind import PagedAttentionKind
from longshore.worker.attention.metadata import AttentionMetadata, PrefillChunk
from longshore.worker.attention.selector import make_attention
from longshore.worker.kernels.latents import LatentNorm, LatentPlaces, prepare_latents
from longshore.worker.kernels.rotary import Rotation
from longshore.worker.kv_cache.buffer import PagedKV, PagedLatents
from longshore.worker.kv_cache.plan import MAX_EXPANDED_ELEMENTS

EXPANDED_BLOCK_SIZE: Final = 64
"""Tokens per block of the expansion buffer, in which a context is contiguous."""

LAYOUT_TOKENS: Final = 64
"""Cost of laying out the projections for expansion, in projected tokens."""


@dataclass(frozen=True)
class LatentProjections:
    """The projections from latents to one layer's keys and values, of this rank's heads.

    keys:   (num_heads, nope_dim, latent_dim).
    values: (num_heads, latent_dim, value_dim).
    """

    keys: Tensor
    values: Tensor


class LatentInputs(NamedTuple):
    """What a layer gives to its backend.

    q_nope:  (num_tokens, num_heads, nope_dim).
    q_rope:  (num_tokens, num_heads, rope_dim).
    vectors: (num_tokens, latent_dim + rope_dim), what is cached.
    norm, rotation: what is done first to latents, and to q_rope and the rotary part of the vectors,
             which are overwritten.
    """

    q_nope: Tensor
    q_rope: Tensor
    vectors: Tensor
    projections: LatentProjections
    norm: LatentNorm | None = None
    rotation: Rotation | None = None

    def prepare(self, places: LatentPlaces | None = None) -> Tensor:
        """See prepare_latents."""
        return prepare_latents(
            self.q_rope, self.vectors, norm=self.norm, rotation=self.rotation, places=places
        )


@dataclass(frozen=True)
class LatentAttentionKind:
    """num_heads: this rank's query heads. Sizes in elements: latent_dim and rope_dim of a cached
    vector, nope_dim and value_dim of a head's projections. scale: factor on scores."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    scale: float

    def make_backend(self, view: PagedLatents) -> "PagedLatentAttention":
        return PagedLatentAttention(view, self)

    def expands(self, num_tokens: int, seq_len: int) -> bool:
        """Whether to expand keys and values for the last `num_tokens` tokens of a sequence of
        `seq_len`: if that is faster by a count of products, weighted as measured on
        a CPU, and the buffer holds at least one head."""
        num_pairs = num_tokens * (2 * seq_len - num_tokens + 1) // 2
        projection = self.latent_dim * (self.nope_dim + self.value_dim)
        absorbed = 2 * (self.latent_dim + self.rope_dim)
        expanded = 3 * self.expanded_dim  # 2 products, but each key is read for one head only
        extra = (seq_len - num_tokens + LAYOUT_TOKENS) * projection
        return extra < num_pairs * (absorbed - expanded) and self.heads_at_once(seq_len) > 0

    def heads_at_once(self, seq_len: int) -> int:
        """How many heads to expand together for a context of `seq_len` tokens, a divisor of
        num_heads; 0 if the buffer cannot hold one."""
        num_blocks = -(-seq_len // EXPANDED_BLOCK_SIZE)
        elements = 2 * num_blocks * EXPANDED_BLOCK_SIZE * self.expanded_dim  # per head
        most = min(MAX_EXPANDED_ELEMENTS // elements, self.num_heads)
        return next((n for n in range(most, 0, -1) if self.num_heads % n == 0), 0)

    @property
    def expanded_dim(self) -> int:
        """Elements of an expanded key or value; the shorter of the two is padded."""
        return max(self.nope_dim + self.rope_dim, self.value_dim)


class PagedLatentAttention:
    """The backend of latent attention. It computes both ways with backends of ordinary attention:
    absorbed over the cache itself, expanded over a buffer with the layout of a cache."""

    def __init__(self, view: PagedLatents, kind: LatentAttentionKind) -> None:
        self._view = view
        self._kind = kind
        # One KV head whose keys and values share memory; the same data is written twice.
        planes = view.latents[:, None, :, None].expand(-1, -1, -1, 2, -1, -1)
        absorbed = PagedAttentionKind(
            num_heads=kind.num_heads, scale=kind.scale, value_dim=kind.latent_dim
        )
        self._absorbed = absorbed.make_backend(PagedKV(planes))
        self.is_replayable: bool = getattr(self._absorbed, "is_replayable", False)
        self._no_slots = torch.empty(0, dtype=torch.int64, device=view.device)
        self.shares_blocks: bool = getattr(self._absorbed, "shares_blocks", False)
        self._expanded: dict[int, _Expanded] = {}  # by number of heads at once

    def __str__(self) -> str:
        return f"latents, absorbed by {self._absorbed}"

    def begin_step(self, metadata: AttentionMetadata) -> "LatentStep":
        absorbed: list[PrefillChunk] = []
        expanded: list[_ExpandedChunk] = []
        num_absorbed = len(metadata.decode_rows)
        spans = [slice(0, num_absorbed)] if num_absorbed else []
        for chunk in metadata.prefill_chunks:
            if self._kind.expands(chunk.num_tokens, chunk.seq_len):
                memory = self._memory(self._kind.heads_at_once(chunk.seq_len))
                expanded.append(_ExpandedChunk(self._view, memory, metadata, chunk))
                continue
            spans.append(_tokens(chunk))
            absorbed.append(replace(chunk, first_token=num_absorbed))
            num_absorbed += chunk.num_tokens
        step: AttentionStep | None = None
        if spans:  # the absorbed tokens form a step of their own, whose vectors are cached before
            step = self._absorbed.begin_step(
                replace(metadata, slot_mapping=self._no_slots, prefill_chunks=absorbed)
            )
        return LatentStep(self._kind, self._view, metadata.slot_mapping, step, spans, expanded)

    def _memory(self, num_heads: int) -> "_Expanded":
        if num_heads not in self._expanded:
            self._expanded[num_heads] = _Expanded(self._kind, num_heads, self._buffer)
        return self._expanded[num_heads]

    @cached_property
    def _buffer(self) -> Tensor:
        """Memory of expanded keys and values; one chunk uses it at a time."""
        view = self._view
        return torch.empty(MAX_EXPANDED_ELEMENTS, dtype=view.dtype, device=view.device)


class LatentStep:
    """One step, all layers."""

    native_steps: tuple[bytes, ...] = ()

    def __init__(
        self,
        kind: LatentAttentionKind,
        view: PagedLatents,
        slots: Tensor,
        absorbed: AttentionStep | None,
        spans: Sequence[slice],
        expanded: Sequence["_ExpandedChunk"],
    ) -> None:
        """slots: of the step's tokens. spans: slices of the tokens that are absorbed. absorbed:
        None if none are."""
        self._kind = kind
        self._latents = view.latents
        self._slots = slots
        self._absorbed = absorbed
        self._spans = spans
        self._expanded = expanded
        head_size = kind.latent_dim + kind.rope_dim
        self._no_vectors = torch.empty((0, 1, head_size), dtype=view.dtype, device=view.device)

    def forward(self, layer: int, inputs: LatentInputs) -> Tensor:
        """See AttentionStep.forward. Returns (num_tokens, num_heads * value_dim)."""
        q_nope, projections, latent_dim = inputs.q_nope, inputs.projections, self._kind.latent_dim
        q = inputs.prepare(LatentPlaces(self._latents[:, layer], self._slots))
        out = q.new_empty(*q.shape[:2], self._kind.value_dim)
        if self._absorbed is not None:
            for span in self._spans:
                multiply_heads(q_nope[span], projections.keys, q[span, :, :latent_dim])
            absorbed = _take(q, self._spans)
            sums = self._absorbed.forward(
                layer, AttentionInputs(absorbed, self._no_vectors, self._no_vectors)
            )
            latent_sums = sums.view(*absorbed.shape[:2], -1)[..., :latent_dim]
            sizes = [span.stop - span.start for span in self._spans]
            for span, part in zip(self._spans, latent_sums.split(sizes), strict=True):
                multiply_heads(part, projections.values, out[span])
        for chunk in self._expanded:
            q_of_chunk = q_nope[chunk.tokens], q[chunk.tokens, :, latent_dim:]
            out[chunk.tokens] = chunk.attend(layer, *q_of_chunk, inputs.vectors, projections)
        return out.flatten(1)


def multiply_heads(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    """out = x M of each head. x: (n, heads, size); matrices: (heads, size, new size); out: (n,
    heads, new size)."""
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))


class _Expanded:
    """The expansion buffer as a KV cache of one layer, for `num_heads` heads of one context.

    buffer:       (MAX_EXPANDED_ELEMENTS,).
    keys, values: (num_tokens, num_heads, expanded_dim), views of the buffer, in which the context
                  of a head is contiguous.
    """

    def __init__(self, kind: LatentAttentionKind, num_heads: int, buffer: Tensor) -> None:
        self.kind = kind
        block = (EXPANDED_BLOCK_SIZE, kind.expanded_dim)
        num_blocks = len(buffer) // (2 * num_heads * math.prod(block))
        used = buffer[: 2 * num_heads * num_blocks * math.prod(block)]
        planes = used.view(2, num_heads, num_blocks, *block)
        self.keys, self.values = planes.flatten(2, 3).transpose(1, 2)
        self.heads = [
            slice(first, first + num_heads) for first in range(0, kind.num_heads, num_heads)
        ]
        self._device = buffer.device
        self._table = torch.arange(num_blocks, dtype=torch.int32, device=self._device).unsqueeze(0)
        self._backend = make_attention(
            PagedKV(planes.permute(2, 1, 0, 3, 4).unsqueeze(2)),
            PagedAttentionKind(num_heads=num_heads, scale=kind.scale),
            may_probe=False,
        )

    def begin_chunk(self, num_tokens: int, seq_len: int) -> AttentionStep:
        """A step that consists of this chunk only."""
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        return self._backend.begin_step(
            AttentionMetadata(
                slot_mapping=torch.arange(seq_len - num_tokens, seq_len, device=self._device),
                block_table=self._table,
                decode_rows=none,
                decode_lens=none,
                decode_segments=(),
                prefill_chunks=(PrefillChunk(0, 0, num_tokens, seq_len),),
            )
        )


class _ExpandedChunk:
    """A chunk for which keys and values are expanded from the latents of its sequence."""

    def __init__(
        self,
        view: PagedLatents,
        memory: _Expanded,
        metadata: AttentionMetadata,
        chunk: PrefillChunk,
    ) -> None:
        self._view = view
        self._memory = memory
        self.tokens = _tokens(chunk)
        self._num_earlier = chunk.seq_len - chunk.num_tokens
        num_blocks = -(-self._num_earlier // view.block_size)
        self._earlier_block_ids = metadata.block_table[chunk.row, :num_blocks].long()
        self._step = memory.begin_chunk(chunk.num_tokens, chunk.seq_len)

    def attend(
        self,
        layer: int,
        q_nope: Tensor,
        q_rope: Tensor,
        vectors: Tensor,
        projections: LatentProjections,
    ) -> Tensor:
        """See LatentStep.forward; q_nope and q_rope are those of the chunk, prepared. Returns (n,
        num_heads, value_dim) for this chunk."""
        memory, tokens, kind = self._memory, self.tokens, self._memory.kind
        earlier = self._earlier(layer)
        parts = []
        for heads in memory.heads:
            to_keys = projections.keys[heads]
            to_values = projections.values[heads].transpose(1, 2).contiguous()
            keys, values = _expand(kind, earlier, to_keys, to_values)
            memory.keys[: len(keys)] = keys
            memory.values[: len(values)] = values
            keys, values = _expand(kind, vectors[tokens], to_keys, to_values)
            q = torch.cat((q_nope[:, heads], q_rope[:, heads]), dim=-1)
            q = _pad(q, kind.expanded_dim)
            out = self._step.forward(0, AttentionInputs(q, keys, values))
            parts.append(out.view_as(q)[..., : kind.value_dim])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _earlier(self, layer: int) -> Tensor:
        """The cached vectors of the tokens before the chunk, (num_earlier, head_size)."""
        blocks = self._view.latents[:, layer].index_select(0, self._earlier_block_ids)
        return blocks.flatten(0, 1)[: self._num_earlier]


def _expand(
    kind: LatentAttentionKind, vectors: Tensor, to_keys: Tensor, to_values: Tensor
) -> tuple[Tensor, Tensor]:
    """Expand vectors, (n, head_size), to keys and values, (n, heads, expanded_dim) each.

    to_keys: (heads, nope_dim, latent_dim); to_values: (heads, value_dim, latent_dim).
    """
    latents, rope = vectors.split((kind.latent_dim, kind.rope_dim), dim=-1)
    nope = F.linear(latents, to_keys.flatten(0, 1)).unflatten(1, to_keys.shape[:2])
    values = F.linear(latents, to_values.flatten(0, 1)).unflatten(1, to_values.shape[:2])
    keys = torch.cat((nope, rope.unsqueeze(1).expand(-1, len(to_keys), -1)), dim=-1)
    return _pad(keys, kind.expanded_dim), _pad(values, kind.expanded_dim)


def _tokens(chunk: PrefillChunk) -> slice:
    return slice(chunk.first_token, chunk.first_token + chunk.num_tokens)


def _take(x: Tensor, spans: Sequence[slice]) -> Tensor:
    """The rows of `x`, (num_tokens, ...), in `spans`; there is at least one span."""
    return x[spans[0]] if len(spans) == 1 else torch.cat([x[span] for span in spans])


def _pad(x: Tensor, size: int) -> Tensor:
    """Pad the last dimension to `size` with zeros."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))
