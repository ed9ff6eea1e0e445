"""The facade: lookup, capacity, naming and release across groups."""

import ast
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import longshore.scheduler
from longshore.protocol.arrays import int32_array
from longshore.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)
from longshore.protocol.kv_cache_spec import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LongestRequest,
)
from longshore.protocol.requests import AddRequest, LoRARequest, MultimodalFeature, RequestOptions
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.features.metrics import BlockMetrics, SampledBlockMetrics
from longshore.scheduler.kv_cache.free_queue import NotTaken
from longshore.scheduler.kv_cache.manager import (
    ComputedBlocks,
    HeldBlocks,
    KVCacheManager,
)
from longshore.scheduler.request import Request
from tests.harness.kv_groups import kv_cache_config

SENIORITY = np.arange(8)


def make_manager(
    num_blocks: int = 16,
    block_size: int = 4,
    num_groups: int = 1,
    *,
    kv_cache: KVCacheConfig | None = None,
    max_model_len: int = 128,
    metrics: BlockMetrics | None = None,
    **settings: Any,
) -> KVCacheManager:
    cache = CacheConfig(block_size=block_size, **settings)
    return KVCacheManager(
        cache,
        kv_cache or kv_cache_config(num_blocks, block_size, num_groups),
        LongestRequest(max_model_len, context_parallel_size=cache.context_parallel_size),
        max_num_seqs=8,
        hash_seed=b"seed",
        metrics=metrics,
    )


def request_of(
    tokens: Sequence[int], request_id: str = "r", *, skip: bool = False, **options: Any
) -> Request:
    message = AddRequest(
        request_id,
        0,
        int32_array(list(tokens)),
        SamplingParams(),
        RequestOptions(skip_reading_prefix_cache=skip, **options),
    )
    return Request(message, client_index=0, now=0.0, max_model_len=128, eos_token_ids=())


def run(manager: KVCacheManager, row: int, request: Request) -> bool:
    """Look up, start and cache a whole prompt, as an admission with enough budget does."""
    computed = manager.get_computed_blocks(request)
    if not manager.start(row, manager.demand(computed, request.num_tokens)):
        return False
    manager.count_lookup(request, computed.num_tokens)
    manager.full_blocks.cache_row(row, request, request.token_ids, request.num_tokens)
    return True


def found(computed: ComputedBlocks) -> tuple[list[list[int]], int]:
    return [list(block_ids) for block_ids in computed.block_ids], computed.num_tokens


def table(manager: KVCacheManager, row: int) -> list[int]:
    return manager.block_ids(row)[0].tolist()


@pytest.mark.req("NUM-10", "ERR-41")
def test_second_request_hits_two_of_three_blocks_and_computes_from_token_eight() -> None:
    manager = make_manager(block_size=4)
    first = request_of(range(12))
    second = request_of([*range(8), 90, 91, 92, 93])
    run(manager, 0, first)
    computed = manager.get_computed_blocks(second)
    assert found(computed) == ([[1, 2]], 8)
    free_before = manager.num_free_blocks
    assert manager.start(1, manager.demand(computed, 12))
    assert table(manager, 1) == [1, 2, 4]
    assert free_before - manager.num_free_blocks == 1
    assert first.block_hashes[:2] == second.block_hashes[:2]
    assert first.block_hashes[2] != second.block_hashes[2]


@pytest.mark.req("NUM-11", "ERR-41")
def test_prompt_of_eighty_hits_three_cached_blocks_of_sixteen() -> None:
    manager = make_manager(block_size=16)
    run(manager, 0, request_of(range(48)))
    computed = manager.get_computed_blocks(request_of(range(80)))
    assert found(computed) == ([[1, 2, 3]], 48)


@pytest.mark.req("NUM-12", "KVM-03", "ERR-13", "ERR-41")
def test_a_fully_cached_prompt_of_sixty_four_recomputes_its_last_block_of_sixteen() -> None:
    manager = make_manager(block_size=16)
    run(manager, 0, request_of(range(64)))
    request = request_of(range(64))
    computed = manager.get_computed_blocks(request)
    assert found(computed) == ([[1, 2, 3]], 48)
    assert manager.start(1, manager.demand(computed, 64))
    assert table(manager, 1)[:3] == table(manager, 0)[:3]
    assert table(manager, 1)[3] != table(manager, 0)[3]


@pytest.mark.req("KVM-03")
@pytest.mark.parametrize(("num_tokens", "hit"), [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_a_hit_is_at_most_all_tokens_but_one(num_tokens: int, hit: int) -> None:
    manager = make_manager(block_size=4)
    run(manager, 0, request_of(range(12)))
    assert manager.get_computed_blocks(request_of(range(num_tokens))).num_tokens == hit


@pytest.mark.req("KVM-02")
def test_nothing_is_looked_up_without_prefix_caching_or_when_the_request_asks_not_to() -> None:
    for caching, skip in ((False, False), (True, True), (False, True)):
        manager = make_manager(enable_prefix_caching=caching)
        run(manager, 0, request_of(range(12)))
        computed = manager.get_computed_blocks(request_of(range(12), skip=skip))
        assert found(computed) == ([[]], 0)


@pytest.mark.req("SYS-07")
def test_one_shared_empty_result_stands_for_every_miss() -> None:
    manager = make_manager()
    results = [manager.get_computed_blocks(request_of(range(n))) for n in (3, 9, 12)]
    assert all(result is results[0] for result in results)


@pytest.mark.req("KVM-04")
def test_lookups_are_counted_once_per_admission_and_apart_for_preempted_requests() -> None:
    manager = make_manager()
    run(manager, 0, request_of(range(9)))
    again = request_of(range(12))
    for _ in range(3):  # a request that waits asks in every step
        manager.get_computed_blocks(again)
    run(manager, 1, again)
    manager.free(1)
    again.num_preemptions = 1
    run(manager, 1, again)
    stats = manager.stats
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (9 + 12, 8)
    assert (stats.num_preempted_queried_tokens, stats.num_preempted_hit_tokens) == (12, 8)


@pytest.mark.req("KVM-04")
def test_requests_that_look_nothing_up_are_not_in_the_statistics() -> None:
    manager = make_manager()
    run(manager, 0, request_of(range(9), skip=True))
    off = make_manager(enable_prefix_caching=False)
    run(off, 0, request_of(range(9)))
    assert (manager.stats.num_queried_tokens, off.stats.num_queried_tokens) == (0, 0)
    assert (manager.stats.num_prompt_tokens, off.stats.num_prompt_tokens) == (9, 9)


@pytest.mark.req("KVM-08", "ERR-13")
def test_capacity_counts_cached_blocks_without_references() -> None:
    manager = make_manager(num_blocks=5)  # 4 usable
    run(manager, 0, request_of(range(8)))  # blocks 1 and 2
    manager.free(0)
    run(manager, 1, request_of(range(50, 54)))  # takes block 3, which was never used
    assert manager.num_free_blocks == 3
    request = request_of([*range(8), *range(60, 68)])  # 2 hits, 2 new: 4 blocks, 3 are free
    computed = manager.get_computed_blocks(request)
    assert computed.num_tokens == 8
    assert manager.start(0, manager.demand(computed, 16)) is None
    assert manager.start(0, manager.demand(computed, 12)) is not None
    assert manager.num_free_blocks == 0


def test_hits_that_another_request_holds_cost_nothing() -> None:
    manager = make_manager(num_blocks=5)
    run(manager, 0, request_of(range(8)))
    request = request_of([*range(8), *range(60, 68)])
    assert manager.start(1, manager.demand(manager.get_computed_blocks(request), 16)) is not None
    assert table(manager, 1) == [*table(manager, 0), 3, 4]
    manager.free(0)
    assert manager.num_free_blocks == 0


def snapshot(manager: KVCacheManager) -> object:
    pool = manager.pool
    blocks = range(pool.num_blocks)
    return (
        pool.free_block_ids(),
        [pool.references()[block_id] for block_id in blocks],
        [pool.block_hash(block_id) for block_id in blocks],
        [[ids.tolist() for ids in manager.block_ids(row)] for row in range(8)],
        vars(manager.stats) if hasattr(manager.stats, "__dict__") else repr(manager.stats),
    )


@pytest.mark.req("ERR-13")
@pytest.mark.parametrize("num_groups", [1, 2])
def test_an_allocation_that_does_not_fit_changes_nothing(num_groups: int) -> None:
    caching = num_groups == 1
    manager = make_manager(9, num_groups=num_groups, enable_prefix_caching=caching)
    run(manager, 0, request_of(range(8)))
    run(manager, 1, request_of(range(50, 54)))
    manager.free(0)
    before = snapshot(manager)
    request = request_of(range(80))
    computed = manager.get_computed_blocks(request)
    assert manager.start(2, manager.demand(computed, 80)) is None
    assert manager.grow(np.array([0, 80, 0, 0, 0, 0, 0, 0]), SENIORITY) is None
    assert manager.grow_row(1, 80) is None
    assert snapshot(manager) == before


@pytest.mark.req("KVM-13", "FRQ-05")
def test_free_frees_the_blocks_of_all_groups_tail_first() -> None:
    manager = make_manager(9, num_groups=2)
    run(manager, 0, request_of(range(12)))
    manager.free(0)
    assert manager.pool.free_block_ids() == [7, 8, 3, 6, 2, 5, 1, 4]
    manager = make_manager(9, num_groups=2, enable_prefix_caching=False)
    run(manager, 0, request_of(range(12)))
    first, second = (ids.tolist() for ids in manager.block_ids(0))
    assert (first, second) == ([1, 2, 3], [4, 5, 6])
    manager.free(0)
    assert manager.pool.free_block_ids() == [4, 1, 5, 2, 6, 3, 7, 8]  # the last freed first


def test_rows_that_grow_together_get_their_blocks_by_seniority_and_once_per_group() -> None:
    manager = make_manager(13, num_groups=2, enable_prefix_caching=False)
    for row in (0, 1, 2):
        run(manager, row, request_of(range(4)))
    seniority = np.array([3, 1, 2, 0, 0, 0, 0, 0])
    appended = manager.grow(np.array([8, 12, 4, 0, 0, 0, 0, 0]), seniority)
    assert appended is not None
    assert [
        (blocks.group, blocks.rows.tolist(), blocks.block_ids.tolist()) for blocks in appended
    ] == [
        (0, [1, 1, 0], [7, 8, 9]),
        (1, [1, 1, 0], [10, 11, 12]),
    ]
    assert manager.grow(np.array([8, 12, 4, 0, 0, 0, 0, 0]), seniority) == []


@pytest.mark.req("NUM-25")
def test_decode_takes_a_block_of_sixteen_in_every_sixteenth_step() -> None:
    manager = make_manager(num_blocks=16, block_size=16)
    run(manager, 0, request_of(range(16)))
    num_tokens = np.zeros(8, np.int64)
    took = []
    for length in range(17, 17 + 64):
        num_tokens[0] = length
        appended = manager.grow(num_tokens, SENIORITY)
        assert appended is not None
        took.append(sum(len(blocks.block_ids) for blocks in appended))
    assert took == ([1] + [0] * 15) * 4


@pytest.mark.req("PRE-05", "POO-10", "ERR-12")
def test_blocks_of_a_request_that_left_stay_findable_until_they_are_reused_tail_first() -> None:
    manager = make_manager(num_blocks=5)
    request = request_of(range(16))
    run(manager, 0, request)
    manager.free(0)
    assert manager.num_free_blocks == 4
    run(manager, 1, request_of(range(50, 58)))  # reuses two blocks
    manager.free(1)
    assert manager.get_computed_blocks(request).num_tokens == 8


@pytest.mark.req("HSH-03", "ERR-22")
def test_equal_blocks_computed_at_the_same_time_are_both_kept() -> None:
    manager = make_manager()
    together = [request_of(range(9), name) for name in ("a", "b")]
    computed = [manager.get_computed_blocks(request) for request in together]
    for row in (0, 1):
        assert manager.start(row, manager.demand(computed[row], 9))
    tables = [table(manager, row) for row in (0, 1)]
    for row, request in enumerate(together):
        manager.full_blocks.cache_row(row, request, request.token_ids, 9)
    assert [table(manager, row) for row in (0, 1)] == tables
    assert set(tables[0]).isdisjoint(tables[1])
    manager.free(0)
    manager.start(2, manager.demand(manager.get_computed_blocks(request_of([77])), 48))
    assert set(tables[0]) <= set(table(manager, 2))
    hit = manager.get_computed_blocks(request_of(range(9)))
    assert found(hit) == ([tables[1][:2]], 8)  # the other copy


@pytest.mark.req("POO-09")
def test_prefix_cache_is_reset_only_when_no_block_is_held() -> None:
    manager = make_manager()
    run(manager, 0, request_of(range(12)))
    assert manager.reset_prefix_cache() is False
    manager.free(0)
    assert manager.get_computed_blocks(request_of(range(12))).num_tokens == 8
    assert manager.reset_prefix_cache() is True
    assert manager.get_computed_blocks(request_of(range(12))).num_tokens == 0


def test_a_salt_shares_blocks_only_with_the_same_salt() -> None:
    manager = make_manager()

    def salted(salt: str | None) -> Request:
        message = AddRequest(
            "r",
            0,
            int32_array(range(12)),
            SamplingParams(),
            options=RequestOptions(cache_salt=salt),
        )
        return Request(message, client_index=0, now=0.0, max_model_len=64, eos_token_ids=())

    run(manager, 0, salted("mine"))
    found = [
        manager.get_computed_blocks(salted(salt)).num_tokens for salt in ("mine", "yours", None)
    ]
    assert found == [8, 0, 0]


@pytest.mark.req("NUM-02", "FRQ-05", "POO-04")
def test_the_blocks_of_a_request_are_freed_tail_first() -> None:
    manager = make_manager(num_blocks=15)
    assert manager.reserve(manager.demand(nothing(manager), 36), answered_step=0) is not None
    assert manager.start(0, manager.demand(nothing(manager), 20))
    assert table(manager, 0) == [10, 11, 12, 13, 14]
    request = request_of(range(20))
    manager.full_blocks.cache_row(0, request, request.token_ids, 20)
    manager.free(0)
    assert manager.pool.free_block_ids() == [14, 13, 12, 11, 10]


@pytest.mark.req("FRQ-05", "POO-04")
def test_uncached_blocks_of_a_request_are_reused_first_and_in_order_of_position() -> None:
    manager = make_manager(num_blocks=15)
    assert manager.reserve(manager.demand(nothing(manager), 36), answered_step=0) is not None
    assert manager.start(0, manager.demand(nothing(manager), 20))
    request = request_of(range(20))
    manager.full_blocks.cache_row(0, request, request.token_ids, 8)
    manager.free(0)
    assert manager.pool.free_block_ids() == [12, 13, 14, 11, 10]


def nothing(manager: KVCacheManager) -> ComputedBlocks:
    """The lookup of a new request."""
    return manager.get_computed_blocks(request_of([99]))


@pytest.mark.req("KVM-01")
def test_every_setting_of_the_constructor_is_heeded() -> None:
    def hit(manager: KVCacheManager, length: int = 25) -> int:
        run(manager, 0, request_of(range(24)))
        return manager.get_computed_blocks(request_of(range(length))).num_tokens

    assert hit(make_manager()) == 24
    assert hit(make_manager(enable_prefix_caching=False)) == 0
    assert hit(make_manager(use_eagle=True)) == 20
    assert hit(make_manager(decode_context_parallel_size=2)) == 24
    assert hit(make_manager(prefill_context_parallel_size=3), 23) == 12
    assert make_manager(decode_context_parallel_size=2).block_sizes == (8,)
    assert make_manager(max_model_len=8).num_blocks_for(100) == 2
    with_stats, without = make_manager(), make_manager(log_stats=False)
    for manager in (with_stats, without):
        run(manager, 0, request_of(range(9)))
    assert (with_stats.stats.num_queried_tokens, without.stats.num_queried_tokens) == (9, 0)
    finer = make_manager(hash_block_size=2)
    request = request_of(range(8))
    run(finer, 0, request)
    assert len(request.block_hashes) == 4
    events = make_manager(enable_kv_cache_events=True)
    for manager, count in ((events, 2), (make_manager(), 0)):
        run(manager, 0, request_of(range(9)))
        assert len(manager.take_events(0)) == count
    metrics = SampledBlockMetrics(lambda: 0.0)
    watched = make_manager(metrics=metrics)
    run(watched, 0, request_of(range(9)))
    assert metrics.num_allocated == 3
    assert metrics.num_allocated == 3


@pytest.mark.req("KVM-05", "ERR-13")
def test_slots_begin_after_the_local_hits_and_end_after_the_lookahead() -> None:
    manager = make_manager(num_blocks=32)
    run(manager, 0, request_of(range(8)))
    request = request_of([*range(8), *range(60, 90)])
    computed = manager.get_computed_blocks(request)
    num_external, num_new, num_lookahead = 4, 4, 1
    num_slots = computed.num_tokens + num_external + num_new + num_lookahead
    demand = manager.demand(computed, num_slots)
    assert demand.num_needed == 3  # for 9 tokens; the hits are held
    assert manager.start(1, demand)
    assert table(manager, 1) == [*table(manager, 0), 3, 4, 5]
    # only computed tokens are cached: no lookahead, and none that are missing yet
    manager.full_blocks.cache_row(
        1, request, request.token_ids, computed.num_tokens + num_external + num_new
    )
    assert [manager.pool.block_hash(b) is not None for b in (3, 4, 5)] == [True, True, False]


@pytest.mark.req("KVM-06")
def test_lookahead_ends_at_the_longest_length_of_a_request() -> None:
    manager = make_manager(num_blocks=32, max_model_len=30)
    assert manager.num_blocks_for(40) == 8
    assert manager.start(0, manager.demand(nothing(manager), 29))
    assert manager.grow(np.array([31, 0, 0, 0, 0, 0, 0, 0]), SENIORITY) == []
    assert manager.grow_row(0, 33) == [[]]
    assert manager.start(1, manager.demand(nothing(manager), 33))
    assert len(table(manager, 1)) == 8


@pytest.mark.req("ERR-13")
def test_a_partly_filled_last_block_has_slots_too() -> None:
    manager = make_manager(block_size=16)
    assert manager.start(0, manager.demand(nothing(manager), 40))
    assert len(table(manager, 0)) == 3


@pytest.mark.req("KVM-09")
def test_draft_tokens_complete_no_cached_block() -> None:
    manager = make_manager()
    request = request_of(range(10))
    assert manager.start(0, manager.demand(nothing(manager), 10 + 3))  # tokens and drafts
    manager.full_blocks.cache_row(0, request, request.token_ids, 13)
    drafted = request_of([*range(10), 70, 71, 72])
    assert manager.get_computed_blocks(drafted).num_tokens == 8
    assert manager.pool.block_hash(3) is None


@pytest.mark.req("KVM-10", "HSH-09", "ERR-13")
def test_blocks_that_are_being_loaded_are_not_found_until_the_load_is_over() -> None:
    manager = make_manager()
    request, other = request_of(range(9)), request_of(range(9))
    held = manager.reserve(manager.demand(manager.get_computed_blocks(request), 9), answered_step=0)
    assert held is not None
    assert manager.get_computed_blocks(other).num_tokens == 0
    manager.attach(0, held, 0)
    assert manager.get_computed_blocks(other).num_tokens == 0
    manager.full_blocks.cache_row(0, request, request.token_ids, 8)
    assert manager.get_computed_blocks(other).num_tokens == 8


@pytest.mark.req("HSH-09", "ERR-13")
def test_a_chunked_prompt_is_found_as_far_as_it_is_scheduled() -> None:
    manager = make_manager()
    request, other = request_of(range(16)), request_of(range(16))
    assert manager.start(0, manager.demand(manager.get_computed_blocks(request), 16))
    for num_scheduled, hit in ((0, 0), (3, 0), (7, 4), (12, 12)):
        manager.full_blocks.cache_row(0, request, request.token_ids, num_scheduled)
        assert manager.get_computed_blocks(other).num_tokens == hit


def test_a_held_hit_stays_cached_when_a_row_takes_it_over() -> None:
    manager = make_manager()
    run(manager, 0, request_of(range(8)))
    request = request_of([*range(8), *range(60, 69)])
    held = manager.reserve(
        manager.demand(manager.get_computed_blocks(request), 17), answered_step=0
    )
    assert held is not None
    manager.attach(1, held, 0)
    manager.full_blocks.cache_row(1, request, request.token_ids, 17)
    assert manager.get_computed_blocks(request_of(request.token_ids.tolist())).num_tokens == 16


FULL = FullAttentionSpec(4, 1, 8, 4)


@pytest.mark.req("KVM-11")
def test_encoder_tokens_size_the_cross_attention_group_which_then_never_grows() -> None:
    cross = CrossAttentionSpec(4, 1, 8, 4, max_encoder_tokens=40)
    groups = (KVCacheGroup(("self",), FULL), KVCacheGroup(("cross",), cross))
    manager = make_manager(kv_cache=KVCacheConfig(24, groups, "float32"))
    request = request_of(range(9))
    computed = manager.get_computed_blocks(request)
    assert manager.demand(computed, 9, num_encoder_tokens=18).num_needed == 3 + 5
    assert manager.start(0, manager.demand(computed, 9, num_encoder_tokens=18))
    assert [len(block_ids) for block_ids in manager.block_ids(0)] == [3, 5]
    manager.full_blocks.cache_row(0, request, request.token_ids, 9)
    appended = manager.grow(np.array([20, 0, 0, 0, 0, 0, 0, 0]), SENIORITY)
    assert appended is not None
    assert [(blocks.group, len(blocks.block_ids)) for blocks in appended] == [(0, 2)]
    again = manager.get_computed_blocks(request_of(range(9)))
    assert (found(again)[0][1], again.num_tokens) == ([], 8)
    held = manager.reserve(manager.demand(again, 12, num_encoder_tokens=4), answered_step=0)
    assert held is not None
    assert [len(block_ids) for block_ids in held.block_ids] == [3, 1]
    manager.truncate(0, 4)
    assert [len(block_ids) for block_ids in manager.block_ids(0)] == [1, 5]
    assert manager.num_common_prefix_blocks(np.array([0])) == (1, 0)
    manager.free(0)
    manager.check([held])


@pytest.mark.req("KVM-12")
def test_results_are_per_group_and_nothing_found_is_one_shared_result() -> None:
    """A row without blocks has empty tables; where None would say so, a plan does not name it."""
    manager = make_manager(num_groups=2)
    assert [block_ids.tolist() for block_ids in manager.block_ids(0)] == [[], []]
    run(manager, 0, request_of(range(8)))
    tables = manager.block_ids(0)
    assert [block_ids.tolist() for block_ids in tables] == [[1, 2], [3, 4]]
    assert tables[1][0] == 3
    results = [manager.get_computed_blocks(request_of([50] * n)) for n in (3, 9)]
    assert results[0] is results[1]
    assert found(results[0]) == ([[], []], 0)


@pytest.mark.req("KVM-14")
def test_the_interface_reports_fit_common_prefix_new_blocks_events_and_reset() -> None:
    """`demand` for all tokens says whether a whole sequence fits, and what `grow` returns are the
    blocks that are new in the step."""
    manager = make_manager(num_blocks=8, enable_kv_cache_events=True)
    run(manager, 0, request_of(range(8)))
    request = request_of([*range(8), *range(50, 62)])
    computed = manager.get_computed_blocks(request)
    whole = manager.demand(computed, request.num_tokens)
    assert (whole.num_new, whole.num_needed) == (3, 3)
    assert manager.start(1, manager.demand(computed, 12))
    assert manager.num_common_prefix_blocks(np.array([0, 1])) == (2,)
    (new,) = manager.grow(np.array([8, 16, 0, 0, 0, 0, 0, 0]), SENIORITY) or ()
    assert (new.rows.tolist(), new.block_ids.tolist()) == ([1], [4])
    assert manager.grow(np.array([8, 16, 0, 0, 0, 0, 0, 0]), SENIORITY) == []
    assert [type(event) for event in manager.take_events(0)] == [BlockStored] * 2
    assert manager.reset_prefix_cache() is False
    manager.free(0)
    manager.free(1)
    assert manager.reset_prefix_cache() is True
    assert manager.take_events(0) == [AllBlocksCleared()]


@pytest.mark.req("STM-11")
def test_pins_and_loads_do_not_distort_what_running_rows_have_in_common() -> None:
    manager = make_manager(num_blocks=32)
    for row in (0, 1):
        run(manager, row, request_of([*range(8), row, row, row, row]))
    assert manager.hold(table(manager, 0)) is not None
    waiting = manager.get_computed_blocks(request_of(range(60)))
    assert manager.reserve(manager.demand(waiting, 12), answered_step=0) is not None
    assert manager.num_common_prefix_blocks(np.array([0, 1])) == (2,)
    assert manager.num_common_prefix_blocks(np.array([1])) == (3,)
    assert manager.num_common_prefix_blocks(np.array([], np.int64)) == (0,)


def test_a_load_gets_no_block_of_an_unanswered_plan_while_computation_does() -> None:
    manager = make_manager(num_blocks=7)
    run(manager, 0, request_of(range(50, 66)))
    manager.free(0, step=5)
    for answered_step, fits in ((4, False), (5, True)):
        held = manager.reserve(manager.demand(nothing(manager), 12), answered_step=answered_step)
        assert (held is not None) is fits
        manager.check([] if held is None else [held])
    assert held is not None
    manager.release(held)
    manager.fence([held, HeldBlocks((np.array([4], np.int32),))], 6)
    assert manager.reserve(manager.demand(nothing(manager), 16), answered_step=5) is None
    assert manager.start(0, manager.demand(nothing(manager), 16)) is not None


@pytest.mark.req("HSH-08", "POO-06", "KVM-01")
def test_groups_of_larger_blocks_share_one_finer_chain_of_hashes() -> None:
    groups = (
        KVCacheGroup(("a",), FULL),
        KVCacheGroup(("b",), FullAttentionSpec(8, 1, 8, 4)),
    )
    manager = make_manager(kv_cache=KVCacheConfig(32, groups, "float32"), hash_block_size=2)
    request = request_of(range(22))
    run(manager, 0, request)
    assert len(request.block_hashes) == 11
    small, large = manager.block_ids(0)
    names = [manager.pool.block_hash(block_id) for block_id in (*small.tolist(), *large.tolist())]
    chain = request.block_hashes
    assert names == [
        chain[1],
        chain[3],
        chain[5],
        chain[7],
        chain[9],
        None,
        chain[3],
        chain[7],
        None,
    ]
    computed = manager.get_computed_blocks(request_of(range(40)))
    assert found(computed) == ([small[:4].tolist(), large[:2].tolist()], 16)
    assert manager.get_computed_blocks(request_of([*range(14), 1, 1, 1])).num_tokens == 8


@pytest.mark.req("POO-12")
def test_how_far_each_block_is_filled_follows_from_hashes_tables_and_token_counts() -> None:
    manager = make_manager(num_blocks=12)
    lengths = {0: 10, 1: 4, 2: 3}
    for row, length in lengths.items():
        run(manager, row, request_of(range(20 * row, 20 * row + length)))
    manager.free(1)

    def num_filled(block_id: int) -> int:
        if manager.pool.block_hash(block_id) is not None:
            return 4
        for row, length in lengths.items():
            if block_id in table(manager, row):
                return min(4, length - 4 * table(manager, row).index(block_id))
        return 0

    assert [num_filled(block_id) for block_id in range(1, 12)] == [4, 4, 2, 4, 3, *[0] * 6]


def test_a_block_that_a_transfer_reads_is_not_handed_out_before_the_transfer_ends() -> None:
    manager = make_manager(num_blocks=5)
    run(manager, 0, request_of(range(8)))
    held = manager.hold(table(manager, 0))
    manager.free(0)
    assert manager.reserve(manager.demand(nothing(manager), 12), answered_step=0) is None
    assert manager.num_free_blocks == 2  # and nothing was taken for what did not fit
    manager.release(held)
    assert manager.num_free_blocks == 4
    manager.check()


@pytest.mark.req("ERR-16")
def test_pages_count_keys_and_values_usage_has_a_total_and_nothing_is_freed_twice() -> None:
    assert FULL.page_size_bytes == 4 * 1 * 2 * 8 * 4
    manager = make_manager(num_blocks=5)
    assert manager.usage == 0
    for row in (0, 1):
        run(manager, row, request_of(range(8 * row, 8 * row + 8)))
    assert manager.usage == 1.0
    (held,) = manager.detach([0])
    manager.release(held)
    assert manager.usage == 0.5
    with pytest.raises(NotTaken, match="cannot be freed: it has no reference"):
        manager.release(held)
    manager.check()


def item(content: str, offset: int) -> MultimodalFeature:
    return MultimodalFeature(content, offset, 3)


@pytest.mark.req("HSH-06")
def test_requests_share_blocks_only_up_to_what_makes_their_kv_different() -> None:
    manager = make_manager(num_blocks=64)
    variants: list[tuple[dict[str, Any], int]] = [
        ({}, 8),
        ({"lora": LoRARequest("a")}, 0),
        ({"lora": LoRARequest("b")}, 0),
        ({"cache_salt": "a"}, 0),
        ({"multimodal": (item("cat", 5),)}, 4),
        ({"multimodal": (item("dog", 5),)}, 4),
        ({"multimodal": (item("cat", 4),)}, 4),
    ]
    run(manager, 0, request_of(range(8)))
    for row, (fields, hit) in enumerate(variants, 1):
        request = request_of([*range(8), 9], **fields)
        assert manager.get_computed_blocks(request).num_tokens == hit
        manager.free(row - 1)
        run(manager, row, request)
        again = request_of([*range(8), 9], **fields)
        assert manager.get_computed_blocks(again).num_tokens == 8


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 12), st.integers(0, 3)), max_size=8),
    st.randoms(use_true_random=False),
)
def test_rows_cached_together_get_the_hashes_of_their_tokens_and_keys(
    rows: list[tuple[int, int, int]], random: Any
) -> None:
    manager = make_manager(num_blocks=80)
    token_ids = np.zeros((8, 128), np.int32)
    requests: list[Request | None] = [None] * 8
    num_tokens = np.zeros(8, np.int64)
    expected = {}
    for row, (length, more, kind) in enumerate(rows):
        fields: dict[str, Any] = [
            {},
            {"cache_salt": "s"},
            {"lora": LoRARequest("a")},
            {"multimodal": (item("cat", 6), item("dog", 17))},
        ][kind]
        tokens = [random.randrange(2) for _ in range(length + more)]
        request = request_of(tokens[:length], **fields)
        assert manager.start(row, manager.demand(nothing(manager), length + more))
        if kind % 2:  # some are cached up to the end of their prompt, as at admission
            manager.full_blocks.cache_row(row, request, request.token_ids, length)
        requests[row], num_tokens[row] = request, length + more
        token_ids[row, : length + more] = tokens
        whole = request_of(tokens, **fields)
        fresh = make_manager(num_blocks=80)
        run(fresh, 0, whole)
        expected[row] = whole.block_hashes
    order = manager.full_blocks.rows_to_cache(num_tokens)
    manager.full_blocks.cache_rows(order, num_tokens, token_ids, requests)
    for row, names in expected.items():
        request = requests[row]
        assert request is not None
        assert request.block_hashes == names
        blocks = table(manager, row)[: len(names)]
        assert [manager.pool.block_hash(block_id) for block_id in blocks] == names


def test_events_have_parents_tokens_group_and_adapter_of_verified_blocks() -> None:
    manager = make_manager(num_blocks=6, enable_kv_cache_events=True)
    request = request_of(range(8), lora=LoRARequest("a"))
    assert manager.start(0, manager.demand(manager.get_computed_blocks(request), 8))
    manager.full_blocks.cache_row(0, request, request.token_ids, 4, step=3)
    num_tokens = np.array([8, 0, 0, 0, 0, 0, 0, 0])
    token_ids = np.zeros((8, 128), np.int32)
    token_ids[0, :8] = range(8)
    manager.full_blocks.cache_rows(
        np.array([0]), num_tokens, token_ids, [request, *[None] * 7], step=4
    )
    first, second = request.block_hashes
    assert manager.take_events(2) == []
    (event,) = manager.take_events(3)
    assert isinstance(event, BlockStored)
    assert (event.block_hash, event.parent_hash) == (first, None)
    assert event.token_ids.tolist() == [0, 1, 2, 3]
    assert (event.group, event.lora_name, event.medium) == (0, "a", "GPU")
    (event,) = manager.take_events(4)
    assert isinstance(event, BlockStored)
    assert (event.block_hash, event.parent_hash) == (second, first)
    assert event.token_ids.tolist() == [4, 5, 6, 7]
    run(manager, 1, request_of(range(8), lora=LoRARequest("a")))  # copies of both
    assert [type(event) for event in manager.take_events(9)] == []
    manager.free(0)
    run(manager, 2, request_of(range(50, 58)))
    events = manager.take_events(9)
    names = [event.block_hash for event in events if isinstance(event, BlockRemoved)]
    assert names == []  # row 1 shares the first and holds a copy of the second


def test_a_hash_that_a_failed_step_removes_was_never_published() -> None:
    manager = make_manager(enable_kv_cache_events=True)
    request = request_of(range(8))
    assert manager.start(0, manager.demand(manager.get_computed_blocks(request), 8))
    manager.full_blocks.cache_row(0, request, request.token_ids, 4, step=3)
    manager.full_blocks.cache_row(0, request, request.token_ids, 8, step=4)
    assert len(manager.take_events(3)) == 1
    manager.uncache_blocks(manager.block_ids(0)[0])
    events = manager.take_events(4)
    assert [type(event) for event in events] == [BlockRemoved]
    assert isinstance(events[0], BlockRemoved)
    assert events[0].block_hash == request.block_hashes[0]


def test_a_new_epoch_begins_with_all_blocks_free_uncached_and_settled() -> None:
    manager = make_manager(num_blocks=8, enable_kv_cache_events=True)
    run(manager, 0, request_of(range(9)))
    assert manager.reserve(manager.demand(nothing(manager), 5), answered_step=0) is not None
    manager.fence([HeldBlocks(manager.block_ids(0))], 9)
    manager.begin_epoch(np.array([0]), answered_step=None)
    manager.check()
    assert manager.num_free_blocks == 7
    assert [block_ids.tolist() for block_ids in manager.block_ids(0)] == [[]]
    assert manager.get_computed_blocks(request_of(range(9))).num_tokens == 0
    assert manager.reserve(manager.demand(nothing(manager), 28), answered_step=0) is not None
    assert manager.take_events(9) == [AllBlocksCleared()]


PROMPT = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=24)


class ManagerMachine(RuleBasedStateMachine):
    """The facade beside a model of lists: tables of rows and of those on no row, the free blocks in
    order, and the prefix of each cached block."""

    num_groups = 1

    def __init__(self) -> None:
        super().__init__()
        self.manager = make_manager(num_blocks=14, num_groups=self.num_groups)
        self.free = list(range(1, 14))
        self.rows: dict[int, list[list[int]]] = {}
        self.requests: dict[int, Request] = {}
        self.held: list[tuple[HeldBlocks, Request]] = []
        self.names: dict[int, tuple[int, bytes]] = {}  # block -> group, tokens of its prefix
        self.fence: dict[int, int] = {}
        self.computed_in: dict[int, int] = {}  # cached block -> step
        self.step = 1

    def refs(self) -> Counter[int]:
        tables = [*self.rows.values(), *([*held.block_ids] for held, _ in self.held)]
        return Counter(int(b) for groups in tables for block_ids in groups for b in block_ids)

    def expected_hit(self, request: Request) -> int:
        """Leading blocks that are cached in every group, a token short of everything."""
        count = 0
        while 4 * (count + 1) < request.num_tokens:
            prefix = request.token_ids[: 4 * (count + 1)].tobytes()
            if not all((g, prefix) in self.names.values() for g in range(self.num_groups)):
                break
            count += 1
        return count

    def take(self, hits: Sequence[Sequence[int]], needed: int, settled: int | None) -> list[int]:
        """The model's new blocks, `needed` for each group, after the hits are held."""
        for block_id in (b for block_ids in hits for b in block_ids):
            if block_id in self.free:
                self.free.remove(block_id)
        suits = [b for b in self.free if settled is None or self.fence.get(b, 0) <= settled]
        new = suits[: needed * self.num_groups]
        for block_id in new:
            self.free.remove(block_id)
            self.names.pop(block_id, None)
        return new

    def enqueue(self, block_id: int) -> None:
        self.free.insert(len(self.free) if block_id in self.names else 0, block_id)

    def refund(self, before: Counter[int], groups: Sequence[Sequence[int]], step: int) -> None:
        """Blocks without a holder line up: tail first, groups in turn."""
        longest = max((len(block_ids) for block_ids in groups), default=0)
        after = self.refs()
        for index in reversed(range(longest)):
            for block_ids in groups:
                if index < len(block_ids) and not after[int(block_ids[index])]:
                    self.enqueue(int(block_ids[index]))
        if step:
            self.fence |= {int(b): step for block_ids in groups for b in block_ids}

    def free_rows(self) -> list[int]:
        return [row for row in range(8) if row not in self.rows]

    @precondition(lambda self: len(self.rows) < 8)
    @rule(
        tokens=PROMPT,
        is_load=st.booleans(),
        name=st.booleans(),
        answered=st.integers(0, 2),
    )
    def arrive(self, tokens: list[int], is_load: bool, name: bool, answered: int) -> None:
        request, row = request_of(tokens), self.free_rows()[0]
        settled = self.step - answered if is_load else None
        computed = self.manager.get_computed_blocks(request)
        hits = [list(block_ids) for block_ids in computed.block_ids]
        assert [len(block_ids) for block_ids in hits] == [
            self.expected_hit(request)
        ] * self.num_groups
        needed = -(-len(tokens) // 4) - len(hits[0])
        unheld = [b for block_ids in hits for b in block_ids if b in self.free]
        total = needed * self.num_groups + len(unheld)
        demand = self.manager.demand(computed, len(tokens))
        assert demand.num_needed == total
        fits = total <= len(self.free)
        if settled is None:
            tables = self.manager.start(row, demand)
            assert (tables is not None) is fits
            got = self.manager.block_ids(row)
            if tables is not None:
                assert list(map(np.ndarray.tolist, tables)) == list(map(np.ndarray.tolist, got))
        else:
            suits = [b for b in self.free if self.fence.get(b, 0) <= settled and b not in unheld]
            fits &= needed * self.num_groups <= len(suits)
            held = self.manager.reserve(demand, answered_step=settled)
            assert (held is not None) is fits
            got = () if held is None else held.block_ids
        if not fits:
            return
        new = self.take(hits, needed, settled)
        for group, block_ids in enumerate(got):
            assert block_ids.dtype == np.int32
            assert block_ids.tolist() == hits[group] + new[group * needed : (group + 1) * needed]
        if settled is None:
            self.rows[row] = [block_ids.tolist() for block_ids in got]
            self.requests[row] = request
            if name:
                self.name_row(row)
        else:
            self.held.append((HeldBlocks(got), request))

    def name_row(self, row: int) -> None:
        request = self.requests[row]
        num_tokens = min(request.num_tokens, 4 * len(self.rows[row][0]))
        self.manager.full_blocks.cache_row(row, request, request.token_ids, num_tokens, self.step)
        for group, block_ids in enumerate(self.rows[row]):
            for index in range(num_tokens // 4):
                self.name(block_ids[index], group, request, index)

    def name(self, block_id: int, group: int, request: Request, index: int) -> None:
        if block_id not in self.names:
            self.names[block_id] = group, request.token_ids[: 4 * (index + 1)].tobytes()
            self.computed_in[block_id] = self.step

    @rule(data=st.data())
    def cache_rows(self, data: st.DataObject) -> None:
        """Every row's tokens so far are verified; full blocks that are not cached are cached."""
        num_tokens, token_ids = np.zeros(8, np.int64), np.zeros((8, 128), np.int32)
        for row, request in self.requests.items():
            count = min(request.num_tokens, 4 * len(self.rows[row][0]))
            num_tokens[row] = data.draw(st.integers(0, count))
            token_ids[row, :count] = request.token_ids[:count]
        rows = self.manager.full_blocks.rows_to_cache(num_tokens)
        requests = [self.requests.get(row) for row in range(8)]
        self.manager.full_blocks.cache_rows(rows, num_tokens, token_ids, requests, self.step)
        for row, request in self.requests.items():
            for group, block_ids in enumerate(self.rows[row]):
                for index in range(int(num_tokens[row]) // 4):
                    self.name(block_ids[index], group, request, index)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.integers(0, 9), together=st.booleans())
    def grow(self, data: st.DataObject, more: int, together: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        num_tokens = 4 * len(self.rows[row][0]) + more
        needed = -(-more // 4)
        fits = needed * self.num_groups <= len(self.free)
        if together:
            wanted = np.zeros(8, np.int64)
            wanted[row] = num_tokens
            assert (self.manager.grow(wanted, SENIORITY) is not None) is fits
        else:
            assert (self.manager.grow_row(row, num_tokens) is not None) is fits
        if fits:
            new = self.take([], needed, None)
            for group, block_ids in enumerate(self.rows[row]):
                block_ids += new[group * needed : (group + 1) * needed]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), step=st.integers(0, 1))
    def truncate(self, data: st.DataObject, step: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        num_tokens = data.draw(st.integers(0, 4 * len(self.rows[row][0])))
        keep = -(-num_tokens // 4)
        step *= self.step
        self.manager.truncate(row, num_tokens, step)
        cut = [block_ids[keep:] for block_ids in self.rows[row]]
        before = self.refs()
        self.rows[row] = [block_ids[:keep] for block_ids in self.rows[row]]
        self.refund(before, cut, step)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), step=st.integers(0, 1), detach=st.booleans())
    def leave(self, data: st.DataObject, step: int, detach: bool) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        before, request = self.refs(), self.requests.pop(row)
        groups = self.rows.pop(row)
        if detach:
            held = self.manager.detach([row])[0]
            assert [block_ids.tolist() for block_ids in held.block_ids] == groups
            self.held.append((held, request))
        else:
            self.manager.free(row, step * self.step)
            self.refund(before, groups, step * self.step)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), step=st.integers(0, 1))
    def release(self, data: st.DataObject, step: int) -> None:
        held, _ = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        before = self.refs()
        self.held = [pair for pair in self.held if pair[0] is not held]
        self.manager.release(held, step=step * self.step)
        self.refund(before, held.block_ids, step * self.step)

    @precondition(lambda self: self.held and len(self.rows) < 8)
    @rule(data=st.data())
    def attach(self, data: st.DataObject) -> None:
        held, request = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        row = self.free_rows()[0]
        self.manager.attach(row, held, 0)
        self.rows[row] = [block_ids.tolist() for block_ids in held.block_ids]
        self.requests[row] = request

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        """A transfer reads some of a row's blocks."""
        row = data.draw(st.sampled_from(sorted(self.rows)))
        block_ids = self.rows[row][-1][1:]
        held = self.manager.hold(block_ids)
        assert held.block_ids[0].tolist() == block_ids
        self.manager.release(held)

    @rule(block_ids=st.lists(st.integers(0, 13), max_size=5))
    def uncache_blocks(self, block_ids: list[int]) -> None:
        self.manager.uncache_blocks(np.array(block_ids, np.int32))
        for block_id in sorted(set(block_ids), key=block_ids.index):
            if self.names.pop(block_id, None) and block_id in self.free:
                self.free.remove(block_id)
                self.enqueue(block_id)
        self.start_over()

    def start_over(self) -> None:
        """A request with an uncached block is rewound to it, as after a failure."""
        for row, groups in self.rows.items():
            cached = [
                next((i for i, b in enumerate(block_ids) if b not in self.names), len(block_ids))
                for block_ids in groups
            ]
            before = self.refs()
            self.manager.truncate(row, 4 * min(cached))
            cut = [block_ids[min(cached) :] for block_ids in groups]
            self.rows[row] = [block_ids[: min(cached)] for block_ids in groups]
            self.refund(before, cut, 0)

    @rule()
    def a_step_passes(self) -> None:
        self.step += 1

    @rule()
    def reset_prefix_cache(self) -> None:
        nobody_holds = len(self.free) == 13
        assert self.manager.reset_prefix_cache() is nobody_holds
        if nobody_holds:
            self.names = {}

    @precondition(lambda self: self.step % 5 == 0)
    @rule(order=st.permutations(range(8)), answered=st.none() | st.integers(0, 2))
    def a_new_epoch_begins(self, order: list[int], answered: int | None) -> None:
        """Blocks without a name are allocated first, in ascending order; then those that were free
        or held without a row; then those of rows, the last row and the last block first."""
        rows = [row for row in order if row in self.rows]
        answered_step = None if answered is None else self.step - answered
        self.manager.begin_epoch(np.array(rows, np.int64), answered_step)
        late = -1 if answered_step is None else answered_step
        self.names = {b: name for b, name in self.names.items() if self.computed_in[b] <= late}
        released = [b for row in reversed(rows) for ids in self.rows[row] for b in reversed(ids)]
        when = {b: index for index, b in enumerate([*self.free, *released])}
        kept = sorted(self.names, key=lambda b: (when.get(b, -1), b))  # the last place counts
        self.free = [b for b in range(1, 14) if b not in self.names] + kept
        self.rows, self.requests, self.held, self.fence = {}, {}, [], {}
        self.computed_in = dict.fromkeys(kept, 0)
        self.step += 1

    @invariant()
    def tables_are_those_of_the_model(self) -> None:
        for row in range(8):
            expected = self.rows.get(row, [[]] * self.num_groups)
            assert [b.tolist() for b in self.manager.block_ids(row)] == expected

    @invariant()
    def free_blocks_stand_in_the_order_of_the_model(self) -> None:
        assert self.manager.pool.free_block_ids() == self.free

    @invariant()
    def references_are_the_holders_and_nothing_is_lost(self) -> None:
        self.manager.check([held for held, _ in self.held])
        refs = self.refs()
        for block_id in range(1, 14):
            assert self.manager.pool.references()[block_id] == refs[block_id]
        assert 1 + len(+refs) + self.manager.num_free_blocks == 14

    @invariant()
    def exactly_the_named_blocks_carry_names(self) -> None:
        pool = self.manager.pool
        cached = {block_id for block_id in range(14) if pool.block_hash(block_id) is not None}
        assert cached == set(self.names)

    @invariant()
    def rows_in_common_are_seen_in_their_tables(self) -> None:
        rows = np.array(sorted(self.rows), np.int64)
        for group, common in enumerate(self.manager.num_common_prefix_blocks(rows)):
            tables = [self.rows[row][group] for row in sorted(self.rows)]
            columns = zip(*tables, strict=False)
            expected = next((i for i, c in enumerate(columns) if len(set(c)) > 1), None)
            if expected is None:
                expected = min(map(len, tables), default=0)
            assert common == expected


class TwoGroupsMachine(ManagerMachine):
    num_groups = 2


@pytest.mark.req("KVM-08", "POO-11", "STM-11", "KVM-13", "POO-04", "POO-05", "POO-09")
@pytest.mark.parametrize("machine", [ManagerMachine, TwoGroupsMachine])
def test_capacity_tables_order_and_hashes_are_those_of_the_model(
    machine: type[ManagerMachine],
) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True),
    )


@pytest.mark.req("SYS-02")
def test_the_scheduler_reaches_managers_and_pool_through_the_facade_only() -> None:
    (folder,) = longshore.scheduler.__path__
    behind = {"coordinator", "full", "windowed", "block_pool", "free_queue", "hash_map"}
    reached = {
        (str(path.relative_to(folder)), node.module)
        for path in Path(folder).rglob("*.py")
        if path.parent.name != "kv_cache"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and node.module is not None
        and node.module.startswith("longshore.scheduler.kv_cache.")
        and node.module.rpartition(".")[2] in behind
    }
    assert reached == set()


def num_calls(operation: Callable[[], object]) -> int:
    """How many functions an operation calls, those of numpy and builtins included."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        operation()
    finally:
        sys.setprofile(None)
    return sum(event in ("call", "c_call") for event in events)


@pytest.mark.req("NUM-31")
def test_operations_call_few_functions_whatever_the_size_of_the_pool() -> None:
    """A call takes about 0.05 to 0.5 us, so this is the order of magnitude of the targets.
    benchmarks/block_pool.py and prefix_lookup.py measure the times."""
    counts = []
    for num_blocks in (100, 20_000):
        manager = make_manager(num_blocks, 16, max_model_len=1600)
        demand = manager.demand(manager.get_computed_blocks(request_of([1], skip=True)), 160)
        operations: dict[str, Callable[[], object]] = {
            "can allocate": lambda manager=manager: manager.num_free_blocks >= 10,  # type: ignore[misc]
            "allocate": lambda manager=manager, demand=demand: manager.start(0, demand),  # type: ignore[misc]
            "append": lambda manager=manager: manager.grow_row(0, 161),  # type: ignore[misc]
            "fork": lambda manager=manager: manager.fork(manager.block_ids(0), 100),  # type: ignore[misc]
            "free": lambda manager=manager: manager.free(0),  # type: ignore[misc]
        }
        counts.append({name: num_calls(operation) for name, operation in operations.items()})
    assert counts[0] == counts[1]
    assert counts[0]["can allocate"] <= 5
    assert all(count <= 40 for count in counts[0].values()), counts[0]
