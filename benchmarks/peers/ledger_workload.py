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


class Tier:
    """A full tier. `side` begins a request with `begin(keys)` (not timed), and has a method for each part.

    samples: microseconds per block of each call, by part.
    """

    def __init__(self, side, at_a_time, seed):
        self._side, self._at_a_time = side, at_a_time
        self._chosen = random.Random(seed)
        self._num_stored = 0
        while self._num_stored < CAPACITY:
            side.begin(self._new_keys())
            assert side.prepare_store() == 0
            side.complete_store()
            side.finish()
        self.samples = {part: [] for part in PARTS}

    def load(self):
        """A request whose keys are stored. Not after `store`, which may have evicted them."""
        first = self._chosen.randrange(0, CAPACITY, self._at_a_time)
        self._side.begin(keys_of(first, self._at_a_time))
        assert self._timed("lookup") == self._at_a_time
        for part in ("touch", "prepare_load", "complete_load", "finish"):
            self._timed(part)

    def store(self):
        """A request with new keys, each of which evicts another."""
        self._side.begin(self._new_keys())
        assert self._timed("prepare_store") == self._at_a_time
        self._timed("complete_store")
        self._side.finish()

    def _new_keys(self):
        first, self._num_stored = self._num_stored, self._num_stored + self._at_a_time
        return keys_of(first, self._at_a_time)

    def _timed(self, part):
        started = time.perf_counter_ns()
        result = getattr(self._side, part)()
        self.samples[part].append((time.perf_counter_ns() - started) / 1e3 / self._at_a_time)
        return result


def measure(side, at_a_time, hits, stores, seed):
    """The samples of a tier."""
    tier = Tier(side, at_a_time, seed)
    gc.collect()
    gc.freeze()
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(hits):
        tier.load()
    for _ in range(stores):
        tier.store()
    cpu_share = (time.process_time() - cpu_started) / (time.perf_counter() - started)
    gc.unfreeze()
    return {"samples": tier.samples, "cpu_share": cpu_share}
