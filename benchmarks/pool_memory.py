"""Time to build a block pool, and its memory: empty, and with all blocks cached.

    python benchmarks/pool_memory.py [--blocks 10000 100000 1000000] [--json F]

Each size runs in a fresh interpreter. `rss_mb` is the resident memory of that process, including
imports (`base_mb`). It includes the block hashes, which running requests share.
"""

import json
import subprocess
import sys

import report

PROGRAM = """
import gc, hashlib, json, sys, time
from longshore.scheduler.kv_cache.block_pool import BlockPool

def rss_mb():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 2**20

num_blocks, row = int(sys.argv[1]), {"base_mb": rss_mb()}
started = time.perf_counter()
pool = BlockPool(num_blocks)
row["build_s"] = time.perf_counter() - started
row["empty_rss_mb"] = rss_mb()
held = []
while pool.num_free:
    block_ids = pool.get_new_blocks(min(pool.num_free, 2048))
    hashes = [hashlib.sha256(block_id.to_bytes(8)).digest() for block_id in map(int, block_ids)]
    pool.cache_blocks([int(block_id) for block_id in block_ids], hashes)
    held.append(block_ids)
while held:
    pool.free_blocks(held.pop())
del hashes, block_ids
gc.collect()
row["cached_rss_mb"] = rss_mb()
print(json.dumps(row))
"""


def measure(num_blocks: int) -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM, str(num_blocks)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {"blocks": num_blocks, **json.loads(printed)}


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    options = arguments.parse_args()
    report.write(options.json, [measure(num_blocks) for num_blocks in options.blocks])


if __name__ == "__main__":
    main()
