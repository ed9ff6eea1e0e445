"""The scheduler's one door to the KV cache: lookup, allocation, naming and release of blocks.

Behind it: coordinator (all groups) -> one manager per group (block tables) -> block pool. Rows are
the scheduler's; tokens are never looked at except to name blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from longshore.connectors.base import NamedBlocks
from longshore.protocol.arrays import EMPTY_INT32, Int32Array, Int64Array, int32_array
from longshore.protocol.kv_cache_spec import NULL_BLOCK, KVCacheConfig
from longshore.protocol.plan import AppendedBlocks
from longshore.scheduler.block_hash import BlockHasher, extra_keys_of
from longshore.scheduler.block_metrics import BlockMetrics
from longshore.scheduler.block_pool import BlockIds, BlockPool
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache_coordinator import make_coordinator
from longshore.scheduler.kv_events import BlockStored, KVEvent, KVEventLog
from longshore.scheduler.request import Request

TokenTable: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int32]]


class ComputedBlocks(NamedTuple):
    """A cached prefix: `block_ids[group]` in order of position, `num_tokens` in all."""

    block_ids: tuple[BlockIds, ...]
    num_tokens: int


class HeldBlocks(NamedTuple):
    """Blocks of somebody who is on no row: `block_ids[group]` in order of position. Whoever has
    this owns one reference to each of them, until it is attached or released."""

    block_ids: tuple[Int32Array, ...]


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
    metrics:   is told how blocks live.
    record_named: keep for `take_named` what gets a name.

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
        metrics: BlockMetrics | None = None,
        record_named: bool = False,
    ) -> None:
        self._named: list[NamedBlocks] | None = [] if record_named else None
        self._events = KVEventLog() if cache.enable_kv_cache_events else None
        self._pool = BlockPool(
            kv_cache.num_blocks, len(kv_cache.groups), metrics=metrics, events=self._events
        )
        self._coordinator = make_coordinator(
            kv_cache, self._pool, cache, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        self._managers = self._coordinator.managers
        self._caching = self._coordinator.caching
        self._hasher = BlockHasher(cache.tokens_per_name, hash_seed, cache.hash_algorithm)
        nothing: BlockIds = []
        self._nothing_computed = ComputedBlocks(tuple(nothing for _ in self._managers), 0)
        self._log_stats = cache.log_stats
        self.stats = PrefixCacheStats()
        self._new_block_ids: list[list[int]] | None = None

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
        self._extend_chain(request, request.token_ids, num_tokens)
        hits, num_hit_tokens = self._coordinator.find_longest_hit(
            request.block_names, num_tokens - 1
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
        """Blocks of all groups that so many tokens fill or begin."""
        return sum(
            [manager.num_blocks_for(num_tokens, num_encoder_tokens) for manager in self._managers]
        )

    def num_blocks_needed(
        self, computed: ComputedBlocks, num_tokens: int, *, num_encoder_tokens: int = 0
    ) -> int:
        """Free blocks that `start` or `reserve` with these would take: new ones, and hits that
        nobody holds."""
        counts = self._num_new_blocks(computed, num_tokens, num_encoder_tokens)
        return sum(counts) + self._num_unheld(computed)

    def can_fit_full_sequence(
        self,
        request: Request,
        computed: ComputedBlocks,
        *,
        num_free: int,
        num_encoder_tokens: int = 0,
    ) -> bool:
        """Whether all tokens the request has now would fit `num_free` free blocks."""
        needed = self.num_blocks_needed(
            computed, request.num_tokens, num_encoder_tokens=num_encoder_tokens
        )
        return needed <= num_free

    def start(
        self,
        row: int,
        computed: ComputedBlocks,
        num_tokens: int,
        *,
        num_encoder_tokens: int = 0,
    ) -> bool:
        """Give an empty row the cached prefix and new blocks for its first `num_tokens` tokens.
        False, and nothing has changed, if there are too few free blocks."""
        counts = self._num_new_blocks(computed, num_tokens, num_encoder_tokens)
        if not self._has_free(sum(counts), computed):
            return False
        if computed.num_tokens:
            for hits in computed.block_ids:
                self._pool.touch(hits)
        for manager, hits, count in zip(self._managers, computed.block_ids, counts, strict=True):
            manager.start(row, hits, self._get_new_blocks(manager.group, count))
        return True

    def reserve(
        self,
        computed: ComputedBlocks,
        num_tokens: int,
        *,
        answered_step: int | None = None,
        num_encoder_tokens: int = 0,
    ) -> HeldBlocks | None:
        """The blocks that `start` would give a row, on no row. None, and nothing has changed, if
        there are too few free ones.

        answered_step: the new blocks are targets of a load: no plan after this one names them, and
        they are not among those of `take_new_block_ids`, which may be zeroed.
        """
        counts = self._num_new_blocks(computed, num_tokens, num_encoder_tokens)
        if not self._has_free(sum(counts), computed):
            return None
        all_hits = np.concatenate([int32_array(hits) for hits in computed.block_ids])
        if answered_step is None:
            self._pool.touch(all_hits)
            new = [
                int32_array(self._get_new_blocks(manager.group, count))
                for manager, count in zip(self._managers, counts, strict=True)
            ]
        else:
            settled = self._pool.get_settled_blocks(sum(counts), answered_step, all_hits)
            if settled is None:
                return None
            self._pool.touch(all_hits)
            new = np.split(settled, np.cumsum(counts)[:-1])
        return HeldBlocks(
            tuple(
                np.concatenate((int32_array(hits), added))
                for hits, added in zip(computed.block_ids, new, strict=True)
            )
        )

    def hold(self, block_ids: Sequence[int]) -> HeldBlocks:
        """One more reference to each of these blocks, all different, of whatever group: a transfer
        reads them, and they are not handed out before it releases them."""
        held = int32_array(block_ids)
        self._pool.touch(held)
        return HeldBlocks((held, *(EMPTY_INT32 for _ in self._managers[1:])))

    def attach(self, row: int, held: HeldBlocks, num_named_tokens: int = 0) -> None:
        """An empty row takes over these references. Blocks that have a name keep it and the next
        ones will be named; `num_named_tokens`, if more, are named by nobody."""
        for manager, block_ids in zip(self._managers, held.block_ids, strict=True):
            manager.attach(row, block_ids, num_named_tokens // manager.block_size)

    def detach(self, row: int) -> HeldBlocks:
        """The row lets go of its blocks; its references stay with the result."""
        return HeldBlocks(tuple([manager.take(row) for manager in self._managers]))

    def release(self, held: HeldBlocks, step: int = 0) -> None:
        """Give references back; named blocks stay findable until they are reused. `step` is the
        newest plan that may still name the blocks.

        Tail first: eviction takes the oldest free block, and a prefix is worth more than its
        continuation. Blocks of several groups that end at the same token go in order of group.
        """
        if len(held.block_ids) == 1:
            self._pool.free_blocks(held.block_ids[0][::-1], step)
            return
        ends = [
            np.arange(1, len(block_ids) + 1) * manager.block_size
            for manager, block_ids in zip(self._managers, held.block_ids, strict=True)
        ]
        order = np.argsort(-np.concatenate(ends), kind="stable")
        self._pool.free_blocks(np.concatenate(held.block_ids)[order], step)

    # Blocks of rows

    def grow(self, num_tokens: Int64Array, seniority: Int64Array) -> list[AppendedBlocks] | None:
        """Give every row the blocks it lacks to hold `num_tokens` (max_num_seqs,) tokens, rows of
        lower `seniority` (same shape) first. None, and nothing has changed, if they do not fit."""
        shorts = [manager.rows_short(num_tokens) for manager in self._managers]
        total = sum(int(counts.sum()) for _, counts in shorts)
        if total == 0:
            return []
        if total > self._pool.num_free:
            return None
        appended = []
        for manager, (rows, counts) in zip(self._managers, shorts, strict=True):
            if len(rows):
                order = np.argsort(seniority[rows])
                rows, counts = rows[order], counts[order]
                block_ids = int32_array(self._get_new_blocks(manager.group, int(counts.sum())))
                row_of_block = manager.append(rows, counts, block_ids)
                appended.append(AppendedBlocks(manager.group, int32_array(row_of_block), block_ids))
        return appended

    def grow_row(self, row: int, num_tokens: int) -> list[list[int]] | None:
        """`grow` for one row: its new blocks per group."""
        counts = [manager.num_row_lacks(row, num_tokens) for manager in self._managers]
        if sum(counts) > self._pool.num_free:
            return None
        new_block_ids: list[list[int]] = []
        for manager, count in zip(self._managers, counts, strict=True):
            block_ids = self._get_new_blocks(manager.group, count)
            if count:
                manager.append_to_row(row, block_ids)
            new_block_ids.append(list(block_ids))
        return new_block_ids

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

    def block_ids_or_none(self, row: int) -> tuple[Int32Array, ...] | None:
        """The same; None if the row holds no block in any group."""
        return self.block_ids(row) if any(m.num_blocks[row] for m in self._managers) else None

    def num_common_prefix_blocks(self, rows: Int64Array) -> tuple[int, ...]:
        """Per group, leading blocks that all of `rows` have in common. Read from their tables, so
        whoever else holds blocks makes no difference."""
        return tuple(manager.num_common_blocks(rows) for manager in self._managers)

    def new_step_starts(self) -> None:
        """From here on `take_new_block_ids` counts the blocks of a new step. Who never calls this
        wants no count, and none is kept."""
        self._new_block_ids = [[] for _ in self._managers]

    def take_new_block_ids(self) -> tuple[Int32Array, ...]:
        """Per group, the blocks handed out to be computed on since the step started, or since the
        last call in it, in that order."""
        taken = tuple(int32_array(block_ids) for block_ids in self._new_block_ids or ())
        self.new_step_starts()
        return taken

    def _num_new_blocks(
        self, computed: ComputedBlocks, num_tokens: int, num_encoder_tokens: int
    ) -> list[int]:
        return [
            manager.num_blocks_for(num_tokens, num_encoder_tokens) - len(hits)
            for manager, hits in zip(self._managers, computed.block_ids, strict=True)
        ]

    def _num_unheld(self, computed: ComputedBlocks) -> int:
        """Hits that nobody holds."""
        return sum([self._pool.num_unheld(hits) for hits in computed.block_ids])

    def _has_free(self, num_new: int, computed: ComputedBlocks) -> bool:
        """Whether so many new blocks and the hits can be had at once."""
        num_left = self._pool.num_free - num_new
        num_hits = sum(map(len, computed.block_ids)) if computed.num_tokens else 0
        return num_hits <= num_left or self._num_unheld(computed) <= num_left

    def _get_new_blocks(self, group: int, count: int) -> BlockIds:
        if count == 0:
            return []
        block_ids = self._pool.get_new_blocks(count)
        if self._new_block_ids is not None:
            self._new_block_ids[group] += block_ids
        return block_ids

    # Names

    def rows_to_name(self, num_tokens: Int64Array) -> Int64Array:
        """Rows with a full block among their first `num_tokens` (max_num_seqs,) that has no name.

        To be asked with tokens that are verified and whose KV is in a plan being built."""
        rows = [manager.rows_to_name(num_tokens) for manager in self._caching]
        if len(rows) == 1:
            return rows[0]
        return np.unique(np.concatenate(rows)) if rows else np.empty(0, np.int64)

    def name_rows(
        self,
        rows: Int64Array,
        num_tokens: Int64Array,
        token_ids: TokenTable,
        requests: Sequence[Request | None],
        step: int = 0,
    ) -> None:
        """Name every full block without a name among the first `num_tokens` (max_num_seqs,) tokens
        of `rows`, one row after the other; they can be found now.

        token_ids: (max_num_seqs, max_model_len) int32.
        requests:  by row; their `block_names` are extended.
        step:      the plan that computes the blocks; no event speaks of them before its answer.
        """
        if not self._caching or len(rows) == 0:
            return
        named = [request for row in rows.tolist() if (request := requests[row]) is not None]
        self._extend_chains(rows, num_tokens[rows], token_ids, named)
        chains = [request.block_names for request in named]
        for manager in self._caching:
            num_full = num_tokens[rows] // manager.block_size
            if self._named is not None:
                for row, request, last in zip(rows.tolist(), named, num_full.tolist(), strict=True):
                    self._record_named(manager.group, row, request, last)
            if self._events is not None:
                for row, request, last in zip(rows.tolist(), named, num_full.tolist(), strict=True):
                    self._tell_stored(manager.group, row, request, token_ids[row], last, step)
            manager.name_rows(rows, num_full, chains)

    def _extend_chains(
        self,
        rows: Int64Array,
        num_tokens: Int64Array,
        token_ids: TokenTable,
        requests: Sequence[Request],
    ) -> None:
        """Extend the names of `requests`, which are on `rows` with `num_tokens` (len(rows),) tokens
        each. Those that lack one name without extra keys, as in decode, go together."""
        size = self._hasher.block_size
        num_links = num_tokens // size
        single: list[int] = []
        chains: list[list[bytes]] = []
        for index, (request, count) in enumerate(zip(requests, num_links.tolist(), strict=True)):
            names, keys = request.block_names, request.extra_keys
            # Who has names has had his extra keys made.
            if len(names) == count - 1 > 0 and (
                keys is None or keys.num_tokens <= size * len(names)
            ):
                single.append(index)
                chains.append(names)
            elif len(names) < count:
                tokens = token_ids[rows[index], : num_tokens[index]]
                self._hasher.extend(names, tokens, extra_keys_of(request))
        if single:
            ends = (rows * token_ids.shape[1] + num_links * size)[single]
            positions = ends[:, None] + np.arange(-size, 0)
            self._hasher.extend_each(chains, token_ids.reshape(-1)[positions])

    def name_blocks(
        self, row: int, request: Request, token_ids: Int32Array, num_tokens: int, step: int = 0
    ) -> None:
        """`name_rows` for one row, from its leading verified tokens: those beyond `token_ids` name
        nothing, whatever `num_tokens` says."""
        if not self._caching:
            return
        num_verified = min(num_tokens, len(token_ids))
        self._extend_chain(request, token_ids, num_verified)
        for manager in self._caching:
            num_full = num_verified // manager.block_size
            if self._named is not None:
                self._record_named(manager.group, row, request, num_full)
            if self._events is not None:
                self._tell_stored(manager.group, row, request, token_ids, num_full, step)
            manager.name_blocks(row, request.block_names, num_full)

    def _extend_chain(self, request: Request, token_ids: Int32Array, num_tokens: int) -> None:
        """Work out the names that the request lacks for full blocks of so many of `token_ids`."""
        if len(request.block_names) < num_tokens // self._hasher.block_size:
            keys = extra_keys_of(request)
            self._hasher.extend(request.block_names, token_ids[:num_tokens], keys)

    def take_named(self) -> list[NamedBlocks]:
        """What got a name since the last call and still has it, in order."""
        assert self._named is not None
        recorded, self._named = self._named, []
        named = []
        for record in recorded:
            pairs = zip(record.block_ids, record.names, strict=True)
            kept = [
                (block_id, name) for block_id, name in pairs if self._pool.name(block_id) == name
            ]
            if kept:
                block_ids, names = zip(*kept, strict=True)
                named.append(NamedBlocks(record.request_id, record.group, block_ids, names))
        return named

    def _record_named(self, group: int, row: int, request: Request, num_full: int) -> None:
        """The row's blocks up to `num_full` are about to be named."""
        manager = self._managers[group]
        first = int(manager.num_named[row])
        if self._named is not None and num_full > first:
            names = manager.names_of_blocks(request.block_names, 0, num_full)
            block_ids = manager.block_ids(row)[first:num_full].tolist()
            self._named.append(NamedBlocks(request.request_id, group, block_ids, names[first:]))

    def _tell_stored(
        self,
        group: int,
        row: int,
        request: Request,
        token_ids: Int32Array,
        num_full: int,
        step: int,
    ) -> None:
        """The row's blocks up to `num_full` are about to be named."""
        assert self._events is not None
        manager = self._managers[group]
        size, first = manager.block_size, int(manager.num_named[row])
        names = manager.names_of_blocks(request.block_names, 0, num_full)
        for index in range(first, num_full):
            if self._pool.get_cached_block(names[index], (group,)) is None:
                event = BlockStored(
                    name=names[index],
                    parent=names[index - 1] if index else None,
                    token_ids=token_ids[index * size : (index + 1) * size].copy(),
                    group=group,
                    lora_name=request.lora_name,
                )
                self._events.stored(event, step)

    def forget_from(self, block_ids: Int32Array) -> None:
        """Un-name exactly these blocks; the content of each cannot be trusted."""
        self._pool.forget_blocks(block_ids)

    def take_events(self, answered_step: int) -> list[KVEvent]:
        """What became findable or ceased to be, in order, as far as the answer to `answered_step`
        proves it; each once. Empty unless events are enabled."""
        return [] if self._events is None else self._events.take(answered_step)

    # Everything

    def reset_prefix_cache(self) -> bool:
        """Forget all names; False while anybody holds a block."""
        return self._pool.reset_prefix_cache()

    def clear(self) -> None:
        """A new epoch: rows are empty, all blocks are free and unnamed, nothing is fenced, and
        whoever held blocks elsewhere holds them no longer."""
        self._pool.clear()
        if self._named is not None:
            self._named = []
        for manager in self._managers:
            manager.clear()
        self._new_block_ids = None

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
