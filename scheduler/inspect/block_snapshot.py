"""Snapshots of the use of every block, for operators, from tables that exist anyway.

The use of a block follows from two columns of the pool, and from the holds and transfers, which are
few; the block tables of running requests are not read for it. Nothing here runs unless a client
asks for a snapshot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, UInt8Array
from longshore.protocol.kv_cache_spec import NULL_BLOCK, KVCacheConfig
from longshore.protocol.statistics import (
    MAX_LISTED_BLOCKS,
    MAX_LISTED_HOLDERS,
    MIN_INTERVAL_S,
    BlockHolder,
    BlockSnapshot,
    BlockState,
    EngineReport,
    GroupUse,
)
from longshore.scheduler.hooks import Hooks
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.holds import Holds
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.request import Request
from longshore.scheduler.step.running import RunningTable


@dataclass(frozen=True, slots=True)
class Holding:
    """Blocks of one owner, by group, without null blocks. `request` is None for a transfer or a
    pin."""

    state: BlockState
    request_id: str
    tables: tuple[Int32Array, ...]
    request: Request | None = None


def states_of(kv_cache: KVCacheManager, holdings: Sequence[Holding]) -> UInt8Array:
    """(num_blocks,) a `BlockState` each. holdings: all holds, pins and transfers."""
    states = kv_cache.pool.states()
    ordered = sorted(holdings, key=lambda holding: holding.state)  # the highest wins
    tables = [table for holding in ordered for table in holding.tables]
    if not tables:
        return states
    ids = np.concatenate(tables).astype(np.int64)
    kinds = np.repeat(
        np.array([holding.state for holding in ordered], np.uint8),
        [sum(map(len, holding.tables)) for holding in ordered],
    )
    references = np.bincount(ids, minlength=kv_cache.num_blocks)[ids]
    is_all = references == kv_cache.pool.num_references(ids)
    states[ids[is_all]] = kinds[is_all]
    return states


class BlockSnapshots:
    """Makes the snapshots. config: the KV cache that the workers agreed on."""

    def __init__(
        self,
        config: KVCacheConfig,
        kv_cache: KVCacheManager,
        running: RunningTable,
        holds: Holds,
        hooks: Hooks,
    ) -> None:
        self._kv_cache = kv_cache
        self._running = running
        self._holds = holds
        self._hooks = hooks
        self._groups = tuple(
            GroupUse(_kind(group.spec), size, len(group.layer_names), group.block_size_bytes, 0)
            for group, size in zip(config.groups, self._kv_cache.block_sizes, strict=True)
        )
        self._latest: BlockSnapshot | None = None
        self._made_s = 0.0

    def latest(self, now: float) -> BlockSnapshot | None:
        """The last snapshot, if it is too early for another one."""
        return self._latest if now - self._made_s < MIN_INTERVAL_S else None

    def make(
        self, report: EngineReport, now: float, *, num_steps: int, num_preemptions: int
    ) -> BlockSnapshot:
        """A snapshot now."""
        holdings = list(self.holdings())
        holders, block_ids = self._list(holdings, now)
        counts = self._kv_cache.num_blocks_of_rows(self._running.order)
        prefixes = self._kv_cache.stats
        self._made_s = now
        self._latest = BlockSnapshot(
            report,
            states=states_of(self._kv_cache, holdings),
            groups=tuple(
                msgspec.structs.replace(group, num_blocks=count)
                for group, count in zip(self._groups, counts, strict=True)
            ),
            num_steps=num_steps,
            num_preemptions=num_preemptions,
            num_prefix_queried_tokens=prefixes.num_queried_tokens,
            num_prefix_hit_tokens=prefixes.num_hit_tokens,
            holders=holders,
            block_ids=block_ids,
        )
        return self._latest

    def holdings(self) -> Iterator[Holding]:
        """All holds, pins and transfers."""
        for request in self._holds:
            if request.hold is not None:
                tables = _without_nulls(request.hold.blocks)
                yield Holding(BlockState.KEPT, request.request_id, tables, request)
        for feature in self._hooks.owners:
            for state, request_id, blocks in feature.owners():
                yield Holding(state, request_id, _without_nulls(blocks))

    def _list(
        self, holdings: Sequence[Holding], now: float
    ) -> tuple[tuple[BlockHolder, ...], Int32Array]:
        """The holders that fit into a snapshot, and an equal share of block ids for each."""
        rows = self._running.order[:MAX_LISTED_HOLDERS].tolist()
        found = [self._holding_on(row) for row in rows]
        found += holdings[: MAX_LISTED_HOLDERS - len(rows)]
        share = MAX_LISTED_BLOCKS // max(len(found) * len(self._groups), 1)
        holders, listed = [], [EMPTY_INT32]
        for holding in found:
            last = [table[max(len(table) - share, 0) :] for table in holding.tables]
            listed += last
            request = holding.request
            holders.append(
                BlockHolder(
                    holding.request_id,
                    holding.state,
                    tuple(map(len, holding.tables)),
                    tuple(map(len, last)),
                    *(() if request is None else self._progress(request, now)),
                )
            )
        return tuple(holders), np.concatenate(listed)

    def _holding_on(self, row: int) -> Holding:
        request = self._running.request_on(row)
        tables = tuple(self._kv_cache.blocks_in_use(row))
        return Holding(BlockState.HELD, request.request_id, tables, request)

    def _progress(self, request: Request, now: float) -> tuple[int, int, int, int, int, int, float]:
        """The fields of a BlockHolder from `row` on."""
        row = request.row
        runs = row >= 0
        return (
            row,
            request.num_prompt_tokens,
            int(self._running.num_tokens[row]) if runs else request.num_tokens,
            int(self._running.num_computed[row]) if runs else request.num_computed_tokens,
            max(request.num_cached_tokens, 0),
            request.num_preemptions,
            max(now - request.arrival_time, 0.0),
        )


def _without_nulls(held: HeldBlocks) -> tuple[Int32Array, ...]:
    return tuple([table[table != NULL_BLOCK] for table in held.block_ids])


def _kind(spec: object) -> str:
    """`SlidingWindowSpec` is "sliding window"."""
    name = type(spec).__name__.removesuffix("Spec")
    return "".join(
        f" {char.lower()}" if char.isupper() and not before.isupper() else char.lower()
        for before, char in zip("A" + name, name, strict=False)
    )
