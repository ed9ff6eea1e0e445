"""When a connector may store a block, and how long it is held until then."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.connectors.base import StorableBlocks
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.scheduler.features.unanswered_blocks import UnansweredBlocks
from tests.connectors.holds import Holds
from tests.harness.connector import AdversarialConnector
from tests.harness.driver import Driver
from tests.harness.kv_groups import BLOCK_SIZE
from tests.harness.shared_drivers import connected
from tests.harness.tokens import prompt_of


def cached(step: int, *block_ids: int, earlier: tuple[int, ...] = ()) -> StorableBlocks:
    """Blocks with their ids as positions."""
    hashes = [bytes([block_id]) for block_id in block_ids]
    return StorableBlocks(step, "r", 0, block_ids, hashes, block_ids, earlier_ids=earlier)


def with_blocks() -> tuple[UnansweredBlocks, Holds]:
    """Two blocks of plan 1, and one of plan 2."""
    holds = Holds()
    unanswered = UnansweredBlocks(holds)
    unanswered.add(1, [cached(1, 7, 8)])
    unanswered.add(2, [cached(2, 9)])
    return unanswered, holds


def taken(unanswered: UnansweredBlocks, answered_step: int) -> list[list[int]]:
    return [list(blocks.block_ids) for blocks in unanswered.take(answered_step)[0]]


@pytest.mark.req("LDS-05")
def test_blocks_may_be_stored_when_their_plan_is_answered_and_are_held_until_then() -> None:
    unanswered, holds = with_blocks()
    assert not unanswered.are_storable(0)
    assert unanswered.take(0) == ([], [])
    assert unanswered.last_step == 2
    assert unanswered.are_storable(1)
    assert unanswered.take(1) == ([cached(1, 7, 8)], [(1, [7, 8])])
    assert holds.held == {1: [7, 8], 2: [9]}
    assert unanswered.take(3) == ([cached(2, 9)], [(2, [9])])
    assert unanswered.last_step == len(unanswered) == 0


def test_an_uncached_block_may_not_be_stored_even_if_its_plan_is_answered_now() -> None:
    unanswered, holds = with_blocks()
    unanswered.remove([8])
    assert taken(unanswered, 1) == [[7]]
    assert 1 in holds.held  # the caller releases it


def test_a_hold_ends_when_all_of_its_blocks_are_uncached() -> None:
    unanswered, holds = with_blocks()
    unanswered.remove([8, 7])
    assert taken(unanswered, 1) == []
    assert holds.held == {2: [9]}


def test_a_block_that_is_computed_once_more_waits_for_its_new_plan() -> None:
    unanswered, _ = with_blocks()
    unanswered.remove([9])
    unanswered.add(3, [cached(3, 9)])
    assert taken(unanswered, 2) == [[7, 8]]
    assert taken(unanswered, 3) == [[9]]


def test_in_a_new_epoch_no_block_is_released_or_may_be_stored() -> None:
    unanswered, holds = with_blocks()
    unanswered.clear()
    assert taken(unanswered, 9) == []
    assert holds.held == {1: [7, 8], 2: [9]}  # void, but not ended


def test_the_blocks_of_a_chunk_are_held_together_and_are_no_chunk_if_one_is_wrong() -> None:
    holds = Holds()
    unanswered = UnansweredBlocks(holds)
    # Two requests whose chunks begin with the same block.
    unanswered.add(1, [cached(1, 5, earlier=(4,)), cached(1, 6, earlier=(4,))])
    assert holds.held == {1: [4, 5, 6]}
    unanswered.remove([4])
    blocks, _ = unanswered.take(1)
    assert [each.block_ids for each in blocks] == [(5,), (6,)]
    assert [each.earlier_ids for each in blocks] == [(), ()]


def test_the_null_block_of_a_chunk_is_not_held() -> None:
    holds = Holds()
    UnansweredBlocks(holds).add(1, [cached(1, 5, earlier=(NULL_BLOCK, 4))])
    assert holds.held == {1: [4, 5]}


@pytest.mark.req("OFF-10")
def test_chunks_are_whole_and_end_within_the_new_blocks() -> None:
    hashes = [bytes([position]) for position in range(3, 9)]
    ids = list(range(13, 19))
    blocks = StorableBlocks(1, "r", 0, ids, hashes, range(3, 9), earlier_ids=(12,))
    assert blocks.chunks(2) == [
        (2, [12, 13], b"\3"),
        (4, [14, 15], b"\5"),
        (6, [16, 17], b"\7"),
    ]
    assert blocks.chunks(4) == [(4, [14, 15, 16, 17], b"\7")]  # block 1 of the first is missing
    without = blocks.only(lambda block_id, _: block_id != 15)
    assert without is not None
    assert without.chunks(2) == [(6, [16, 17], b"\7")]
    assert [chunk.block_ids for chunk in blocks.chunks(1)] == [[block_id] for block_id in ids]


PLANS = st.lists(
    st.tuples(
        st.sets(st.integers(1, 6), max_size=4),  # cached by the plan
        st.sets(st.integers(1, 6), max_size=2),  # uncached before it
        st.integers(0, 3),  # plans in flight
    ),
    max_size=12,
)


@given(PLANS)
def test_every_block_is_held_until_it_may_be_stored_or_is_uncached(
    plans: list[tuple[set[int], set[int], int]],
) -> None:
    holds = Holds()
    unanswered = UnansweredBlocks(holds)
    waiting: dict[int, set[int]] = {}  # right blocks by plan
    answered = 0
    for step, (new, uncached, num_in_flight) in enumerate(plans, 1):
        answered = max(answered, step - 1 - num_in_flight)
        waiting = {number: blocks - uncached for number, blocks in waiting.items()}
        expected = [blocks for number, blocks in waiting.items() if number <= answered and blocks]
        waiting = {number: each for number, each in waiting.items() if number > answered and each}
        unanswered.remove(uncached)
        assert unanswered.are_storable(answered) == bool(expected)
        blocks, plan_holds = unanswered.take(answered)
        assert [set(each.block_ids) for each in blocks] == expected
        for hold_id, _ in plan_holds:
            holds.release(hold_id)
        unanswered.add(step, [cached(step, *sorted(new))] if new else [])
        waiting |= {step: new} if new else {}
        assert unanswered.last_step == max(waiting, default=0)
        assert len(holds.held) == len(unanswered) == len(waiting)


# In a scheduler


class Chunky(AdversarialConnector):
    chunk_blocks = 2


def test_a_connector_that_stores_nothing_gets_no_blocks_and_holds_none() -> None:
    driver = connected(rules={})
    key = driver.add("r", prompt_of(9), max_tokens=1)
    driver.plan()
    assert driver.scheduler.num_transfers == 0
    driver.run_until_idle()
    assert not any(step.storable for step in driver.adversary.steps)
    driver.check_complete(key)
    driver.check_idle()


def test_what_the_connector_does_not_hold_is_free_after_the_hook() -> None:
    driver = connected(rules={"stores": lambda: False})
    driver.add("r", prompt_of(9), max_tokens=1)
    driver.plan()
    assert driver.scheduler.num_transfers == 1
    driver.run_until_idle()
    assert [len(blocks.block_ids) for step in driver.adversary.steps for blocks in step.storable]
    assert driver.scheduler.num_transfers == 0
    assert driver.num_free_blocks == driver.num_blocks - 1


def test_a_connector_that_stores_all_blocks_of_a_plan_takes_over_their_hold() -> None:
    driver = connected(rules={"stores": lambda: True}, max_steps_in_flight=1)
    holder = driver.adversary.holder
    driver.add("r", prompt_of(9), max_tokens=1)
    driver.step()
    driver.step()
    (store,) = driver.ranks.stores
    assert store.hold_id == 1
    assert driver.num_free_blocks == driver.num_blocks - 3
    assert holder.hold(store.block_ids) == 2  # only in the hook, and once
    holder.release(2)
    driver.ranks.end_store(store)
    driver.check_idle()


@pytest.mark.parametrize("chunk", [3, BLOCK_SIZE, 9])
def test_chunks_have_the_blocks_of_earlier_plans(chunk: int) -> None:
    connector = Chunky(stores=lambda: False)
    driver = Driver(connector=connector, long_prefill_token_threshold=chunk)
    key = driver.add("r", prompt_of(5 * BLOCK_SIZE + 1), max_tokens=1)
    driver.run_until_idle()
    storable = [blocks for step in connector.steps for blocks in step.storable]
    assert [position for blocks in storable for position in blocks.positions] == list(range(5))
    chunks = [each for blocks in storable for each in blocks.chunks(2)]
    assert [each.position for each in chunks] == [0, 2]
    ids = {
        position: block_id
        for blocks in storable
        for position, block_id in zip(blocks.positions, blocks.block_ids, strict=True)
    }
    assert [each.block_ids for each in chunks] == [[ids[0], ids[1]], [ids[2], ids[3]]]
    assert all(len(blocks.request_hashes) == 5 for blocks in storable)
    driver.check_complete(key)


def test_a_hold_ends_when_all_ranks_have_released_it() -> None:
    driver = connected(num_ranks=2)
    holder = driver.adversary.holder
    hold_id = holder.hold([3, 4])
    assert not holder.release_rank(hold_id, 1)
    assert not holder.release_rank(hold_id, 1)  # a repeated report
    assert driver.num_free_blocks == driver.num_blocks - 3
    assert holder.release_rank(hold_id, 0)
    assert driver.num_free_blocks == driver.num_blocks - 1
    assert not holder.release_rank(hold_id, 0)
    assert not holder.release_rank(99, 0)


def test_blocks_of_steps_that_failed_are_not_storable() -> None:
    driver = connected(rules={"stores": lambda: False})
    bad = driver.add("bad", prompt_of(9))
    driver.plan(nan_ids=["bad"])
    driver.run_until_idle()
    assert bad in driver.finished
    assert not any(step.storable for step in driver.adversary.steps)
    assert any(step.uncached for step in driver.adversary.steps)
    driver.check_idle()
