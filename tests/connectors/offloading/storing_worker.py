"""A worker process that stores blocks in host memory, says so, and waits to be killed:
FD SEED NUM_BLOCKS."""

import random
import sys
import time

from tests.connectors.offloading.ranks import Rank, blocks_of, cache_of, configs_of
from tests.harness.kv_groups import full


def start(fd: int, seed: int) -> Rank:
    """A rank with content that depends on the seed."""
    cache = cache_of(40, [full()], [2])
    (config,) = configs_of([cache], fd=fd, verify_kv="always")
    rank = Rank(cache, config)
    rank.fill(random.Random(seed))
    return rank


if __name__ == "__main__":
    rank = start(int(sys.argv[1]), int(sys.argv[2]))
    num_blocks = int(sys.argv[3])
    blocks = blocks_of([0] * num_blocks, [[1 + index] for index in range(num_blocks)])
    rank.store("store", blocks, range(num_blocks))
    assert rank.wait() == {"store": []}
    print("stored", flush=True)
    time.sleep(600)
