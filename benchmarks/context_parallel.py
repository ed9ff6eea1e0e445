"""Two shards with copies of one KV head: either each stores all tokens, or they split the tokens.

    python benchmarks/context_parallel.py MODEL [--contexts 256 2048] [--layouts NAME ...]
        [--prompts 4] [--rounds 3] [--json F]

MODEL is a model folder with one KV head or with latents (`mqa-tiny-rand` of peers/make_models.py).
All engines have the same number of blocks, and so the same memory per rank, and are loaded before
timing starts. Each round answers new prompts of `context` tokens with one token, which is timed as
prefill, and again with 33 tokens. The prompts are cached by then, so the second time is that of 33
decode steps. Layouts take turns; times are the minima of all rounds. `ratio` compares with two
shards that store all tokens. `plain` compares with the same shards without compiled kernels,
because context parallel attention is plain torch. `same` is the share of answers equal to those of
these shards. Bytes are those of one rank.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import report
from parallel import answer

from longshore import LLM
from longshore.deploy.cli.cache_plan import plan
from longshore.deploy.cli.client_options import CachePlanOptions

BLOCK_SIZE, NUM_BLOCKS, NUM_OUT = 16, 2000, 33
LAYOUTS: dict[str, dict[str, Any]] = {
    "2 shards": {},
    "2 shards, plain torch": {"cpu_kernels": "torch"},
    "2 shards that share": {"decode_context_parallel_size": 2},
    "2 shards that share, turns of 16": {
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": 16,
    },
}
BASELINE, PLAIN = "2 shards", "2 shards, plain torch"


def memory(model: Path, num_sharing: int) -> dict[str, float]:
    """Memory of one rank: KV cache bytes per token, and the tokens that NUM_BLOCKS blocks hold."""
    cache = plan(
        CachePlanOptions(
            plan=str(model),
            tensor_parallel_size=2,
            decode_context_parallel_size=num_sharing,
            block_size=BLOCK_SIZE,
        )
    ).cache
    per_block = cache.groups[0].block_tokens
    return {
        "bytes_per_token": cache.block_bytes / per_block,
        "tokens_that_fit": (NUM_BLOCKS - cache.num_reserved_blocks) * per_block,
    }


def measure(
    model: Path, contexts: list[int], layouts: list[str], num_prompts: int, rounds: int
) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    rows = []
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                LLM(
                    model,
                    device="cpu",
                    threads=1,
                    tensor_parallel_size=2,
                    block_size=BLOCK_SIZE,
                    num_blocks=NUM_BLOCKS,
                    max_model_len=max(contexts) + NUM_OUT,
                    **LAYOUTS[name],
                )
            )
            for name in dict.fromkeys([BASELINE, PLAIN, *layouts])
        }
        for context in contexts:
            prefills: dict[str, list[float]] = {name: [] for name in engines}
            decodes: dict[str, list[float]] = {name: [] for name in engines}
            same = dict.fromkeys(engines, 0)
            for turn in range(rounds + 1):
                prompts = generator.integers(3, 4000, (num_prompts, context)).tolist()
                wanted: list[list[int]] = []
                for name, llm in engines.items():
                    prefill_s, _ = answer(llm, prompts, 1)
                    decode_s, token_ids = answer(llm, prompts, NUM_OUT)
                    wanted = wanted or token_ids
                    if turn:  # the first round warms up
                        prefills[name].append(prefill_s)
                        decodes[name].append(decode_s)
                        same[name] += sum(map(list.__eq__, token_ids, wanted))
            for name in engines:
                row: dict[str, Any] = {"context": context, "layout": name}
                for phase, walls in (("prefill", prefills), ("decode", decodes)):
                    least = {each: min(walls[each]) for each in engines}
                    row[f"{phase}_ms"] = 1e3 * least[name] / (NUM_OUT if phase == "decode" else 1)
                    row[f"{phase}_ratio"] = least[name] / least[BASELINE]
                    row[f"{phase}_plain"] = least[name] / least[PLAIN]
                row |= memory(model, LAYOUTS[name].get("decode_context_parallel_size", 1))
                row["same"] = same[name] / (rounds * num_prompts)
                row["walls_s"] = [prefills[name], decodes[name]]
                rows.append(row)
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 2048])
    parser.add_argument(
        "--layouts",
        nargs="+",
        choices=LAYOUTS,
        default=list(LAYOUTS),
        help=f"beside {BASELINE!r} and {PLAIN!r}, with which they are compared",
    )
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = measure(
        options.model, options.contexts, options.layouts, options.prompts, options.rounds
    )
    report.write(options.json, rows, model=options.model.name, num_prompts=options.prompts)


if __name__ == "__main__":
    main()
