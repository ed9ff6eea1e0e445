"""The free queue against an ordered list. Blocks are cached, unless a test is about those that are
not."""

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

from longshore.protocol.arrays import Int32Array
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.scheduler.kv_cache.free_queue import (
    FreeQueue,
    NotInFreeQueue,
    NotTaken,
    OutOfBlocks,
)

NUM_BLOCKS = 9


def ids(*block_ids: int) -> Int32Array:
    return np.array(block_ids, np.int32)


def all_cached(num_blocks: int) -> bytearray:
    return bytearray([1] * num_blocks)


class FreeQueueMachine(RuleBasedStateMachine):
    """Every operation on the queue and on a list, with the holders of each taken block beside; each
    operation one by one or in bulk. The last blocks of the list are retained, with a priority."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cached = all_cached(NUM_BLOCKS)
        self.queue = FreeQueue(self.is_cached)
        self.model = list(range(1, NUM_BLOCKS))
        self.taken: list[int] = []
        self.priorities: dict[int, int] = {}  # of retained blocks

    @rule(count=st.integers(0, NUM_BLOCKS - 1), few=st.booleans())
    def popleft(self, count: int, few: bool) -> None:
        pop = self.queue.popleft_few if few else self.queue.popleft_n
        if count > len(self.model):
            with pytest.raises(OutOfBlocks, match=f"{count} blocks are needed"):
                pop(count)
            return
        assert list(pop(count)) == self.model[:count]
        self.taken += self.model[:count]
        del self.model[:count]
        self.priorities = {b: self.priorities[b] for b in self.priorities if b in self.model}

    def take(self, block_id: int) -> None:
        self.model.remove(block_id)
        self.priorities.pop(block_id, None)

    def insert(self, block_id: int, priority: int = 0) -> None:
        """As the last block of this priority."""
        below = [b for b in self.model if self.priorities.get(b, 0) <= priority]
        self.model.insert(len(below), block_id)
        if priority:
            self.priorities[block_id] = priority

    @rule(data=st.data(), few=st.booleans())
    def release(self, data: st.DataObject, few: bool) -> None:
        block_ids = data.draw(st.permutations(self.taken))
        block_ids = block_ids[: data.draw(st.integers(0, len(block_ids)))]
        if few:
            self.queue.release_few([NULL_BLOCK, *block_ids])
        else:
            assert self.queue.release_n(ids(NULL_BLOCK, *block_ids))
        for block_id in block_ids:
            if self.is_cached[block_id]:
                self.insert(block_id)
            else:
                self.model.insert(0, block_id)
        self.taken = [block_id for block_id in self.taken if block_id not in block_ids]

    @rule(block_id=st.integers(1, NUM_BLOCKS - 1))
    def cache_or_uncache(self, block_id: int) -> None:
        self.is_cached[block_id] ^= 1

    @rule(data=st.data())
    def move_to_head(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.permutations(range(1, NUM_BLOCKS)))[:3]
        free = [block_id for block_id in block_ids if block_id in self.model]
        for block_id in free:
            self.is_cached[block_id] = 0
        self.queue.move_to_head(block_ids)
        for block_id in free:
            self.take(block_id)
        self.model = free[::-1] + self.model

    @rule(data=st.data(), priority=st.integers(1, 3))
    def move_to_retained(self, data: st.DataObject, priority: int) -> None:
        block_ids = data.draw(st.permutations(range(1, NUM_BLOCKS)))[:3]
        for block_id in block_ids:
            self.is_cached[block_id] = 1
        self.queue.move_to_retained(ids(*block_ids), priority)
        for block_id in block_ids:
            if block_id in self.model:
                self.take(block_id)
                self.insert(block_id, priority)

    @rule(data=st.data())
    def move_to_tail(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.permutations(range(1, NUM_BLOCKS)))[:3]
        for block_id in block_ids:
            self.is_cached[block_id] = 1
        self.queue.move_to_tail(ids(*block_ids))
        for block_id in [block_id for block_id in self.model if block_id in block_ids]:
            self.take(block_id)
            self.insert(block_id)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), few=st.booleans())
    def remove(self, data: st.DataObject, few: bool) -> None:
        block_id = data.draw(st.sampled_from(self.model))
        if few:
            self.queue.remove(block_id)
        else:
            self.queue.remove_n(ids(block_id))
        self.take(block_id)
        self.taken.append(block_id)

    @rule(data=st.data(), few=st.booleans())
    def remove_what_is_not_there(self, data: st.DataObject, few: bool) -> None:
        block_id = data.draw(st.sampled_from([NULL_BLOCK, *self.taken]))

        def remove() -> None:
            if few:
                self.queue.remove(block_id)
            else:
                self.queue.remove_n(ids(*self.model, block_id))

        with pytest.raises(NotInFreeQueue, match=f"block {block_id} is not free"):
            remove()

    @rule(data=st.data())
    def release_a_block_without_references(self, data: st.DataObject) -> None:
        wrong = data.draw(st.sampled_from([*self.model, *self.taken]))
        block_ids = [NULL_BLOCK, *self.taken, wrong]
        with pytest.raises(NotTaken, match=f"block {wrong} cannot be freed"):
            self.queue.release_few(block_ids)
        if wrong in self.taken:
            assert not self.queue.release_n(ids(*block_ids))
        else:
            with pytest.raises(NotTaken, match=f"block {wrong} cannot be freed"):
                self.queue.release_n(ids(*block_ids))

    @invariant()
    def order_and_count_are_those_of_the_list(self) -> None:
        assert list(self.queue) == self.model
        assert len(self.queue) == self.queue.num_free == len(self.model)

    @invariant()
    def taken_blocks_have_no_place_in_the_queue(self) -> None:
        for block_id in (NULL_BLOCK, *self.taken):
            assert self.queue.position[block_id] < 0
        assert len({int(self.queue.position[block_id]) for block_id in self.model}) == len(
            self.model
        )


@pytest.mark.req("FRQ-01", "FRQ-02", "FRQ-03", "FRQ-04")
def test_free_queue_behaves_like_an_ordered_list() -> None:
    run_state_machine_as_test(
        FreeQueueMachine,
        settings=settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True),
    )


@pytest.mark.req("FRQ-01", "FRQ-02", "FRQ-05")
@pytest.mark.parametrize("at_a_time", [1, 7, 400])
def test_order_survives_any_number_of_turns_of_the_log_with_gaps_in_it(at_a_time: int) -> None:
    queue, model = FreeQueue(all_cached(3000)), list(range(1, 3000))
    rng = np.random.default_rng(at_a_time)
    for _ in range(20_000 // at_a_time):
        gap = model.pop(int(rng.integers(len(model))))
        queue.remove(gap)
        popped = queue.popleft_n(at_a_time)
        assert popped.tolist() == model[:at_a_time]
        back = [gap, *reversed(popped.tolist())]
        assert queue.release_n(ids(*back))
        model = model[at_a_time:] + back
    assert list(queue) == model
    assert queue.num_free == 2999


@pytest.mark.req("FRQ-02", "POO-04")
@pytest.mark.parametrize("at_a_time", [1, 7, 400])
def test_order_survives_any_number_of_turns_at_the_head(at_a_time: int) -> None:
    is_cached = bytearray(3000)
    queue, model = FreeQueue(is_cached), list(range(1, 3000))
    rng = np.random.default_rng(at_a_time)
    for _ in range(20_000 // at_a_time):
        taken = [model.pop(int(rng.integers(len(model)))) for _ in range(at_a_time)]
        queue.remove_n(ids(*taken))
        for block_id in taken:
            is_cached[block_id] = rng.random() < 0.2
        assert queue.release_n(ids(*taken))
        for block_id in taken:
            model.insert(len(model) if is_cached[block_id] else 0, block_id)
    assert list(queue) == model
    assert queue.num_free == 2999


@pytest.mark.req("FRQ-01")
@pytest.mark.parametrize("pop", [FreeQueue.popleft_n, FreeQueue.popleft_few])
def test_the_last_pop_hands_out_the_last_block_and_nothing_else(pop: object) -> None:
    queue = FreeQueue(all_cached(4))
    assert callable(pop)
    assert list(pop(queue, 3)) == [1, 2, 3]
    assert list(pop(queue, 0)) == []
    assert queue.release_n(ids(2))
    assert list(pop(queue, 1)) == [2]


@pytest.mark.req("FRQ-03", "ERR-21")
def test_taking_from_an_empty_queue_raises_and_leaves_it_usable() -> None:
    queue = FreeQueue(all_cached(3))
    queue.popleft_n(2)
    for pop in (queue.popleft_n, queue.popleft_few):
        with pytest.raises(OutOfBlocks, match="1 blocks are needed, 0 are free"):
            pop(1)
    assert queue.release_n(ids(2, 1))
    assert list(queue) == [2, 1]


@pytest.mark.req("FRQ-03", "ERR-21")
def test_removing_a_block_that_is_not_free_raises_and_corrupts_nothing() -> None:
    queue = FreeQueue(all_cached(5))
    queue.remove(2)
    for absent in (2, 0):
        with pytest.raises(NotInFreeQueue):
            queue.remove(absent)
        with pytest.raises(NotInFreeQueue):
            queue.remove_n(ids(1, absent))
    assert list(queue) == [1, 3, 4]
    assert queue.num_free == 3


@pytest.mark.req("FRQ-03")
def test_zero_blocks_and_empty_lists_change_nothing() -> None:
    queue = FreeQueue(all_cached(4))
    assert queue.release_n(ids())
    queue.release_few([])
    queue.remove_n(ids())
    assert queue.popleft_n(0).tolist() == queue.popleft_few(0) == []
    assert list(queue) == [1, 2, 3]


@pytest.mark.req("FRQ-05", "ERR-11")
def test_the_block_freed_longest_ago_is_handed_out_first() -> None:
    queue = FreeQueue(all_cached(6))
    queue.popleft_n(5)
    assert queue.release_n(ids(4))
    assert queue.release_n(ids(2, 5))
    assert queue.popleft_n(2).tolist() == [4, 2]
    assert queue.release_n(ids(4))
    assert list(queue) == [5, 4]


@pytest.mark.parametrize("few", [True, False])
def test_a_block_with_several_references_is_free_only_after_the_last_is_released(
    few: bool,
) -> None:
    queue = FreeQueue(all_cached(5))

    def acquire(*block_ids: int) -> None:
        if few:
            queue.acquire_few([NULL_BLOCK, *block_ids])
        else:
            assert queue.acquire_n(ids(NULL_BLOCK, *block_ids))

    def release(*block_ids: int) -> None:
        if few:
            queue.release_few([NULL_BLOCK, *block_ids])
        else:
            assert queue.release_n(ids(NULL_BLOCK, *block_ids))

    acquire(1, 2, 3)
    assert list(queue) == [4]
    acquire(2)
    acquire(4, 2)
    assert queue.num_free == 0
    release(4, 3, 2, 1)
    assert list(queue) == [4, 3, 1]
    release(2)
    assert list(queue) == [4, 3, 1]
    release(2)
    assert list(queue) == [4, 3, 1, 2]


def test_a_repeated_block_is_left_to_the_scalar_loop() -> None:
    queue = FreeQueue(all_cached(5))
    assert not queue.acquire_n(ids(1, 2, 1))
    assert list(queue) == [1, 2, 3, 4]
    queue.acquire_few([1, 2, 1])
    assert not queue.release_n(ids(1, 2, 1))
    assert (list(queue), queue.num_free) == ([3, 4], 2)
    queue.release_few([1, 2, 1])
    assert list(queue) == [3, 4, 2, 1]
