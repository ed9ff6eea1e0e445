"""Names of the blocks of rows: which are due, what they are called, and who hears of it.

A block gets its name when all its tokens are verified and its KV is in a plan already built; from
then on it can be found. Whoever is to hear of it (connectors, subscribers) does so from here.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from longshore.connectors.base import CachedBlocks
from longshore.protocol.arrays import Int32Array, Int64Array
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.scheduler.features.events import BlockStored, KVEventLog
from longshore.scheduler.kv_cache.block_hash import BlockHasher, extra_keys_of
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.full import SingleTypeManager
from longshore.scheduler.request import Request

TokenTable: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int32]]


class FullBlocks:
    """Gives blocks their names, in all groups that cache.

    caching: their managers.
    events:  is told of each name that gets its first block.
    record_cached: keep for `take_cached` what gets a name.
    """

    def __init__(
        self,
        caching: Sequence[SingleTypeManager],
        pool: BlockPool,
        hasher: BlockHasher,
        *,
        events: KVEventLog | None,
        record_cached: bool,
    ) -> None:
        self._caching = tuple(caching)
        self._pool = pool
        self._hasher = hasher
        self._events = events
        self._named: list[CachedBlocks] | None = [] if record_cached else None

    def rows_to_cache(self, num_tokens: Int64Array) -> Int64Array:
        """Rows with a full block among their first `num_tokens` (max_num_seqs,) that has no name.

        To be asked with tokens that are verified and whose KV is in a plan being built."""
        if len(self._caching) == 1:
            return self._caching[0].rows_to_cache(num_tokens)
        is_due = np.zeros(len(num_tokens), np.bool_)
        for manager in self._caching:
            is_due[manager.rows_to_cache(num_tokens)] = True
        return is_due.nonzero()[0]

    def cache_rows(
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
        requests:  by row; their `block_hashes` are extended.
        step:      the plan that computes the blocks; no event speaks of them before its answer.
        """
        if not self._caching or len(rows) == 0:
            return
        cached = [request for row in rows.tolist() if (request := requests[row]) is not None]
        self._extend_hashes_of_rows(rows, num_tokens[rows], token_ids, cached)
        chains = [request.block_hashes for request in cached]
        for manager in self._caching:
            num_full = num_tokens[rows] // manager.block_size
            if self._named is not None:
                for row, request, last in zip(
                    rows.tolist(), cached, num_full.tolist(), strict=True
                ):
                    self._record_cached(manager, row, request, last)
            if self._events is not None:
                for row, request, last in zip(
                    rows.tolist(), cached, num_full.tolist(), strict=True
                ):
                    self._tell_stored(manager, row, request, token_ids[row], last, step)
            manager.cache_rows(rows, num_full, chains)

    def _extend_hashes_of_rows(
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
            hashes, keys = request.block_hashes, request.extra_keys
            # Who has names has had his extra keys made.
            if len(hashes) == count - 1 > 0 and (
                keys is None or keys.num_tokens <= size * len(hashes)
            ):
                single.append(index)
                chains.append(hashes)
            elif len(hashes) < count:
                tokens = token_ids[rows[index], : num_tokens[index]]
                self._hasher.extend(hashes, tokens, extra_keys_of(request))
        if single:
            ends = (rows * token_ids.shape[1] + num_links * size)[single]
            positions = ends[:, None] + np.arange(-size, 0)
            self._hasher.extend_each(chains, token_ids.reshape(-1)[positions])

    def cache_row(
        self, row: int, request: Request, token_ids: Int32Array, num_tokens: int, step: int = 0
    ) -> None:
        """`cache_rows` for one row, from its leading verified tokens: those beyond `token_ids` name
        nothing, whatever `num_tokens` says."""
        if not self._caching:
            return
        num_verified = min(num_tokens, len(token_ids))
        self.extend_hashes(request, token_ids, num_verified)
        for manager in self._caching:
            num_full = num_verified // manager.block_size
            if self._named is not None:
                self._record_cached(manager, row, request, num_full)
            if self._events is not None:
                self._tell_stored(manager, row, request, token_ids, num_full, step)
            manager.cache_row(row, request.block_hashes, num_full)

    def extend_hashes(self, request: Request, token_ids: Int32Array, num_tokens: int) -> None:
        """Work out the names that the request lacks for full blocks of so many of `token_ids`."""
        if len(request.block_hashes) < num_tokens // self._hasher.block_size:
            keys = extra_keys_of(request)
            self._hasher.extend(request.block_hashes, token_ids[:num_tokens], keys)

    def take_cached(self) -> list[CachedBlocks]:
        """What got a name since the last call and still has it, in order."""
        assert self._named is not None
        recorded, self._named = self._named, []
        cached = []
        for record in recorded:
            pairs = zip(record.block_ids, record.block_hashes, strict=True)
            kept = [
                (block_id, block_hash)
                for block_id, block_hash in pairs
                if self._pool.block_hash(block_id) == block_hash
            ]
            if kept:
                block_ids, hashes = zip(*kept, strict=True)
                cached.append(CachedBlocks(record.request_id, record.group, block_ids, hashes))
        return cached

    def clear(self) -> None:
        """Forget what nobody has taken."""
        if self._named is not None:
            self._named = []

    def _record_cached(
        self, manager: SingleTypeManager, row: int, request: Request, num_full: int
    ) -> None:
        """The row's blocks up to `num_full` are about to be named."""
        first = int(manager.num_cached_blocks[row])
        if self._named is not None and num_full > first:
            hashes = manager.hashes_of_blocks(request.block_hashes, first, num_full)
            block_ids = manager.table[row, first:num_full].tolist()
            self._named.append(CachedBlocks(request.request_id, manager.group, block_ids, hashes))

    def _tell_stored(
        self,
        manager: SingleTypeManager,
        row: int,
        request: Request,
        token_ids: Int32Array,
        num_full: int,
        step: int,
    ) -> None:
        """The row's blocks up to `num_full` are about to be named."""
        assert self._events is not None
        group, size, first = manager.group, manager.block_size, int(manager.num_cached_blocks[row])
        hashes = manager.hashes_of_blocks(request.block_hashes, 0, num_full)
        for index in range(first, num_full):
            is_new = self._pool.get_cached_block(hashes[index], (group,)) is None
            if is_new and manager.table[row, index] != NULL_BLOCK:
                event = BlockStored(
                    block_hash=hashes[index],
                    parent_hash=hashes[index - 1] if index else None,
                    token_ids=token_ids[index * size : (index + 1) * size].copy(),
                    group=group,
                    lora_name=request.lora_name,
                )
                self._events.stored(event, step)
