"""Block tables of one group of full attention."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.kv_cache_spec import FullAttentionSpec
from longshore.scheduler.block_pool import BlockPool
from longshore.scheduler.single_type_manager import FullAttentionManager

NAMES = [b"H%d" % index for index in range(8)]


def make_manager(
    num_blocks: int = 16, block_size: int = 4, max_num_seqs: int = 4
) -> tuple[FullAttentionManager, BlockPool]:
    pool = BlockPool(num_blocks)
    spec = FullAttentionSpec(block_size, num_kv_heads=1, head_size=8, dtype_bytes=2)
    manager = FullAttentionManager(spec, pool, group=0, max_num_seqs=max_num_seqs, max_model_len=64)
    return manager, pool


@pytest.mark.req("NUM-02", "FRQ-05", "POO-04")
def test_a_request_gives_its_blocks_back_tail_first() -> None:
    manager, pool = make_manager(num_blocks=15)
    pool.get_new_blocks(9)
    manager.start(0, [], pool.get_new_blocks(5))
    assert manager.block_ids(0).tolist() == [10, 11, 12, 13, 14]
    manager.free(0)
    assert pool.free_block_ids() == [14, 13, 12, 11, 10]


@pytest.mark.req("STM-05")
@pytest.mark.parametrize(
    ("named", "max_tokens", "hits"),
    [
        ([0, 1, 2], 64, 3),
        ([0, 1, 2], 12, 3),
        ([0, 1, 2], 11, 2),  # 11 // 4 names are looked at
        ([0, 1, 2], 3, 0),
        ([0, 2, 3], 64, 1),  # stops at the first miss
        ([1, 2, 3], 64, 0),
        ([], 64, 0),
    ],
)
def test_lookup_goes_left_to_right_and_stops_at_the_first_miss(
    named: list[int], max_tokens: int, hits: int
) -> None:
    manager, pool = make_manager()
    block_ids = pool.get_new_blocks(len(named))
    pool.cache_full_blocks(block_ids, [NAMES[index] for index in named], 0)
    free_before = pool.num_free
    assert manager.find_longest_hit(NAMES, max_tokens) == block_ids[:hits]
    assert pool.num_free == free_before  # a lookup holds nothing


@pytest.mark.req("STM-05", "ERR-13")
def test_lookup_asks_for_no_name_behind_the_first_miss() -> None:
    manager, pool = make_manager()
    asked: list[bytes] = []

    def get_cached_block(name: bytes, groups: tuple[int, ...]) -> list[int] | None:
        asked.append(name)
        return [1] if name in (NAMES[0], NAMES[2]) else None

    pool.get_cached_block = get_cached_block  # type: ignore[method-assign, assignment]
    assert manager.find_longest_hit(NAMES, 64) == [1]
    assert asked == NAMES[:2]


@pytest.mark.req("STM-04")
def test_state_is_the_table_and_the_number_of_named_blocks_until_the_row_is_freed() -> None:
    manager, pool = make_manager()
    hits = pool.get_new_blocks(1)
    pool.cache_full_blocks(hits, NAMES[:1], 0)
    manager.start(2, hits, pool.get_new_blocks(2))
    assert manager.block_ids(2).tolist() == [1, 2, 3]
    assert (int(manager.num_blocks[2]), int(manager.num_named[2])) == (3, 1)
    manager.cache_blocks(2, NAMES, 11)
    assert int(manager.num_named[2]) == 2
    manager.free(2)
    assert (int(manager.num_blocks[2]), int(manager.num_named[2])) == (0, 0)
    assert manager.block_ids(2).tolist() == []
    assert manager.find_longest_hit(NAMES, 64) == [1, 2]  # the names outlive the row


def test_only_full_blocks_that_have_no_name_are_named() -> None:
    manager, pool = make_manager()
    manager.start(0, [], pool.get_new_blocks(3))
    manager.cache_blocks(0, NAMES, 7)
    assert [pool.key(block_id) is not None for block_id in (1, 2, 3)] == [True, False, False]
    assert manager.rows_to_name(np.array([7, 0, 0, 0])).tolist() == []
    assert manager.rows_to_name(np.array([8, 0, 0, 0])).tolist() == [0]
    manager.cache_blocks(0, NAMES, 12)
    assert [pool.key(block_id) is not None for block_id in (1, 2, 3)] == [True, True, True]


@pytest.mark.req("SYS-05")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), max_size=5),
    st.permutations(range(4)),
)
def test_appended_blocks_go_to_the_ends_of_the_tables_and_move_nothing(
    rounds: list[list[int]], order: list[int]
) -> None:
    manager, pool = make_manager(num_blocks=200)
    tables: list[list[int]] = [[] for _ in range(4)]
    for lacking in rounds:
        rows = np.array([row for row in order if lacking[row]], np.int64)
        if len(rows) == 0:
            continue
        counts = np.array([lacking[row] for row in rows])
        block_ids = pool.get_new_blocks(int(counts.sum()))
        row_of_block = manager.append(rows, counts, block_ids)
        for row, block_id in zip(row_of_block.tolist(), block_ids, strict=True):
            tables[row].append(block_id)
        assert [manager.block_ids(row).tolist() for row in range(4)] == tables
        assert manager.num_blocks.tolist() == [len(table) for table in tables]


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (40, 10)])
def test_a_partly_filled_block_is_a_block(num_tokens: int, blocks: int) -> None:
    manager, pool = make_manager()
    assert manager.num_blocks_for(num_tokens) == blocks
    manager.start(1, [], pool.get_new_blocks(2))
    wanted = np.full(4, num_tokens)
    short = [blocks, max(blocks - 2, 0), blocks, blocks]
    assert manager.num_blocks_short(wanted).tolist() == short


def test_a_table_that_was_handed_out_does_not_change_afterwards() -> None:
    manager, pool = make_manager()
    manager.start(0, [], pool.get_new_blocks(1))
    copy = manager.block_ids(0)
    manager.free(0)
    manager.start(0, [], pool.get_new_blocks(1))
    assert copy.tolist() == [1]
