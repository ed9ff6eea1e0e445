"""When events of block hashes are published."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from longshore.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from longshore.scheduler.features.events import KVEventLog
from longshore.scheduler.kv_cache.block_pool import BlockPool

TOKENS = np.arange(4, dtype=np.int32)


def stored(name: bytes, group: int = 0) -> BlockStored:
    return BlockStored(name, None, TOKENS, group)


@pytest.mark.req("MET-02")
def test_a_hash_is_published_once_the_step_that_computes_its_block_is_answered() -> None:
    log = KVEventLog()
    log.stored(stored(b"a"), 3)
    log.stored(stored(b"b"), 4)
    log.stored(stored(b"loaded"), 0)
    taken = log.take(2)
    assert [e.block_hash for e in taken if isinstance(e, BlockStored)] == [b"loaded"]
    assert log.take(3) == [stored(b"a")]
    assert log.take(3) == []
    assert log.take(9) == [stored(b"b")]


@pytest.mark.req("MET-02")
def test_a_hash_waits_for_its_newest_block_which_may_be_the_only_valid_one() -> None:
    log = KVEventLog()
    log.stored(stored(b"a"), 3)
    log.copied(b"a", 0, 5)
    assert log.take(4) == []
    assert log.take(5) == [stored(b"a")]
    log.copied(b"a", 0, 7)
    assert log.take(9) == []


@pytest.mark.req("MET-02")
def test_a_hash_that_was_removed_before_it_was_proven_is_never_published() -> None:
    log = KVEventLog()
    log.stored(stored(b"a"), 3)
    log.stored(stored(b"a", group=1), 3)
    log.removed(b"a", 0)
    assert log.take(9) == [stored(b"a", group=1)]
    log.removed(b"a", 1)
    assert log.take(9) == [BlockRemoved(b"a", 1)]


def test_cleared_comes_first_and_voids_what_was_not_taken() -> None:
    log = KVEventLog()
    log.stored(stored(b"a"), 0)
    log.stored(stored(b"b"), 5)
    log.cleared()
    log.stored(stored(b"c"), 0)
    assert log.take(9) == [AllBlocksCleared(), stored(b"c")]


class EventsMachine(RuleBasedStateMachine):
    """A subscriber who only hears events knows, once all steps are answered, what can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.log = KVEventLog()
        self.pool = BlockPool(6, num_groups=2, events=self.log)
        self.step = 0
        self.known: set[tuple[int, bytes]] = set()

    @rule(count=st.integers(0, 3))
    def take_new_blocks(self, count: int) -> None:
        if count <= self.pool.num_free:
            self.pool.free_blocks(self.pool.get_new_blocks(count))

    @rule(name=st.sampled_from([b"a", b"b"]), group=st.integers(0, 1), block_id=st.integers(1, 5))
    def name_block(self, name: bytes, group: int, block_id: int) -> None:
        if self.pool.block_hash(block_id) is None:
            self.step += 1
            if self.pool.get_cached_block(name, [group]) is None:
                self.log.stored(stored(name, group), self.step)
            self.pool.cache_blocks([block_id], [name], group)

    @rule(block_ids=st.lists(st.integers(0, 5), max_size=6))
    def free_skipped(self, block_ids: list[int]) -> None:
        self.pool.uncache_blocks(block_ids)

    @precondition(lambda self: self.pool.num_free == 5)
    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache()

    @rule(unanswered=st.integers(0, 2))
    def listen(self, unanswered: int) -> None:
        self.hear(self.log.take(self.step - unanswered))

    def hear(self, events: list[KVEvent]) -> None:
        for event in events:
            match event:
                case BlockStored(block_hash=name, group=group):
                    assert (group, name) not in self.known
                    self.known.add((group, name))
                case BlockRemoved(block_hash=name, group=group):
                    self.known.remove((group, name))
                case AllBlocksCleared():
                    self.known.clear()

    def teardown(self) -> None:
        self.hear(self.log.take(self.step))
        found = {
            (group, name)
            for group in (0, 1)
            for name in (b"a", b"b")
            if self.pool.get_cached_block(name, [group]) is not None
        }
        assert self.known == found


def test_a_subscriber_ends_up_knowing_what_can_be_found() -> None:
    run_state_machine_as_test(
        EventsMachine,
        settings=settings(
            max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
        ),
    )
