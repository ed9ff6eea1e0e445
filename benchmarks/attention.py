"""Attention of one step on the CPU: the compiled kernel beside torch over gathered blocks, and
beside the time that reading the keys and values from memory takes.

    python benchmarks/attention.py [--json F] [--repeats N] [--threads N]

Both sides get the same cache, queries and block table, and take turns; the least time of a step's
attention, over all layers and divided by them, counts. `bound` is the bytes of keys and values over
the measured read bandwidth; where they fit a cache, less than 1 of it is possible. `errors` is the
largest difference between the two sides.
"""

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import report
import torch
from torch import Tensor

from longshore.worker.attention.backend import AttentionBackend
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.attention.native_backend import NativeAttention
from longshore.worker.attention.segments import decode_segments
from longshore.worker.attention.torch_backend import TorchAttention
from longshore.worker.kernels.native import native
from longshore.worker.kv_cache import KVCache
from longshore.worker.slot_mapping import slot_mapping
from longshore.worker.step_batch import make_batch

BLOCK_SIZE = 16
SHAPES = {"tiny": (8, 2, 32, 4), "0.6b": (16, 8, 128, 2)}  # heads, KV heads, head size, layers
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


class Case:
    """Sequences of `earlier` computed tokens each that compute `new` more."""

    def __init__(self, shape: str, batch: int, earlier: int, new: int) -> None:
        heads, kv_heads, head_dim, layers = SHAPES[shape]
        length = earlier + new
        blocks = -(-length // BLOCK_SIZE)
        self.cache = KVCache(
            batch * blocks + 1,
            num_layers=layers,
            block_size=BLOCK_SIZE,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        for block in self.cache.buffer:
            block.normal_()
        ids = list(range(1, batch * blocks + 1))
        random.Random(0).shuffle(ids)
        table = np.array(ids, np.int32).reshape(batch, blocks)
        step = make_batch(np.full(batch, new), np.full(batch, length), BLOCK_SIZE)
        slots = slot_mapping(table, step.token_rows(), step.positions(), BLOCK_SIZE)
        self.metadata = AttentionMetadata(
            slot_mapping=torch.from_numpy(slots),
            block_table=torch.from_numpy(table),
            decode_rows=torch.from_numpy(step.rows[: step.num_decodes]),
            decode_lens=torch.from_numpy(step.ends[: step.num_decodes]),
            decode_segments=decode_segments(step.decode_blocks(BLOCK_SIZE), BLOCK_SIZE),
            prefill_chunks=step.prefill_chunks(),
        )
        qkv = torch.randn(batch * new, heads + 2 * kv_heads, head_dim).bfloat16()
        self.qkv = qkv.split((heads, kv_heads, kv_heads), dim=1)
        self.num_layers = layers
        self.kv_bytes = batch * length * 2 * kv_heads * head_dim * 2
        self.flops = 4 * heads * head_dim * batch * sum(range(earlier + 1, length + 1))

    def attend(self, backend: AttentionBackend) -> Tensor:
        step = backend.begin_step(self.metadata)
        for layer in range(self.num_layers):
            out = step.forward(layer, *self.qkv)
        return out


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="%(default)s")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--only", choices=["decode", "prefill"], help="measure these alone")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    kernels = native()
    if kernels is None:
        raise SystemExit("the CPU kernels are not built: pip install -e . with a C++ compiler")
    bandwidth = read_bandwidth()
    cases = [("decode", batch, context - 1, 1) for batch, context in DECODES]
    cases += [("prefill", *prefill) for prefill in PREFILLS]
    rows = []
    with torch.inference_mode():
        for shape, (heads, *_) in SHAPES.items():
            for kind, batch, earlier, new in cases:
                if arguments.only not in (None, kind):
                    continue
                case = Case(shape, batch, earlier, new)
                sides = {
                    "kernel": NativeAttention(kernels, case.cache, num_heads=heads),
                    "torch": TorchAttention(case.cache, num_heads=heads),
                }
                rows.append(
                    {"shape": shape, "kind": kind, "batch": batch, "earlier": earlier, "new": new}
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
    least = dict.fromkeys(sides, float("inf"))
    for _ in range(repeats):
        for name, backend in sides.items():
            least[name] = min(least[name], seconds(lambda b=backend: case.attend(b)))
    kernel_s, torch_s = (least[name] / case.num_layers for name in ("kernel", "torch"))
    return {
        "kernel_us": kernel_s * 1e6,
        "torch_us": torch_s * 1e6,
        "torch/kernel": torch_s / kernel_s,
        "kernel/bound": kernel_s / (case.kv_bytes / bandwidth),
        "gflop/s": case.flops / kernel_s / 1e9,
        "error": (outputs["kernel"] - outputs["torch"]).abs().max().item(),
    }


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def read_bandwidth() -> float:
    """Bytes per second of a sum over memory that no cache holds."""
    memory = torch.ones(1 << 27, dtype=torch.float32)
    return memory.nbytes / min(seconds(memory.sum) for _ in range(7))


if __name__ == "__main__":
    main()
