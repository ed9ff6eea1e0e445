"""The choice between FlashInfer and the Triton kernels for prefill chunks, when a worker starts.

A probe computes chunks on random inputs of the model's shapes with FlashInfer, compares the results
with plain torch, and times FlashInfer against the Triton kernels. It never fails: if FlashInfer is
missing, raises, or computes something else, the Triton kernels are used.
"""

import importlib.util
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from longshore.worker.attention.backend import AttentionBackend, AttentionInputs
from longshore.worker.attention.flashinfer_backend import FlashInferAttention, unsupported
from longshore.worker.attention.metadata import AttentionMetadata, PrefillChunk
from longshore.worker.attention.torch_backend import TorchAttention
from longshore.worker.attention.triton_backend import TritonAttention
from longshore.worker.kv_cache.buffer import PagedKV
from longshore.worker.kv_cache.fp8 import FP8, to_fp8

if TYPE_CHECKING:
    from longshore.worker.attention.kind import PagedAttentionKind

logger = logging.getLogger(__name__)

Timer = Callable[[Callable[[], object], torch.device], float]
"""Seconds of one call on a device."""

CHUNKS: Final = ((512, 2048), (200, 200))
"""New tokens and length of each sequence of the probe."""

NUM_REPEATS: Final = 10
NUM_LAYERS: Final = 2  # strides of the cache as with many
MAX_ERROR: Final = 0.02
"""Of the norm of all results, relative to plain torch; rounding to bfloat16 gives 0.004."""


def prefill_backend(
    cache: PagedKV,
    kind: "PagedAttentionKind",
    *,
    is_wanted: bool,
    timer: Timer | None = None,
) -> AttentionBackend:
    """FlashInfer's backend if it computes chunks of this kind rightly and faster than the Triton
    kernels, whose backend it is otherwise. is_wanted: FlashInfer was asked for: it need not be
    faster. Says in the log what it chose, and why, unless FlashInfer is not installed and not
    asked for."""
    triton = TritonAttention(cache, kind)
    if not is_wanted and importlib.util.find_spec("flashinfer") is None:
        return triton
    level = logging.WARNING if is_wanted else logging.INFO
    reason = unsupported(cache, kind)
    if reason is None:
        try:
            backend = FlashInferAttention(cache, kind)
            reason = _why_not(cache, kind, None if is_wanted else timer or _seconds)
        except Exception as error:  # another package's: it compiles and loads libraries
            reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger.log(level, "FlashInfer is not used for %s: %s", kind, reason)
        return triton
    logger.info("FlashInfer computes the prefill chunks of %s", kind)
    return backend


def _why_not(cache: PagedKV, kind: "PagedAttentionKind", timer: Timer | None) -> str | None:
    """Why FlashInfer should not be used; None if it should. timer: None: speed does not matter."""
    generator = torch.Generator(cache.device).manual_seed(0)
    small = _random_cache(cache, generator)
    metadata = _metadata(small)
    num_tokens = sum(new for new, _ in CHUNKS)
    q, k, v = (
        torch.randn(
            (num_tokens, heads, cache.head_dim),
            generator=generator,
            device=cache.device,
            dtype=cache.dtype,
        )
        for heads in (kind.num_heads, cache.num_kv_heads, cache.num_kv_heads)
    )
    inputs = AttentionInputs(q, k, v)
    steps = {
        make: make(small, kind).begin_step(metadata)
        for make in (TorchAttention, FlashInferAttention, TritonAttention)
    }
    wanted, found = (
        steps[make].forward(1, inputs).float() for make in (TorchAttention, FlashInferAttention)
    )
    error = float((found - wanted).norm() / wanted.norm())
    if not error <= MAX_ERROR:  # also if it is NaN
        return f"its results differ from plain torch by {error:.1%} (at most {MAX_ERROR:.0%})"
    if timer is None:
        return None
    theirs, ours = (
        timer(lambda step=steps[make]: step.forward(1, inputs), cache.device)  # type: ignore[misc]
        for make in (FlashInferAttention, TritonAttention)
    )
    if theirs < ours:
        return None
    return f"it takes {theirs * 1e6:.0f} us for chunks that take Triton kernels {ours * 1e6:.0f} us"


def _random_cache(cache: PagedKV, generator: torch.Generator) -> PagedKV:
    """A small cache like `cache`, with other contents."""
    num_blocks = sum(-(-length // cache.block_size) for _, length in CHUNKS) + 1
    shape = (num_blocks, cache.num_kv_heads, NUM_LAYERS, *cache.planes.shape[3:])
    planes = torch.randn(shape, generator=generator, device=cache.device, dtype=cache.dtype)
    if cache.fp8 is None:
        return PagedKV(planes)
    scales = (cache.fp8.scales * NUM_LAYERS)[:NUM_LAYERS]
    stored = to_fp8(planes * scales[1].keys, scales[1].keys).view(FP8)
    return PagedKV(stored, replace(cache.fp8, scales=scales))


def _metadata(cache: PagedKV) -> AttentionMetadata:
    """A step of CHUNKS, on shuffled blocks."""
    device, size = cache.device, cache.block_size
    width = max(-(-length // size) for _, length in CHUNKS)
    ids = torch.randperm(cache.num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
    table = torch.zeros((len(CHUNKS), width), dtype=torch.int32)
    chunks, slots, first = [], [], 0
    for row, (new, length) in enumerate(CHUNKS):
        used = -(-length // size)
        table[row, :used], ids = ids[:used], ids[used:]
        chunks.append(PrefillChunk(row, first, new, length))
        positions = torch.arange(length - new, length)
        slots.append(table[row, positions // size].long() * size + positions % size)
        first += new
    none = torch.empty(0, dtype=torch.int64, device=device)
    return AttentionMetadata(
        slot_mapping=torch.cat(slots).to(device),
        block_table=table.to(device),
        decode_rows=none,
        decode_lens=none,
        decode_segments=(),
        prefill_chunks=chunks,
    )


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    call()
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(NUM_REPEATS):
        call()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / NUM_REPEATS
