"""The facade: lookup, capacity, naming and release across groups."""

import ast
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
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
from longshore.protocol.client import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.scheduler.config import CacheConfig
from longshore.scheduler.kv_cache_manager import KVCacheManager
from longshore.scheduler.request import Request
from tests.scheduler.driver import kv_cache_config

SENIORITY = np.arange(8)


def make_manager(
    num_blocks: int = 16,
    block_size: int = 4,
    num_groups: int = 1,
    *,
    enable_prefix_caching: bool = True,
    max_model_len: int = 128,
) -> KVCacheManager:
    return KVCacheManager(
        CacheConfig(block_size=block_size, enable_prefix_caching=enable_prefix_caching),
        kv_cache_config(num_blocks, block_size, num_groups),
        max_num_seqs=8,
        max_model_len=max_model_len,
        hash_seed=b"seed",
    )


def request_of(tokens: Sequence[int], request_id: str = "r", *, skip: bool = False) -> Request:
    message = AddRequest(
        request_id, 0, int32_array(list(tokens)), SamplingParams(), skip_reading_prefix_cache=skip
    )
    return Request(message, client_index=0, now=0.0, max_model_len=128, eos_token_ids=())


def run(manager: KVCacheManager, row: int, request: Request) -> bool:
    """Look up, start and name a whole prompt, as an admission with enough budget does."""
    computed = manager.get_computed_blocks(request)
    if not manager.start(row, request, computed, request.num_tokens):
        return False
    manager.cache_blocks(row, request, request.token_ids)
    return True


def table(manager: KVCacheManager, row: int) -> list[int]:
    return manager.block_ids(row)[0].tolist()


@pytest.mark.req("NUM-10")
def test_second_request_hits_two_of_three_blocks_and_computes_from_token_eight() -> None:
    manager = make_manager(block_size=4)
    first = request_of(range(12))
    second = request_of([*range(8), 90, 91, 92, 93])
    run(manager, 0, first)
    computed = manager.get_computed_blocks(second)
    assert (computed.block_ids, computed.num_tokens) == (([1, 2],), 8)
    free_before = manager.num_free_blocks
    assert manager.start(1, second, computed, 12)
    assert table(manager, 1) == [1, 2, 4]
    assert free_before - manager.num_free_blocks == 1
    assert first.block_names[:2] == second.block_names[:2]
    assert first.block_names[2] != second.block_names[2]


@pytest.mark.req("NUM-11")
def test_prompt_of_eighty_hits_three_cached_blocks_of_sixteen() -> None:
    manager = make_manager(block_size=16)
    run(manager, 0, request_of(range(48)))
    computed = manager.get_computed_blocks(request_of(range(80)))
    assert (computed.block_ids, computed.num_tokens) == (([1, 2, 3],), 48)


@pytest.mark.req("NUM-12", "KVM-03", "ERR-13")
def test_a_fully_cached_prompt_of_sixty_four_recomputes_its_last_block_of_sixteen() -> None:
    manager = make_manager(block_size=16)
    run(manager, 0, request_of(range(64)))
    request = request_of(range(64))
    computed = manager.get_computed_blocks(request)
    assert (computed.block_ids, computed.num_tokens) == (([1, 2, 3],), 48)
    assert manager.start(1, request, computed, 64)
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
        assert (computed.block_ids, computed.num_tokens) == (([],), 0)
    assert make_manager(enable_prefix_caching=True).get_computed_blocks(request_of([1])) is not None


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


@pytest.mark.req("KVM-08", "ERR-13")
def test_capacity_counts_cached_blocks_that_nobody_holds() -> None:
    manager = make_manager(num_blocks=5)  # 4 usable
    run(manager, 0, request_of(range(8)))  # blocks 1 and 2
    manager.free(0)
    run(manager, 1, request_of(range(50, 54)))  # takes block 3, which was never used
    assert manager.num_free_blocks == 3
    request = request_of([*range(8), *range(60, 68)])  # 2 hits, 2 new: 4 blocks, 3 are free
    computed = manager.get_computed_blocks(request)
    assert computed.num_tokens == 8
    assert manager.start(0, request, computed, 16) is False
    assert manager.start(0, request, computed, 12) is True
    assert manager.num_free_blocks == 0


def test_hits_that_somebody_holds_cost_nothing() -> None:
    manager = make_manager(num_blocks=5)
    run(manager, 0, request_of(range(8)))
    request = request_of([*range(8), *range(60, 68)])
    assert manager.start(1, request, manager.get_computed_blocks(request), 16) is True
    assert table(manager, 1) == [*table(manager, 0), 3, 4]
    manager.free(0)
    assert manager.num_free_blocks == 0


def snapshot(manager: KVCacheManager) -> object:
    pool = manager._pool
    blocks = range(pool.num_blocks)
    return (
        pool.free_block_ids(),
        [pool.ref_count(block_id) for block_id in blocks],
        [pool.key(block_id) for block_id in blocks],
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
    assert manager.start(2, request, computed, 80) is False
    assert manager.grow(np.array([0, 80, 0, 0, 0, 0, 0, 0]), SENIORITY) is None
    assert manager.grow_row(1, 80) is None
    assert snapshot(manager) == before


@pytest.mark.req("KVM-13", "FRQ-05")
def test_free_gives_back_the_blocks_of_all_groups_each_tail_first() -> None:
    manager = make_manager(9, num_groups=2, enable_prefix_caching=False)
    run(manager, 0, request_of(range(12)))
    first, second = (ids.tolist() for ids in manager.block_ids(0))
    assert (first, second) == ([1, 2, 3], [4, 5, 6])
    manager.free(0)
    assert manager._pool.free_block_ids() == [7, 8, 3, 2, 1, 6, 5, 4]


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
    for row, request in enumerate(together):
        assert manager.start(row, request, computed[row], 9)
    tables = [table(manager, row) for row in (0, 1)]
    for row, request in enumerate(together):
        manager.cache_blocks(row, request, request.token_ids)
    assert [table(manager, row) for row in (0, 1)] == tables
    assert set(tables[0]).isdisjoint(tables[1])
    manager.free(0)
    manager.start(2, request_of([77] * 48), manager.get_computed_blocks(request_of([77])), 48)
    assert set(tables[0]) <= set(table(manager, 2))
    hit = manager.get_computed_blocks(request_of(range(9)))
    assert hit.block_ids == (tables[1][:2],)  # the other copy


@pytest.mark.req("POO-09")
def test_prefix_cache_is_reset_only_when_nobody_holds_a_block() -> None:
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
        message = AddRequest("r", 0, int32_array(range(12)), SamplingParams(), cache_salt=salt)
        return Request(message, client_index=0, now=0.0, max_model_len=64, eos_token_ids=())

    run(manager, 0, salted("mine"))
    found = [
        manager.get_computed_blocks(salted(salt)).num_tokens for salt in ("mine", "yours", None)
    ]
    assert found == [8, 0, 0]


class ManagerMachine(RuleBasedStateMachine):
    """Rows come, grow and go on a small pool; the tables are kept a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = make_manager(num_blocks=10)
        self.tables: dict[int, list[int]] = {}
        self.requests: dict[int, Request] = {}

    @precondition(lambda self: len(self.tables) < 8)
    @rule(kind=st.integers(0, 2), length=st.integers(1, 30), share=st.integers(0, 12))
    def start(self, kind: int, length: int, share: int) -> None:
        row = min(set(range(8)) - set(self.tables))
        request = request_of([5] * min(share, length) + [10 + kind] * max(length - share, 0))
        computed = self.manager.get_computed_blocks(request)
        hits = computed.block_ids[0]
        assert computed.num_tokens == 4 * len(hits) < length
        unheld = self.manager._pool.num_unheld(hits)
        needed = -(-length // 4) - len(hits) + unheld
        free_before = self.manager.num_free_blocks
        assert run(self.manager, row, request) == (needed <= free_before)
        if needed <= free_before:
            self.tables[row] = table(self.manager, row)
            self.requests[row] = request
            assert self.tables[row][: len(hits)] == hits
            assert self.manager.num_free_blocks == free_before - needed

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), more=st.integers(1, 9))
    def grow(self, data: st.DataObject, more: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.tables)))
        new_block_ids = self.manager.grow_row(row, 4 * len(self.tables[row]) + more)
        if new_block_ids is not None:
            self.tables[row] += new_block_ids[0]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.tables)))
        self.manager.free(row)
        del self.tables[row], self.requests[row]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def forget_names(self, data: st.DataObject) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.tables)))]
        self.manager.forget_names(request)
        assert self.manager.get_computed_blocks(request).num_tokens == 0

    @invariant()
    def tables_only_ever_grow_at_their_ends(self) -> None:
        for row in range(8):
            assert table(self.manager, row) == self.tables.get(row, [])

    @invariant()
    def references_are_the_holders_and_nothing_is_lost(self) -> None:
        held = [block_id for ids in self.tables.values() for block_id in ids]
        pool = self.manager._pool
        for block_id in range(1, 10):
            assert pool.ref_count(block_id) == held.count(block_id)
        assert 1 + len(set(held)) + self.manager.num_free_blocks == 10


@pytest.mark.req("KVM-08", "POO-11")
def test_capacity_and_tables_are_those_of_the_second_book() -> None:
    run_state_machine_as_test(
        ManagerMachine,
        settings=settings(max_examples=50, stateful_step_count=25, deadline=None, derandomize=True),
    )


@pytest.mark.req("SYS-02")
def test_each_layer_of_the_kv_cache_knows_only_the_next() -> None:
    layers = {
        "kv_cache_manager",
        "kv_cache_coordinator",
        "single_type_manager",
        "block_pool",
        "free_queue",
        "prefix_map",
    }
    (folder,) = longshore.scheduler.__path__

    def imported(module: str) -> set[str]:
        tree = ast.parse((Path(folder) / f"{module}.py").read_text(encoding="utf-8"))
        names = {
            node.module.rpartition(".")[2]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
        }
        return names & layers

    assert imported("scheduler") == {"kv_cache_manager"}
    # the facade creates the pool that its coordinator's managers share
    assert imported("kv_cache_manager") == {"kv_cache_coordinator", "block_pool"}
    assert imported("kv_cache_coordinator") == {"single_type_manager", "block_pool"}
    assert imported("single_type_manager") == {"block_pool"}
    assert imported("block_pool") == {"free_queue", "prefix_map"}
    for module in ("running", "waiting", "budget", "plan_builder", "request", "policy", "engine"):
        assert imported(module) <= {"kv_cache_manager"}
