"""Groups that give blocks back while a request runs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import KVCacheSpec, LongestRequest
from longshore.scheduler.config import SchedulerConfig, check_states
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.coordinator import manager_class
from longshore.scheduler.kv_cache.states import StateManager
from longshore.scheduler.kv_cache.windowed import (
    ChunkedLocalManager,
    SlidingWindowManager,
    WindowedManager,
)
from tests.harness.kv_groups import chunked, first_seen, full, state, window

NAMES = [b"H%d" % index for index in range(16)]


def make(
    spec: KVCacheSpec, num_blocks: int = 40, max_model_len: int = 64
) -> tuple[WindowedManager, BlockPool]:
    pool = BlockPool(num_blocks)
    longest = LongestRequest(max_model_len)
    manager = manager_class(spec)(spec, pool, group=0, max_num_seqs=4, longest=longest)
    assert isinstance(manager, WindowedManager)
    return manager, pool


def free_skipped(manager: WindowedManager, *settled: int, only_cached: bool = False) -> Int32Array:
    """By row, in order of row."""
    counts = np.zeros(4, np.int64)
    counts[: len(settled)] = settled
    return manager.free_skipped(counts, np.arange(4), only_cached=only_cached)


@pytest.mark.req("STM-01")
def test_each_kind_that_frees_skipped_blocks_has_its_manager() -> None:
    assert manager_class(window(4)) is SlidingWindowManager
    assert manager_class(chunked(4)) is ChunkedLocalManager
    assert manager_class(state()) is StateManager


@pytest.mark.req("NUM-08", "STM-09")
def test_a_window_of_four_after_seven_tokens_skips_four() -> None:
    manager, _ = make(window(4))
    assert manager.num_skipped_tokens(7) == 4  # token 7 sees 4..7
    assert manager.num_skipped_tokens(2) <= 0


@pytest.mark.req("NUM-09", "STM-09")
def test_a_window_of_eight_after_twelve_tokens_frees_its_first_block() -> None:
    manager, pool = make(window(8))
    manager.start(0, [], pool.get_new_blocks(3))
    assert manager.num_skipped_tokens(12) == 5
    assert free_skipped(manager, 12).tolist() == [1]
    assert manager.block_ids(0).tolist() == [0, 2, 3]
    assert free_skipped(manager, 14).tolist() == []
    assert free_skipped(manager, 15).tolist() == [2]
    assert manager.block_ids(0).tolist() == [0, 0, 3]


@pytest.mark.req("STM-10")
def test_chunked_attention_keeps_the_current_chunk() -> None:
    manager, pool = make(chunked(8))
    manager.start(0, [], pool.get_new_blocks(5))
    for settled, block_ids in {8: [3, 4, 5], 15: [3, 4, 5], 16: [5]}.items():
        free_skipped(manager, settled)
        table = manager.block_ids(0)
        assert table[table > 0].tolist() == block_ids
        assert len(table) == 5


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.one_of(
        st.builds(window, st.integers(1, 30), st.sampled_from([2, 4])),
        st.builds(chunked, st.integers(1, 30), st.sampled_from([2, 4])),
    ),
    st.lists(st.lists(st.integers(0, 64), min_size=4, max_size=4), max_size=6),
    st.permutations(range(4)),
)
@pytest.mark.req("STM-09", "STM-10")
def test_exactly_the_blocks_that_no_later_token_looks_at_are_given_back_in_order(
    spec: KVCacheSpec, rounds: list[list[int]], seniority: list[int]
) -> None:
    manager, pool = make(spec, num_blocks=200)
    tables = []
    for row in range(4):
        tables.append(list(pool.get_new_blocks(64 // spec.block_size)))
        manager.start(row, [], int32_array(tables[row]))
    settled = [0] * 4
    for counts in rounds:
        settled = [max(pair) for pair in zip(settled, counts, strict=True)]
        expected = []
        for row in sorted(range(4), key=seniority.__getitem__):
            first = first_seen(spec, settled[row]) // spec.block_size
            expected += [block_id for block_id in reversed(tables[row][:first]) if block_id]
            tables[row][:first] = [0] * len(tables[row][:first])
        got = manager.free_skipped(np.array(settled), np.array(seniority), only_cached=False)
        assert got.tolist() == expected
        assert [manager.block_ids(row).tolist() for row in range(4)] == tables


def test_a_block_that_is_not_cached_yet_is_kept_until_it_is() -> None:
    manager, pool = make(window(4))
    manager.start(0, [], pool.get_new_blocks(4))
    manager.cache_row(0, NAMES, 1)
    assert free_skipped(manager, 16, only_cached=True).tolist() == [1]
    manager.cache_row(0, NAMES, 4)
    assert free_skipped(manager, 16, only_cached=True).tolist() == [3, 2]
    assert list(manager.find(NAMES[:3])) == [1, 2, 3]  # given back, not forgotten by name


def test_a_row_that_is_cut_and_used_again_frees_skipped_blocks_again() -> None:
    manager, pool = make(window(4))
    manager.start(0, [], pool.get_new_blocks(4))
    assert free_skipped(manager, 16).tolist() == [3, 2, 1]
    assert manager.truncate(0, 0).tolist() == [0, 0, 0, 4]
    manager.append_to_row(0, [5, 6, 7])
    assert free_skipped(manager, 12).tolist() == [6, 5]
    manager.take([0])[0]
    manager.start(0, [8, 9], [10])
    assert free_skipped(manager, 12).tolist() == [9, 8]


@pytest.mark.req("STM-11")
def test_rows_of_a_windowed_group_have_no_blocks_in_common() -> None:
    manager, pool = make(window(4))
    manager.start(0, pool.get_new_blocks(2), [])
    manager.start(1, [1, 2], [])
    assert manager.num_common_blocks(np.array([0, 1])) == 0


@pytest.mark.req("STM-10")
def test_a_row_has_all_pages_of_its_state_from_its_start_on() -> None:
    pool = BlockPool(40)
    manager = StateManager(state(3), pool, group=0, max_num_seqs=4, longest=LongestRequest(64))
    assert list(manager.positions(0, manager.num_positions(1), 0)) == [0, 1, 2]
    manager.start(0, [], pool.get_new_blocks(3))
    assert manager.rows_short(np.array([32, 0, 3, 0]))[2] == 0
    assert manager.truncate(0, 0).tolist() == []
    assert manager.block_ids(0).tolist() == [1, 2, 3]
    assert manager.num_blocks_for(1) == manager.num_blocks_for(10_000) == 3


@pytest.mark.parametrize(
    ("settings_", "complaint"),
    [
        ({"num_speculative_tokens": 2}, "num_speculative_tokens"),
        ({"num_lookahead_tokens": 2}, "num_speculative_tokens"),
    ],
)
def test_settings_that_states_do_not_support_are_rejected_with_a_reason(
    settings_: dict[str, int], complaint: str
) -> None:
    config = SchedulerConfig(max_model_len=64, **settings_)  # type: ignore[arg-type]
    check_states(config, [full(), window(4)])
    with pytest.raises(ConfigError, match=complaint):
        check_states(config, [full(), state()])


@pytest.mark.parametrize(("needs", "table"), [(8, [1, 2, 3]), (8, [0, 2, 3]), (8, [0, 2])])
def test_a_row_can_resume_where_it_has_what_the_next_token_reads(
    needs: int, table: list[int]
) -> None:
    manager, _ = make(window(4))
    assert manager.has_needed(int32_array(table), needs)
    assert not manager.has_needed(int32_array(table[:1]), needs)
    assert not manager.has_needed(int32_array([1, 0, 3]), needs)
