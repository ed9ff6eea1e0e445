"""The free queue against an ordered list."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from longshore.scheduler.free_queue import UNLINKED, FreeQueue, NotInFreeQueue, OutOfBlocks

NUM_BLOCKS = 9


class FreeQueueMachine(RuleBasedStateMachine):
    """Every operation on the queue and on a list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FreeQueue(NUM_BLOCKS)
        self.model = list(range(1, NUM_BLOCKS))
        self.taken: list[int] = []

    @rule(count=st.integers(0, NUM_BLOCKS - 1))
    def popleft_n(self, count: int) -> None:
        if count > len(self.model):
            with pytest.raises(OutOfBlocks, match=f"{count} blocks are needed"):
                self.queue.popleft_n(count)
            return
        assert self.queue.popleft_n(count) == self.model[:count]
        self.taken += self.model[:count]
        del self.model[:count]

    @rule(data=st.data())
    def append_n(self, data: st.DataObject) -> None:
        block_ids = data.draw(st.permutations(self.taken))
        block_ids = block_ids[: data.draw(st.integers(0, len(block_ids)))]
        self.queue.append_n(block_ids)
        self.model += block_ids
        self.taken = [block_id for block_id in self.taken if block_id not in block_ids]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.model))
        self.queue.remove(block_id)
        self.model.remove(block_id)
        self.taken.append(block_id)

    @rule(data=st.data())
    def remove_what_is_not_there(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from([0, *self.taken]))
        with pytest.raises(NotInFreeQueue, match=f"block {block_id} is not free"):
            self.queue.remove(block_id)

    @invariant()
    def order_and_count_are_those_of_the_list(self) -> None:
        assert list(self.queue) == self.model
        assert len(self.queue) == self.queue.num_free == len(self.model)

    @invariant()
    def the_list_reads_the_same_backwards(self) -> None:
        backwards = []
        block_id = self.queue._previous[0]
        while block_id != 0:
            backwards.append(block_id)
            block_id = self.queue._previous[block_id]
        assert backwards == self.model[::-1]

    @invariant()
    def blocks_outside_point_nowhere(self) -> None:
        for block_id in self.taken:
            assert self.queue._next[block_id] == UNLINKED
            assert self.queue._previous[block_id] == UNLINKED


@pytest.mark.req("FRQ-01", "FRQ-02", "FRQ-03", "FRQ-04")
def test_free_queue_behaves_like_an_ordered_list_in_both_directions() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        FreeQueueMachine,
        settings=settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True),
    )


@pytest.mark.req("FRQ-01")
def test_fake_end_is_never_handed_out_not_even_by_the_last_pop() -> None:
    queue = FreeQueue(4)
    assert queue.popleft_n(3) == [1, 2, 3]
    assert queue.popleft_n(0) == []
    queue.append_n([2])
    assert queue.popleft_n(1) == [2]


@pytest.mark.req("FRQ-03", "ERR-21")
def test_taking_from_an_empty_queue_raises_and_leaves_it_usable() -> None:
    queue = FreeQueue(3)
    queue.popleft_n(2)
    with pytest.raises(OutOfBlocks, match="1 blocks are needed, 0 are free"):
        queue.popleft_n(1)
    queue.append_n([2, 1])
    assert list(queue) == [2, 1]


@pytest.mark.req("FRQ-03", "ERR-21")
def test_removing_a_block_that_is_not_free_raises_and_corrupts_nothing() -> None:
    queue = FreeQueue(5)
    queue.remove(2)
    for absent in (2, 0):
        with pytest.raises(NotInFreeQueue):
            queue.remove(absent)
    assert list(queue) == [1, 3, 4]
    assert queue.num_free == 3


@pytest.mark.req("FRQ-03")
def test_zero_blocks_and_empty_lists_change_nothing() -> None:
    queue = FreeQueue(4)
    queue.append_n([])
    assert queue.popleft_n(0) == []
    assert list(queue) == [1, 2, 3]


@pytest.mark.req("FRQ-04")
def test_removed_blocks_have_both_links_cleared() -> None:
    queue = FreeQueue(6)
    queue.remove(3)
    queue.popleft_n(2)
    for block_id in (1, 2, 3):
        assert (queue._next[block_id], queue._previous[block_id]) == (UNLINKED, UNLINKED)
    assert queue.num_free == 2


@pytest.mark.req("FRQ-05", "ERR-11")
def test_the_block_freed_longest_ago_is_handed_out_first() -> None:
    queue = FreeQueue(6)
    queue.popleft_n(5)
    queue.append_n([4])
    queue.append_n([2, 5])
    assert queue.popleft_n(2) == [4, 2]
    queue.append_n([4])
    assert list(queue) == [5, 4]
