"""The blocks of the KV cache: their references, their hashes, and which is allocated next.

One pool serves all groups. A block without a reference keeps its hash and its content until it is
allocated again, so the free queue is also the prefix cache, evicted in LRU order once no block
without a hash is free. Blocks are integers, which index the columns here. These are read one by one
or in bulk, whichever is faster for the number of blocks.
"""

from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np

from longshore.connectors.base.retention import RetainedPrefixes
from longshore.protocol.arrays import (
    EMPTY_INT32,
    BoolArray,
    Int32Array,
    Int64Array,
    UInt8Array,
    int32_array,
)
from longshore.protocol.errors import LongshoreError
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.requests import MAX_CACHE_PRIORITY, CacheHint, Tenant
from longshore.protocol.statistics import BlockState
from longshore.scheduler.features.events import KVEventLog
from longshore.scheduler.features.metrics import BlockMetrics
from longshore.scheduler.kv_cache.blocks import FEW_BLOCKS, FEW_FREED_BLOCKS, BlockIds
from longshore.scheduler.kv_cache.free_queue import TAKEN, FreeQueue
from longshore.scheduler.kv_cache.hash_map import BlockHashMap


class BlockPool:
    """`num_blocks` blocks, including the null block: a placeholder that is never allocated, freed
    or cached, and whose references are not counted.

    num_set_aside: blocks after the null block that are always in use and never allocated.
    metrics: receives every block that is allocated, hit or evicted.
    events:  receives every hash whose last block was evicted or uncached.

    Block ids are int32 arrays or, if they are few, lists: see `blocks.BlockIds`.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        *,
        num_set_aside: int = 0,
        metrics: BlockMetrics | None = None,
        events: KVEventLog | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._num_set_aside = num_set_aside
        self.num_usable = num_blocks - 1 - num_set_aside
        self.metrics = metrics
        self._events = events
        self._prefixes = tuple(BlockHashMap() for _ in range(num_groups))
        self._unannounced: set[int] = set()  # cached blocks that no event is about
        self._is_cached_item = bytearray(num_blocks)
        self._is_cached: UInt8Array = np.frombuffer(self._is_cached_item, np.uint8)
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._group = np.zeros(num_blocks if num_groups > 1 else 0, np.int16)
        self.retained = RetainedPrefixes(num_blocks)
        self._mark: Int32Array = np.zeros(
            0, np.int32
        )  # of blocks in chains, see `chain`; 0: in none
        self._make_room: Callable[[int], None] | None = None
        self._start_free()

    def _start_free(self, block_ids: Int32Array | None = None) -> None:
        """All blocks are free, in this order."""
        self.free_queue = FreeQueue(self._is_cached_item, self._num_set_aside, block_ids)
        self.free_queue.make_room = self._make_room
        # The position of a block in the free queue, or minus its number of references if it is
        # held: so it cannot be both free and held.
        self._position, self._position_item = (
            self.free_queue.position,
            self.free_queue.position_item,
        )
        self._fence: Int64Array = np.zeros(self.num_blocks, np.int64)
        self._fence_item = memoryview(self._fence)
        self._computed_in: Int64Array = np.zeros(self.num_blocks, np.int64)  # of cached blocks
        self._computed_in_item = memoryview(self._computed_in)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, including cached ones without a reference."""
        return self.free_queue.num_free

    @property
    def num_cached(self) -> int:
        """Blocks with a hash, held or free. O(n): a byte per block is read."""
        return int(np.count_nonzero(self._is_cached.view(np.bool_)))

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are held, 0 to 1."""
        return (self.num_usable - self.num_free) / self.num_usable

    def block_hash(self, block_id: int) -> bytes | None:
        """The block's hash, if it is full and cached."""
        return self._hashes[block_id]

    def _group_of(self, block_id: int) -> int:
        return int(self._group[block_id]) if len(self._group) else 0

    def free_block_ids(self) -> list[int]:
        """All free blocks in order of allocation. O(n): for checks, not for steps."""
        return list(self.free_queue)

    # Blocks

    def get_new_blocks(self, count: int) -> BlockIds:
        """Allocate the first free blocks; cached ones are evicted, retained ones last. Raises
        OutOfBlocks."""
        if count > FEW_BLOCKS:
            block_ids = self.free_queue.popleft_n(count)
            self._evict(block_ids.tolist())
            return block_ids
        few = self.free_queue.popleft_few(count)
        self._evict(few)
        return few

    def get_settled_blocks(
        self, count: int, answered_step: int, keep: Int32Array
    ) -> Int32Array | None:
        """`get_new_blocks` for blocks that no plan after `answered_step` refers to and that are not
        in `keep`. None, and nothing has changed, if there are too few."""
        if self._make_room is not None:
            self._make_room(count - self.free_queue.num_before_retained())
        pieces: list[Int32Array] = []
        missing = count
        for block_ids in self.free_queue.chunks():
            settled: BoolArray = self._fence[block_ids] <= answered_step
            if len(keep):
                settled &= np.isin(block_ids, keep, invert=True)
            pieces.append(block_ids[settled][:missing])
            missing -= len(pieces[-1])
            if missing == 0:
                break
        if missing:
            return None
        found = np.concatenate(pieces) if pieces else EMPTY_INT32
        self.free_queue.remove_n(found)
        self._evict(found.tolist())
        return found

    def free_blocks(self, block_ids: BlockIds, step: int = 0) -> None:
        """Release one reference each, in this order. A block without another one stays cached at
        the tail of the free queue if it has a hash; without a hash it goes to the head and is
        reused before any cached one. step: the newest plan that may still refer to these blocks;
        0: none.

        Raises NotTaken, and nothing has changed, if a block has too few references.
        """
        is_long = len(block_ids) > FEW_FREED_BLOCKS
        if not (is_long and self.free_queue.release_n(np.asarray(block_ids, np.int32))):
            block_ids = block_ids if isinstance(block_ids, list) else block_ids.tolist()
            self.free_queue.release_few(block_ids)
        if self.retained.prefixes or self._make_room is not None:
            self._set_aside_retained(int32_array(block_ids))
        if step:
            self.fence(block_ids, step)

    def touch(self, block_ids: BlockIds) -> None:
        """Add one reference each; a block that had none is removed from the free queue."""
        is_long = len(block_ids) > FEW_BLOCKS
        if not (is_long and self.free_queue.acquire_n(np.asarray(block_ids, np.int32))):
            few = block_ids if isinstance(block_ids, list) else block_ids.tolist()
            self.free_queue.acquire_few(few)
        if self.metrics is not None:
            accessed = int32_array(block_ids)
            self.metrics.accessed(accessed[accessed != NULL_BLOCK])

    def is_private(self, block_id: int, answered_step: int) -> bool:
        """Whether the block's only holder may write to it: it has one reference, is not cached, and
        no plan after `answered_step` refers to it for an earlier holder."""
        is_settled = self._fence_item[block_id] <= answered_step
        return self._position_item[block_id] == -1 and self._hashes[block_id] is None and is_settled

    def num_unheld(self, block_ids: BlockIds) -> int:
        """How many of these blocks, all different, are free."""
        if isinstance(block_ids, list):
            position = self._position_item
            return len([block_id for block_id in block_ids if position[block_id] >= 0])
        return int(np.count_nonzero(self._position[block_ids.astype(np.int64)] >= 0))

    def fence(self, block_ids: BlockIds, step: int) -> None:
        """Plan `step`, the newest, refers to these blocks: until it is answered and once they are
        free, they may be allocated for compute but not as the target of a load."""
        if isinstance(block_ids, list):
            fence = self._fence_item
            for block_id in block_ids:
                fence[block_id] = step
        else:
            self._fence[block_ids.astype(np.int64)] = step

    # Retained prefixes

    def retain(
        self,
        block_ids: Int32Array,
        hint: CacheHint,
        prefixes: Sequence[Int32Array] = (),
        *,
        tenant: Tenant,
        now: float,
    ) -> None:
        """Retain those of these held blocks that are cached; see `RetainedPrefixes.add`."""
        cached, *others = [ids[self._is_cached[ids] != 0] for ids in (block_ids, *prefixes)]
        ended = self.retained.add(cached, hint, others, tenant=tenant, now=now)
        self._end_retained(ended)

    def expire_retained(self, now: float) -> None:
        """End the hints whose time to live has passed."""
        self._end_retained(self.retained.expire(now))

    def _end_retained(self, block_ids: Int32Array) -> None:
        self.free_queue.move_to_tail(block_ids)
        if self._make_room is not None:
            self._set_aside_retained(block_ids)

    def _set_aside_retained(self, block_ids: Int32Array) -> None:
        """Of these blocks, in this order, allocate those that are retained after all others."""
        if self._make_room is not None:
            chained = block_ids[self._mark[block_ids] != 0]
            self.free_queue.move_to_retained(chained, 0)
        priorities = self.retained.priorities(block_ids)
        for priority in range(1, MAX_CACHE_PRIORITY + 1):
            retained = block_ids[priorities == priority]
            if len(retained):
                self.free_queue.move_to_retained(retained, priority)

    # Chains

    def chain(self, make_room: Callable[[int], None]) -> None:
        """Blocks of chains (see `mark`) are allocated after all others but retained ones.
        make_room: called with the number of blocks that are missing then, to `unmark` or uncache
        some."""
        self._mark = np.zeros(self.num_blocks, np.int32)
        self._make_room = self.free_queue.make_room = make_room

    def marks(self, block_ids: Int32Array) -> Int32Array:
        """The mark of each block; 0: it is in no chain."""
        marks: Int32Array = self._mark[block_ids]
        return marks

    def mark(self, block_ids: Int32Array, mark: int) -> None:
        """These cached blocks are in a chain now, with this mark, until they are unmarked or
        uncached."""
        self._mark[block_ids] = mark
        self._set_aside_retained(block_ids)

    def are_cached(self, block_ids: Int32Array) -> BoolArray:
        """Which of these blocks have a hash."""
        are_cached: BoolArray = self._is_cached[block_ids] != 0
        return are_cached

    def unmark(self, block_ids: Int32Array, mark: int) -> int:
        """Those of these blocks that still have the mark are in no chain any more. Returns how many
        of them are allocated earlier now."""
        marked = block_ids[self._mark[block_ids] == mark]
        self._mark[marked] = 0
        free = marked[(self._position[marked] >= 0) & (self.retained.priorities(marked) == 0)]
        self.free_queue.move_to_tail(free)
        return len(free)

    # The prefix cache

    def cache_pages(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[bytes],
        group: int,
        step: int,
        *,
        is_announced: bool = True,
    ) -> None:
        """`cache_blocks` for the pages of a state. Events are about the first of them only, or
        (not `is_announced`) about none."""
        self.cache_blocks(block_ids, hashes, group, step)
        if self._events is not None:
            self._unannounced.update(block_ids[is_announced:])

    def cache_blocks(
        self, block_ids: Sequence[int], hashes: Sequence[bytes], group: int = 0, step: int = 0
    ) -> None:
        """Cache full blocks, all different: `block_ids[i]` holds the KV of the prefix with hash
        `hashes[i]`, once plan `step` has been computed (0: it does already). Cached blocks keep
        their hashes; null blocks are skipped."""
        ids, column = block_ids, self._hashes
        before = [column[block_id] for block_id in ids]
        if NULL_BLOCK in ids or before.count(None) < len(before):
            wanted = [
                bool(b) and block_hash is None for b, block_hash in zip(ids, before, strict=True)
            ]
            ids, hashes = list(compress(ids, wanted)), list(compress(hashes, wanted))
        is_cached, computed_in = self._is_cached_item, self._computed_in_item
        for block_id, block_hash in zip(ids, hashes, strict=True):
            column[block_id] = block_hash
            is_cached[block_id] = 1
            computed_in[block_id] = step
        if len(self._group):
            self._group[ids] = group
        self._prefixes[group].insert_n(hashes, ids)

    def get_cached_block(self, block_hash: bytes, groups: Sequence[int]) -> list[int] | None:
        """One block with this hash per group; None if a group has none."""
        block_ids: list[int] = []
        for group in groups:
            block_id = self._prefixes[group].get_one_block(block_hash)
            if block_id is None:
                return None
            block_ids.append(block_id)
        return block_ids

    def find_cached_prefix(self, hashes: Sequence[bytes], group: int = 0) -> BlockIds:
        """One block per hash, left to right, up to the first hash without a block."""
        found = self._prefixes[group].find_prefix(hashes)
        return found if len(found) <= FEW_BLOCKS else int32_array(found)

    def cached_in(self, group: int) -> Callable[[bytes], bool]:
        """Tells of a hash whether some block of the group has it."""
        return self._prefixes[group].contains

    def uncache_blocks(self, block_ids: BlockIds) -> None:
        """Remove these blocks from the prefix cache; others with the same hashes stay."""
        uncached = self._uncache(block_ids if isinstance(block_ids, list) else block_ids.tolist())
        self.free_queue.move_to_head(uncached)

    def num_leading_cached(self, block_ids: Int32Array) -> int:
        """How many leading blocks are cached or null."""
        hashes = [self._hashes[block_id] if block_id else b"" for block_id in block_ids.tolist()]
        return hashes.index(None) if None in hashes else len(hashes)

    def reset_prefix_cache(self) -> bool:
        """Uncache all blocks. False, and nothing has changed, while any block is held."""
        if self.num_free != self.num_usable:
            return False
        self._uncache_all()
        return True

    def begin_epoch(self, answered_step: int | None, released: Int32Array) -> None:
        """Make all blocks free and unfenced; references to them are void. A block stays cached if
        its KV is computed by plan `answered_step` or one before it; None: none does.

        released: held blocks in the order in which they are released, with repetitions; the first
                  ones are evicted first, after all that are free already.
        """
        if answered_step is None:
            self._uncache_all()
            self._start_free()
            return
        cached = np.flatnonzero(self._is_cached)
        self._uncache(cached[self._computed_in[cached] > answered_step].tolist())
        if self._events is not None:
            self._events.proven()
        when = np.zeros(self.num_blocks, np.int64)
        when[self.free_block_ids()] = np.arange(1, self.num_free + 1)
        when[released] = np.arange(self.num_free + 1, self.num_free + 1 + len(released))
        order = np.lexsort((when * self._is_cached, self._is_cached))
        free = int32_array(order[order > NULL_BLOCK + self._num_set_aside])
        self._start_free(free)
        self._set_aside_retained(free)

    def cached_block_ids(self) -> Int32Array:
        """All cached blocks, ascending."""
        return int32_array(np.flatnonzero(self._is_cached))

    def _uncache_all(self) -> None:
        for prefixes in self._prefixes:
            prefixes.clear()
        self._hashes = [None] * self.num_blocks
        self._unannounced.clear()
        self._is_cached[:] = 0
        self.free_queue.move_to_head(self.retained.clear().tolist())
        self.free_queue.move_to_head(np.flatnonzero(self._mark).tolist())
        self._mark[:] = 0
        if self._events is not None:
            self._events.cleared()

    def _evict(self, block_ids: list[int]) -> None:
        """Uncache blocks that have just been allocated."""
        evicted = self._uncache(block_ids)
        if self.metrics is not None:
            self.metrics.evicted(int32_array(evicted))
            self.metrics.allocated(int32_array(block_ids))

    def _uncache(self, block_ids: Sequence[int]) -> list[int]:
        """Uncache those of these blocks that are cached; returns them."""
        column, is_cached = self._hashes, self._is_cached_item
        cached: list[int] = []
        hashes: list[bytes] = []
        for block_id in block_ids:
            block_hash = column[block_id]
            if block_hash is not None:
                column[block_id] = None
                is_cached[block_id] = 0
                cached.append(block_id)
                hashes.append(block_hash)
        if not cached:
            return cached
        if self.retained.prefixes:
            self.retained.evicted(cached)
        if self._make_room is not None:
            self._mark[cached] = 0
        if len(self._prefixes) == 1:
            self._prefixes[0].pop_n(hashes, cached)
        else:
            for block_hash, block_id in zip(hashes, cached, strict=True):
                self._prefixes[self._group_of(block_id)].pop(block_hash, block_id)
        if self._events is not None:
            announced = [
                (self._group_of(block_id), block_hash)
                for block_id, block_hash in zip(cached, hashes, strict=True)
                if block_id not in self._unannounced
            ]
            self._unannounced.difference_update(cached)
            for group, block_hash in dict.fromkeys(announced):
                if block_hash not in self._prefixes[group]:
                    self._events.removed(block_hash, group)
        return cached

    # Checks

    def references(self) -> Int64Array:
        """(num_blocks,) references to each block; 0 for the null block and those set aside."""
        references = np.maximum(-self._position, 0).astype(np.int64)
        references[: NULL_BLOCK + 1 + self._num_set_aside] = 0
        return references

    def num_references(self, block_ids: Int64Array) -> Int64Array:
        """References to each of these blocks, without the null block and those set aside."""
        return np.maximum(-self._position[block_ids], 0).astype(np.int64)

    def states(self) -> UInt8Array:
        """(num_blocks,) a `BlockState` each, as far as references and hashes determine it: HELD by
        one holder, SHARED by several. Takes a few vector operations."""
        is_held = (self._position < 0).view(np.uint8)
        states: UInt8Array = (self._position < TAKEN).view(np.uint8)
        states += BlockState.FREE.value
        states += is_held * np.uint8(BlockState.HELD - BlockState.FREE)
        states += self._is_cached & (is_held ^ 1)
        states[: NULL_BLOCK + 1 + self._num_set_aside] = BlockState.RESERVED.value
        return states

    def check(self, num_holders: Int64Array) -> None:
        """Raise LongshoreError if the pool is inconsistent. num_holders: (num_blocks,) references
        that holders have. The null block, held and free blocks must be all blocks, reference
        counts must match, and exactly the cached blocks must be found by their hashes."""
        references = self.references()
        wrong = np.flatnonzero(references != num_holders)
        if len(wrong):
            block_id = int(wrong[0])
            raise LongshoreError(
                f"{len(wrong)} blocks have wrong reference counts; block {block_id} has "
                f"{references[block_id]} references and {num_holders[block_id]} holders"
            )
        free = self.free_block_ids()
        num_held = int(np.count_nonzero(references))
        if len(set(free)) != self.num_free or num_held + self.num_free != self.num_usable:
            raise LongshoreError(
                f"{len(set(free))} blocks are in the free queue, which counts {self.num_free}; "
                f"{num_held} are held; {self.num_usable} are usable"
            )
        is_cached = self._is_cached[free]
        if (is_cached[:-1] > is_cached[1:]).any():
            raise LongshoreError("a cached block is reused before a free one without a hash")
        cached = [
            block_id for block_id, block_hash in enumerate(self._hashes) if block_hash is not None
        ]
        for block_id in cached:
            group, block_hash = self._group_of(block_id), self._hashes[block_id]
            if block_hash is None or block_id not in self._prefixes[group].holders(block_hash):
                raise LongshoreError(f"block {block_id} is not found under its hash")
        if np.flatnonzero(self._is_cached).tolist() != cached:
            raise LongshoreError("the column of cached blocks differs from their hashes")
        priorities = self.retained.priorities(int32_array(free)).astype(np.int64) * 2
        if self._make_room is not None:
            priorities += (priorities == 0) & (self._mark[free] != 0)
        if (priorities[:-1] > priorities[1:]).any():
            raise LongshoreError("a retained block is reused before one of a lower priority")
        uncached = int32_array(np.flatnonzero(self._is_cached == 0))
        if self.retained.priorities(uncached).any():
            raise LongshoreError("a block is retained that is not cached")
        if self._make_room is not None and self._mark[uncached].any():
            raise LongshoreError("a block is in a chain that is not cached")
        num_found = sum(prefixes.num_holders for prefixes in self._prefixes)
        if num_found != len(cached):
            raise LongshoreError(f"{num_found} blocks are found by hash, {len(cached)} have one")
