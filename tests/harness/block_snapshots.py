"""What a `BlockSnapshot` must say, computed block by block from all holders."""

from collections import Counter, defaultdict

from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.statistics import BlockSnapshot, BlockState
from longshore.scheduler.scheduler import Scheduler


def make_block_snapshot(scheduler: Scheduler, now: float) -> BlockSnapshot:
    """A new snapshot; the cached one is discarded."""
    scheduler._snapshots._latest = None
    return scheduler.make_block_snapshot(now, "engine")


def expected_states(scheduler: Scheduler) -> list[BlockState]:
    """By block id."""
    pool, rows = scheduler.kv_cache.pool, Counter[int]()
    others: dict[int, set[BlockState]] = defaultdict(set)
    num_references = pool.references().tolist()
    for row in scheduler.running.order.tolist():
        for table in scheduler.kv_cache.block_ids(row):
            rows.update(table.tolist())
    holders = [
        (BlockState.KEPT, each.hold.blocks) for each in scheduler.waiting if each.hold is not None
    ]
    holders += [(BlockState.KEPT, pin.blocks) for pin in scheduler.pins or ()]
    if (states_of_forks := scheduler._forks.states) is not None:
        holders += [(BlockState.KEPT, held) for held in states_of_forks.of_fork.values()]
    transfers = scheduler._transfers
    if transfers is not None:
        for load in transfers.loads.values():
            state = BlockState.QUARANTINED if load.request is None else BlockState.TRANSFER
            holders.append((state, load.blocks))
        holders += [(BlockState.TRANSFER, send.blocks) for send in transfers._sends.values()]
        holders += [(BlockState.TRANSFER, held) for held in transfers._holds.values()]
    for state, held in holders:
        for table in held.block_ids:
            for block_id in table.tolist():
                others[block_id].add(state)
    states = []
    for block_id in range(pool.num_blocks):
        if block_id <= NULL_BLOCK + pool._num_set_aside:
            states.append(BlockState.RESERVED)
        elif rows[block_id]:
            is_shared = num_references[block_id] > 1
            states.append(BlockState.SHARED if is_shared else BlockState.HELD)
        elif others[block_id]:
            states.append(max(others[block_id]))
        else:
            is_cached = pool.block_hash(block_id) is not None
            states.append(BlockState.CACHED if is_cached else BlockState.FREE)
    return states


def check_block_map(scheduler: Scheduler, now: float) -> BlockSnapshot:
    """The snapshot is correct, and lists all holders with their blocks if they are few."""
    block_map = make_block_snapshot(scheduler, now)
    states = block_map.states.tolist()
    assert states == expected_states(scheduler)
    num_free = states.count(BlockState.FREE) + states.count(BlockState.CACHED)
    assert num_free == block_map.report.num_free_blocks == scheduler.kv_cache.num_free_blocks
    listed = iter(block_map.block_ids.tolist())
    held, in_groups = Counter[int](), Counter[int]()
    for holder in block_map.holders:
        assert holder.num_listed == holder.num_blocks
        ids = [[next(listed) for _ in range(count)] for count in holder.num_listed]
        assert NULL_BLOCK not in {block_id for table in ids for block_id in table}
        held.update(block_id for table in ids for block_id in table)
        if holder.state is BlockState.HELD:
            in_groups.update(dict(enumerate(holder.num_blocks)))
            request = scheduler.running.request_on(holder.row)
            assert request.request_id == holder.request_id
            tables = scheduler.kv_cache.block_ids(holder.row)
            assert ids == [[each for each in table.tolist() if each] for table in tables]
    assert next(listed, None) is None
    assert held == Counter(dict(enumerate(scheduler.kv_cache.pool.references().tolist())))
    assert [group.num_blocks for group in block_map.groups] == [
        in_groups[group] for group in range(len(block_map.groups))
    ]
    return block_map
