"""The scheduler's one door to the KV cache: lookup, allocation, naming and release of blocks.

Behind it: coordinator (all groups) -> one manager per group (block tables) -> block pool. Rows are
the scheduler's; tokens are never looked at except to name blocks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, Int64Array, UInt8Array, int32_array
from longshore.protocol.kv_cache_spec import (
    DEFAULT_STEPS_IN_FLIGHT,
    NULL_BLOCK,
    KVCacheConfig,
    sink_block_ids,
)
from longshore.protocol.plan import AppendedBlocks
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.features.events import KVEvent, KVEventLog
from longshore.scheduler.features.metrics import BlockMetrics
from longshore.scheduler.kv_cache.block_hash import BlockHasher
from longshore.scheduler.kv_cache.block_pool import BlockIds, BlockPool
from longshore.scheduler.kv_cache.blocks import BlockCopy as BlockCopy  # the callers speak them too
from longshore.scheduler.kv_cache.blocks import BlockDemand as BlockDemand
from longshore.scheduler.kv_cache.blocks import ComputedBlocks as ComputedBlocks
from longshore.scheduler.kv_cache.blocks import HeldBlocks as HeldBlocks
from longshore.scheduler.kv_cache.blocks import laid_out
from longshore.scheduler.kv_cache.coordinator import make_coordinator
from longshore.scheduler.kv_cache.full_blocks import FullBlocks
from longshore.scheduler.kv_cache.release_order import ReleaseOrder
from longshore.scheduler.kv_cache.settled_counts import SettledCounts
from longshore.scheduler.kv_cache.windowed import MambaManager, WindowedManager
from longshore.scheduler.request import Request


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
    """Blocks of all rows and groups.

    hash_seed: the deployment's; block names follow from it.
    max_num_batched_tokens: computed at most for one request in all steps in flight together, of
               which there are `max_steps_in_flight`; None sets no limit. They bound what a group
               that forgets holds.
    metrics:   is told how blocks live.
    record_cached: keep for `full_blocks.take_cached` what gets a name.
    naming:    gives full blocks their names; to be told what is computed.

    Arrays indexed by row are (max_num_seqs,) int64. `num_tokens` of a row counts everything it
    needs slots for, lookahead included; more than `max_model_len` is taken as `max_model_len`.
    """

    def __init__(
        self,
        cache: CacheConfig,
        kv_cache: KVCacheConfig,
        *,
        max_num_seqs: int,
        max_model_len: int,
        hash_seed: bytes,
        max_num_batched_tokens: int | None = None,
        max_steps_in_flight: int = DEFAULT_STEPS_IN_FLIGHT,
        metrics: BlockMetrics | None = None,
        record_cached: bool = False,
    ) -> None:
        self._events = KVEventLog() if cache.enable_kv_cache_events else None
        self._pool = BlockPool(
            kv_cache.num_blocks,
            len(kv_cache.groups),
            num_set_aside=sum(map(len, sink_block_ids(kv_cache.groups))),
            metrics=metrics,
            events=self._events,
        )
        self._coordinator = make_coordinator(
            kv_cache,
            self._pool,
            cache,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_steps_in_flight=max_steps_in_flight,
        )
        self._managers = self._coordinator.managers
        self._release_order = ReleaseOrder(
            self.block_sizes, [m.frees_skipped for m in self._managers]
        )
        self._caching = self._coordinator.caching
        self._windowed = [m for m in self._managers if isinstance(m, WindowedManager)]
        self._states = [m for m in self._managers if isinstance(m, MambaManager)]
        self._settled = SettledCounts()
        hasher = BlockHasher(cache.tokens_per_hash, hash_seed, cache.hash_algorithm)
        self.full_blocks = FullBlocks(
            self._caching, self._pool, hasher, events=self._events, record_cached=record_cached
        )
        nothing: BlockIds = []
        self._nothing_computed = ComputedBlocks(tuple(nothing for _ in self._managers), 0)
        self._log_stats = cache.log_stats
        self.stats = PrefixCacheStats()

    @property
    def num_blocks(self) -> int:
        """With the null block."""
        return self._pool.num_blocks

    @property
    def num_groups(self) -> int:
        """KV cache groups, each with block tables of its own."""
        return len(self._managers)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Tokens per block, by group."""
        return tuple(manager.block_size for manager in self._managers)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of usable blocks that somebody holds."""
        return self._pool.usage

    @property
    def metrics(self) -> BlockMetrics | None:
        """Who is told how blocks live."""
        return self._pool.metrics

    # Lookup

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The longest cached prefix of a waiting request, at least one token short of all of it
        (something must be computed to sample from). Holds nothing yet."""
        if not self._looks_up(request):
            return self._nothing_computed
        num_tokens = request.num_tokens
        self.full_blocks.extend_hashes(request, request.token_ids, num_tokens)
        hits, num_hit_tokens = self._coordinator.find_longest_hit(
            request.block_hashes, num_tokens - 1
        )
        return ComputedBlocks(hits, num_hit_tokens) if num_hit_tokens else self._nothing_computed

    def count_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """The request is admitted, with so many tokens found; a lookup by itself counts nothing,
        for who waits asks in every step."""
        if self._log_stats and self._looks_up(request):
            self.stats.count(request, num_hit_tokens)

    def _looks_up(self, request: Request) -> bool:
        return bool(self._caching) and not request.skip_reading_prefix_cache

    # Blocks for those who come

    def num_blocks_for(self, num_tokens: int, *, num_encoder_tokens: int = 0) -> int:
        """Blocks of all groups that a request of so many tokens holds at once at most."""
        return sum([m.num_blocks_for(num_tokens, num_encoder_tokens) for m in self._managers])

    def demand(
        self,
        computed: ComputedBlocks,
        num_tokens: int,
        *,
        num_loaded: int = 0,
        num_encoder_tokens: int = 0,
    ) -> BlockDemand:
        """What a request needs to hold `num_tokens` tokens, `computed` among them. Somebody else
        brings KV behind those, so that `num_loaded` tokens are computed; 0 if nobody does."""
        hits = computed.block_ids
        if len(self._managers) == 1 and not self._windowed:
            end = self._managers[0].num_positions(num_tokens, num_encoder_tokens)
            first = len(hits[0])
            return BlockDemand(computed, (range(first, end),), (end,), end - first)
        ends = [m.num_positions(num_tokens, num_encoder_tokens) for m in self._managers]
        positions = [
            manager.positions(len(found), end, num_loaded)
            for manager, found, end in zip(self._managers, hits, ends, strict=True)
        ]
        return BlockDemand(computed, tuple(positions), tuple(ends), sum(map(len, positions)))

    def num_blocks_needed(self, demand: BlockDemand) -> int:
        """Free blocks that `start` or `reserve` take: new ones, and hits that nobody holds."""
        return demand.num_new + self._num_unheld(demand.computed)

    def start(self, row: int, demand: BlockDemand) -> bool:
        """Give an empty row the cached prefix and new blocks. False, and nothing has changed, if
        there are too few free blocks."""
        if not self._has_free(demand):
            return False
        computed = demand.computed
        if computed.num_tokens:
            for manager, hits in zip(self._managers, computed.block_ids, strict=True):
                first = manager.first_needed(computed.num_tokens)  # null blocks before it
                self._pool.touch(hits[first:] if first else hits)
        for manager, hits, positions, end in zip(
            self._managers, computed.block_ids, demand.positions, demand.ends, strict=True
        ):
            block_ids = self._pool.get_new_blocks(len(positions)) if positions else []
            manager.start(row, hits, laid_out(len(hits), end, positions, block_ids))
        return True

    def reserve(
        self, demand: BlockDemand, *, answered_step: int | None = None
    ) -> HeldBlocks | None:
        """The blocks that `start` would give a row, on no row. None, and nothing has changed, if
        there are too few free ones.

        answered_step: the new blocks are targets of a load: no plan after this one names them.
        """
        if not self._has_free(demand):
            return None
        all_hits = np.concatenate([int32_array(hits) for hits in demand.computed.block_ids])
        if answered_step is None:
            self._pool.touch(all_hits)
            new = int32_array(self._pool.get_new_blocks(demand.num_new))
        else:
            settled = self._pool.get_settled_blocks(demand.num_new, answered_step, all_hits)
            if settled is None:
                return None
            self._pool.touch(all_hits)
            new = settled
        tables = []
        for hits, positions, end in zip(
            demand.computed.block_ids, demand.positions, demand.ends, strict=True
        ):
            added = laid_out(len(hits), end, positions, new[: len(positions)])
            tables.append(np.concatenate((int32_array(hits), int32_array(added))))
            new = new[len(positions) :]
        return HeldBlocks(tuple(tables))

    def hold(self, block_ids: Sequence[int]) -> HeldBlocks:
        """One more reference to each of these blocks, all different, of whatever group: a transfer
        reads them, and they are not handed out before it releases them."""
        held = int32_array(block_ids)
        self._pool.touch(held)
        return HeldBlocks((held, *(EMPTY_INT32 for _ in self._managers[1:])))

    def attach(self, row: int, held: HeldBlocks, num_hashed_tokens: int = 0) -> None:
        """An empty row takes over these references. Blocks that have a name keep it and the next
        ones will be named; `num_hashed_tokens`, if more, are named by nobody."""
        for manager, block_ids in zip(self._managers, held.block_ids, strict=True):
            manager.attach(row, block_ids, num_hashed_tokens // manager.block_size)

    def detach(self, row: int) -> HeldBlocks:
        """The row lets go of its blocks; its references stay with the result."""
        return HeldBlocks(tuple([manager.take(row) for manager in self._managers]))

    def cut(self, held: HeldBlocks, num_tokens: int) -> tuple[HeldBlocks, HeldBlocks]:
        """What `num_tokens` tokens need of these, and the rest. Both are the caller's now."""
        pairs = [
            (block_ids, manager.num_positions(num_tokens) if manager.caches_prefixes else None)
            for manager, block_ids in zip(self._managers, held.block_ids, strict=True)
        ]
        kept = tuple([block_ids[:end] for block_ids, end in pairs])
        return HeldBlocks(kept), HeldBlocks(
            tuple([EMPTY_INT32 if end is None else block_ids[end:] for block_ids, end in pairs])
        )

    def release(self, held: HeldBlocks, step: int = 0) -> None:
        """Give references back; named blocks stay findable until they are reused. `step` is the
        newest plan that may still name the blocks. Tail first: see `ReleaseOrder`."""
        if len(held.block_ids) == 1:
            self._pool.free_blocks(held.block_ids[0][::-1], step)
        else:
            self._pool.free_blocks(self._release_order.tail_first(held.block_ids), step)

    # Blocks that several share

    @property
    def can_fork(self) -> bool:
        """Whether a request can begin anywhere in another one's KV: no group forgets."""
        return not self._windowed and self.follows_from_tokens

    @property
    def follows_from_tokens(self) -> bool:
        """Whether equal tokens have equal KV: no group keeps anything else."""
        return all(manager.caches_prefixes for manager in self._managers)

    def fork(self, tables: Sequence[Int32Array], num_tokens: int) -> HeldBlocks:
        """What somebody holds who begins with the first `num_tokens` tokens of these tables: a copy
        of the ids, with one more reference to each block. No data is copied."""
        shared = tuple(
            [
                table[: manager.num_positions(num_tokens)].copy()
                for manager, table in zip(self._managers, tables, strict=True)
            ]
        )
        for block_ids in shared:
            self._pool.touch(block_ids)
        return HeldBlocks(shared)

    def num_blocks_to_resume(
        self, held: HeldBlocks, num_computed: int, num_tokens: int, answered_step: int
    ) -> int:
        """Free blocks that `resume` takes."""
        num_new = 0
        for manager, table in zip(self._managers, held.block_ids, strict=True):
            num_new += max(manager.num_positions(num_tokens) - len(table), 0)
            position, is_partial = divmod(num_computed, manager.block_size)
            num_new += bool(
                is_partial and not self._pool.is_private(int(table[position]), answered_step)
            )
        return num_new

    def resume(
        self,
        row: int,
        held: HeldBlocks,
        num_computed: int,
        num_tokens: int,
        *,
        step: int,
        answered_step: int,
    ) -> list[BlockCopy] | None:
        """An empty row takes over these references, which hold the KV of `num_computed` tokens, and
        gets blocks for `num_tokens`. What plan `step` has to copy, so that the row writes to no
        block of somebody else. None, and nothing has changed, if there are too few free blocks."""
        num_new = self.num_blocks_to_resume(held, num_computed, num_tokens, answered_step)
        if num_new > self._pool.num_free:
            return None
        self.attach(row, held)
        copies = self.make_writable(row, num_computed, step=step, answered_step=answered_step)
        self.grow_row(row, num_tokens)
        return copies

    def make_writable(
        self, row: int, num_computed: int, *, step: int, answered_step: int
    ) -> list[BlockCopy]:
        """The row is about to write behind its first `num_computed` tokens. Blocks that these fill
        in part and that others hold, or find by a name, or write to, are replaced by new ones in
        its table; the copies are for plan `step` to make, before anything is loaded into the
        sources. There are enough free blocks."""
        copies = []
        for manager in self._managers:
            position, num_tokens = divmod(num_computed, manager.block_size)
            if not num_tokens:
                continue
            source_id = target_id = int(manager.table[row, position])
            if not self._pool.is_private(source_id, answered_step):
                target_id = int(self._pool.get_new_blocks(1)[0])
                self._pool.free_blocks([source_id], step)
                copies.append(BlockCopy(source_id, target_id, num_tokens))
            manager.redirect(row, position, target_id)
        return copies

    # Blocks of rows

    @property
    def frees_skipped(self) -> bool:
        """Whether any group gives blocks back while a request runs; see `free_skipped`."""
        return bool(self._windowed)

    def free_skipped(
        self,
        num_computed: Int64Array,
        num_verified: Int64Array,
        generation: Int64Array,
        *,
        step: int,
        answered_step: int,
    ) -> None:
        """Give back the blocks that no row will need again, the eldest row's first. To be called
        when plan `step` is about to be made, before anybody gets blocks; see `SettledCounts`."""
        settled = self._settled.before_plan(
            num_computed, num_verified, generation, step=step, answered_step=answered_step
        )
        for manager in self._windowed:
            only_cached = manager in self._caching
            block_ids = manager.free_skipped(settled, generation, only_cached=only_cached)
            if len(block_ids):
                self._pool.free_blocks(block_ids, step - 1)
        for manager in self._states:
            manager.step_begins()

    def aligned_chunk(self, num_computed: int, num_new: int) -> int:
        """How many of `num_new` tokens a step may compute behind `num_computed`, at least one: see
        `MambaManager` for what a group that keeps states asks of it."""
        allowed = 0
        while self._states and allowed != num_new:
            allowed = num_new
            for manager in self._states:
                num_new = manager.aligned_chunk(num_computed, num_new)
        return num_new

    def aligned_chunks(self, num_computed: Int64Array, num_new: Int64Array) -> Int64Array:
        """`aligned_chunk` for columns."""
        is_cut = bool(self._states)
        while is_cut:
            before = num_new
            for manager in self._states:
                num_new = manager.aligned_chunks(num_computed, num_new)
            is_cut = bool((num_new != before).any())
        return num_new

    def resume_point(self, tables: Sequence[Int32Array], num_good: int) -> int:
        """At most `num_good` tokens behind which a request with these tables can go on: every group
        has what the next token needs. `num_good` itself, if all groups keep everything; else a
        common block border, or 0."""
        if not self._windowed:
            return num_good
        border = math.lcm(*self.block_sizes)
        num_tokens = num_good - num_good % border
        while num_tokens and not all(
            manager.has_needed(table, num_tokens)
            for manager, table in zip(self._managers, tables, strict=True)
        ):
            num_tokens -= border
        return num_tokens

    def grow(self, num_tokens: Int64Array, seniority: Int64Array) -> list[AppendedBlocks] | None:
        """Give every row the blocks it lacks to hold `num_tokens` (max_num_seqs,) tokens, rows of
        lower `seniority` (same shape) first. None, and nothing has changed, if they do not fit."""
        shorts = [manager.rows_short(num_tokens) for manager in self._managers]
        num_new = [m.num_new_blocks(c) for m, (_, c) in zip(self._managers, shorts, strict=True)]
        total = sum(num_new)
        if total == 0:
            return []
        if total > self._pool.num_free:
            return None
        appended = []
        for manager, (rows, counts), count in zip(self._managers, shorts, num_new, strict=True):
            if len(rows):
                order = np.argsort(seniority[rows])
                rows, counts = rows[order], counts[order]
                block_ids = manager.lay_out(counts, self._pool.get_new_blocks(count))
                row_of_block = manager.append(rows, counts, block_ids)
                appended.append(AppendedBlocks(manager.group, int32_array(row_of_block), block_ids))
        return appended

    def grow_row(self, row: int, num_tokens: int) -> list[list[int]] | None:
        """`grow` for one row: its new table entries per group."""
        firsts = [int(manager.num_blocks[row]) for manager in self._managers]
        ends = [
            first + manager.num_row_lacks(row, num_tokens)
            for manager, first in zip(self._managers, firsts, strict=True)
        ]
        positions = [
            manager.positions(first, end, 0)
            for manager, first, end in zip(self._managers, firsts, ends, strict=True)
        ]
        if sum(map(len, positions)) > self._pool.num_free:
            return None
        entries: list[list[int]] = []
        for manager, first, end, wanted in zip(
            self._managers, firsts, ends, positions, strict=True
        ):
            new = self._pool.get_new_blocks(len(wanted)) if wanted else []
            added = laid_out(first, end, wanted, new)
            if end > first:
                manager.append_to_row(row, added)
            entries.append(list(added))
        return entries

    def truncate(self, row: int, num_tokens: int, step: int = 0) -> None:
        """Give back the blocks beyond those that `num_tokens` tokens need: the row was rewound. The
        caller has un-named whatever it does not trust."""
        cut = HeldBlocks(tuple(manager.truncate(row, num_tokens) for manager in self._managers))
        self.release(cut, step)

    def free(self, row: int, step: int = 0) -> None:
        """`detach` and `release`."""
        self.release(self.detach(row), step)

    def fence(self, blocks: HeldBlocks | Sequence[Int32Array], step: int) -> None:
        """Plan `step` names these blocks: until it is answered nothing may be loaded into them,
        even if they are free."""
        for block_ids in blocks.block_ids if isinstance(blocks, HeldBlocks) else blocks:
            self._pool.fence(block_ids, step)

    def block_ids(self, row: int) -> tuple[Int32Array, ...]:
        """Copies of the row's block tables, one per group."""
        return tuple([manager.block_ids(row) for manager in self._managers])

    def num_common_prefix_blocks(self, rows: Int64Array) -> tuple[int, ...]:
        """Per group, leading blocks that all of `rows` have in common. Read from their tables, so
        whoever else holds blocks makes no difference."""
        return tuple(manager.num_common_blocks(rows) for manager in self._managers)

    def _num_unheld(self, computed: ComputedBlocks) -> int:
        """Hits that nobody holds."""
        return sum([self._pool.num_unheld(hits) for hits in computed.block_ids])

    def _has_free(self, demand: BlockDemand) -> bool:
        """Whether the new blocks and the hits can be had at once."""
        num_free = self._pool.num_free
        return demand.num_blocks <= num_free or self.num_blocks_needed(demand) <= num_free

    # Names beside those of `full_blocks`

    def uncache_blocks(self, block_ids: Int32Array) -> None:
        """Un-name exactly these blocks; the content of each cannot be trusted."""
        self._pool.uncache_blocks(block_ids)

    def take_events(self, answered_step: int) -> list[KVEvent]:
        """What became findable or ceased to be, in order, as far as the answer to `answered_step`
        proves it; each once. Empty unless events are enabled."""
        return [] if self._events is None else self._events.take(answered_step)

    # What an operator sees

    def pool_states(self) -> UInt8Array:
        """See `BlockPool.states`."""
        return self._pool.states()

    def num_references(self, block_ids: Int64Array) -> Int64Array:
        """See `BlockPool.num_references`."""
        return self._pool.num_references(block_ids)

    def blocks_in_use(self, row: int) -> list[Int32Array]:
        """The row's blocks by group, without those forgotten, in order of position."""
        return [manager.blocks_in_use(row) for manager in self._managers]

    def num_blocks_of_rows(self, rows: Int64Array) -> list[int]:
        """By group, blocks in the tables of these rows, those shared counted in each."""
        return [manager.num_blocks_of_rows(rows) for manager in self._managers]

    # Everything

    def reset_prefix_cache(self) -> bool:
        """Forget all names; False while anybody holds a block."""
        return self._pool.reset_prefix_cache()

    def clear(self) -> None:
        """A new epoch: rows are empty, all blocks are free and unnamed, nothing is fenced, and
        whoever held blocks elsewhere holds them no longer."""
        self._pool.clear()
        self.full_blocks.clear()
        self._settled.clear()
        for manager in self._managers:
            manager.clear()

    def check(self, holders: Iterable[HeldBlocks] = ()) -> None:
        """Raise LongshoreError, naming what is off, unless all blocks are accounted for: by rows,
        by `holders` (everybody who holds blocks and is on no row) or by the free queue. O(blocks):
        for tests and idle moments."""
        num_holders = np.zeros(self.num_blocks, np.int64)
        held = [block_ids for holder in holders for block_ids in holder.block_ids]
        for block_ids in (*(manager.held() for manager in self._managers), *held):
            np.add.at(num_holders, block_ids, 1)
        num_holders[NULL_BLOCK] = 0
        self._pool.check(num_holders)
