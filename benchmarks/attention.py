"""Attention of one step on the CPU: the compiled kernel compared with torch on gathered blocks,
and with the time to read the keys and values from memory. The `limited` cases are layers with
windows, chunks, soft caps and sinks; the cost of a window does not depend on the tokens before it.

    python benchmarks/attention.py [--json F] [--repeats N] [--threads N] [--only KIND]
        [--shapes tiny] [--max-tokens N]

Both sides get the same cache, queries and block table, and take turns. Times are minima per layer:
the attention of all layers of a step, divided by their number. `bound` is the size of keys and
values divided by the measured read bandwidth; a ratio below 1 is possible if they fit in a CPU
cache. `errors` is the largest difference between the two sides.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import report
import torch
from torch import Tensor

from longshore.protocol.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheDtype,
    KVCacheGroup,
)
from longshore.worker.attention.backend import AttentionBackend, AttentionInputs
from longshore.worker.attention.kind import PagedAttentionKind
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.attention.native_backend import NativeAttention
from longshore.worker.attention.reach import Reach
from longshore.worker.attention.segments import decode_segments
from longshore.worker.attention.torch_backend import TorchAttention
from longshore.worker.kernels.native import Native, native
from longshore.worker.kv_cache.buffer import KVCache, PagedKV
from longshore.worker.kv_cache.plan import element_bytes
from longshore.worker.kv_cache.slot_mapping import slots_at
from longshore.worker.process.device import dtype_name
from longshore.worker.step.step_batch import StepBatch, make_batch

BLOCK_SIZE = 16
CPU = torch.device("cpu")
Shape: TypeAlias = tuple[int, int, int, int]  # heads, KV heads, head size, layers
SHAPES: dict[str, Shape] = {"tiny": (8, 2, 32, 4), "0.6b": (16, 8, 128, 2)}
BLOCKS_AT_ONCE = 256
"""How many blocks are filled with random numbers at a time, which need four bytes each."""
DECODES = [
    (batch, context)
    for batch in (1, 8, 64, 256)
    for context in (128, 512, 2048, 4096, 16384)
    if batch * context <= 1 << 17
]
PREFILLS = [  # sequences, tokens before, new tokens
    (1, 0, 64),
    (1, 0, 256),
    (1, 0, 2048),
    (8, 0, 256),
    (1, 1024, 4),
    (1, 1024, 64),
    (16, 1024, 64),
    (1, 1024, 256),
    (1, 1024, 1024),
    (1, 6144, 2048),
]


LIMITED = [  # sequences, tokens before, new tokens, special settings of the layer
    *[(1, context - 1, 1, {"window": 1024}) for context in (1024, 2048, 16384, 65536)],
    *[(8, context - 1, 1, {"window": 1024}) for context in (1024, 2048, 16384, 65536)],
    *[(1, context - 512, 512, {"window": 1024}) for context in (2048, 16384, 65536)],
    (1, 65535, 1, {"chunk": 8192}),
    (1, 16384 - 512, 512, {"chunk": 8192}),
    *[(8, 2047, 1, more) for more in ({}, {"softcap": 50.0}, {"sinks": True})],
    *[(1, 1024, 1024, more) for more in ({}, {"softcap": 50.0}, {"sinks": True})],
]


class Case:
    """Sequences with `earlier` computed tokens each, which compute `new` more: a number for all, or
    one per sequence.

    The cache holds only what the new tokens attend to, as in a group that frees skipped blocks. All
    other lines of the block table are block 0.
    """

    def __init__(
        self,
        shape: str | Shape,
        batch: int,
        earlier: int | Sequence[int],
        new: int | Sequence[int],
        *,
        block_size: int = BLOCK_SIZE,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device = CPU,
        kv_cache_dtype: KVCacheDtype = "auto",
        sinks: bool = False,
        **kind: Any,
    ) -> None:
        heads, kv_heads, head_dim, layers = SHAPES[shape] if isinstance(shape, str) else shape
        self.kind = PagedAttentionKind(num_heads=heads, **kind)
        self.reach = Reach(window=self.kind.window, chunk=self.kind.chunk)
        starts, counts = (
            np.broadcast_to(given, batch).astype(np.int64) for given in (earlier, new)
        )
        lengths, firsts = starts + counts, np.maximum(0, self.reach.first_key(starts))
        first_blocks, end_blocks = firsts // block_size, -(-lengths // block_size)
        num_blocks = int((end_blocks - first_blocks).sum())
        spec = FullAttentionSpec(
            block_size=block_size,
            num_kv_heads=kv_heads,
            head_size=head_dim,
            dtype_bytes=element_bytes(kv_cache_dtype, dtype.itemsize),
        )
        group = KVCacheGroup(tuple(str(layer) for layer in range(layers)), spec)
        kept = dtype_name(dtype) if kv_cache_dtype == "auto" else kv_cache_dtype
        config = KVCacheConfig(num_blocks + 1, (group,), kept)
        view = KVCache(config, dtype=dtype, device=device).view(0)
        assert isinstance(view, PagedKV)
        self.cache = view
        for blocks in self.cache.planes[1:].split(BLOCKS_AT_ONCE):
            blocks.copy_(torch.randn(blocks.shape, device=device))
        ids = list(range(1, num_blocks + 1))
        random.Random(0).shuffle(ids)
        table = np.zeros((batch, int(end_blocks.max())), np.int32)
        for row, (first, end) in enumerate(zip(first_blocks, end_blocks, strict=True)):
            table[row, first:end] = [ids.pop() for _ in range(first, end)]
        self.batch = make_batch(counts, lengths, block_size)
        self.metadata = metadata(self.batch, table, block_size, device)
        num_tokens = int(counts.sum())
        qkv = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim, device=device).to(dtype)
        self.qkv = qkv.split((heads, kv_heads, kv_heads), dim=1)
        self.sinks = torch.randn(heads, device=device) if sinks else None
        self.num_layers = layers
        self.kv_bytes = int((lengths - firsts).sum()) * 2 * kv_heads * head_dim * spec.dtype_bytes
        positions = self.batch.positions()
        seen = positions + 1 - np.maximum(0, self.reach.first_key(positions))
        self.flops = 4 * heads * head_dim * int(seen.sum())

    def attend(self, backend: AttentionBackend) -> Tensor:
        step = backend.begin_step(self.metadata)
        for layer in range(self.num_layers):
            out = step.forward(layer, AttentionInputs(*self.qkv, sinks=self.sinks))
        return out


def metadata(
    step: StepBatch, table: np.ndarray, block_size: int = BLOCK_SIZE, device: torch.device = CPU
) -> AttentionMetadata:
    places = np.divmod(step.positions(), block_size)
    slots = slots_at(table, step.token_rows(), places, block_size)
    on_device = [
        torch.from_numpy(array).to(device)
        for array in (
            slots,
            table,
            step.rows[: step.num_decodes],
            step.ends[: step.num_decodes],
        )
    ]
    return AttentionMetadata(
        *on_device,
        decode_segments=decode_segments(step.decode_blocks(block_size), block_size),
        prefill_chunks=step.prefill_chunks(),
    )


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="%(default)s")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument(
        "--only", choices=["decode", "prefill", "limited"], help="measure only these"
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--max-tokens", type=int, help="leave out cases with more in the cache")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    kernels = built_kernels()
    bandwidth = read_bandwidth()
    plain: dict[str, Any] = {}
    cases = [("decode", batch, context - 1, 1, plain) for batch, context in DECODES]
    cases += [("prefill", *prefill, plain) for prefill in PREFILLS]
    cases += [("limited", *limited) for limited in LIMITED]
    cases = [
        case
        for case in cases
        if arguments.only in (None, case[0])
        and (arguments.max_tokens is None or case[1] * (case[2] + case[3]) <= arguments.max_tokens)
    ]
    rows = []
    with torch.inference_mode():
        for shape in arguments.shapes:
            for kind, batch, earlier, new, more in cases:
                case = Case(shape, batch, earlier, new, **more)
                sides = {
                    "kernel": NativeAttention(kernels, case.cache, case.kind),
                    "torch": TorchAttention(case.cache, case.kind),
                }
                named = ", ".join(f"{name} {value}" for name, value in more.items())
                rows.append(
                    {"shape": shape, "kind": kind, "batch": batch, "earlier": earlier, "new": new}
                    | {"layer": named or "plain"}
                    | compare(case, sides, arguments.repeats, bandwidth)
                )
    report.write(
        arguments.json,
        rows,
        threads=torch.get_num_threads(),
        instruction_set=kernels.instruction_set,
        read_gb_per_s=bandwidth / 1e9,
    )


def compare(
    case: Case, sides: dict[str, AttentionBackend], repeats: int, bandwidth: float
) -> dict[str, Any]:
    outputs = {name: case.attend(backend) for name, backend in sides.items()}
    ways = {name: partial(case.attend, backend) for name, backend in sides.items()}
    least = least_seconds(ways, repeats)
    kernel_s, torch_s = (least[name] / case.num_layers for name in ("kernel", "torch"))
    return {
        "kernel_us": kernel_s * 1e6,
        "torch_us": torch_s * 1e6,
        "torch/kernel": torch_s / kernel_s,
        "kernel/bound": kernel_s / (case.kv_bytes / bandwidth),
        "gflop/s": case.flops / kernel_s / 1e9,
        "error": (outputs["kernel"] - outputs["torch"]).abs().max().item(),
    }


def built_kernels() -> Native:
    kernels = native()
    if kernels is None:
        raise SystemExit("the CPU kernels are not built: pip install -e . with a C++ compiler")
    return kernels


def least_seconds(ways: Mapping[Any, Callable[[], object]], repeats: int) -> dict[Any, float]:
    """Return the least seconds by way. They take turns."""
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, call in ways.items():
            least[name] = min(least[name], seconds(call))
    return least


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def read_bandwidth() -> float:
    """Bytes per second of a sum over memory that fits in no cache."""
    memory = torch.ones(1 << 27, dtype=torch.float32)
    return memory.nbytes / min(seconds(memory.sum) for _ in range(7))


if __name__ == "__main__":
    main()
