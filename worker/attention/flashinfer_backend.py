"""Prefill chunks with FlashInfer's kernels (Ye et al., 2025); decodes with Triton's.

FlashInfer is optional, and chosen by a probe (`attention_probe`). It plans a step on the host, from
lengths that the host knows only of chunks: those of decodes are on the device, and their steps run
as graphs, which a plan cannot be part of.

Not verified on a device: FlashInfer needs one, and there was none.
"""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from longshore.worker.attention.metadata import AttentionMetadata, PrefillChunk
from longshore.worker.attention.triton_backend import TritonAttention, TritonAttentionStep
from longshore.worker.kv_cache.buffer import PagedKV

if TYPE_CHECKING:
    from longshore.worker.attention.kind import PagedAttentionKind

WORKSPACE_BYTES: Final = 128 << 20
"""As FlashInfer's documentation recommends."""

NUM_PLANNERS: Final = 4
"""A planner copies a step's plan to the device from its own pinned memory, so the next steps use
others; more than the steps that may be in flight."""


def unsupported(cache: PagedKV, kind: "PagedAttentionKind") -> str | None:
    """Why FlashInfer cannot compute this kind of layer; None if it may."""
    if kind.chunk is not None:
        return f"it has no chunks, of {kind.chunk} tokens"
    if kind.value_dim not in (None, cache.head_dim):
        return "its kernels for latents have another interface"
    if cache.dtype not in (torch.float16, torch.bfloat16):
        return f"it does not compute {cache.dtype}"
    return None


class FlashInferAttention(TritonAttention):
    """Bound to one cache and one kind of layer. Raises ImportError without FlashInfer."""

    def __init__(self, cache: PagedKV, kind: "PagedAttentionKind") -> None:
        super().__init__(cache, kind)
        flashinfer = importlib.import_module("flashinfer")
        device = cache.planes.device
        workspace = _workspace(device)
        self._planners = [
            _Planner(flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND"), device)
            for _ in range(NUM_PLANNERS)
        ]
        self._description = f"FlashInfer for chunks, Triton kernels for decodes, {kind}"

    def begin_step(self, metadata: AttentionMetadata) -> TritonAttentionStep:
        if not metadata.prefill_chunks:
            return super().begin_step(metadata)
        planner = self._planners.pop(0)
        self._planners.append(planner)
        planner.plan(self, metadata)
        return _FlashInferStep(self, metadata, planner)


_WORKSPACES: Final[dict[torch.device, Tensor]] = {}


def _workspace(device: torch.device) -> Tensor:
    """Memory for parts of results; layers use it one after the other."""
    if device not in _WORKSPACES:
        _WORKSPACES[device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _WORKSPACES[device]


class _Planner:
    """A wrapper of FlashInfer, and the event after which it may plan again."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self.wrapper = wrapper
        self._planned = torch.cuda.Event() if device.type == "cuda" else None

    def plan(self, attention: FlashInferAttention, metadata: AttentionMetadata) -> None:
        if self._planned is not None:
            self._planned.synchronize()  # of several steps ago
        cache, reach = attention.cache, attention.reach
        chunks = metadata.prefill_chunks
        nums_blocks = [-(-chunk.seq_len // cache.block_size) for chunk in chunks]
        self.wrapper.plan(
            _starts([chunk.num_tokens for chunk in chunks]),
            _starts(nums_blocks),
            _block_ids(metadata, nums_blocks, chunks),
            torch.tensor(
                [(chunk.seq_len - 1) % cache.block_size + 1 for chunk in chunks], dtype=torch.int32
            ),
            attention.num_heads,
            cache.num_kv_heads,
            cache.head_dim,
            cache.block_size,
            causal=True,
            sm_scale=attention.scale,
            window_left=-1 if reach.window is None else reach.window - 1,
            logits_soft_cap=attention.softcap,
            q_data_type=cache.dtype,
            kv_data_type=cache.planes.dtype,
        )
        if self._planned is not None:
            self._planned.record()


def _starts(counts: Sequence[int]) -> Tensor:
    """(n + 1,) int32 on the host: where each item starts, and the end."""
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32)
    torch.cumsum(torch.tensor(counts), 0, out=starts[1:])
    return starts


def _block_ids(
    metadata: AttentionMetadata, nums_blocks: Sequence[int], chunks: Sequence[PrefillChunk]
) -> Tensor:
    """The blocks of all chunks, one after the other, on the device."""
    rows = zip(chunks, nums_blocks, strict=True)
    return torch.cat([metadata.block_table[chunk.row, :count] for chunk, count in rows])


class _FlashInferStep(TritonAttentionStep):
    """A step with chunks."""

    def __init__(
        self, attention: FlashInferAttention, metadata: AttentionMetadata, planner: _Planner
    ) -> None:
        super().__init__(attention, metadata)
        self._planner = planner

    def _prefill(
        self, layer: int, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        if sinks is not None:  # not every kernel of FlashInfer has them
            return super()._prefill(layer, q, keys, values, sinks)
        scales = self._scales(layer)
        settings: dict[str, Any] = {}
        if keys.dtype == torch.float8_e4m3fn:
            settings |= {"k_scale": scales.keys, "v_scale": scales.values}
        out: Tensor = self._planner.wrapper.run(q.contiguous(), (keys, values), **settings)
        return out
