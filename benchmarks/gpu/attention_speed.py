"""Attention of one layer: decodes as a share of the bandwidth, prefills as a share of the rate of
products."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from attention import Case, Shape
from torch import Tensor

from benchmarks.gpu.ceilings import copy_bytes_per_s, graph_kernel_s, matmul_flops_per_s
from benchmarks.gpu.results import Run, at_least
from benchmarks.gpu.timing import graph_seconds
from longshore.worker.attention.backend import AttentionInputs
from longshore.worker.attention.selector import make_attention
from longshore.worker.kernels.operators import num_launches

LARGE_BYTES: Final = 512 << 20
"""A decode that reads more than this must reach DECODE_SHARE of the bandwidth."""

DECODE_SHARE: Final = 0.8
PREFILL_SHARE: Final = 0.5
COLD_BYTES: Final = 256 << 20
"""Several layers of a small cell, which are more than the caches hold, are measured in turns."""

HEADS_8B: Final = (32, 8, 128)
HEADS_32B: Final = (64, 8, 128)
HEADS_0_6B: Final = (16, 8, 128)
DECODES: Final = [
    # heads, sequences, tokens, settings
    (HEADS_8B, 256, 1024, {}),
    (HEADS_8B, 64, 4096, {}),
    (HEADS_8B, 16, 16_384, {}),
    (HEADS_8B, 1, 200_000, {}),
    (HEADS_8B, 256, 2048, {"kv_cache_dtype": "fp8_e4m3"}),
    (HEADS_32B, 64, 4096, {}),
    (HEADS_8B, 1, 1024, {}),
    (HEADS_8B, 1, 8192, {}),
    (HEADS_8B, 8, 1024, {}),
    (HEADS_8B, 64, 512, {}),
    (HEADS_0_6B, 256, 256, {}),
    (HEADS_8B, 64, 16_384, {"window": 1024}),
]
PREFILLS: Final = [
    # heads, sequences, tokens before, new tokens
    (HEADS_8B, 1, 0, 8192),
    (HEADS_32B, 1, 0, 8192),
    (HEADS_8B, 1, 0, 2048),
    (HEADS_8B, 8, 0, 1024),
    (HEADS_8B, 1, 16_384, 2048),
    (HEADS_8B, 16, 4096, 128),
]


def measure(run: Run) -> None:
    decodes, prefills = DECODES, PREFILLS
    if run.is_dry:
        decodes = [((4, 2, 16), 2, 64, {}), ((4, 2, 16), 2, 64, {"window": 16})]
        prefills = [((4, 2, 16), 2, 16, 16)]
    for heads, batch, context, more in decodes:
        name = ", ".join([f"decode attention of {heads}, {batch} x {context:,}", *_named(more)])
        run.check(name, partial(_measure_decode, run, name, heads, batch, context, more))
    for heads, batch, before, new in prefills:
        name = f"prefill attention of {heads}, {batch} x {new:,} after {before:,}"
        run.check(name, partial(_measure_prefill, run, name, heads, batch, before, new))


def _measure_decode(
    run: Run,
    name: str,
    heads: tuple[int, int, int],
    batch: int,
    context: int,
    more: dict[str, Any],
) -> None:
    case = _case(run, (*heads, 1), batch, context - 1, 1, **more)
    num_layers = 1 if run.is_dry else min(64, -(-COLD_BYTES // case.kv_bytes))
    if num_layers > 1:
        case = _case(run, (*heads, num_layers), batch, context - 1, 1, **more)
    with torch.inference_mode():
        seconds = graph_seconds(_layers(case), torch.device(run.device))
    if case.kv_bytes > LARGE_BYTES:
        run.figure(
            name,
            case.kv_bytes / seconds / 1e9,
            "GB/s",
            ceiling=copy_bytes_per_s(run) / 1e9,
            target=at_least(DECODE_SHARE),
        )
        return
    launches = num_launches("decode_attention") if run.device == "cuda" else 1
    floor_s = case.kv_bytes / copy_bytes_per_s(run) + launches * graph_kernel_s(run)
    run.figure(name, seconds * 1e6, "µs", floor=floor_s * 1e6)


def _measure_prefill(
    run: Run, name: str, heads: tuple[int, int, int], batch: int, before: int, new: int
) -> None:
    case = _case(run, (*heads, 1), batch, before, new)
    with torch.inference_mode():
        seconds = graph_seconds(_layers(case), torch.device(run.device))
    run.figure(
        name,
        case.flops / seconds / 1e12,
        "TFLOP/s",
        ceiling=matmul_flops_per_s(run) / 1e12,
        target=at_least(PREFILL_SHARE) if run.is_dry or new >= 8192 else None,
    )


def _case(run: Run, shape: Shape, batch: int, before: int, new: int, **more: Any) -> Case:
    return Case(shape, batch, before, new, device=torch.device(run.device), **more)


def _layers(case: Case) -> list[Callable[[], Tensor]]:
    """The attention of each layer. On a CPU, it includes the KV write."""
    step = make_attention(case.cache, case.kind).begin_step(case.metadata)
    if hasattr(step, "attend"):
        return [partial(step.attend, layer, case.qkv[0]) for layer in range(case.num_layers)]
    return [
        partial(step.forward, layer, AttentionInputs(*case.qkv)) for layer in range(case.num_layers)
    ]


def _named(settings: dict[str, Any]) -> list[str]:
    return [f"{name} {value}" for name, value in settings.items()]
