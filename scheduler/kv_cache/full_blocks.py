"""Full blocks of rows: caches them under their hashes, and reports newly cached blocks.

A block is cached when all its tokens are verified and its KV is in a plan already built; from then
on it can be found. Connectors and event subscribers get newly cached blocks from here.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from longshore.connectors.base import StorableBlocks
from longshore.protocol.arrays import Int32Array, Int64Array
from longshore.protocol.events import BlockStored
from longshore.protocol.kv_cache_spec import NULL_BLOCK, page_hashes
from longshore.scheduler.features.events import KVEventLog
from longshore.scheduler.kv_cache.block_hash import BlockHasher
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.full import SingleTypeManager
from longshore.scheduler.request import Request

TokenTable: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int32]]


class FullBlocks:
    """Hashes and caches full blocks, in all caching groups.

    caching: their managers.
    events:  receives each hash with its first block.
    chunk_blocks: of the connector; 0: it stores none. Otherwise newly cached blocks are kept for
             `take_cached`, except those of requests with `no_store`.
    state_group: the group of states in pages, if there are any.
    hasher:   of all blocks.
    recorded: these blocks, some of which may have been evicted.
    """

    def __init__(
        self,
        caching: Sequence[SingleTypeManager],
        pool: BlockPool,
        hasher: BlockHasher,
        *,
        events: KVEventLog | None,
        chunk_blocks: int,
        state_group: int = 0,
    ) -> None:
        self._state_group = state_group
        self._caching = tuple(caching)
        self._pool = pool
        self.hasher = hasher
        self._events = events
        self._chunk_blocks = chunk_blocks
        self.recorded: list[StorableBlocks] = []
        self._has_listeners = chunk_blocks > 0 or events is not None

    def rows_to_cache(self, num_tokens: Int64Array) -> Int64Array:
        """Rows with a full block, among their first `num_tokens` (max_num_seqs,), that is not
        cached. These tokens must be verified, with their KV in the plan that is being built."""
        if len(self._caching) == 1:
            return self._caching[0].rows_to_cache(num_tokens)
        has_full = np.zeros(len(num_tokens), np.bool_)
        for manager in self._caching:
            has_full[manager.rows_to_cache(num_tokens)] = True
        return has_full.nonzero()[0]

    def cache_rows(
        self,
        rows: Int64Array,
        num_tokens: Int64Array,
        token_ids: TokenTable,
        requests: Sequence[Request | None],
        step: int = 0,
    ) -> None:
        """Cache every full block among the first `num_tokens` (max_num_seqs,) tokens of `rows`, one
        row after the other.

        token_ids: (max_num_seqs, max_model_len) int32.
        requests:  by row; their `block_hashes` are extended.
        step:      the plan that computes the blocks; their events are published after its output.
        """
        if not self._caching or len(rows) == 0:
            return
        occupants = [request for row in rows.tolist() if (request := requests[row]) is not None]
        self._extend_hashes_of_rows(rows, num_tokens[rows], token_ids, occupants)
        chains = [request.block_hashes for request in occupants]
        for manager in self._caching:
            num_full = num_tokens[rows] // manager.block_size
            if self._has_listeners:
                for row, request, last in zip(
                    rows.tolist(), occupants, num_full.tolist(), strict=True
                ):
                    self._tell(manager, row, request, token_ids[row], last, step)
            manager.cache_rows(rows, num_full, chains, step)

    def _extend_hashes_of_rows(
        self,
        rows: Int64Array,
        num_tokens: Int64Array,
        token_ids: TokenTable,
        requests: Sequence[Request],
    ) -> None:
        """Extend the hashes of `requests`, on `rows` with `num_tokens` (len(rows),) tokens each.
        Requests that lack one hash without extra keys, as in decode, are hashed together."""
        size = self.hasher.block_size
        num_links = num_tokens // size
        single: list[int] = []
        chains: list[list[bytes]] = []
        for index, (request, count) in enumerate(zip(requests, num_links.tolist(), strict=True)):
            hashes, keys = request.block_hashes, request.extra_keys
            if len(hashes) == count - 1 > 0 and (
                keys is None or keys.num_tokens <= size * len(hashes)
            ):
                single.append(index)
                chains.append(hashes)
            elif len(hashes) < count:
                self.hasher.extend(hashes, token_ids[rows[index], : num_tokens[index]], keys)
        if single:
            ends = (rows * token_ids.shape[1] + num_links * size)[single]
            positions = ends[:, None] + np.arange(-size, 0)
            self.hasher.extend_each(chains, token_ids.reshape(-1)[positions])

    def cache_row(
        self, row: int, request: Request, token_ids: Int32Array, num_tokens: int, step: int = 0
    ) -> None:
        """`cache_rows` for one row, from its leading verified tokens: tokens beyond `token_ids` are
        not cached, whatever `num_tokens` is. At an admission it costs a third of `cache_rows`."""
        num_verified = min(num_tokens, len(token_ids))
        if not self._caching or num_verified < self.hasher.block_size:
            return
        self.extend_hashes(request, token_ids[:num_verified])
        for manager in self._caching:
            num_full = num_verified // manager.block_size
            if self._has_listeners:
                self._tell(manager, row, request, token_ids, num_full, step)
            manager.cache_row(row, request.block_hashes, num_full, step)

    def cache_last(
        self, request: Request, held: HeldBlocks, num_tokens: int, step: int = 0
    ) -> None:
        """Cache the last full blocks of a request that has ended with these blocks: plans of its
        row have not cached those that plan `step`, or one just before, has completed. Connectors
        do not get them any more."""
        token_ids = request.token_ids[:num_tokens]
        self.extend_hashes(request, token_ids)
        for manager in self._caching:
            table = held.block_ids[manager.group].tolist()
            first = last = num_tokens // manager.block_size
            while first and self._pool.block_hash(table[first - 1]) is None:
                first -= 1
            block_ids = table[first:last]
            if self._events is not None:
                self._announce(manager, request, token_ids, first, block_ids, step)
            hashes = manager.hashes_of_blocks(request.block_hashes, first, last)
            self._pool.cache_blocks(block_ids, hashes, manager.group, step)

    def extend_hashes(self, request: Request, token_ids: Int32Array) -> None:
        """Compute the hashes that the request lacks for full blocks of `token_ids`."""
        if len(request.block_hashes) < len(token_ids) // self.hasher.block_size:
            self.hasher.extend(request.block_hashes, token_ids, request.extra_keys)

    def record_state(
        self, request: Request, num_tokens: int, pages: list[int], block_hash: bytes, step: int
    ) -> None:
        """Report that plan `step` keeps the state after `num_tokens` tokens of a request in these
        pages."""
        if self._chunk_blocks and not request.options.no_store:
            hashes = page_hashes(block_hash, len(pages))
            positions = [num_tokens // self.hasher.block_size - 1] * len(pages)
            name, chain = request.request_id, request.block_hashes
            self.recorded.append(
                StorableBlocks(step, name, self._state_group, pages, hashes, positions, chain)
            )
        if self._events is not None:
            size, group = self.hasher.block_size, self._state_group
            parents = request.block_hashes[: num_tokens // size - 1][-1:]
            event = BlockStored(
                block_hash=block_hash,
                parent_hash=parents[0] if parents else None,
                token_ids=request.token_ids[num_tokens - size : num_tokens].copy(),
                group=group,
                lora_name=request.lora_name,
            )
            self._events.stored(event, step)

    def take_cached(self) -> list[StorableBlocks]:
        """Blocks that were cached since the last call and still are, in order."""
        recorded, self.recorded = self.recorded, []
        cached = []
        for record in recorded:
            hashes = list(map(self._pool.block_hash, record.block_ids))
            if hashes == record.block_hashes:
                cached.append(record)
            elif (left := record.only(self._is_cached)) is not None:
                cached.append(left)
        return cached

    def _is_cached(self, block_id: int, block_hash: bytes) -> bool:
        return self._pool.block_hash(block_id) == block_hash

    def clear(self) -> None:
        """Discard recorded blocks that have not been taken."""
        self.recorded = []

    def _tell(
        self,
        manager: SingleTypeManager,
        row: int,
        request: Request,
        token_ids: Int32Array,
        num_full: int,
        step: int,
    ) -> None:
        """Report that the row's blocks up to `num_full` are about to be cached."""
        group, first = manager.group, int(manager.num_cached_blocks[row])
        if num_full <= first:
            return
        chain, positions = request.block_hashes, range(first, num_full)
        hashes = manager.hashes_of_blocks(chain, first, num_full)
        block_ids = manager.table[row, first:num_full].tolist()
        for index, is_kept in enumerate(manager.serves_hits(first, num_full)):
            if not is_kept:
                block_ids[index] = NULL_BLOCK
        if self._chunk_blocks and not request.options.no_store:
            earlier: Sequence[int] = ()
            if num_earlier := first % self._chunk_blocks:
                earlier = manager.table[row, first - num_earlier : first].tolist()
            name = request.request_id
            self.recorded.append(
                StorableBlocks(step, name, group, block_ids, hashes, positions, chain, earlier)
            )
        if self._events is not None:
            self._announce(manager, request, token_ids, first, block_ids, step)

    def _announce(
        self,
        manager: SingleTypeManager,
        request: Request,
        token_ids: Int32Array,
        first: int,
        block_ids: Sequence[int],
        step: int,
    ) -> None:
        """Record the events of a request's blocks from position `first` on, which are about to be
        cached."""
        assert self._events is not None
        group, size, chain = manager.group, manager.block_size, request.block_hashes
        hashes = manager.hashes_of_blocks(chain, first, first + len(block_ids))
        parents = manager.hashes_of_blocks(chain, first - 1, first) if first else [None]
        for index, (block_id, block_hash, parent_hash) in enumerate(
            zip(block_ids, hashes, [*parents, *hashes], strict=False), first
        ):
            if block_id == NULL_BLOCK:
                continue
            if self._pool.get_cached_block(block_hash, (group,)) is not None:
                self._events.copied(block_hash, group, step)
            else:
                event = BlockStored(
                    block_hash=block_hash,
                    parent_hash=parent_hash,
                    token_ids=token_ids[index * size : (index + 1) * size].copy(),
                    group=group,
                    lora_name=request.lora_name,
                )
                self._events.stored(event, step)
