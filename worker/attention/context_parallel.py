"""Attention with context parallelism: ranks split the tokens of every sequence among them.

The ranks hold the same KV head, or the same latents. The queries of all their heads are gathered,
and each rank attends to the tokens that it stores. It returns to the rank that owns the heads the
weighted sum of values and the logarithm of the sum of weights, from which the results are merged
(as in flash decoding, Dao et al., 2023).

A rank stores its tokens of a sequence in order of position, so a query sees the first n of them.
On a GPU the Triton kernels compute a rank's part (see kept_attention), else torch in float32.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionBackend, AttentionInputs
from longshore.worker.attention.kept_attention import KeptAttention
from longshore.worker.attention.kind import PagedAttentionKind
from longshore.worker.attention.latent_backend import (
    LatentAttentionKind,
    LatentInputs,
    multiply_heads,
)
from longshore.worker.attention.metadata import AttentionMetadata, DecodeSegment, PrefillChunk
from longshore.worker.attention.selector import computes_in_torch
from longshore.worker.attention.triton_backend import MAX_HEAD_DIM
from longshore.worker.errors import UnsupportedModel
from longshore.worker.kernels.operators import uses_triton
from longshore.worker.kernels.rotary import rotary_
from longshore.worker.kv_cache.buffer import PagedKV, PagedLatents
from longshore.worker.kv_cache.context_share import ContextShare
from longshore.worker.kv_cache.fp8 import (
    KVScales,
    from_fp8,
    to_fp8,
)
from longshore.worker.ranks.parallel import Parallel

MAX_SCORES: Final = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Maximum scores of a tile, over the heads of all ranks, which limits memory use. It is lower
on a CPU because of its caches, and because small tiles compute fewer masked scores."""


def shared_backend(kind: object, view: Any, parallel: Parallel) -> AttentionBackend:
    """The backend for layers of `kind` with context parallelism. Raises UnsupportedModel if the
    kind does not support it."""
    share = parallel.context_share
    match kind:
        case PagedAttentionKind(window=None, chunk=None):
            return SharedAttention(view, kind, parallel)
        case LatentAttentionKind():
            return SharedLatentAttention(view, kind, parallel)
        case _:
            raise UnsupportedModel(
                f"decode_context_parallel_size={share.size}: layers of {kind} do not support "
                "context parallelism. Remove decode_context_parallel_size."
            )


def _description(parallel: Parallel, kind: object, memory: "KeptMemory") -> str:
    computed = "Triton kernels" if _uses_kernels(memory) else "torch"
    return f"{computed}, context parallel over {parallel.context_share.size} ranks, {kind}"


def _uses_kernels(memory: "KeptMemory") -> bool:
    keys, _ = memory.planes(0)
    return uses_triton(keys) and keys.shape[3] <= MAX_HEAD_DIM and not computes_in_torch()


def kept_context(
    memory: "KeptMemory", share: ContextShare, metadata: AttentionMetadata, **settings: Any
) -> "KeptContext | KeptAttention":
    """One step's attention to the tokens that this rank stores. settings: as of KeptContext."""
    context = KeptAttention if _uses_kernels(memory) else KeptContext
    return context(memory, share, metadata, **settings)


class SharedAttention:
    """Layers with keys and values; this rank has one KV head."""

    def __init__(self, cache: PagedKV, kind: PagedAttentionKind, parallel: Parallel) -> None:
        if cache.num_kv_heads != 1:
            raise UnsupportedModel(
                f"decode_context_parallel_size={parallel.context_share.size} with "
                f"{cache.num_kv_heads} KV heads per rank, but context parallelism supports one. "
                "Raise tensor_parallel_size or remove decode_context_parallel_size."
            )
        self._memory = KeptKeysAndValues(cache)
        self._scale = cache.head_dim**-0.5 if kind.scale is None else kind.scale
        self._kind = kind
        self._parallel = parallel

    def __str__(self) -> str:
        return _description(self._parallel, self._kind, self._memory)

    def begin_step(self, metadata: AttentionMetadata) -> "SharedAttentionStep":
        context = kept_context(
            self._memory,
            self._parallel.context_share,
            metadata,
            num_heads=self._kind.num_heads,
            scale=self._scale,
            softcap=self._kind.softcap,
        )
        return SharedAttentionStep(self._parallel, context)


class SharedAttentionStep:
    """One step, all layers."""

    native_steps: tuple[bytes, ...] = ()

    def __init__(self, parallel: Parallel, context: "KeptContext | KeptAttention") -> None:
        self._parallel = parallel
        self._context = context

    def forward(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """See AttentionStep.forward."""
        q, k, v, rotation, sinks = inputs
        if rotation is not None:
            rotary_(q, k, rotation)
        self._context.write(layer, k, v)
        return attend(self._parallel, self._context, layer, q, sinks).to(q.dtype).flatten(1)


class SharedLatentAttention:
    """Layers with latents, always absorbed (see latent_backend): no rank has the latents of a whole
    context, so keys and values are never expanded."""

    def __init__(self, view: PagedLatents, kind: LatentAttentionKind, parallel: Parallel) -> None:
        self._memory = KeptLatents(view, kind.latent_dim)
        self._kind = kind
        self._parallel = parallel

    def __str__(self) -> str:
        return _description(self._parallel, self._kind, self._memory)

    def begin_step(self, metadata: AttentionMetadata) -> "SharedLatentStep":
        context = kept_context(
            self._memory,
            self._parallel.context_share,
            metadata,
            num_heads=self._kind.num_heads,
            scale=self._kind.scale,
        )
        return SharedLatentStep(self._parallel, context)


class SharedLatentStep:
    """One step, all layers."""

    native_steps: tuple[bytes, ...] = ()

    def __init__(self, parallel: Parallel, context: "KeptContext | KeptAttention") -> None:
        self._parallel = parallel
        self._context = context

    def forward(self, layer: int, inputs: LatentInputs) -> Tensor:
        """See LatentStep.forward."""
        q = inputs.prepare()
        self._context.write(layer, inputs.vectors)
        projections = inputs.projections
        multiply_heads(inputs.q_nope, projections.keys, q[..., : projections.keys.shape[2]])
        sums = attend(self._parallel, self._context, layer, q).to(q.dtype)
        return torch.bmm(sums.transpose(0, 1), projections.values).transpose(0, 1).flatten(1)


def attend(
    parallel: Parallel,
    context: "KeptContext | KeptAttention",
    layer: int,
    q: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to the tokens of all ranks; every rank must call this.

    q: (num_tokens, num_heads, dim); sinks: None or (num_heads,).
    Returns (num_tokens, num_heads, value_dim) float32.
    """
    # Keep no reference to the sent tensor: sent and received tensors are a step's largest memory.
    return merge(
        parallel.exchange_context(context.attend(layer, parallel.gather_context(q))), sinks
    )


def merge(parts: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Merge the results of all ranks.

    parts: (ranks, num_tokens, num_heads, value_dim + 1) from KeptContext.attend, overwritten.
    sinks: None, or (num_heads,), logits without values. Returns (num_tokens, num_heads, value_dim).
    """
    sums, logs = parts[..., :-1], parts[..., -1:]
    total = logs.logsumexp(0)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.unsqueeze(1))
    return sums.mul_((logs - total).exp_()).sum(0)


class KeptContext:
    """One step's attention to the tokens that this rank stores; shared by all layers."""

    def __init__(
        self,
        memory: "KeptMemory",
        share: ContextShare,
        metadata: AttentionMetadata,
        *,
        num_heads: int,
        scale: float,
        softcap: float | None = None,
    ) -> None:
        """num_heads: heads of one rank. On the compute queue; does not wait for the device."""
        assert metadata.kept_tokens is not None
        self._memory = memory
        self._scale = scale
        self._softcap = softcap
        self._kept_tokens = metadata.kept_tokens
        slots = metadata.slot_mapping.index_select(0, metadata.kept_tokens)
        blocks = slots.div(memory.block_size, rounding_mode="floor")
        self._places = (blocks, slots - blocks * memory.block_size)
        size = memory.block_size
        self._batches = [_decodes(share, size, metadata, s) for s in metadata.decode_segments]
        max_rows = MAX_SCORES[slots.device.type] // (num_heads * share.size)
        self._batches += [
            _chunk(share, size, metadata, chunk, max_rows) for chunk in metadata.prefill_chunks
        ]

    def write(self, layer: int, *of_tokens: Tensor) -> None:
        """Store this rank's part of the KV of the step's tokens."""
        kept = (each.index_select(0, self._kept_tokens) for each in of_tokens)
        self._memory.write(layer, self._places, *kept)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """q: (ranks, num_tokens, num_heads, dim), the queries of all ranks.

        Returns (ranks, num_tokens, num_heads, value_dim + 1) float32: for each query, the weighted
        mean of the values of the tokens that it sees on this rank, and the logarithm of the sum of
        their weights; zeros and -infinity if there are none.
        """
        memory = self._memory
        out = q.new_empty(*q.shape[:3], memory.value_dim + 1, dtype=torch.float32)
        scales = memory.scales(layer)
        for batch in self._batches:
            keys, values = memory.read(layer, batch.block_ids)
            for tile in batch.tiles:
                some = q[:, tile.tokens].permute(1, 0, 2, 3).flatten(1, 2).float()
                found = self._find(
                    some.unflatten(0, tile.lens.shape).mul_(self._scale * scales.keys),
                    keys[:, : tile.num_keys],
                    values[:, : tile.num_keys],
                    tile.lens,
                )
                if scales.values != 1.0:
                    found[..., :-1].mul_(scales.values)
                of_ranks = found.flatten(0, 1).unflatten(1, (len(q), q.shape[2]))
                out[:, tile.tokens] = of_ranks.transpose(0, 1)
        return out

    def _find(self, q: Tensor, keys: Tensor, values: Tensor, lens: Tensor) -> Tensor:
        """q: (n, queries, heads, dim), scaled; keys, values: (n, num_keys, ...); lens: (n,
        queries), how many keys each query sees. Returns (n, queries, heads, value_dim + 1)."""
        scores = (q.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, q.shape[1:3])
        if self._softcap is not None:
            scores = scores.div_(self._softcap).tanh_().mul_(self._softcap)
        is_hidden = torch.arange(keys.shape[1], device=keys.device) >= lens[:, :, None, None]
        scores = scores.masked_fill_(is_hidden, float("-inf"))
        highest = scores.amax(-1, keepdim=True)
        highest = highest.masked_fill(highest == float("-inf"), 0.0)
        weights = scores.sub_(highest).exp_()
        total = weights.sum(-1, keepdim=True)
        sums = (weights.flatten(1, 2) @ values).unflatten(1, q.shape[1:3])
        return torch.cat((sums / total.clamp(min=1.0), highest + total.log()), -1)


class _QueryTile(NamedTuple):
    """Consecutive tokens of the step that are computed together, of n sequences.

    lens:     (n, queries), how many keys of its sequence each query sees on this rank.
    num_keys: keys per sequence to compute: the maximum of `lens`, at least 1.
    """

    tokens: slice
    lens: Tensor
    num_keys: int


class _Batch(NamedTuple):
    """Sequences whose keys are read together. block_ids: (n, blocks per sequence)."""

    block_ids: Tensor
    tiles: Sequence[_QueryTile]


def _decodes(
    share: ContextShare, block_size: int, metadata: AttentionMetadata, segment: DecodeSegment
) -> _Batch:
    tokens = slice(segment.first_seq, segment.first_seq + segment.num_seqs)
    rows = metadata.decode_rows[tokens].unsqueeze(1)
    lens = metadata.decode_lens[tokens].unsqueeze(1)
    columns = torch.arange(segment.num_blocks, device=rows.device)
    # Entries after a sequence's own are stale; the null block, all zeros, replaces them.
    is_own = columns * (block_size * share.size) < lens
    block_ids = metadata.block_table[rows, columns * is_own].long() * is_own
    num_keys = segment.num_blocks * block_size
    return _Batch(block_ids, [_QueryTile(tokens, share.num_kept(lens), num_keys)])


def _chunk(
    share: ContextShare,
    block_size: int,
    metadata: AttentionMetadata,
    chunk: PrefillChunk,
    max_rows: int,
) -> _Batch:
    """max_rows: maximum of queries times keys of a tile."""
    device = metadata.block_table.device
    num_blocks = -(-chunk.seq_len // (block_size * share.size))
    block_ids = metadata.block_table[chunk.row, :num_blocks].long().unsqueeze(0)
    start = chunk.seq_len - chunk.num_tokens
    step = max(1, max_rows // (num_blocks * block_size))
    tiles = []
    for first in range(start, chunk.seq_len, step):
        end = min(first + step, chunk.seq_len)
        num_keys = max(1, int(share.num_kept(np.array(end))))  # reading one key is always safe
        lens = share.num_kept(torch.arange(first + 1, end + 1, device=device))
        shift = chunk.first_token - start
        tiles.append(_QueryTile(slice(shift + first, shift + end), lens.unsqueeze(0), num_keys))
    return _Batch(block_ids, tiles)


class KeptMemory(Protocol):
    """The cache as a sequence of tokens. value_dim: elements of a value."""

    block_size: int
    value_dim: int

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values in place, (num_blocks, 1, block_size, dim) each."""
        ...

    def write(self, layer: int, places: tuple[Tensor, Tensor], *kept: Tensor) -> None:
        """places: the block of each token, and the offset in it."""
        ...

    def read(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(n, blocks) -> keys and values, (n, tokens, dim) float32."""
        ...

    def scales(self, layer: int) -> KVScales:
        """The scales by which keys and values that were read must be multiplied."""
        ...


class KeptKeysAndValues:
    def __init__(self, cache: PagedKV) -> None:
        self._fp8 = cache.fp8
        self._dtype = cache.dtype
        planes = cache.planes if cache.fp8 is None else cache.planes.view(torch.uint8)
        self._planes = planes.squeeze(1)  # there is one head
        self.block_size, self.value_dim = cache.block_size, cache.head_dim
        self._of_layers = cache.planes

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = self._of_layers[:, :, layer].unbind(2)
        return keys, values

    def write(self, layer: int, places: tuple[Tensor, Tensor], *kept: Tensor) -> None:
        scales = self.scales(layer)
        for plane, x, scale in zip((0, 1), kept, scales, strict=True):
            stored = x.squeeze(1) if self._fp8 is None else to_fp8(x.squeeze(1), scale)
            self._planes[:, layer, plane].index_put_(places, stored)

    def read(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = (
            _read(self._planes[:, layer, plane], block_ids, is_fp8=self._fp8 is not None)
            for plane in (0, 1)
        )
        return keys, values

    def scales(self, layer: int) -> KVScales:
        return KVScales() if self._fp8 is None else self._fp8.scales[layer]


class KeptLatents:
    """The cached vector of a token is its key; the latent, its first part, is its value."""

    def __init__(self, view: PagedLatents, latent_dim: int) -> None:
        self._latents = view.latents
        self.block_size, self.value_dim = view.block_size, latent_dim

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        vectors = self._latents[:, layer].unsqueeze(1)
        return vectors, vectors[..., : self.value_dim]

    def write(self, layer: int, places: tuple[Tensor, Tensor], *kept: Tensor) -> None:
        self._latents[:, layer].index_put_(places, kept[0])

    def read(self, layer: int, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        vectors = _read(self._latents[:, layer], block_ids)
        return vectors, vectors[..., : self.value_dim]

    def scales(self, layer: int) -> KVScales:
        return KVScales()


def _read(plane: Tensor, block_ids: Tensor, *, is_fp8: bool = False) -> Tensor:
    """plane: (num_blocks, block_size, dim); block_ids: (n, blocks) -> (n, tokens, dim) float32."""
    blocks = plane.flatten(1).index_select(0, block_ids.flatten())  # flattened blocks gather faster
    numbers = from_fp8(blocks, torch.float32) if is_fp8 else blocks.float()
    return numbers.view(len(block_ids), -1, plane.shape[2])
