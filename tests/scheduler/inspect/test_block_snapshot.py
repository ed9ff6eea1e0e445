"""The picture of the blocks. That it is true is checked against a reading of all books, here and by
the drivers of the random runs (`check_block_map`)."""

from collections import Counter

import numpy as np
import pytest

from longshore.protocol import statistics
from longshore.protocol.arrays import int32_array
from longshore.protocol.handshake import ToClient
from longshore.protocol.kv_cache_spec import SinkFullAttentionSpec
from longshore.protocol.requests import AddRequest
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.statistics import (
    MAX_LISTED_BLOCKS,
    MAX_LISTED_HOLDERS,
    BlockState,
)
from longshore.protocol.transport.codec import Decoder, Encoder
from longshore.scheduler.config import CacheConfig, SchedulerConfig
from longshore.scheduler.inspect.block_snapshot import Holding, states_of
from longshore.scheduler.scheduler import Scheduler
from tests.harness.block_snapshots import check_block_map, make_block_snapshot
from tests.harness.driver import Driver
from tests.harness.kv_groups import full, kv_cache_config, window
from tests.harness.tokens import prompt_of


def counts(driver: Driver) -> dict[BlockState, int]:
    """Blocks by state, those that there are."""
    states = check_block_map(driver.scheduler, driver.now).states
    return {BlockState(state): count for state, count in sorted(Counter(states.tolist()).items())}


def test_an_unused_pool_is_free_except_for_the_null_block() -> None:
    assert counts(Driver(num_blocks=40)) == {BlockState.RESERVED: 1, BlockState.FREE: 39}


def test_blocks_of_an_ended_request_stay_findable_and_are_shared_by_the_next_two() -> None:
    driver = Driver(num_blocks=40, block_size=4)
    driver.add("first", prompt_of(16), max_tokens=1)
    driver.run()
    assert counts(driver)[BlockState.CACHED] == 4
    driver.add("second", [*prompt_of(16), 50], max_tokens=8)
    driver.add("third", [*prompt_of(16), 60], max_tokens=8)
    driver.step()
    assert counts(driver) == {
        BlockState.RESERVED: 1,
        BlockState.FREE: 33,
        BlockState.HELD: 2,
        BlockState.SHARED: 4,
    }
    block_map = make_block_snapshot(driver.scheduler, driver.now)
    assert [holder.request_id for holder in block_map.holders] == ["second", "third"]
    assert [holder.num_cached_tokens for holder in block_map.holders] == [16, 16]
    assert block_map.groups[0].num_blocks == 10


def test_blocks_that_a_session_keeps_between_inputs_belong_to_no_running_request() -> None:
    driver = Driver(num_blocks=40, block_size=4)
    key = driver.add("session", prompt_of(9), max_tokens=2, resumable=True, keeps_blocks=True)
    while not driver.continued[key]:
        driver.step()
    assert counts(driver)[BlockState.KEPT] == 3
    (holder,) = make_block_snapshot(driver.scheduler, driver.now).holders
    assert (holder.request_id, holder.state, holder.row) == ("session", BlockState.KEPT, -1)
    assert (holder.num_tokens, holder.num_computed_tokens) == (11, 10)


def test_a_block_is_in_quarantine_only_if_no_request_uses_it() -> None:
    driver = Driver(num_blocks=40, block_size=4)
    driver.add("runs", prompt_of(8), max_tokens=8)
    driver.step()
    kv_cache = driver.scheduler.kv_cache
    (table,) = kv_cache.block_ids(driver.requests["runs"].row)
    new = int32_array(kv_cache.pool.get_new_blocks(2))
    kv_cache.pool.touch([int(table[0]), int(new[1])])
    holdings = [
        Holding(BlockState.QUARANTINED, "load", (int32_array([table[0], new[0], new[1]]),)),
        Holding(BlockState.KEPT, "session", (new[1:],)),
    ]
    states = states_of(kv_cache, holdings)
    assert states[table[0]] == BlockState.SHARED
    assert states[new].tolist() == [BlockState.QUARANTINED] * 2
    assert states_of(kv_cache, holdings[:1])[new[1]] == BlockState.SHARED  # with an unknown holder


def test_groups_say_their_kind_and_freed_blocks_are_not_counted() -> None:
    driver = Driver(full(4), window(4, 4), num_blocks=60, max_num_batched_tokens=8)
    driver.add("r", prompt_of(40), max_tokens=4)
    driver.steps(7)
    groups = check_block_map(driver.scheduler, driver.now).groups
    assert [group.kind for group in groups] == ["full attention", "sliding window"]
    assert groups[0].num_blocks >= 10 > 5 > groups[1].num_blocks


def test_blocks_that_sinks_have_set_aside_are_reserved() -> None:
    spec = SinkFullAttentionSpec(4, 1, 8, 4, sink_tokens=8)
    driver = Driver(spec)
    states = make_block_snapshot(driver.scheduler, 1.0).states
    assert states[:3].tolist() == [BlockState.RESERVED] * 3
    assert set(states[3:].tolist()) == {BlockState.FREE}


def test_requests_for_snapshots_in_quick_succession_get_the_same_one() -> None:
    scheduler = Driver().scheduler
    first = scheduler.make_block_snapshot(10.0, "engine")
    assert scheduler.make_block_snapshot(10.0 + 0.9 * statistics.MIN_INTERVAL_S, "engine") is first
    assert scheduler.make_block_snapshot(10.0 + statistics.MIN_INTERVAL_S, "engine") is not first


@pytest.fixture(scope="module")
def crowd() -> Scheduler:
    """300 requests that run on 200 blocks each."""
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=1000, max_num_seqs=300, max_num_batched_tokens=300 * 800),
        CacheConfig(block_size=4),
        kv_cache=kv_cache_config(100_000),
        hash_seed=b"seed",
        vocab_size=100_000,
    )
    for index in range(300):
        prompt = np.full(800, index, np.int32)
        message = AddRequest(f"r{index}", index, prompt, SamplingParams(max_tokens=9))
        scheduler.add_request(message, client=0, now=0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.num_rows == 300
    return scheduler


def test_at_most_the_maximum_number_of_holders_is_listed_the_oldest_first(
    crowd: Scheduler,
) -> None:
    picture = make_block_snapshot(crowd, 1.0)
    assert [each.request_id for each in picture.holders] == [
        f"r{index}" for index in range(MAX_LISTED_HOLDERS)
    ]
    assert {each.num_blocks for each in picture.holders} == {(200,)}
    assert {each.num_listed for each in picture.holders} == {(200,)}
    assert np.count_nonzero(picture.states == BlockState.HELD) == 60_000
    assert picture.report.num_running == 300


def test_block_ids_are_shared_out_among_the_holders_their_last_ones(
    crowd: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore.scheduler.inspect.block_snapshot.MAX_LISTED_BLOCKS", 256 * 50)
    picture = make_block_snapshot(crowd, 1.0)
    assert {(each.num_blocks, each.num_listed) for each in picture.holders} == {((200,), (50,))}
    assert len(picture.block_ids) == 256 * 50 < MAX_LISTED_BLOCKS
    table = crowd.kv_cache.block_ids(picture.holders[3].row)[0]
    assert picture.block_ids[150:200].tolist() == table[-50:].tolist()


def test_a_big_picture_travels_with_its_states_as_a_frame_of_their_own(crowd: Scheduler) -> None:
    picture = make_block_snapshot(crowd, 1.0)
    header, *frames = Encoder[ToClient]().encode(picture)
    assert [len(frame) for frame in frames] == [100_000, 4 * len(picture.block_ids)]
    received = Decoder[ToClient](ToClient).decode([header, *frames])
    assert isinstance(received, statistics.BlockSnapshot)
    np.testing.assert_array_equal(received.states, picture.states)
    assert received.holders == picture.holders
