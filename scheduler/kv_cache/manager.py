"""The scheduler's one interface to the KV cache: lookup, allocation, caching and freeing of blocks.

Coordinator (all groups) -> one manager per group (block tables) -> block pool. Rows belong to the
scheduler; token ids are read only to hash blocks.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import methodcaller

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, Int64Array, int32_array
from longshore.protocol.events import KVEvent
from longshore.protocol.kv_cache_spec import (
    NULL_BLOCK,
    KVCacheConfig,
    LongestRequest,
    sink_block_ids,
)
from longshore.protocol.plan import AppendedBlocks
from longshore.protocol.requests import CacheHint, Tenant
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.features.events import KVEventLog
from longshore.scheduler.features.metrics import BlockMetrics
from longshore.scheduler.kv_cache.block_hash import BlockHasher
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.blocks import (
    BlockCopy,
    BlockDemand,
    BlockIds,
    ComputedBlocks,
    HeldBlocks,
    table_entries,
)
from longshore.scheduler.kv_cache.coordinator import make_coordinator
from longshore.scheduler.kv_cache.ends import Ends
from longshore.scheduler.kv_cache.free_order import FreeOrder
from longshore.scheduler.kv_cache.full import SingleTypeManager
from longshore.scheduler.kv_cache.full_blocks import FullBlocks
from longshore.scheduler.kv_cache.habits import StateKind
from longshore.scheduler.kv_cache.states import KeptStates, StateManager
from longshore.scheduler.kv_cache.windowed import SettledCounts, WindowedManager
from longshore.scheduler.request import Request


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked up and hit, counted once per admission; separately for preempted requests.

    num_prompt_tokens: tokens of requests that were not preempted, looked up or not.
    """

    num_prompt_tokens: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_preempted_queried_tokens: int = 0
    num_preempted_hit_tokens: int = 0


class KVCacheManager:
    """Blocks of all rows and groups.

    longest:   the longest request; what it has in flight bounds what a windowed group holds.
    hash_seed: the deployment's seed of block hashes.
    metrics:   receives what happens to blocks.
    chunk_blocks: of the connector, see `FullBlocks`.

    pool:        the blocks, to look at; the scheduler changes them by the methods here.
    full_blocks: hashes and caches blocks that are full.
    frees_skipped: some group frees blocks while a request runs; see `free_skipped`.
    resumes_anywhere: a row can go on after any number of its tokens; see `resume_point`.
    kept_states: the states that later requests can begin with; None: the model has no states, or
                 there is no prefix caching.
    ends:        what requests leave for those that begin with all of it; None: nothing.
    state_border: they are after multiples of so many tokens.
    follows_from_tokens: equal tokens have equal KV in all groups.
    num_yieldable: blocks that features release when others need them.
    can_fork:  a request can begin with any part of another one's KV: no group frees blocks early.
    has_states: but only with a part after which there is a state.

    Arrays indexed by row are (max_num_seqs,) int64. `num_tokens` of a row counts everything that
    needs a slot, including lookahead, and is limited to that of the longest request.
    """

    def __init__(
        self,
        cache: CacheConfig,
        kv_cache: KVCacheConfig,
        longest: LongestRequest,
        *,
        max_num_seqs: int,
        hash_seed: bytes,
        metrics: BlockMetrics | None = None,
        chunk_blocks: int = 0,
    ) -> None:
        self._events = KVEventLog() if cache.enable_kv_cache_events else None
        self.pool = BlockPool(
            kv_cache.num_blocks,
            len(kv_cache.groups),
            num_set_aside=sum(map(len, sink_block_ids(kv_cache.groups))),
            metrics=metrics,
            events=self._events,
        )
        self._coordinator = make_coordinator(
            kv_cache,
            self.pool,
            cache,
            max_num_seqs=max_num_seqs,
            longest=longest,
        )
        self._managers = self._coordinator.managers
        self._caching = self._coordinator.caching
        self._windowed = [m for m in self._managers if isinstance(m, WindowedManager)]
        self._settled = SettledCounts()
        self.num_blocks, self.num_usable_blocks = kv_cache.num_blocks, self.pool.num_usable
        self.num_yieldable = 0
        self.num_groups = len(self._managers)
        self.block_sizes = tuple(manager.block_size for manager in self._managers)
        self.frees_skipped = bool(self._windowed)
        self._paged_states = [m for m in self._managers if isinstance(m, StateManager)]
        self.resumes_anywhere = not (self.frees_skipped or self._paged_states)
        of_tokens = [m for m in self._managers if m not in self._paged_states]
        self.kept_states: KeptStates | None = None
        if self._paged_states and cache.enable_prefix_caching:
            self.kept_states = KeptStates(
                self._paged_states[0],
                [manager.block_size for manager in self._caching],
                self.pool,
                cache.tokens_per_hash,
            )
        self._looks_up = bool(self._caching) or self.kept_states is not None
        self.state_border = math.lcm(self._coordinator.alignment, cache.tokens_per_hash)
        self.follows_from_tokens = all(m.caches_prefixes for m in of_tokens)
        self.can_fork = self.follows_from_tokens and not self.frees_skipped
        self.has_states = bool(self._paged_states)
        self._free_order = FreeOrder(
            [m.block_size for m in of_tokens], [m.frees_skipped for m in of_tokens]
        )
        hasher = BlockHasher(cache.tokens_per_hash, hash_seed, cache.hash_algorithm)
        self.full_blocks = FullBlocks(
            self._caching,
            self.pool,
            hasher,
            events=self._events,
            chunk_blocks=chunk_blocks,
            state_group=sum(manager.group for manager in self._paged_states),
        )
        self.ends: Ends | None = None
        if self.kept_states is not None and self.can_fork:
            self.ends = Ends(self._managers, self.pool, self.full_blocks, self.kept_states)
        nothing: BlockIds = []
        self._nothing_computed = ComputedBlocks(tuple(nothing for _ in self._managers), 0)
        self._log_stats = cache.log_stats
        self.stats = PrefixCacheStats()

    @property
    def num_free_blocks(self) -> int:
        return self.pool.free_queue.num_free

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are held, 0 to 1."""
        return self.pool.usage

    # Lookup

    def get_computed_blocks(self, request: Request) -> ComputedBlocks:
        """The longest cached prefix of a waiting request, without its last token (one token must be
        computed to sample from). Takes no reference yet."""
        if not self._looks_up or request.skips_prefix_cache:
            return self._nothing_computed
        self.full_blocks.extend_hashes(request, request.token_ids)
        hashes, num_tokens = request.block_hashes, len(request.token_ids) - 1
        hits, num_hit_tokens = self._find_hit(hashes, num_tokens)
        if self.kept_states is not None:
            return self._with_state(hashes, hits, num_hit_tokens)
        return ComputedBlocks(hits, num_hit_tokens) if num_hit_tokens else self._nothing_computed

    def _find_hit(
        self, hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[BlockIds, ...], int]:
        """The longest prefix of at most `max_tokens` tokens that all groups have, states aside."""
        if not self._caching and self.kept_states is not None:
            return self._nothing_computed.block_ids, max_tokens - max_tokens % self.state_border
        return self._coordinator.find_longest_hit(hashes, max_tokens)

    def _with_state(
        self, hashes: Sequence[bytes], hits: tuple[BlockIds, ...], num_tokens: int
    ) -> ComputedBlocks:
        """The longest part of this hit after which a state is kept."""
        assert self.kept_states is not None
        while num_tokens:
            state, num_with_state = self.kept_states.find_last(hashes, num_tokens)
            if num_with_state == num_tokens:
                return ComputedBlocks(hits, num_tokens, state)
            hits, num_tokens = self._find_hit(hashes, num_with_state)
        return self._nothing_computed

    def keep_state(
        self, request: Request, num_tokens: int, kind: StateKind, *, generation: int, step: int
    ) -> list[int] | None:
        """Blocks for the state after the first `num_tokens` tokens of a request, which plan `step`
        computes on the row of this generation, and which is found from now on; see
        `KeptStates.keep`. None if it is kept already, or there are too few blocks."""
        assert self.kept_states is not None
        hashes = request.block_hashes[: num_tokens // self.kept_states.tokens_per_hash]
        if self.kept_states.has(hashes[-1]):
            return None
        found, _ = self._find_hit(hashes, num_tokens)
        hits = [ids for m, ids in zip(self._managers, found, strict=True) if m in self._caching]
        pages = self.kept_states.keep(
            hashes, num_tokens, kind, hits, generation=generation, step=step
        )
        if pages is not None:
            self.full_blocks.record_state(request, num_tokens, pages, hashes[-1], step)
        return pages

    def extend_hashes(self, request: Request) -> None:
        """Compute the block hashes of a waiting request that `get_computed_blocks` needs."""
        if self._looks_up and not request.skips_prefix_cache:
            self.full_blocks.extend_hashes(request, request.token_ids)

    def find_junction(self, request: Request) -> int:
        """Where the prefix of a request that starts ends, as far as the groups without states have
        it cached. Later requests that share it can begin there if they find a state."""
        if request.skips_prefix_cache:
            return 0
        return self._coordinator.find_junction(request.block_hashes, len(request.token_ids) - 1)

    def count_lookup(self, request: Request, num_hit_tokens: int) -> None:
        """The request is admitted with this many cached tokens. Lookups alone are not counted,
        because a waiting request is looked up in every step."""
        request.num_hit_tokens = num_hit_tokens
        request.state_source = None
        if not self._log_stats:
            return
        stats, num_tokens = self.stats, len(request.token_ids)
        if not request.num_preemptions:
            stats.num_prompt_tokens += num_tokens
        if not self._looks_up or request.skips_prefix_cache:
            return
        if request.num_preemptions:
            stats.num_preempted_queried_tokens += num_tokens
            stats.num_preempted_hit_tokens += num_hit_tokens
        else:
            stats.num_queried_tokens += num_tokens
            stats.num_hit_tokens += num_hit_tokens

    # Allocation for a request that starts

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at a time, without those that
        depend on encoder tokens."""
        return sum([manager.num_blocks_for(num_tokens) for manager in self._managers])

    def demand(
        self,
        computed: ComputedBlocks,
        num_tokens: int,
        *,
        num_loaded: int = 0,
        num_encoder_tokens: int = 0,
    ) -> BlockDemand:
        """What a request needs to hold `num_tokens` tokens, including `computed`; valid until a
        block is allocated or freed.

        num_loaded: tokens that are computed when a connector has loaded KV after the cached prefix;
                    0 if nothing is loaded.
        """
        hits = computed.block_ids
        num_unheld = sum(map(self.pool.num_unheld, hits)) if computed.num_tokens else 0
        # A path of its own, because it saves 5% of a step in which a tenth of the requests changes.
        if len(self._managers) == 1 and not self._windowed:
            end = self._managers[0].num_positions(num_tokens, num_encoder_tokens)
            first = len(hits[0])
            num_new = end - first
            return BlockDemand(
                computed, (range(first, end),), (end,), num_new, num_new + num_unheld
            )
        ends = [m.num_positions(num_tokens, num_encoder_tokens) for m in self._managers]
        positions = [
            manager.positions(len(found), end, num_loaded)
            for manager, found, end in zip(self._managers, hits, ends, strict=True)
        ]
        num_new = sum(map(len, positions))
        return BlockDemand(computed, positions, ends, num_new, num_new + num_unheld)

    def start(self, row: int, demand: BlockDemand) -> tuple[Int32Array, ...] | None:
        """Give an empty row the cached prefix and new blocks; returns its block tables, one per
        group. None, and nothing has changed, if there are too few free blocks."""
        if demand.num_needed > self.num_free_blocks:
            return None
        computed = demand.computed
        if computed.num_tokens:
            for manager, hits in zip(self._managers, computed.block_ids, strict=True):
                first = manager.first_needed(computed.num_tokens)  # null blocks before it
                self.pool.touch(hits[first:] if first else hits)
        tables = []
        for manager, hits, positions, end in zip(
            self._managers, computed.block_ids, demand.positions, demand.ends, strict=True
        ):
            block_ids = self.pool.get_new_blocks(len(positions)) if positions else []
            if len(positions) != end - len(hits):
                block_ids = table_entries(len(hits), end, positions, block_ids)
            tables.append(manager.start(row, hits, block_ids))
        return tuple(tables)

    def state_copies(
        self, prefix: ComputedBlocks, tables: Sequence[Int32Array], *, step: int
    ) -> list[BlockCopy]:
        """The copies that plan `step` must make so that a row with these tables has the state after
        this prefix. Their sources have no owner, but until the plan is answered nothing may be
        loaded into them."""
        if not len(prefix.state):
            return []
        assert self.kept_states is not None
        self.kept_states.num_found += 1
        self.pool.fence(prefix.state, step)
        table = tables[self._paged_states[0].group]
        pages = zip(int32_array(prefix.state).tolist(), table.tolist(), strict=True)
        return [BlockCopy(source_id, target_id, 1) for source_id, target_id in pages]

    def reserve(self, demand: BlockDemand, *, answered_step: int) -> HeldBlocks | None:
        """The blocks that `start` would give a row, without a row, as targets of a load: no plan
        after `answered_step` refers to the new ones. None, and nothing has changed, if there are
        too few free ones."""
        if demand.num_needed > self.num_free_blocks:
            return None
        all_hits = np.concatenate([int32_array(hits) for hits in demand.computed.block_ids])
        new = self.pool.get_settled_blocks(demand.num_new, answered_step, all_hits)
        if new is None:
            return None
        self.pool.touch(all_hits)
        tables = []
        for hits, positions, end in zip(
            demand.computed.block_ids, demand.positions, demand.ends, strict=True
        ):
            added = table_entries(len(hits), end, positions, new[: len(positions)])
            tables.append(np.concatenate((int32_array(hits), int32_array(added))))
            new = new[len(positions) :]
        return HeldBlocks(tuple(tables))

    # Blocks without a row

    def hold(self, block_ids: Sequence[int]) -> HeldBlocks:
        """Take one more reference to each of these blocks, all different, of any group, for a
        transfer that reads them: they are not allocated again until it releases them."""
        held = int32_array(block_ids)
        self.pool.touch(held)
        return HeldBlocks((held, *(EMPTY_INT32 for _ in self._managers[1:])))

    def attach(self, row: int, held: HeldBlocks, num_hashed_tokens: int = 0) -> None:
        """An empty row takes over these references. Blocks of the first `num_hashed_tokens` tokens,
        and leading ones that are cached, are not cached again."""
        for manager, block_ids in zip(self._managers, held.block_ids, strict=True):
            manager.attach(row, block_ids, num_hashed_tokens // manager.block_size)

    def detach(self, rows: list[int]) -> list[HeldBlocks]:
        """Empty the rows; their references belong to the results."""
        tables = [manager.take(rows) for manager in self._managers]
        return list(map(HeldBlocks, zip(*tables, strict=True)))

    def cut(self, held: HeldBlocks, num_tokens: int) -> tuple[HeldBlocks, HeldBlocks]:
        """The blocks that `num_tokens` tokens need, and the others. The caller owns both."""
        pairs = [
            (block_ids, manager.num_positions(num_tokens) if manager.caches_prefixes else None)
            for manager, block_ids in zip(self._managers, held.block_ids, strict=True)
        ]
        kept = tuple([block_ids[:end] for block_ids, end in pairs])
        return HeldBlocks(kept), HeldBlocks(
            tuple([EMPTY_INT32 if end is None else block_ids[end:] for block_ids, end in pairs])
        )

    def release(self, *held: HeldBlocks, step: int = 0) -> None:
        """Release these references, one owner after the other, the blocks of each tail first (see
        `FreeOrder`). Cached blocks can be found until they are evicted. step: the newest plan that
        may still refer to the blocks."""
        tables = list(map(self._tail_first, held))
        self.pool.free_blocks(tables[0] if len(tables) == 1 else np.concatenate(tables), step)

    def retain(self, held: HeldBlocks, hint: CacheHint, *, tenant: Tenant, now: float) -> None:
        """Evict the cached blocks of these tables after those of other prefixes; see
        `RetainedPrefixes`. A prefix that ends within a block has all of it."""
        tables = [held, *(self.cut(held, prefix.num_tokens)[0] for prefix in hint.prefixes)]
        block_ids, *prefixes = [self._tail_first(table)[::-1] for table in tables]
        self.pool.retain(block_ids, hint, prefixes, tenant=tenant, now=now)

    def _tail_first(self, held: HeldBlocks) -> Int32Array:
        if len(self._managers) == 1:
            return held.block_ids[0][::-1]
        if not self._paged_states:
            return self._free_order.tail_first(held.block_ids)
        tables = list(held.block_ids)
        pages = tables.pop(self._paged_states[0].group)  # in no order
        several = len(tables) > 1
        others = self._free_order.tail_first(tables) if several else tables[0][::-1]
        return np.concatenate((pages, others))

    # Blocks that several requests share

    def share(self, held: HeldBlocks) -> None:
        """Take one more reference to each of these blocks, which somebody holds."""
        for table in held.block_ids:
            self.pool.touch(table[table != NULL_BLOCK])

    def fork(
        self, tables: Sequence[Int32Array], num_tokens: int, state: HeldBlocks | None = None
    ) -> HeldBlocks:
        """Take one more reference to each block of the first `num_tokens` tokens of these tables.
        No data is copied. state: the state after these tokens; None: that in the tables is."""
        if state is not None:
            pairs = zip(tables, state.block_ids, self._managers, strict=True)
            tables = [own if m in self._paged_states else table for table, own, m in pairs]
        shared = tuple(
            [
                table[: manager.num_positions(num_tokens)].copy()
                for manager, table in zip(self._managers, tables, strict=True)
            ]
        )
        for block_ids in shared:
            self.pool.touch(block_ids)
        return HeldBlocks(shared)

    def new_state(self, step: int) -> HeldBlocks | None:
        """Blocks for a state that plan `step` writes; None if there are too few free ones."""
        num_pages = self._paged_states[0].num_pages
        if num_pages > self.num_free_blocks:
            return None
        pages = int32_array(self.pool.get_new_blocks(num_pages))
        self.pool.fence(pages, step)
        return self.state_in(pages)

    def state_in(self, pages: Int32Array) -> HeldBlocks:
        """A state in these blocks, to which the caller has references, or takes them."""
        return HeldBlocks(
            tuple([pages if m in self._paged_states else EMPTY_INT32 for m in self._managers])
        )

    def pages_of(self, state: HeldBlocks) -> Int32Array:
        """The blocks that the state in this table fills."""
        return state.block_ids[self._paged_states[0].group]

    def num_blocks_to_resume(
        self, held: HeldBlocks, num_computed: int, num_tokens: int, answered_step: int
    ) -> int:
        """Free blocks that `resume` takes."""
        num_new = 0
        for manager, table in zip(self._managers, held.block_ids, strict=True):
            num_new += max(manager.num_positions(num_tokens) - len(table), 0)
            for position, _ in self._written_first(manager, num_computed):
                num_new += not self.pool.is_private(int(table[position]), answered_step)
        return num_new

    def _written_first(
        self, manager: SingleTypeManager, num_computed: int
    ) -> Iterator[tuple[int, int]]:
        """The positions of blocks that a row with `num_computed` tokens has, and which it writes to
        in its next step, with the tokens in them: the partial last one, or all pages of a state."""
        if isinstance(manager, StateManager):
            for position in range(manager.num_pages):
                yield position, 1
            return
        position, num_tokens = divmod(num_computed, manager.block_size)
        if num_tokens:
            yield position, num_tokens

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
        gets blocks for `num_tokens`. Returns the copies that plan `step` must make, so that the row
        writes to no block that another request holds or can find. None, and nothing has changed, if
        there are too few free blocks."""
        num_new = self.num_blocks_to_resume(held, num_computed, num_tokens, answered_step)
        if num_new > self.num_free_blocks:
            return None
        self.attach(row, held)
        copies = self.make_writable(row, num_computed, step=step, answered_step=answered_step)
        self.grow_row(row, num_tokens)
        return copies

    def make_writable(
        self, row: int, num_computed: int, *, step: int, answered_step: int
    ) -> list[BlockCopy]:
        """Prepare the row to write after its first `num_computed` tokens. A partial block, or page
        of its state, that other requests hold, can find by its hash, or write to, is replaced by a
        new one in the row's table. Returns the copies, which plan `step` makes before anything is
        loaded into the sources. There must be enough free blocks."""
        copies = []
        for manager in self._managers:
            shared = []
            for position, num_tokens in self._written_first(manager, num_computed):
                block_id = int(manager.table[row, position])
                if self.pool.is_private(block_id, answered_step):
                    manager.redirect(row, position, block_id)
                else:
                    shared.append((position, block_id, num_tokens))
            targets = int32_array(self.pool.get_new_blocks(len(shared))).tolist()
            for (position, source_id, num_tokens), target_id in zip(shared, targets, strict=True):
                manager.redirect(row, position, target_id)
                copies.append(BlockCopy(source_id, target_id, num_tokens))
            self.pool.free_blocks([block_id for _, block_id, _ in shared], step)
        return copies

    # Blocks of rows

    def free_skipped(
        self,
        num_computed: Int64Array,
        num_verified: Int64Array,
        generation: Int64Array,
        *,
        step: int,
        answered_step: int,
    ) -> None:
        """Free the blocks that no row needs any more, in admission order. To be called before plan
        `step` is made and before blocks are allocated; see `SettledCounts`."""
        settled = self._settled.before_plan(
            num_computed, num_verified, generation, step=step, answered_step=answered_step
        )
        for manager in self._windowed:
            only_cached = manager in self._caching
            block_ids = manager.free_skipped(settled, generation, only_cached=only_cached)
            if len(block_ids):
                self.pool.free_blocks(block_ids, step - 1)

    def num_before(
        self, tables: Sequence[Int32Array], bad: Sequence[int] | Int32Array
    ) -> int | None:
        """Leading tokens of a row with these tables whose KV is in none of the `bad` blocks; None:
        it has none of them."""
        firsts = []
        for manager, table in zip(self._managers, tables, strict=True):
            is_bad = np.isin(table, bad)
            if is_bad.any():
                is_whole = manager in self._paged_states
                firsts.append(0 if is_whole else int(is_bad.argmax()) * manager.block_size)
        return min(firsts, default=None)

    def resume_point(self, tables: Sequence[Int32Array], num_good: int) -> int:
        """The most tokens, up to `num_good`, after which a request with these tables can resume,
        because every group has what the next token needs: `num_good` itself, if no group frees
        blocks early; otherwise a common block boundary, or 0. A state cannot be rewound: 0."""
        if self._paged_states:
            return 0
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

    def grow(
        self, num_tokens: Int64Array, admission_order: Int64Array
    ) -> list[AppendedBlocks] | None:
        """Give every row the blocks it lacks to hold `num_tokens` (max_num_seqs,) tokens, rows of
        lower `admission_order` (same shape) first. None, and nothing has changed, if there are too
        few free blocks."""
        shorts, total = [], 0
        for manager in self._managers:
            shorts.append(manager.rows_short(num_tokens))
            total += shorts[-1][2]
        if total == 0:
            return []
        if total > self.num_free_blocks:
            return None
        appended = []
        for manager, (rows, counts, count) in zip(self._managers, shorts, strict=True):
            if count:
                order = np.argsort(admission_order[rows])
                rows, counts = rows[order], counts[order]
                block_ids = manager.lay_out(counts, self.pool.get_new_blocks(count))
                row_of_block = manager.append(rows, counts, block_ids)
                appended.append(AppendedBlocks(manager.group, int32_array(row_of_block), block_ids))
        return appended

    def grow_row(self, row: int, num_tokens: int) -> list[list[int]] | None:
        """`grow` for one row: its new table entries per group. One row costs a sixth of `grow`, and
        under pressure a step asks once per row."""
        wanted, num_new = [], 0
        for manager in self._managers:
            first = int(manager.num_blocks[row])
            end = max(manager.num_positions(num_tokens), first) if manager.grows else first
            positions = manager.positions(first, end, 0) if end > first else ()
            wanted.append((manager, first, end, positions))
            num_new += len(positions)
        if num_new > self.num_free_blocks:
            return None
        entries: list[list[int]] = []
        for manager, first, end, positions in wanted:
            added: BlockIds = []
            if end > first:
                new = self.pool.get_new_blocks(len(positions)) if positions else []
                added = new
                if len(positions) < end - first:
                    added = table_entries(first, end, positions, new)
                manager.append_to_row(row, added)
            entries.append(list(added))
        return entries

    def truncate(self, row: int, num_tokens: int, step: int = 0) -> None:
        """Free the blocks beyond those that `num_tokens` tokens need: the row was rewound. The
        caller has uncached the blocks whose content is wrong."""
        cut = HeldBlocks(tuple(manager.truncate(row, num_tokens) for manager in self._managers))
        self.release(cut, step=step)

    def free(self, row: int, step: int = 0) -> None:
        """`detach` and `release`."""
        self.release(*self.detach([row]), step=step)

    def fence(self, blocks: Sequence[HeldBlocks], step: int) -> None:
        """Plan `step` refers to these blocks: until it is answered, nothing may be loaded into
        them, even if they are free."""
        tables = [block_ids for one in blocks for block_ids in one.block_ids]
        self.pool.fence(tables[0] if len(tables) == 1 else np.concatenate(tables), step)

    def block_ids(self, row: int) -> tuple[Int32Array, ...]:
        """Copies of the row's block tables, one per group."""
        return tuple(map(methodcaller("block_ids", row), self._managers))

    def num_common_prefix_blocks(self, rows: Int64Array) -> tuple[int, ...]:
        """Per group, leading blocks that the tables of all `rows` have in common."""
        return tuple(map(methodcaller("num_common_blocks", rows), self._managers))

    def uncache_unshared(self, held: HeldBlocks) -> None:
        """Remove those of these blocks that have no other holder from the prefix cache, so that
        they are reused before any cached one."""
        block_ids = np.concatenate(held.block_ids)
        block_ids = block_ids[block_ids != NULL_BLOCK]
        self.pool.uncache_blocks(block_ids[self.pool.num_references(block_ids) == 1])

    def uncache_blocks(self, block_ids: Int32Array) -> None:
        """Remove exactly these blocks from the prefix cache, because their content is wrong."""
        self.pool.uncache_blocks(block_ids)

    def take_events(self, answered_step: int) -> list[KVEvent]:
        """Events of blocks cached or evicted, in order, as far as the output of `answered_step`
        proves them; each event once. Empty unless events are enabled."""
        return [] if self._events is None else self._events.take(answered_step)

    # What operators see

    def blocks_in_use(self, row: int) -> list[Int32Array]:
        """The row's blocks by group, without those freed early, in order of position."""
        return [manager.blocks_in_use(row) for manager in self._managers]

    def num_blocks_of_rows(self, rows: Int64Array) -> list[int]:
        """Number of blocks in the tables of these rows, by group; shared blocks count in each
        row."""
        return [manager.num_blocks_of_rows(rows) for manager in self._managers]

    # Everything

    def reset_prefix_cache(self) -> bool:
        """Uncache all blocks; False while any block is held."""
        is_reset = self.pool.reset_prefix_cache()
        if self.kept_states is not None:
            self.kept_states.chains.prune()
        return is_reset

    def begin_epoch(self, rows: Int64Array, answered_step: int | None) -> None:
        """A new epoch: `rows`, those in use, become empty, all blocks are free, nothing is fenced,
        and references held elsewhere are void. answered_step: the last plan whose KV outlives its
        workers, and stays cached; None: no KV does."""
        tables = [table[::-1] for row in rows[::-1].tolist() for table in self.block_ids(row)]
        self.pool.begin_epoch(answered_step, np.concatenate([EMPTY_INT32, *tables]))
        self.full_blocks.clear()
        self._settled.clear()
        if self.kept_states is not None:
            self.kept_states.begin_epoch()
        for manager in self._managers:
            manager.clear()

    def check(self, holders: Iterable[HeldBlocks] = ()) -> None:
        """Raise LongshoreError unless all blocks are accounted for: by rows, by `holders` (all
        owners without a row) or by the free queue. O(blocks): for tests and idle moments."""
        num_holders = np.zeros(self.num_blocks, np.int64)
        held = [block_ids for holder in holders for block_ids in holder.block_ids]
        for block_ids in (*(manager.held() for manager in self._managers), *held):
            np.add.at(num_holders, block_ids, 1)
        num_holders[NULL_BLOCK] = 0
        self.pool.check(num_holders)
        if self.kept_states is not None:
            self.kept_states.chains.check()
