"""Cost of allocating and freeing a block, by number of blocks at a time, compared with vLLM.

    python benchmarks/block_pool.py [--at-a-time 1 16 256 1024 8192] [--json F]
    python benchmarks/block_pool.py --manager [--json F]

Each allocation evicts a cached block (`evicting`) or none does (`plain`). Caching the blocks in
between is not timed. Medians in µs per block.

`--manager` measures calls of the KV cache manager for a request of 512 tokens (32 blocks), in µs:
whether it can be allocated, allocating it, one more block for it (`append`; `append_each`: for each
of 64 requests in one call), a fork of it, and freeing it.
"""

import gc
import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import report

from longshore.protocol.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LongestRequest,
)
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.blocks import BlockIds, ComputedBlocks
from longshore.scheduler.kv_cache.manager import KVCacheManager

NUM_BLOCKS = 20_000
PEER_PROGRAM = """
import json, pathlib, sys, tempfile
sys.path.insert(0, sys.argv[1])
import bench_vllm_core as bench
result = {}
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "config.json").write_text(json.dumps(bench.LLAMA_2L))
    bench.part_c(folder, result)
print(json.dumps(result["c"]))
"""


class Pool:
    """A pool whose blocks are free, and cached if `evicting`: then each allocation evicts a block,
    because a turn caches what it allocates before it frees it.

    allocate_ns, free_ns: times of each turn.
    """

    def __init__(self, at_a_time: int, *, evicting: bool) -> None:
        self._pool = BlockPool(NUM_BLOCKS)
        self._at_a_time, self._evicting = at_a_time, evicting
        self._num_cached = 0
        self.allocate_ns: list[int] = []
        self.free_ns: list[int] = []
        block_ids = self._pool.get_new_blocks(NUM_BLOCKS - 1)
        self._cache(block_ids)
        self._pool.free_blocks(block_ids)

    def take_turn(self) -> None:
        """Allocate blocks and free them."""
        started = time.perf_counter_ns()
        block_ids = self._pool.get_new_blocks(self._at_a_time)
        self.allocate_ns.append(time.perf_counter_ns() - started)
        self._cache(block_ids)
        started = time.perf_counter_ns()
        self._pool.free_blocks(block_ids)
        self.free_ns.append(time.perf_counter_ns() - started)

    def _cache(self, block_ids: BlockIds) -> None:
        if self._evicting:
            first, self._num_cached = self._num_cached, self._num_cached + len(block_ids)
            hashes = [number.to_bytes(32, "big") for number in range(first, self._num_cached)]
            self._pool.cache_blocks([int(block_id) for block_id in block_ids], hashes)


def measure(at_a_time: int, *, evicting: bool) -> dict[str, float]:
    """Our medians for this many blocks at a time."""
    pool = Pool(at_a_time, evicting=evicting)
    repeats = max(200, min(20_000, 300_000 // at_a_time))
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        pool.take_turn()
    gc.unfreeze()
    return {
        "allocate_us": float(np.median(pool.allocate_ns[repeats // 10 :])) / 1e3 / at_a_time,
        "free_us": float(np.median(pool.free_ns[repeats // 10 :])) / 1e3 / at_a_time,
    }


def measure_manager(num_tokens: int = 512, num_rows: int = 64) -> dict[str, float]:
    """Medians of the manager's calls, in µs."""
    spec = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype_bytes=2)
    manager = KVCacheManager(
        CacheConfig(block_size=16),
        KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(("layer",), spec),), "bfloat16"),
        LongestRequest(2 * num_tokens),
        max_num_seqs=num_rows + 1,
        hash_seed=b"benchmark",
    )
    nothing, samples = ComputedBlocks(([],), 0), defaultdict(list)

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter_ns()
        result = call(*arguments)
        samples[name].append((time.perf_counter_ns() - started) / 1e3)
        return result

    for row in range(1, num_rows + 1):
        manager.start(row, manager.demand(nothing, num_tokens))
    slots, order = np.full(num_rows + 1, num_tokens), np.arange(num_rows + 1)
    slots[0] = 0
    for _ in range(3000):
        demand = timed("can_allocate", manager.demand, nothing, num_tokens)
        tables = timed("allocate", manager.start, 0, demand)
        timed("append", manager.grow_row, 0, num_tokens + 1)
        timed("append_each", manager.grow, slots + 1, order)
        for row in range(1, num_rows + 1):
            manager.truncate(row, num_tokens)
        fork = timed("fork", manager.fork, tables, num_tokens)
        manager.release(fork)
        timed("free", manager.free, 0)
    medians = {name: float(np.median(us)) for name, us in samples.items()}
    return medians | {"append_each": medians["append_each"] / num_rows}


def measure_peer(python: Path) -> dict[int, dict[str, float]] | None:
    """vLLM's medians by blocks at a time; None, with a warning, if vLLM is not installed."""
    if not python.exists():
        print(f"*** NO PEER: {python} does not exist; install it with benchmarks/peers/setup.sh")
        return None
    command = [str(python), "-c", PEER_PROGRAM, str(report.PEERS)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {int(size): row for size, row in json.loads(printed.splitlines()[-1]).items()}


def main() -> None:
    arguments = report.parser(__doc__, peer="core")
    arguments.add_argument("--at-a-time", type=int, nargs="+", default=[1, 16, 256, 1024, 8192])
    arguments.add_argument("--manager", action="store_true", help="calls of the manager instead")
    options = arguments.parse_args()
    if options.manager:
        report.write(options.json, [measure_manager()])
        return
    peers = measure_peer(options.peer_python)
    rows: list[dict[str, Any]] = []
    for at_a_time in options.at_a_time:
        for kind in ("evicting", "plain"):
            ours = measure(at_a_time, evicting=kind == "evicting")
            row: dict[str, Any] = {"at_a_time": at_a_time, "blocks": kind, **ours, "peer": None}
            if peers is not None and at_a_time in peers:
                peer = peers[at_a_time]
                keys = ("get_evict_us", "free_us")
                if kind == "plain":
                    keys = ("get_uncached_us", "free_uncached_us")
                row["peer"] = {"allocate_us": peer[keys[0]], "free_us": peer[keys[1]]}
                row["ratio"] = sum(row["peer"].values()) / sum(ours.values())
            rows.append(row)
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
