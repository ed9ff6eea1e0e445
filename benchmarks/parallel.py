"""One engine on two CPU cores: one process with two threads, two shards, or two pipeline stages.

    python benchmarks/parallel.py MODEL [--workloads decode prefill] [--layouts NAME ...]
        [--prompts 16] [--rounds 3] [--json F]

MODEL is a model folder. All layouts are loaded before timing starts and take turns; in each round
they answer the same new prompts. `decode` has prompts of 16 tokens with 64 out, `prefill` prompts
of 512 tokens with one out. Times are minima of all rounds. `ratio` is output (decode) or prompt
(prefill) tokens per second divided by those of one process with two threads. `same` is the share of
greedy answers equal to its answers.

Two ranks have the same cores and memory as two threads, so this measures the overhead of the
layouts; their purpose is a model that does not fit in one device. Sums over shards are rounded
differently, so in bfloat16 some answers differ.
"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import report

from longshore import LLM, SamplingParams

LAYOUTS: dict[str, dict[str, Any]] = {
    "1 process, 2 threads": {"threads": 2},
    "1 process, 1 thread": {"threads": 1},
    "2 shards": {"tensor_parallel_size": 2, "threads": 1},
    "2 stages": {"pipeline_parallel_size": 2, "threads": 1},
}
BASELINE = "1 process, 2 threads"
WORKLOADS = {"decode": (16, 64), "prefill": (512, 1)}


def answer(llm: LLM, prompts: list[list[int]], num_out: int) -> tuple[float, list[list[int]]]:
    """The seconds it took, and the tokens."""
    params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return time.perf_counter() - started, [output.outputs[0].token_ids for output in outputs]


def measure(
    model: Path, workloads: list[str], layouts: list[str], num_prompts: int, rounds: int
) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                LLM(model, device="cpu", num_blocks=1000, max_model_len=1024, **LAYOUTS[name])
            )
            for name in dict.fromkeys([BASELINE, *layouts])
        }
        rows = []
        for workload in workloads:
            num_in, num_out = WORKLOADS[workload]
            walls: dict[str, list[float]] = {name: [] for name in engines}
            same = dict.fromkeys(engines, 0)
            for turn in range(rounds + 1):
                prompts = generator.integers(3, 4000, (num_prompts, num_in)).tolist()
                wanted: list[list[int]] = []
                for name, llm in engines.items():
                    wall_s, token_ids = answer(llm, prompts, num_out)
                    wanted = wanted or token_ids
                    if turn:  # the first round warms up
                        walls[name].append(wall_s)
                        same[name] += sum(map(list.__eq__, token_ids, wanted))
            num_tokens = num_prompts * (num_out if num_out > 1 else num_in)
            least = {name: min(walls[name]) for name in engines}
            rows += [
                {
                    "workload": workload,
                    "layout": name,
                    "tokens_per_s": num_tokens / least[name],
                    "ratio": least[BASELINE] / least[name],
                    "same": same[name] / (rounds * num_prompts),
                    "walls_s": walls[name],
                }
                for name in engines
            ]
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=LAYOUTS,
        default=list(LAYOUTS),
        help=f"beside {BASELINE!r}, with which they are compared",
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = measure(
        options.model, options.workloads, options.layouts, options.prompts, options.rounds
    )
    report.write(options.json, rows, model=options.model.name, num_prompts=options.prompts)


if __name__ == "__main__":
    main()
