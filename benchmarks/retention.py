"""Hit rates with cache hints on an agent workload, between LRU and the best possible one.

    python benchmarks/retention.py [--workload FILE] [--jobs 120] [--capacities 2000 4000]
        [--json F]

Jobs of turns with a tool call between them share system prompts. Each turn is looked up in the real
block pool, gets blocks for what is not cached, caches its prompt and answer, and frees them. The
next turn of the job arrives when the tool has answered, so that turns of many jobs alternate.

With hints, the job is the session, and a turn asks to keep its KV for the 90th percentile of its
tool's gaps, as a client would who knows its tools: with priority 2 up to 10 seconds, with 1 up to
100, and not for longer gaps. The system prompt is kept with priority 2 for 30 seconds. After the
last turn, only the system prompt is kept. `hints` is with the default share of a quarter of the
blocks for all jobs together, `hints_all` with a `cache_share` of 1.

`minimum` is Belady's MIN (see `eviction.py`), which knows the future. `way` is how much of the way
from LRU to it the hints go. FILE has a job per line:

    {"job_id": "job-0", "arrival_s": 0.0, "shared_prefix": {"id": 7, "num_tokens": 1000},
     "turns": [{"num_new_tokens": 320, "num_output_tokens": 90, "tool": "bash", "gap_s": 1.7}, ...]}
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import report
from eviction import most_hits

from longshore.protocol.arrays import int32_array
from longshore.protocol.requests import CacheHint, CachePrefix, Tenant
from longshore.scheduler.kv_cache.block_pool import BlockPool

BLOCK_SIZE: Final = 64
TOKEN_S: Final = 0.02
SYSTEM_PROMPT_TTL_S: Final = 30.0
SHORT_GAP_S: Final = 10.0
LONGEST_GAP_S: Final = 100.0
CAPACITIES: Final = (2_000, 4_000, 8_000)
TOOLS: Final = {"bash": (1.0, 1.0), "edit": (0.2, 0.5), "tests": (20.0, 0.8), "user": (90.0, 1.0)}
"""Median gap in seconds, and sigma of its logarithm."""
WEIGHTS: Final = (60, 25, 12, 3)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the keys of its blocks, answer included, and what its client knows."""

    now: float
    job: int
    keys: list[bytes]
    num_prompt_blocks: int
    num_shared_tokens: int
    tool: str | None


def generate(seed: int, num_jobs: int, jobs_per_s: float = 0.1) -> list[dict[str, Any]]:
    """Jobs of 33 turns on average, with one of eight system prompts of 3,000 to 10,000 tokens."""
    random = Random(seed)
    prompts = [random.randrange(3_000, 10_000) for _ in range(8)]
    jobs = []
    arrival_s = 0.0
    for number in range(num_jobs):
        arrival_s += random.expovariate(jobs_per_s)
        which = random.randrange(len(prompts))
        turns = []
        for _ in range(1 + min(int(random.expovariate(1 / 32)), 150)):
            (tool,) = random.choices(list(TOOLS), WEIGHTS)
            median, sigma = TOOLS[tool]
            turns.append(
                {
                    "num_new_tokens": 1 + int(random.expovariate(1 / 400)),
                    "num_output_tokens": 1 + int(random.expovariate(1 / 150)),
                    "tool": tool,
                    "gap_s": median * random.lognormvariate(0, sigma),
                }
            )
        turns[-1] |= {"tool": None, "gap_s": 0.0}
        shared = {"id": which, "num_tokens": prompts[which]}
        job = {"job_id": f"job-{number}", "arrival_s": arrival_s, "shared_prefix": shared}
        jobs.append(job | {"turns": turns})
    return jobs


def requests_of(jobs: Sequence[dict[str, Any]]) -> Iterator[Turn]:
    """The turns of all jobs in the order in which they arrive."""
    arrivals = [(job["arrival_s"], number, 0) for number, job in enumerate(jobs)]
    heapify(arrivals)
    lengths = [job["shared_prefix"]["num_tokens"] for job in jobs]
    while arrivals:
        now, number, index = heappop(arrivals)
        shared, turn = jobs[number]["shared_prefix"], jobs[number]["turns"][index]
        num_prompt = lengths[number] + turn["num_new_tokens"]
        lengths[number] = num_prompt + turn["num_output_tokens"]
        num_shared_blocks = shared["num_tokens"] // BLOCK_SIZE
        keys = [
            b"shared-%d-%d" % (shared["id"], position)
            if position < num_shared_blocks
            else b"job-%d-%d" % (number, position)
            for position in range(lengths[number] // BLOCK_SIZE)
        ]
        num_prompt_blocks = num_prompt // BLOCK_SIZE
        yield Turn(now, number, keys, num_prompt_blocks, shared["num_tokens"], turn["tool"])
        if index + 1 < len(jobs[number]["turns"]):
            ended_at = now + TOKEN_S * turn["num_output_tokens"]
            heappush(arrivals, (ended_at + turn["gap_s"], number, index + 1))


def times_to_live(jobs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The 90th percentile of each tool's gaps."""
    gaps: dict[str, list[float]] = {}
    for turn in (turn for job in jobs for turn in job["turns"] if turn["tool"] is not None):
        gaps.setdefault(turn["tool"], []).append(turn["gap_s"])
    return {tool: max(0.1, float(np.quantile(each, 0.9))) for tool, each in gaps.items()}


def hint_of(turn: Turn, ttls_s: dict[str, float]) -> CacheHint:
    system_prompt = CachePrefix(turn.num_shared_tokens, SYSTEM_PROMPT_TTL_S, priority=2)
    gap_s = 0.0 if turn.tool is None else ttls_s[turn.tool]
    ttl_s = 0.0 if turn.tool is None or gap_s > LONGEST_GAP_S else gap_s + 200 * TOKEN_S
    priority = 2 if ttl_s and gap_s <= SHORT_GAP_S else 1
    return CacheHint(ttl_s, f"job-{turn.job}", priority, prefixes=(system_prompt,))


def replay(
    turns: Sequence[Turn], capacity: int, ttls_s: dict[str, float] | None, share: float = 0.25
) -> int:
    """Number of blocks that hit. ttls_s: None: without hints."""
    pool = BlockPool(capacity + 1)
    tenant = Tenant("agents", cache_share=share)
    num_hits = 0
    for turn in turns:
        if turn.now >= pool.retained.next_expiry_s:
            pool.expire_retained(turn.now)
        hits = pool.find_cached_prefix(turn.keys)
        num_hits += len(hits)
        pool.touch(hits)
        new = pool.get_new_blocks(len(turn.keys) - len(hits))
        pool.cache_blocks(list(map(int, new)), turn.keys[len(hits) :])
        block_ids = np.concatenate((int32_array(hits), int32_array(new)))
        if ttls_s is not None:
            shared = block_ids[: -(-turn.num_shared_tokens // BLOCK_SIZE)]
            pool.retain(block_ids, hint_of(turn, ttls_s), [shared], tenant=tenant, now=turn.now)
        pool.free_blocks(block_ids[::-1])
    return num_hits


def measure(turns: Sequence[Turn], ttls_s: dict[str, float], capacity: int) -> dict[str, Any]:
    num_blocks = sum(turn.num_prompt_blocks for turn in turns)
    minimum = most_hits([turn.keys for turn in turns], capacity) / num_blocks
    lru = replay(turns, capacity, None) / num_blocks
    row = {"capacity": capacity, "lru": lru}
    for name, share in (("hints", 0.25), ("hints_all", 1.0)):
        row[name] = replay(turns, capacity, ttls_s, share) / num_blocks
        row[f"way_{name}"] = (row[name] - lru) / (minimum - lru)
    return row | {"minimum": minimum}


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--workload", type=Path, metavar="FILE", help="default: generated")
    arguments.add_argument("--jobs", type=int, default=120, help="to generate: %(default)s")
    arguments.add_argument("--capacities", type=int, nargs="+", default=list(CAPACITIES))
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    if options.workload is None:
        jobs = generate(options.seed, options.jobs)
    else:
        jobs = [json.loads(line) for line in options.workload.read_text().splitlines()]
    turns, ttls_s = list(requests_of(jobs)), times_to_live(jobs)
    longest = max(len(turn.keys) for turn in turns)
    if min(options.capacities) < longest:
        arguments.error(f"the longest turn has {longest} blocks; use larger capacities")
    rows = [measure(turns, ttls_s, capacity) for capacity in sorted(options.capacities)]
    report.write(options.json, rows, num_jobs=len(jobs), num_turns=len(turns), seed=options.seed)


if __name__ == "__main__":
    main()
