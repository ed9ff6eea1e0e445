"""The block pool against a list that is searched from the front."""

from collections.abc import Callable

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

from longshore.protocol.arrays import EMPTY_INT32, Int32Array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.scheduler.kv_cache import block_pool
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_cache.blocks import FEW_BLOCKS
from longshore.scheduler.kv_cache.free_queue import (
    NotTaken,
    OutOfBlocks,
)

NUM_BLOCKS = 8
NAMES = [b"name-%d" % index for index in range(4)]


class BlockPoolMachine(RuleBasedStateMachine):
    """A pool beside: the free blocks in order, references and (name, group) per block, and the
    order in which blocks were cached."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, num_groups=2)
        self.free = list(range(1, NUM_BLOCKS))
        self.refs = dict.fromkeys(range(1, NUM_BLOCKS), 0)
        self.cached: dict[int, tuple[bytes, int]] = {}

    def held(self) -> list[int]:
        return [block_id for block_id, count in self.refs.items() if count]

    @rule(count=st.integers(0, NUM_BLOCKS))
    def get_new_blocks(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(OutOfBlocks):
                self.pool.get_new_blocks(count)
            return
        expected = self.free[:count]
        assert list(self.pool.get_new_blocks(count)) == expected
        del self.free[:count]
        for block_id in expected:
            self.refs[block_id] = 1
            self.cached.pop(block_id, None)

    def enqueue(self, block_id: int) -> None:
        self.free.insert(len(self.free) if block_id in self.cached else 0, block_id)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def free_blocks(self, data: st.DataObject) -> None:
        references = [block_id for block_id in self.held() for _ in range(self.refs[block_id])]
        block_ids = data.draw(st.permutations([NULL_BLOCK, *references]))
        block_ids = block_ids[: data.draw(st.integers(0, len(block_ids)))]
        self.pool.free_blocks(block_ids)
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                self.refs[block_id] -= 1
                if self.refs[block_id] == 0:
                    self.enqueue(block_id)

    @rule(block_ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4))
    def touch(self, block_ids: list[int]) -> None:
        unheld = {block_id for block_id in block_ids if self.refs.get(block_id) == 0}
        if len(set(block_ids)) == len(block_ids):
            assert self.pool.num_unheld(block_ids) == len(unheld)
        self.pool.touch(block_ids)
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if self.refs[block_id] == 0:
                self.free.remove(block_id)
            self.refs[block_id] += 1

    @precondition(lambda self: self.held())
    @rule(data=st.data(), name=st.sampled_from(NAMES), group=st.integers(0, 1))
    def cache_full_block(self, data: st.DataObject, name: bytes, group: int) -> None:
        block_id = data.draw(st.sampled_from(self.held()))
        self.pool.cache_blocks([NULL_BLOCK, block_id], [b"skipped", name], group)
        self.cached.setdefault(block_id, (name, group))

    @rule()
    def reset_prefix_cache(self) -> None:
        nobody_holds = not self.held()
        assert self.pool.reset_prefix_cache() is nobody_holds
        if nobody_holds:
            self.cached = {}

    @invariant()
    def null_held_and_free_blocks_are_all_blocks(self) -> None:
        held = set(self.held())
        assert self.pool.free_block_ids() == self.free
        assert held.isdisjoint(self.free)
        assert 1 + len(held) + self.pool.num_free == NUM_BLOCKS
        assert self.pool.usage == pytest.approx(len(held) / (NUM_BLOCKS - 1))

    @invariant()
    def the_pool_finds_its_books_in_order(self) -> None:
        self.pool.check(np.array([0, *self.refs.values()]))

    @rule(data=st.data())
    def free_too_much(self, data: st.DataObject) -> None:
        references = [block_id for block_id in self.held() for _ in range(self.refs[block_id])]
        wrong = data.draw(st.integers(1, NUM_BLOCKS - 1))
        with pytest.raises(NotTaken, match="cannot be freed: it has no reference"):
            self.pool.free_blocks([*references, *[wrong] * (1 + references.count(wrong))])

    @rule(block_ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=4))
    def uncache_blocks(self, block_ids: list[int]) -> None:
        self.pool.uncache_blocks(block_ids)
        for block_id in block_ids:
            if self.cached.pop(block_id, None) and block_id in self.free:
                self.free.remove(block_id)
                self.enqueue(block_id)

    @invariant()
    def references_are_as_many_as_holders(self) -> None:
        for block_id, count in self.refs.items():
            assert self.pool.references()[block_id] == count
        assert self.pool.references()[NULL_BLOCK] == 0

    @invariant()
    def exactly_the_named_blocks_are_found(self) -> None:
        for block_id in range(NUM_BLOCKS):
            assert self.pool.block_hash(block_id) == self.cached.get(block_id, (None, 0))[0]
        for group in (0, 1):
            for name in NAMES:
                holders = [b for b, value in self.cached.items() if value == (name, group)]
                found = self.pool.get_cached_block(name, [group])
                # a dict of the test and the pool both keep the order of naming
                assert found == (holders[:1] or None)


@pytest.mark.req("POO-02", "POO-04", "POO-05", "POO-08", "POO-09", "POO-11", "ERR-12", "ERR-17")
@pytest.mark.parametrize("few_blocks", [FEW_BLOCKS, 1, 0])
def test_pool_behaves_like_its_brute_force_model(
    few_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of blocks counts as few enough for a scalar loop."""
    monkeypatch.setattr(block_pool, "FEW_BLOCKS", few_blocks)
    monkeypatch.setattr(block_pool, "FEW_FREED_BLOCKS", few_blocks)
    run_state_machine_as_test(
        BlockPoolMachine,
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True),
    )


def named_pool(num_blocks: int, names: dict[int, bytes]) -> BlockPool:
    """All blocks free: the cached ones in ascending order after the others in ascending order."""
    pool = BlockPool(num_blocks)
    block_ids = list(pool.get_new_blocks(num_blocks - 1))
    pool.cache_blocks(list(names), list(names.values()), 0)
    pool.free_blocks(sorted(names) + sorted(set(block_ids) - set(names), reverse=True))
    return pool


@pytest.mark.req("NUM-01", "POO-08", "POO-10")
def test_three_blocks_come_from_the_head_and_the_cached_one_loses_its_name() -> None:
    pool = named_pool(6, {2: b"two", 3: b"three", 4: b"four", 5: b"five"})  # all but 1 are cached
    assert pool.free_block_ids() == [1, 2, 3, 4, 5]
    assert pool.get_new_blocks(3) == [1, 2, 3]
    assert [pool.references()[block_id] for block_id in (1, 2, 3)] == [1, 1, 1]
    assert [pool.block_hash(block_id) for block_id in (1, 2, 3)] == [None, None, None]
    assert pool.get_cached_block(b"two", [0]) is None
    assert pool.free_block_ids() == [4, 5]


@pytest.mark.req("NUM-03")
def test_touched_cached_blocks_leave_the_middle_of_the_queue_and_keep_their_hashes() -> None:
    pool = named_pool(5, {2: b"two", 3: b"three"})
    pool.touch([2, 3])
    assert pool.free_block_ids() == [1, 4]
    assert (pool.references()[2], pool.references()[3]) == (1, 1)
    assert pool.block_hash(2) == b"two"
    assert pool.block_hash(3) == b"three"


@pytest.mark.req("NUM-04", "POO-04", "POO-10")
def test_cached_blocks_without_references_are_free_and_queued_after_uncached_ones() -> None:
    pool = named_pool(8, {3: b"three", 6: b"six"})
    pool.touch([1, 2])  # request A
    pool.touch([5])  # request B
    assert pool.free_block_ids() == [4, 7, 3, 6]  # 3 and 6 are cached
    assert pool.num_free == 4
    assert pool.num_blocks - pool.num_free == 4  # in use, with the null block
    assert pool.usage == pytest.approx(3 / 7)


@pytest.mark.req("POO-02")
def test_null_block_is_never_allocated_freed_cached_or_counted() -> None:
    pool = BlockPool(4)
    assert pool.get_new_blocks(3) == [1, 2, 3]
    pool.touch([NULL_BLOCK])
    pool.free_blocks([NULL_BLOCK, NULL_BLOCK])
    pool.cache_blocks([NULL_BLOCK], [b"null"], 0)
    assert pool.references()[NULL_BLOCK] == 0
    assert pool.block_hash(NULL_BLOCK) is None
    assert pool.get_cached_block(b"null", [0]) is None
    assert pool.num_unheld([NULL_BLOCK]) == 0
    assert pool.free_block_ids() == []


def test_more_blocks_than_are_free_raise_and_change_nothing() -> None:
    pool = named_pool(4, {1: b"one"})
    with pytest.raises(OutOfBlocks, match="4 blocks are needed, 3 are free"):
        pool.get_new_blocks(4)
    assert pool.free_block_ids() == [2, 3, 1]
    assert pool.get_cached_block(b"one", [0]) == [1]


@pytest.mark.req("POO-04", "ERR-12")
def test_cached_blocks_are_queued_in_the_given_order_with_their_hashes() -> None:
    pool = BlockPool(7)
    pool.get_new_blocks(5)
    pool.cache_blocks([4, 1], [b"four", b"one"], 0)
    pool.touch([2])
    pool.free_blocks([4, 2, 1])
    assert pool.free_block_ids() == [6, 4, 1]
    assert pool.references()[2] == 1
    assert pool.get_cached_block(b"four", [0]) == [4]


@pytest.mark.req("POO-04", "FRQ-05")
@pytest.mark.parametrize("few_blocks", [0, FEW_BLOCKS])
def test_blocks_without_a_hash_are_reused_before_cached_ones_the_last_freed_first(
    few_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_pool, "FEW_FREED_BLOCKS", few_blocks)
    pool = BlockPool(9)
    pool.get_new_blocks(7)
    pool.cache_blocks([1, 2, 5], [b"one", b"two", b"five"])
    pool.touch([3])
    pool.free_blocks([4, 3, 2, 1])  # a request's table, tail first
    assert pool.free_block_ids() == [4, 8, 2, 1]
    pool.free_blocks([7, 6, 5])
    assert pool.free_block_ids() == [6, 7, 4, 8, 2, 1, 5]
    assert pool.get_new_blocks(5) == [6, 7, 4, 8, 2]
    assert pool.get_cached_block(b"one", [0]) == [1]


def test_a_free_block_that_loses_its_hash_is_reused_first() -> None:
    pool = named_pool(5, {1: b"one", 2: b"two", 3: b"three"})
    pool.touch([1])
    pool.uncache_blocks([1, 3, 4])
    assert pool.free_block_ids() == [3, 4, 2]
    pool.check(np.array([0, 1, 0, 0, 0]))


def test_freeing_a_block_without_references_raises_and_changes_nothing() -> None:
    pool = BlockPool(5)
    pool.get_new_blocks(2)
    with pytest.raises(LongshoreError, match="block 3 cannot be freed: it has no reference"):
        pool.free_blocks([1, 3])
    assert pool.free_block_ids() == [3, 4]
    with pytest.raises(LongshoreError, match="block 2 cannot be freed: it has no reference"):
        pool.free_blocks([2, 2])
    assert pool.num_free == 2
    assert [pool.references()[block_id] for block_id in range(5)] == [0, 1, 1, 0, 0]


@pytest.mark.req("POO-07")
def test_a_prefix_is_found_only_if_every_group_has_it() -> None:
    pool = BlockPool(6, num_groups=2)
    pool.get_new_blocks(3)
    pool.cache_blocks([1], [b"name"], 0)
    assert pool.get_cached_block(b"name", [0]) == [1]
    assert pool.get_cached_block(b"name", [0, 1]) is None
    pool.cache_blocks([3], [b"name"], 1)
    assert pool.get_cached_block(b"name", [0, 1]) == [1, 3]
    assert pool.get_cached_block(b"name", [1, 0]) == [3, 1]


@pytest.mark.req("POO-08")
def test_reuse_of_one_copy_leaves_the_other_copies_findable() -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(3)
    pool.cache_blocks([1, 2], [b"same", b"same"], 0)
    pool.free_blocks([1])
    assert pool.get_new_blocks(1) == [1]
    assert pool.get_cached_block(b"same", [0]) == [2]


@pytest.mark.req("POO-08")
def test_reuse_of_an_uncached_block_is_no_error() -> None:
    pool = named_pool(4, {1: b"one"})
    pool.uncache_blocks([1, 2])
    assert pool.get_cached_block(b"one", [0]) is None
    assert pool.get_new_blocks(1) == [1]


def test_an_uncached_block_leaves_its_hash_to_the_other_copies() -> None:
    pool = BlockPool(6, num_groups=2)
    block_ids = pool.get_new_blocks(5)
    pool.cache_blocks(block_ids[:3], [b"bad", b"bad", b"good"], 0)
    pool.cache_blocks(block_ids[3:4], [b"bad"], 1)
    pool.uncache_blocks([1])
    assert pool.get_cached_block(b"bad", [0]) == [2]
    pool.uncache_blocks([2])
    assert pool.get_cached_block(b"bad", [0]) is None
    assert pool.get_cached_block(b"bad", [1]) == [4]
    assert pool.get_cached_block(b"good", [0]) == [3]
    assert [pool.block_hash(block_id) for block_id in (1, 2)] == [None, None]


@pytest.mark.req("POO-09")
def test_reset_of_the_prefix_cache_waits_until_only_the_null_block_is_in_use() -> None:
    pool = named_pool(4, {1: b"one", 2: b"two"})
    pool.touch([3])
    assert pool.reset_prefix_cache() is False
    assert pool.get_cached_block(b"one", [0]) == [1]
    pool.free_blocks([3])
    assert pool.reset_prefix_cache() is True
    assert pool.get_cached_block(b"one", [0]) is None
    assert [pool.block_hash(block_id) for block_id in range(4)] == [None] * 4


@pytest.mark.req("POO-01")
def test_a_block_is_a_number_with_a_count_a_hash_and_a_position_in_the_queue() -> None:
    pool = BlockPool(5, num_groups=8)
    assert pool.get_new_blocks(1) == [1]
    assert (pool.references()[1], pool.block_hash(1)) == (1, None)
    pool.cache_blocks([1], [b"full"], 7)
    assert [pool.get_cached_block(b"full", [group]) for group in (0, 7)] == [None, [1]]
    pool.free_blocks([1])
    assert (pool.references()[1], pool.block_hash(1)) == (0, b"full")
    assert pool.free_block_ids() == [2, 3, 4, 1]


@pytest.mark.req("POO-06")
def test_full_blocks_are_cached_once_and_null_blocks_among_them_are_skipped() -> None:
    pool = BlockPool(6)
    block_ids = pool.get_new_blocks(3)
    pool.cache_blocks([NULL_BLOCK, 1, NULL_BLOCK, 2], [b"a", b"b", b"c", b"d"])
    assert [pool.block_hash(block_id) for block_id in range(4)] == [None, b"b", b"d", None]
    pool.cache_blocks([2], [b"e"])
    assert (pool.block_hash(2), pool.get_cached_block(b"e", [0])) == (b"d", None)
    assert pool.get_cached_block(b"d", [0]) == [block_ids[1]]


def test_of_blocks_some_of_which_are_cached_the_others_can_be_cached() -> None:
    pool = BlockPool(6)
    pool.cache_blocks(pool.get_new_blocks(4)[1:2], [b"b"])
    pool.cache_blocks([1, 2, NULL_BLOCK, 3], [b"a", b"other", b"null", b"c"])
    assert [pool.block_hash(block_id) for block_id in range(5)] == [None, b"a", b"b", b"c", None]
    assert pool.find_cached_prefix([b"a", b"b", b"c", b"other"]) == [1, 2, 3]
    assert pool.get_cached_block(b"other", [0]) is None


def test_a_block_without_references_is_not_fenced_by_a_failed_free() -> None:
    pool = BlockPool(3)
    with pytest.raises(NotTaken):
        pool.free_blocks([1], step=9)
    settled = pool.get_settled_blocks(2, 0, EMPTY_INT32)
    assert settled is not None
    assert settled.tolist() == [1, 2]


@pytest.mark.parametrize("num_blocks", [6, 300])
def test_a_settled_block_is_the_oldest_free_one_of_no_unanswered_plan(
    num_blocks: int,
) -> None:
    pool = BlockPool(num_blocks)
    everything = list(pool.get_new_blocks(num_blocks - 1))
    pool.cache_blocks(everything, [b"%d" % block_id for block_id in everything])
    pool.free_blocks(everything[:3], step=7)
    pool.free_blocks(everything[3:])
    before = pool.free_block_ids()
    assert pool.get_settled_blocks(num_blocks - 3, 6, EMPTY_INT32) is None
    assert pool.get_settled_blocks(num_blocks - 4, 6, np.array([4], np.int32)) is None
    assert pool.free_block_ids() == before
    found = pool.get_settled_blocks(1, 6, np.array([4], np.int32))
    assert found is not None
    assert found.tolist() == [5]
    assert pool.references()[5] == 1
    found = pool.get_settled_blocks(4, 7, EMPTY_INT32)
    assert found is not None
    assert found.tolist() == [1, 2, 3, 4] if num_blocks == 300 else [4, 1, 2, 3]
    assert pool.get_new_blocks(0) == []


class ToldBlocks:
    """A BlockMetrics that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[int]]] = []

    def allocated(self, block_ids: Int32Array) -> None:
        self.told.append(("allocated", block_ids.tolist()))

    def accessed(self, block_ids: Int32Array) -> None:
        self.told.append(("accessed", block_ids.tolist()))

    def evicted(self, block_ids: Int32Array) -> None:
        self.told.append(("evicted", block_ids.tolist()))


@pytest.mark.req("POO-03", "POO-05", "MET-03")
def test_the_collector_hears_of_every_block_handed_out_hit_and_evicted() -> None:
    metrics = ToldBlocks()
    pool = BlockPool(4, metrics=metrics)
    pool.get_new_blocks(2)  # nothing is cached: told all the same
    pool.cache_blocks([1, 2], [b"one", b"two"])
    pool.free_blocks([2, 1])
    pool.touch([NULL_BLOCK, 1])
    pool.get_new_blocks(2)
    told = [(what, block_ids) for what, block_ids in metrics.told if block_ids]
    assert told == [
        ("allocated", [1, 2]),
        ("accessed", [1]),
        ("evicted", [2]),
        ("allocated", [3, 2]),
    ]


@pytest.mark.req("POO-03")
@pytest.mark.parametrize("count", [3, 200])
def test_new_blocks_come_from_the_head_with_one_reference_and_without_hashes(count: int) -> None:
    pool = named_pool(402, {block_id: b"%d" % block_id for block_id in range(2, 402)})
    with pytest.raises(OutOfBlocks, match="402 blocks are needed, 401 are free"):
        pool.get_new_blocks(402)
    assert list(pool.get_new_blocks(count)) == list(range(1, count + 1))
    for block_id in range(1, count + 1):
        assert (pool.references()[block_id], pool.block_hash(block_id)) == (1, None)
        assert pool.get_cached_block(b"%d" % block_id, [0]) is None
    assert pool.get_cached_block(b"%d" % (count + 1), [0]) == [count + 1]
    pool.check(np.array([0, *[1] * count, *[0] * (401 - count)]))


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda pool: pool.touch([1]), "block 1 has 2 references and 1 holders"),
        (lambda pool: pool._prefixes[0].clear(), "block 1 is not found under its hash"),
        (
            lambda pool: pool._prefixes[0].insert_n([b"stray"], [3]),
            "2 blocks are found by hash, 1 have",
        ),
        (lambda pool: setattr(pool.free_queue, "num_free", 1), "which counts 1"),
    ],
)
def test_a_check_of_the_pool_says_what_is_inconsistent(
    damage: Callable[[BlockPool], object], complaint: str
) -> None:
    pool = BlockPool(4)
    pool.get_new_blocks(1)
    pool.cache_blocks([1], [b"one"])
    pool.check(np.array([0, 1, 0, 0]))
    damage(pool)
    with pytest.raises(LongshoreError, match=complaint):
        pool.check(np.array([0, 1, 0, 0]))


def test_a_check_notices_a_cached_block_before_one_without_a_hash() -> None:
    pool = BlockPool(4)
    pool.cache_blocks([1], [b"one"])  # it is free and has its place at the head
    with pytest.raises(LongshoreError, match="before a free one without a hash"):
        pool.check(np.zeros(4, np.int64))
