"""What must hold of blocks between any two calls of a scheduler."""

from collections import Counter

import numpy as np

from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.scheduler.scheduler import Scheduler
from tests.harness.transfers import Transfers
from tests.harness.worker import Workers
from tests.harness.worker_rows import check_tables_agree


def held_by_waiting(scheduler: Scheduler) -> Counter[int]:
    """References of requests that hold blocks without a row, and of pins."""
    return held_by_pins(scheduler) + Counter(
        block_id
        for request in scheduler.waiting
        if request.hold is not None
        for ids in request.hold.blocks.block_ids
        for block_id in ids.tolist()
    )


def held_by_pins(scheduler: Scheduler) -> Counter[int]:
    """References of pins."""
    return Counter(
        block_id
        for pin in scheduler.pins or ()
        for ids in pin.blocks.block_ids
        for block_id in ids[ids != NULL_BLOCK].tolist()
    )


def has_unanswered_blocks(scheduler: Scheduler) -> bool:
    """Whether blocks are held that the connector may store when their plan is answered."""
    transfers = scheduler._transfers
    return transfers is not None and len(transfers._unanswered) > 0


def check_references(scheduler: Scheduler) -> None:
    """null + held + free = all, and as many references as holders."""
    holders = held_by_waiting(scheduler)
    for row in scheduler.running.order.tolist():
        for ids in scheduler.kv_cache.block_ids(row):
            holders.update(ids.tolist())
    for feature in (scheduler._transfers, scheduler._forks.states):
        for _, _, held in () if feature is None else feature.owners():
            holders.update(np.concatenate(held.block_ids).tolist())
    del holders[NULL_BLOCK]
    pool = scheduler.kv_cache.pool
    num_reserved = 1 + pool._num_set_aside
    assert num_reserved + len(holders) + pool.num_free == pool.num_blocks
    references = pool.references().tolist()
    assert references == [holders[block_id] for block_id in range(pool.num_blocks)]


def check_owned(scheduler: Scheduler, transfers: Transfers) -> None:
    """No block that has an owner can be allocated."""
    owned = transfers.owned_ids()
    for row in scheduler.running.order.tolist():
        for ids in scheduler.kv_cache.block_ids(row):
            owned.update(ids.tolist())
    free = set(scheduler.kv_cache.pool.free_block_ids())
    assert not free & (owned - {NULL_BLOCK}), f"owned blocks {free & owned} are free"


def check_rows(scheduler: Scheduler, workers: Workers) -> None:
    """Scheduler and workers have the same rows. Block tables are equal, but for blocks that the
    scheduler has freed since, as no later token reads them."""
    ours, theirs = scheduler.running, workers.table
    for column in ("generation", "num_computed", "num_known", "last_computed"):
        np.testing.assert_array_equal(getattr(ours, column), getattr(theirs, column))
    assert ours.num_rows == theirs.num_rows == len(workers.tables)
    for row, groups in workers.tables.items():
        tables = scheduler.kv_cache.block_ids(row)
        for ids, table in zip(groups, tables, strict=True):
            if scheduler.kv_cache.frees_skipped:
                check_tables_agree(ids, table)
            else:
                assert ids == table.tolist()


def used_blocks(scheduler: Scheduler, tables: dict[int, list[list[int]]]) -> dict[int, set[int]]:
    """By row: the blocks of its tables that a step may read or write."""
    return {
        row: {
            block_id
            for ids, table in zip(groups, scheduler.kv_cache.block_ids(row), strict=True)
            for block_id, is_kept in zip(ids, (table != NULL_BLOCK).tolist(), strict=True)
            if is_kept
        }
        for row, groups in tables.items()
    }
