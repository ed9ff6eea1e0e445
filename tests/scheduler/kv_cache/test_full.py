"""Block tables of one group of full attention."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.arrays import Int64Array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import CrossAttentionSpec, FullAttentionSpec, LongestRequest
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.coordinator import manager_class, register_manager
from longshore.scheduler.kv_cache.full import FullAttentionManager, SingleTypeManager

NAMES = [b"H%d" % index for index in range(8)]


def make_manager(
    num_blocks: int = 16, block_size: int = 4, max_num_seqs: int = 4
) -> tuple[FullAttentionManager, BlockPool]:
    pool = BlockPool(num_blocks)
    spec = FullAttentionSpec(block_size, num_kv_heads=1, head_size=8, dtype_bytes=2)
    longest = LongestRequest(64)
    manager = FullAttentionManager(spec, pool, group=0, max_num_seqs=max_num_seqs, longest=longest)
    return manager, pool


def found(manager: SingleTypeManager, names: list[bytes], max_tokens: int) -> list[int]:
    """Blocks of the longest cached prefix of at most so many tokens."""
    last = max_tokens // manager.block_size
    return list(manager.find(manager.hashes_of_blocks(names, 0, last)))


def lacking(manager: SingleTypeManager, num_tokens: Int64Array) -> list[int]:
    """Blocks that each row lacks."""
    short = np.zeros(len(num_tokens), np.int64)
    rows, counts, _ = manager.rows_short(num_tokens)
    assert (counts > 0).all()
    short[rows] = counts
    return short.tolist()


@pytest.mark.req("STM-05")
@pytest.mark.parametrize(
    ("cached", "max_tokens", "hits"),
    [
        ([0, 1, 2], 64, 3),
        ([0, 1, 2], 12, 3),
        ([0, 1, 2], 11, 2),  # 11 // 4 hashes are looked up
        ([0, 1, 2], 3, 0),
        ([0, 2, 3], 64, 1),  # stops at the first miss
        ([1, 2, 3], 64, 0),
        ([], 64, 0),
    ],
)
def test_lookup_goes_left_to_right_and_stops_at_the_first_miss(
    cached: list[int], max_tokens: int, hits: int
) -> None:
    manager, pool = make_manager()
    block_ids = pool.get_new_blocks(len(cached))
    pool.cache_blocks(block_ids, [NAMES[index] for index in cached], 0)
    free_before = pool.num_free
    assert found(manager, NAMES, max_tokens) == block_ids[:hits]
    assert pool.num_free == free_before  # a lookup holds nothing


@pytest.mark.req("STM-04")
def test_state_is_the_table_and_the_number_of_cached_blocks_until_the_row_is_freed() -> None:
    manager, pool = make_manager()
    hits = pool.get_new_blocks(1)
    pool.cache_blocks(hits, NAMES[:1], 0)
    manager.start(2, hits, pool.get_new_blocks(2))
    assert manager.block_ids(2).tolist() == [1, 2, 3]
    assert (int(manager.num_blocks[2]), int(manager.num_cached_blocks[2])) == (3, 1)
    manager.cache_row(2, NAMES, 2)
    assert int(manager.num_cached_blocks[2]) == 2
    assert manager.take([2])[0].tolist() == [1, 2, 3]
    assert (int(manager.num_blocks[2]), int(manager.num_cached_blocks[2])) == (0, 0)
    assert manager.block_ids(2).tolist() == []
    assert found(manager, NAMES, 64) == [1, 2]  # the blocks stay cached after the row


def test_only_full_uncached_blocks_are_cached() -> None:
    manager, pool = make_manager()
    manager.start(0, [], pool.get_new_blocks(3))
    manager.cache_row(0, NAMES, 1)
    assert [pool.block_hash(block_id) is not None for block_id in (1, 2, 3)] == [True, False, False]
    assert manager.rows_to_cache(np.array([7, 0, 0, 0])).tolist() == []
    assert manager.rows_to_cache(np.array([8, 0, 0, 0])).tolist() == [0]
    manager.cache_row(0, NAMES, 3)
    assert [pool.block_hash(block_id) is not None for block_id in (1, 2, 3)] == [True, True, True]


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
    assert lacking(manager, wanted) == short


def test_a_table_that_was_handed_out_does_not_change_afterwards() -> None:
    manager, pool = make_manager()
    manager.start(0, [], pool.get_new_blocks(1))
    copy = manager.block_ids(0)
    pool.free_blocks(manager.take([0])[0])
    manager.start(0, [], pool.get_new_blocks(1))
    assert copy.tolist() == [1]


@pytest.mark.parametrize("together", [True, False])
def test_caching_rows_together_equals_caching_each_alone(together: bool) -> None:
    manager, pool = make_manager(num_blocks=32)
    chains = [[b"%d.%d" % (row, index) for index in range(8)] for row in range(4)]
    for row in range(4):
        manager.start(row, [], pool.get_new_blocks(5))
    for full in ([1, 1, 1, 1], [2, 1, 5, 2], [3, 2, 5, 3]):
        rows = np.array([2, 0, 3, 1])
        num_full = np.array(full)[rows]
        if together:
            manager.cache_rows(rows, num_full, [chains[row] for row in rows])
        else:
            for row in rows.tolist():
                manager.cache_row(row, chains[row], full[row])
        assert manager.num_cached_blocks.tolist() == full
        for row in range(4):
            cached = [pool.block_hash(block_id) for block_id in manager.block_ids(row).tolist()]
            assert cached == chains[row][: full[row]] + [None] * (5 - full[row])


@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_a_prefix_with_an_uncached_block_in_its_middle_gets_it_cached_again(
    one_at_a_time: bool,
) -> None:
    manager, pool = make_manager()
    manager.start(0, [], pool.get_new_blocks(4))
    manager.cache_row(0, NAMES, 3)
    pool.uncache_blocks([2])
    manager.attach(1, manager.take([0])[0], 0)
    for num_full in (2, 3, 4) if one_at_a_time else (4,):
        manager.cache_rows(np.array([1]), np.array([num_full]), [NAMES])
    assert [pool.block_hash(block_id) for block_id in (1, 2, 3, 4)] == NAMES[:4]


@pytest.mark.req("HSH-08", "POO-06")
def test_a_block_of_several_hash_blocks_has_the_hash_of_the_last() -> None:
    pool = BlockPool(8)
    spec = FullAttentionSpec(8, num_kv_heads=1, head_size=8, dtype_bytes=2)
    manager = FullAttentionManager(
        spec, pool, group=0, max_num_seqs=1, longest=LongestRequest(64), tokens_per_hash=2
    )
    links = [b"link-%d" % index for index in range(10)]
    manager.start(0, [], pool.get_new_blocks(3))
    manager.cache_rows(np.array([0]), np.array([1]), [links])
    manager.cache_row(0, links, 2)
    assert [pool.block_hash(block_id) for block_id in (1, 2, 3)] == [links[3], links[7], None]
    assert found(manager, links, 20) == [1, 2]
    assert found(manager, links, 15) == [1]
    assert found(manager, links[:7], 20) == [1]
    other_end = [*links[:7], b"other"]
    assert found(manager, other_end, 20) == [1]


@pytest.mark.req("COO-02", "ERR-20")
def test_ranks_that_share_a_blocks_tokens_make_it_as_much_larger_everywhere() -> None:
    pool = BlockPool(8)
    spec = FullAttentionSpec(4, num_kv_heads=1, head_size=8, dtype_bytes=2)
    longest = LongestRequest(60, context_parallel_size=3)
    manager = FullAttentionManager(spec, pool, group=0, max_num_seqs=2, longest=longest)
    assert manager.block_size == 12
    assert manager.table.shape == (2, 5)
    assert [manager.num_blocks_for(count) for count in (0, 1, 12, 13, 60)] == [0, 1, 1, 2, 5]
    assert lacking(manager, np.array([13, 12])) == [2, 1]
    manager.start(0, [], pool.get_new_blocks(2))
    assert manager.rows_to_cache(np.array([11, 0])).tolist() == []
    manager.cache_row(0, NAMES, 2)
    assert found(manager, NAMES, 24) == [1, 2]
    assert found(manager, NAMES, 23) == [1]


@pytest.mark.req("STM-11")
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(1, 3), max_size=16), min_size=1, max_size=4))
def test_common_blocks_are_the_leading_columns_that_agree(tables: list[list[int]]) -> None:
    manager, _ = make_manager()
    for row, block_ids in enumerate(tables):
        manager.start(row, [], np.array(block_ids, np.int32))
    expected = 0
    for column in zip(*tables, strict=False):
        if len(set(column)) > 1:
            break
        expected += 1
    assert manager.num_common_blocks(np.arange(len(tables))) == expected
    assert manager.num_common_blocks(np.arange(0)) == 0


def test_a_row_cut_to_fewer_tokens_loses_its_tail_and_counts_the_cached_blocks_it_kept() -> None:
    manager, pool = make_manager()
    manager.start(1, [], pool.get_new_blocks(5))
    manager.cache_row(1, NAMES, 4)
    pool.uncache_blocks([2])
    assert manager.truncate(1, 40).tolist() == []
    assert manager.truncate(1, 9).tolist() == [4, 5]
    assert manager.block_ids(1).tolist() == [1, 2, 3]
    assert int(manager.num_cached_blocks[1]) == 1
    assert manager.truncate(1, 0).tolist() == [1, 2, 3]
    assert (int(manager.num_blocks[1]), int(manager.num_cached_blocks[1])) == (0, 0)


@pytest.mark.req("KVM-06")
def test_no_row_needs_slots_beyond_the_longest_request() -> None:
    manager, pool = make_manager(num_blocks=32)  # max_model_len 64
    assert manager.num_blocks_for(64 + 5) == 16
    manager.start(0, [], pool.get_new_blocks(16))
    assert lacking(manager, np.array([69, 0, 70, 3])) == [0, 0, 16, 1]


@pytest.mark.req("KVM-11")
def test_cross_attention_takes_the_encoders_blocks_once_and_caches_nothing() -> None:
    pool = BlockPool(16)
    spec = CrossAttentionSpec(4, 1, 8, 2, max_encoder_tokens=30)
    longest = LongestRequest(64)
    manager = manager_class(spec)(spec, pool, group=0, max_num_seqs=2, longest=longest)
    assert manager.table.shape == (2, 8)
    assert [manager.num_blocks_for(9, encoder) for encoder in (0, 1, 4, 5, 30)] == [0, 1, 1, 2, 8]
    manager.start(0, [], pool.get_new_blocks(2))
    assert lacking(manager, np.array([64, 64])) == [0, 0]
    assert manager.truncate(0, 1).tolist() == []
    assert manager.caches_prefixes is False
    assert manager.num_common_blocks(np.array([0])) == 0


class ThirdPartySpec(FullAttentionSpec, frozen=True, tag="third"):
    """A kind of attention that this package does not know."""


@pytest.mark.req("STM-12")
def test_a_third_party_registers_the_manager_of_its_own_spec() -> None:
    spec = ThirdPartySpec(4, 1, 8, 2)
    assert manager_class(FullAttentionSpec(4, 1, 8, 2)) is FullAttentionManager
    with pytest.raises(ConfigError, match="no block manager is registered for ThirdPartySpec"):
        manager_class(spec)

    @register_manager(ThirdPartySpec)
    class ThirdPartyManager(FullAttentionManager):
        pass

    assert manager_class(spec) is ThirdPartyManager
