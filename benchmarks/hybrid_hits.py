"""Share of prompt tokens that the prefix cache of a hybrid model finds, by rules and memory.

    python benchmarks/hybrid_hits.py [--workloads conversation synthetic agents-keep agents-drop]
        [--plans 9B 35B-A3B] [--memory 0.25 0.5 1 2 4 inf] [--requests N] [--jobs 200]
        [--sides scheduler] [--job-rate 0.1] [--rules] [--json F]

A hybrid model has attention KV for every token and recurrent states that are kept only where a
snapshot was taken. A prefix of length p is found if the attention blocks up to p are cached and a
snapshot at p is. Each request is looked up, computed and finished before the next one (see
`hybrid_caches.py`), so that only rules are compared. A row has the share of:

- `full`: a full-attention model with the same bytes of KV per token and no states, LRU
- `vllm`, `sglang`: their rules, in `hybrid_caches.py`
- `ours`: `hybrid_rules.py`
- `scheduler`: the real scheduler, in `hybrid_scheduler.py`
- `bound`: an upper bound, which knows the future and gets snapshots for free

`--memory` is in multiples of what an 80 GB GPU leaves for the pool. `times_peer` is ours over the
better one of the two, and `of_full` over `full`. What ours loses against an endless cache of full
attention is split into `block_ends`, `first_sharers` and `evicted`. `--rules` measures our rules
without or with one of them at a time instead.

`agents-keep` and `agents-drop` are jobs of `longshore bench agents` with a template that keeps the
reasoning of former turns, and one that drops it when a user writes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Any, Final

import report
from hybrid_caches import BLOCK, Cache, Foresight, LruPool, Sglang, Vllm
from hybrid_rules import Hybrid, Rules
from hybrid_scheduler import Scheduled
from hybrid_workloads import TRACES, Request, agents, read_trace

GPU_BYTES: Final = 80e9
MEMORY_SHARE: Final = 0.9
ACTIVATIONS_BYTES: Final = 4e9
"""Of a step, with CUDA graphs."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Shapes of a model, as in transformers' `Qwen3_5TextConfig` and `Qwen3_5MoeTextConfig`.
    Keys, values and inputs of convolutions have 2 bytes per element, states 4."""

    attention_layers: int
    kv_heads: int
    linear_layers: int
    weight_bytes: float
    head_dim: int = 256
    value_heads: int = 32
    key_heads: int = 16
    linear_head_dim: int = 128
    conv_width: int = 4

    @property
    def layer_token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * 2

    @property
    def layer_state_bytes(self) -> int:
        channels = (2 * self.key_heads + self.value_heads) * self.linear_head_dim
        state = self.value_heads * self.linear_head_dim**2 * 4
        return state + (self.conv_width - 1) * channels * 2

    @property
    def token_bytes(self) -> int:
        return self.attention_layers * self.layer_token_bytes

    @property
    def state_bytes(self) -> int:
        return self.linear_layers * self.layer_state_bytes

    @property
    def state_tokens(self) -> float:
        return self.state_bytes / self.token_bytes

    @property
    def paged_state_tokens(self) -> int:
        """With the padding of its last page."""
        return ceil(self.state_tokens / BLOCK) * BLOCK

    @property
    def vllm_block(self) -> int:
        return ceil(self.layer_state_bytes / self.layer_token_bytes / BLOCK) * BLOCK

    @property
    def vllm_state_tokens(self) -> int:
        """A block per group of as many linear layers as there are attention layers."""
        return self.vllm_block * ceil(self.linear_layers / self.attention_layers)

    def capacity(self, memory: float) -> float:
        """Tokens of KV in the pool."""
        pool = MEMORY_SHARE * GPU_BYTES - self.weight_bytes - ACTIVATIONS_BYTES
        return memory * pool / self.token_bytes


PLANS: Final = {
    "9B": Plan(attention_layers=8, kv_heads=4, linear_layers=24, weight_bytes=17.9e9),  # bf16
    "35B-A3B": Plan(attention_layers=10, kv_heads=2, linear_layers=30, weight_bytes=35.6e9),  # FP8
}

CACHES: Final[dict[str, Callable[[Plan, float, Sequence[Request]], Cache]]] = {
    "full": lambda plan, capacity, _: LruPool(capacity),
    "vllm": lambda plan, capacity, _: Vllm(capacity, plan.vllm_block, plan.vllm_state_tokens),
    "sglang": lambda plan, capacity, _: Sglang(capacity, plan.state_tokens),
    "ours": lambda plan, capacity, _: Hybrid(capacity, plan.paged_state_tokens),
    "scheduler": lambda plan, capacity, requests: Scheduled(
        capacity, plan.paged_state_tokens, requests
    ),
    "bound": lambda plan, capacity, requests: Foresight(capacity, requests),
}

VARIANTS: Final = {
    "recommended": Rules(),
    "no insurance": Rules(insurance=0),
    "insurance at factors of 4": Rules(insurance_factor=4),
    "no junctions": Rules(junctions=False),
    "no junctions, no insurance": Rules(junctions=False, insurance=0),
    "junctions of what is evicted": Rules(seen_junctions=True),
    "no end of the system prompt": Rules(system=False),
    "no turn start": Rules(turn_start="none"),
    "turn start first to go": Rules(turn_start="first to go"),
    "prompt's end, not the answer's": Rules(answer_end=False),
    "prompt's end and the answer's": Rules(prompt_end=True),
    "consumed ends as others": Rules(consumed_first=False),
    "a hit refreshes its path": Rules(refreshes_path=True),
    "all groups alike": Rules(by_turn=False),
    "gaps of cached turns": Rules(gaps="hits"),
    "a gap of a minute": Rules(gaps="fixed"),
    "without tokens per memory": Rules(by_size=False),
    "newest young end first": Rules(newest_first=True),
    "oldest first": Rules(by_rate=False),
    "oldest first, consumed as others": Rules(by_rate=False, consumed_first=False),
}


def workload(name: str, options: Any) -> list[Request]:
    if name.startswith("agents-"):
        is_dropped = name == "agents-drop"
        return list(agents(options.jobs, options.job_rate, is_dropped=is_dropped))
    return list(read_trace(TRACES / f"{name}_trace.jsonl.gz", options.requests))


def serve(cache: Cache, requests: Sequence[Request]) -> float:
    """Share of the prompt tokens found."""
    for request in requests:
        cache.serve(request)
    return cache.totals.found / cache.totals.prompt


def losses(cache: Cache) -> dict[str, float]:
    totals = cache.totals
    return {
        "block_ends": totals.lost_at_block_ends / totals.prompt,
        "first_sharers": totals.lost_by_first_sharers / totals.prompt,
        "evicted": totals.lost_by_eviction / totals.prompt,
    }


def compare(
    plan: Plan, memory: float, requests: Sequence[Request], sides: Sequence[str]
) -> dict[str, Any]:
    capacity = plan.capacity(memory)
    row: dict[str, Any] = {}
    lost: dict[str, float] = {}
    for name in sides:
        cache = CACHES[name](plan, capacity, requests)
        row[name] = serve(cache, requests)
        if name == "ours":
            lost = losses(cache)
    if {"ours", "full", "vllm", "sglang"} <= row.keys():
        row["of_full"] = row["ours"] / row["full"] if row["full"] else None
        peer = max(row["vllm"], row["sglang"])
        row["times_peer"] = row["ours"] / peer if peer else None
    return row | lost


def rows_of(options: Any) -> Iterator[dict[str, Any]]:
    for name in options.workloads:
        requests = workload(name, options)
        for plan in options.plans:
            for memory in options.memory:
                row = {"workload": name, "plan": plan, "memory": str(memory)}
                if not options.rules:
                    yield row | compare(PLANS[plan], memory, requests, options.sides)
                    continue
                for rules, chosen in VARIANTS.items():
                    state_tokens = PLANS[plan].paged_state_tokens
                    cache = Hybrid(PLANS[plan].capacity(memory), state_tokens, chosen)
                    found = serve(cache, requests)
                    yield row | {"rules": rules, "found": found} | losses(cache)


def main() -> None:
    arguments = report.parser(__doc__)
    names = ["conversation", "synthetic", "agents-keep", "agents-drop"]
    arguments.add_argument("--workloads", nargs="+", choices=names, default=names)
    arguments.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    arguments.add_argument(
        "--memory", nargs="+", type=float, default=[0.25, 0.5, 1.0, 2.0, 4.0, inf]
    )
    arguments.add_argument("--sides", nargs="+", choices=list(CACHES), default=list(CACHES))
    arguments.add_argument("--requests", type=int, help="of a trace; default: all")
    arguments.add_argument("--jobs", type=int, default=200)
    arguments.add_argument("--job-rate", type=float, default=0.1, help="jobs per second")
    arguments.add_argument("--rules", action="store_true", help="measure our rules one by one")
    options = arguments.parse_args()
    report.write(options.json, list(rows_of(options)))


if __name__ == "__main__":
    main()
