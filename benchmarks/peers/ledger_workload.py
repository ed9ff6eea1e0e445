"""The calls that `benchmarks/offload_ledger.py` times, for both sides alike: a full tier is asked for stored
keys, which are loaded, and then stores new ones. Standard library only, because it also runs in vLLM's
environment.
"""

import gc
import random
import time

CAPACITY = 65_536
PARTS = ("lookup", "touch", "prepare_load", "complete_load", "prepare_store", "complete_store", "finish")


def keys_of(first, count):
    """Keys as block hashes with a group look, equal for equal numbers, and new objects in each call, because
    every request computes its own."""
    numbers = range(first, first + count)
    return [(number * 0x9E3779B97F4A7C15 % 2**256).to_bytes(32, "big") + bytes(4) for number in numbers]


def measure(side, at_a_time, hits, stores, seed):
    """Microseconds per block of each call, by part. `side` begins a request with `begin(keys)` (not timed),
    and has a method for each part."""
    chosen = random.Random(seed)
    samples = {part: [] for part in PARTS}

    def timed(part, *arguments):
        started = time.perf_counter_ns()
        result = getattr(side, part)(*arguments)
        samples[part].append((time.perf_counter_ns() - started) / 1e3 / at_a_time)
        return result

    for first in range(0, CAPACITY, at_a_time):
        side.begin(keys_of(first, at_a_time))
        assert side.prepare_store() == 0
        side.complete_store()
        side.finish()
    gc.collect()
    gc.freeze()
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(hits):
        side.begin(keys_of(chosen.randrange(0, CAPACITY, at_a_time), at_a_time))
        assert timed("lookup") == at_a_time
        timed("touch")
        timed("prepare_load")
        timed("complete_load")
        timed("finish")
    for number in range(stores):
        side.begin(keys_of(CAPACITY + number * at_a_time, at_a_time))
        assert timed("prepare_store") == at_a_time
        timed("complete_store")
        side.finish()
    cpu_share = (time.process_time() - cpu_started) / (time.perf_counter() - started)
    gc.unfreeze()
    return {"samples": samples, "cpu_share": cpu_share}
