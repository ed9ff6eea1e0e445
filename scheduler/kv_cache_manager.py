"""The scheduler's one door to the KV cache: lookup, allocation, naming and release of blocks.

Behind it: coordinator (all groups) -> one manager per group (block tables) -> block pool. Rows are
the scheduler's; tokens are never looked at except to name blocks.
"""

from dataclasses import dataclass

import numpy as np

from longshore.protocol.arrays import Int32Array, Int64Array, int32_array
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.protocol.plan import AppendedBlocks
from longshore.scheduler.block_hash import BlockHasher
from longshore.scheduler.block_pool import BlockPool
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache_coordinator import make_coordinator
from longshore.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """A cached prefix: `block_ids[group]` in order of position, `num_tokens` in all."""

    block_ids: tuple[list[int], ...]
    num_tokens: int


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked up and found, counted once per admission; preempted requests apart."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_preempted_queried_tokens: int = 0
    num_preempted_hit_tokens: int = 0

    def count(self, request: Request, num_hit_tokens: int) -> None:
        """One admission has used a lookup."""
        if request.num_preemptions:
            self.num_preempted_queried_tokens += request.num_tokens
            self.num_preempted_hit_tokens += num_hit_tokens
        else:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += num_hit_tokens


class KVCacheManager:
    """Blocks of all rows and groups."""

    def __init__(
        self,
        cache: CacheConfig,
        kv_cache: KVCacheConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        hash_seed: bytes,
    ) -> None:
        self._pool = BlockPool(kv_cache.num_blocks)
        self._coordinator = make_coordinator(
            kv_cache,
            self._pool,
            enable_prefix_caching=cache.enable_prefix_caching,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        self._managers = self._coordinator.managers
        self._hasher = BlockHasher(cache.block_size, hash_seed, cache.hash_algorithm)
        self._nothing_computed = ComputedBlocks(tuple([] for _ in self._managers), 0)
        self.stats = PrefixCacheStats()

    @property
    def num_blocks(self) -> int:
        """With the null block."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of usable blocks that somebody holds."""
        return self._pool.usage

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The longest cached prefix of a waiting request, at least one token short of all of it
        (something must be computed to sample from). Holds nothing yet."""
        if not self._looks_up(request):
            return self._nothing_computed
        self._hasher.extend(request.block_names, request.token_ids, cache_salt=request.cache_salt)
        hits, num_tokens = self._coordinator.find_longest_hit(
            request.block_names, request.num_tokens - 1
        )
        return ComputedBlocks(tuple(hits), num_tokens) if num_tokens else self._nothing_computed

    def start(self, row: int, request: Request, computed: ComputedBlocks, num_tokens: int) -> bool:
        """Give an empty row the cached prefix and new blocks for its first `num_tokens` tokens.

        False, and nothing has changed, if there are too few free blocks. A hit that nobody holds
        is a free block too, and is counted as taken.
        """
        counts = [
            manager.num_blocks_for(num_tokens) - len(hits)
            for manager, hits in zip(self._managers, computed.block_ids, strict=True)
        ]
        unheld = sum(self._pool.num_unheld(hits) for hits in computed.block_ids)
        if sum(counts) + unheld > self._pool.num_free:
            return False
        for hits in computed.block_ids:
            self._pool.touch(hits)
        for manager, hits, count in zip(self._managers, computed.block_ids, counts, strict=True):
            manager.start(row, hits, self._pool.get_new_blocks(count))
        if self._looks_up(request):
            self.stats.count(request, computed.num_tokens)
        return True

    def grow(self, num_tokens: Int64Array, seniority: Int64Array) -> list[AppendedBlocks] | None:
        """Give every row the blocks it lacks to hold `num_tokens` (max_num_seqs,) tokens, rows of
        lower `seniority` (same shape) first. None, and nothing has changed, if they do not fit."""
        shorts = [manager.num_blocks_short(num_tokens) for manager in self._managers]
        total = sum(int(short.sum()) for short in shorts)
        if total == 0:
            return []
        if total > self._pool.num_free:
            return None
        appended = []
        for manager, short in zip(self._managers, shorts, strict=True):
            rows = np.flatnonzero(short)
            rows = rows[np.argsort(seniority[rows])]
            counts = short[rows]
            block_ids = self._pool.get_new_blocks(int(counts.sum()))
            row_of_block = manager.append(rows, counts, block_ids)
            appended.append(
                AppendedBlocks(manager.group, int32_array(row_of_block), int32_array(block_ids))
            )
        return appended

    def grow_row(self, row: int, num_tokens: int) -> list[list[int]] | None:
        """`grow` for one row: its new blocks per group."""
        counts = [
            max(manager.num_blocks_for(num_tokens) - int(manager.num_blocks[row]), 0)
            for manager in self._managers
        ]
        if sum(counts) > self._pool.num_free:
            return None
        new_block_ids = [self._pool.get_new_blocks(count) for count in counts]
        for manager, block_ids in zip(self._managers, new_block_ids, strict=True):
            if block_ids:
                manager.append(np.array([row]), np.array([len(block_ids)]), block_ids)
        return new_block_ids

    def rows_to_name(self, num_tokens: Int64Array) -> Int64Array:
        """Rows with a full block among their first `num_tokens` (max_num_seqs,) that has no name.

        To be asked with tokens that are verified and whose KV is in a plan being built."""
        if not self._coordinator.caches_prefixes:
            return np.empty(0, np.int64)
        rows = [manager.rows_to_name(num_tokens) for manager in self._managers]
        return rows[0] if len(rows) == 1 else np.unique(np.concatenate(rows))

    def cache_blocks(self, row: int, request: Request, token_ids: Int32Array) -> None:
        """Name the row's full blocks of `token_ids`, its leading tokens; they can be found now."""
        if not self._coordinator.caches_prefixes:
            return
        self._hasher.extend(request.block_names, token_ids, cache_salt=request.cache_salt)
        for manager in self._managers:
            manager.cache_blocks(row, request.block_names, len(token_ids))

    def forget_names(self, request: Request) -> None:
        """Un-name every block of the request's prefix, whoever holds it: the content of some
        cannot be trusted. What is lost besides is a hit."""
        for manager in self._managers:
            for name in request.block_names:
                self._pool.forget(name, manager.group)

    def _looks_up(self, request: Request) -> bool:
        return self._coordinator.caches_prefixes and not request.skip_reading_prefix_cache

    def block_ids(self, row: int) -> tuple[Int32Array, ...]:
        """Copies of the row's block tables, one per group."""
        return tuple(manager.block_ids(row) for manager in self._managers)

    def free(self, row: int) -> None:
        """The row lets go of its blocks; named ones stay findable until they are reused."""
        for manager in self._managers:
            manager.free(row)

    def reset_prefix_cache(self) -> bool:
        """Forget all names; False while anybody holds a block."""
        return self._pool.reset_prefix_cache()
