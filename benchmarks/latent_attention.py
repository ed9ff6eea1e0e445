"""Latent attention of one step: absorbed projections compared with expanded keys and values.

    python benchmarks/latent_attention.py [--json F] [--repeats N] [--threads N] [--shape S]
                                          [--dtype D]

Both sides get the same cache, queries and block table, and take turns. Times are minima per layer.
`chosen/best` is the time of the side that LatentAttentionKind.expands chooses, divided by that of
the faster side. A decode is always absorbed; the time with expansion is shown for comparison.
`errors` is the largest difference between the two sides.
"""

import random
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import report
import torch
from attention import BLOCK_SIZE, least_seconds, metadata
from torch import Tensor

from longshore.worker.attention.latent_backend import (
    LatentAttentionKind,
    LatentProjections,
    PagedLatentAttention,
)
from longshore.worker.attention.metadata import AttentionMetadata
from longshore.worker.kernels.native import native
from longshore.worker.kv_cache.buffer import PagedLatents
from longshore.worker.step.step_batch import StepBatch, make_batch

LAYERS = 2
SHAPES = {
    "tiny": LatentAttentionKind(
        num_heads=8, latent_dim=64, rope_dim=16, nope_dim=32, value_dim=32, scale=48**-0.5
    ),
    # Shapes of DeepSeek-V2-Lite, and of one of eight shards of DeepSeek-V3.
    "v2-lite": LatentAttentionKind(
        num_heads=16, latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128, scale=192**-0.5
    ),
}
CASES = [  # sequences, tokens before, new tokens
    *[(batch, context - 1, 1) for batch, context in ((1, 512), (1, 4096), (8, 512), (32, 512))],
    *[(1, 0, new) for new in (16, 64, 256, 1024)],
    *[(1, earlier, new) for earlier in (256, 2048) for new in (4, 16, 64, 128, 192, 256, 512)],
]


class Absorbing(LatentAttentionKind):
    def expands(self, num_tokens: int, seq_len: int) -> bool:
        return False


class Expanding(LatentAttentionKind):
    def expands(self, num_tokens: int, seq_len: int) -> bool:
        return True


class Case:
    """Sequences with `earlier` computed tokens each, which compute `new` more."""

    def __init__(
        self, kind: LatentAttentionKind, batch: int, earlier: int, new: int, dtype: torch.dtype
    ) -> None:
        self.new, self.length = new, earlier + new
        blocks = -(-self.length // BLOCK_SIZE)
        head_size = kind.latent_dim + kind.rope_dim
        shape = (batch * blocks + 1, LAYERS, BLOCK_SIZE, head_size)
        self.view = PagedLatents(torch.empty(shape, dtype=dtype).normal_())
        ids = list(range(1, batch * blocks + 1))
        random.Random(0).shuffle(ids)
        table = np.array(ids, np.int32).reshape(batch, blocks)
        step = make_batch(np.full(batch, new), np.full(batch, self.length), BLOCK_SIZE)
        as_chunks = StepBatch(step.rows, step.starts, step.counts, num_decodes=0)
        self.steps = {
            Absorbing: metadata(step, table),
            Expanding: metadata(as_chunks, table),
        }
        heads = (batch * new, kind.num_heads)
        self.inputs = (
            torch.randn(*heads, kind.nope_dim).to(dtype),
            torch.randn(*heads, kind.rope_dim).to(dtype),
            torch.randn(batch * new, head_size).to(dtype),
        )
        to_keys = torch.randn(kind.num_heads, kind.nope_dim, kind.latent_dim)
        to_values = torch.randn(kind.num_heads, kind.latent_dim, kind.value_dim)
        width = kind.latent_dim**-0.5
        self.projections = LatentProjections(
            (to_keys * width).to(dtype), (to_values * width).to(dtype)
        )

    def attend(self, backend: PagedLatentAttention, step: AttentionMetadata) -> Tensor:
        planned = backend.begin_step(step)
        for layer in range(LAYERS):
            out = planned.forward(layer, *self.inputs, projections=self.projections)
        return out


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="%(default)s")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--shape", choices=SHAPES, help="measure only this")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    rows = []
    with torch.inference_mode():
        for shape, kind in SHAPES.items():
            if arguments.shape not in (None, shape):
                continue
            for batch, earlier, new in CASES:
                case = Case(kind, batch, earlier, new, dtype)
                rows.append(
                    {"shape": shape, "batch": batch, "earlier": earlier, "new": new}
                    | compare(kind, case, arguments.repeats)
                )
    kernels = native()
    report.write(
        arguments.json,
        rows,
        dtype=arguments.dtype,
        threads=torch.get_num_threads(),
        instruction_set=None if kernels is None else kernels.instruction_set,
    )


def compare(kind: LatentAttentionKind, case: Case, repeats: int) -> dict[str, Any]:
    backends = {side: side(**asdict(kind)).make_backend(case.view) for side in case.steps}
    outputs = {side: case.attend(backends[side], step) for side, step in case.steps.items()}
    ways = {side: partial(case.attend, backends[side], step) for side, step in case.steps.items()}
    least = {side: least_s / LAYERS for side, least_s in least_seconds(ways, repeats).items()}
    expands = case.new > 1 and kind.expands(case.new, case.length)
    return {
        "absorbed_us": least[Absorbing] * 1e6,
        "expanded_us": least[Expanding] * 1e6,
        "expanded/absorbed": least[Expanding] / least[Absorbing],
        "chosen": "expanded" if expands else "absorbed",
        "chosen/best": least[Expanding if expands else Absorbing] / min(least.values()),
        "error": (outputs[Absorbing] - outputs[Expanding]).abs().max().item(),
    }


if __name__ == "__main__":
    main()
