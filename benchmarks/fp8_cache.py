"""Keys and values in fp8 compared with bfloat16: bytes per token over all layers, and the cost of
attention on the CPU.

    python benchmarks/fp8_cache.py [--json F] [--shapes S ...] [--repeats N] [--threads N]

Both sides use the compiled kernel on a cache with the same random numbers, and take turns. Times
are minima per layer: the attention of all layers of a step, divided by their number.
"""

from functools import partial
from typing import Any, Final

import report
import torch
from attention import BLOCK_SIZE, SHAPES, Case, built_kernels, least_seconds

from longshore.protocol.kv_cache_spec import KVCacheDtype
from longshore.worker.attention.native_backend import NativeAttention

STEPS: Final = [  # sequences, tokens before, new tokens
    (1, 4095, 1),
    (8, 1023, 1),
    (8, 4095, 1),
    (32, 511, 1),
    (1, 0, 256),
    (1, 1024, 256),
    (1, 0, 2048),
]
SIDES: Final[dict[str, KVCacheDtype]] = {"bf16": "auto", "fp8": "fp8_e4m3"}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--repeats", type=int, default=9, help="%(default)s")
    parser.add_argument("--threads", type=int, help="default: torch's")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    kernels = built_kernels()
    rows = []
    with torch.inference_mode():
        for shape in arguments.shapes:
            for batch, earlier, new in STEPS:
                row: dict[str, Any] = {"shape": shape, "batch": batch, "earlier": earlier}
                cases = {}
                for side, kept in SIDES.items():
                    torch.manual_seed(0)
                    cases[side] = Case(shape, batch, earlier, new, kv_cache_dtype=kept)
                    row[f"{side}_token_bytes"] = cases[side].cache.planes[0].nbytes // BLOCK_SIZE
                times = compare(
                    {
                        side: (case, NativeAttention(kernels, case.cache, case.kind))
                        for side, case in cases.items()
                    },
                    arguments.repeats,
                )
                row |= {"new": new} | {f"{side}_us": time_us for side, time_us in times.items()}
                rows.append(row | {"fp8/bf16": times["fp8"] / times["bf16"]})
    report.write(
        arguments.json,
        rows,
        threads=torch.get_num_threads(),
        instruction_set=kernels.instruction_set,
    )


def compare(sides: dict[str, tuple[Case, NativeAttention]], repeats: int) -> dict[str, float]:
    """Microseconds per layer, by side."""
    ways = {name: partial(case.attend, backend) for name, (case, backend) in sides.items()}
    least = least_seconds(ways, repeats + 1)  # the first one warms up
    return {name: least[name] / case.num_layers * 1e6 for name, (case, _) in sides.items()}


if __name__ == "__main__":
    main()
