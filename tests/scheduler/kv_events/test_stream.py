"""What subscribers of KV events receive, and that they can rebuild the index from it."""

from collections.abc import Sequence
from typing import Any

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

from longshore.protocol.arrays import EMPTY_INT32, int32_array
from longshore.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ClearedBlocks,
    KVEvent,
    KVEventsConfig,
    Locality,
    Medium,
    RemovedBlocks,
    StoredBlocks,
    WireEvent,
)
from longshore.protocol.kv_cache_spec import CustomSpec, KVCacheSpec, SinkFullAttentionSpec
from longshore.protocol.transport.channel import Endpoint
from longshore.scheduler.features.events import KVEventLog
from longshore.scheduler.kv_cache.block_pool import BlockPool
from longshore.scheduler.kv_events.stream import (
    MAX_BATCH_BLOCKS,
    SNAPSHOT_PAYLOAD_BLOCKS,
    EventStream,
    kind_of,
)
from tests.harness.connector import AdversarialConnector
from tests.harness.driver import Driver
from tests.harness.event_index import EventIndex
from tests.harness.kv_groups import (
    chunked,
    config_of,
    cross,
    full,
    kv_cache_config,
    latent,
    state,
    window,
)
from tests.scheduler.test_random_runs import engines, events, play

SIZE = 4
ID = b"0123456789abcdef"
NOWHERE = Endpoint("inproc://nowhere")


def stream_of(
    *specs: KVCacheSpec,
    context_parallel_size: int = 1,
    max_buffer_bytes: int = 1 << 20,
    **fields: Any,
) -> EventStream:
    return EventStream(
        KVEventsConfig(endpoint=NOWHERE, replay_endpoint=NOWHERE, **fields),
        config_of(10, *specs) if specs else kv_cache_config(10, SIZE, num_groups=2),
        publisher_id=ID,
        context_parallel_size=context_parallel_size,
        max_buffer_bytes=max_buffer_bytes,
    )


def stored(
    block_hash: bytes,
    parent: bytes | None = None,
    *,
    tokens: Sequence[int] | None = None,
    group: int = 0,
    lora: str | None = None,
    medium: Medium = "GPU",
    locality: Locality | None = None,
) -> BlockStored:
    """A block whose tokens follow from its hash."""
    ids = [block_hash[0]] * SIZE if tokens is None else tokens
    return BlockStored(block_hash, parent, int32_array(list(ids)), group, lora, medium, locality)


def wire_events(stream: EventStream, events: list[KVEvent]) -> list[WireEvent]:
    """What a subscriber decodes of the only batch with these events."""
    (batch,) = stream.append(events, 2.0)
    index = EventIndex()
    index.next_number = batch.number
    index.blocks.update(
        {(("GPU", None, 0), b"x"): (None, ()), (("GPU", None, 0), b"y"): (None, ())}
    )
    assert index.receive(*batch)
    return index.batches[0].events


# Events of consecutive blocks


def test_consecutive_blocks_of_a_prefix_are_one_event() -> None:
    (event,) = wire_events(stream_of(), [stored(b"a"), stored(b"b", b"a"), stored(b"c", b"b")])
    assert event == StoredBlocks(
        block_hashes=[b"a", b"b", b"c"],
        parent_block_hash=None,
        token_ids=[97] * 4 + [98] * 4 + [99] * 4,
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


@pytest.mark.parametrize(
    "second",
    [
        stored(b"b"),
        stored(b"b", b"another"),
        stored(b"b", b"a", group=1),
        stored(b"b", b"a", lora="l"),
        stored(b"b", b"a", medium="CPU"),
        stored(b"b", b"a", locality="LOCAL"),
        stored(b"b", b"a", tokens=()),
        stored(b"b", b"a", tokens=(1, 2)),
    ],
)
def test_blocks_that_differ_are_two_events(second: BlockStored) -> None:
    first, other = wire_events(stream_of(), [stored(b"a"), second])
    assert isinstance(first, StoredBlocks)
    assert isinstance(other, StoredBlocks)
    assert (first.block_hashes, other.block_hashes) == ([b"a"], [b"b"])
    assert other.token_ids == second.token_ids.tolist()
    assert other.block_size == (len(second.token_ids) or SIZE)
    assert (other.medium, other.locality) == (second.medium, second.locality)
    assert (other.group_idx, other.lora_name) == (second.group, second.lora_name)


def test_removals_from_one_place_are_one_event_and_order_is_kept() -> None:
    stream = stream_of()
    stream.append([stored(b"x"), stored(b"y"), stored(b"y", group=1)], 1.0)
    events = wire_events(
        stream, [BlockRemoved(b"x", 0), BlockRemoved(b"y", 0), stored(b"x"), BlockRemoved(b"x", 0)]
    )
    assert [type(event) for event in events] == [RemovedBlocks, StoredBlocks, RemovedBlocks]
    assert events[0] == RemovedBlocks([b"x", b"y"], "GPU", 0)


def test_what_changes_nothing_is_not_published() -> None:
    stream = stream_of()
    assert stream.append([], 1.0) == []
    (first,) = stream.append([stored(b"a")], 1.0)
    assert stream.append([stored(b"a"), BlockRemoved(b"b", 0), BlockRemoved(b"a", 1)], 1.0) == []
    (second,) = stream.append([BlockRemoved(b"a", 0)], 1.0)
    assert (first.number, second.number) == (0, 1)


def test_blocks_in_other_media_are_repeated_after_a_medium_is_cleared() -> None:
    """On the wire, `AllBlocksCleared` is about all media."""
    stream = stream_of()
    in_host = [stored(b"h", medium="CPU"), stored(b"i", b"h", medium="CPU")]
    stream.append([stored(b"a"), *in_host, stored(b"d", medium="DISK", locality="LOCAL")], 1.0)
    cleared, host, disk = wire_events(stream, [AllBlocksCleared()])
    assert cleared == ClearedBlocks()
    assert isinstance(host, StoredBlocks)
    assert isinstance(disk, StoredBlocks)
    assert (host.medium, host.block_hashes) == ("CPU", [b"h", b"i"])
    assert (disk.medium, disk.locality, disk.block_hashes) == ("DISK", "LOCAL", [b"d"])
    cleared, disk = wire_events(stream, [AllBlocksCleared("CPU")])
    assert cleared == ClearedBlocks()
    assert isinstance(disk, StoredBlocks)
    assert disk.medium == "DISK"


@pytest.mark.parametrize(
    ("spec", "kind", "size"),
    [
        (full(8), "full_attention", None),
        (window(6, 8), "sliding_window", 6),
        (chunked(16, 8), "chunked_local_attention", None),
        (latent(8), "mla_attention", None),
        (state(block_size=8), "mamba", None),
        (cross(block_size=8), "cross_attention", None),
        (
            SinkFullAttentionSpec(
                block_size=8, num_kv_heads=1, head_size=8, dtype_bytes=4, sink_tokens=8
            ),
            "sink_full_attention",
            None,
        ),
        (CustomSpec(8, 64, "package.module:Class"), "unknown", None),
    ],
)
def test_groups_have_their_kind_in_the_words_of_vllm(
    spec: KVCacheSpec, kind: str, size: int | None
) -> None:
    assert kind_of(spec) == kind
    stream = stream_of(spec, context_parallel_size=2)
    (event,) = wire_events(stream, [stored(b"a", tokens=())])
    assert isinstance(event, StoredBlocks)
    assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == (kind, size)
    assert event.block_size == 16


def test_hashes_as_integers_are_their_last_eight_bytes() -> None:
    events = [stored(bytes(range(32)), b"\xff" * 32)]
    (event,) = wire_events(stream_of(kv_events_hashes="int"), [*events])
    assert isinstance(event, StoredBlocks)
    assert event.block_hashes == [0x18191A1B1C1D1E1F]
    assert event.parent_block_hash == 2**64 - 1


# The replay buffer and batches


def test_replay_has_the_latest_batches_up_to_a_number() -> None:
    stream = stream_of(kv_events_buffer=3)
    batches = [stream.append([stored(bytes([name]))], 1.0)[0] for name in range(5)]
    assert stream.replay(0) == batches[2:]
    assert stream.replay(3) == batches[3:]
    assert stream.replay(5) == stream.replay(2**64 - 1) == []


def test_replay_buffer_is_bounded_in_bytes_too() -> None:
    stream = stream_of(max_buffer_bytes=300)
    for name in range(20):
        stream.append([stored(bytes([name]))], 1.0)
    kept = stream.replay(0)
    assert kept[-1].number == 19
    assert 1 < len(kept) < 20
    assert sum(len(batch.payload) for batch in kept) <= 300


@pytest.mark.parametrize("is_chain", [True, False])
def test_long_lists_of_events_are_several_batches(is_chain: bool) -> None:
    names = [number.to_bytes(4, "big") for number in range(2 * MAX_BATCH_BLOCKS + 5)]
    parents = [None, *names[:-1]] if is_chain else [None] * len(names)
    stream, index = stream_of(), EventIndex()
    blocks = [stored(*pair) for pair in zip(names, parents, strict=True)]
    batches = stream.append(blocks, 1.0)
    assert [batch.number for batch in batches] == [0, 1, 2]
    assert all(index.receive(*batch) for batch in batches)
    assert index.hashes() == set(names)
    number, payloads = stream.snapshot(1.0)
    late = EventIndex()
    taken = list(payloads)
    late.restore(number, taken)
    assert (late.blocks, late.next_number) == (index.blocks, 3)
    assert len(taken) == -(-len(names) // SNAPSHOT_PAYLOAD_BLOCKS)


def test_snapshot_does_not_change_while_it_is_taken() -> None:
    stream = stream_of()
    stream.append([stored(b"a"), stored(b"b")], 1.0)
    number, payloads = stream.snapshot(1.0)
    stream.append([BlockRemoved(b"a", 0), stored(b"c")], 1.0)
    index = EventIndex()
    index.restore(number, payloads)
    assert (index.hashes(), index.next_number) == ({b"a", b"b"}, 1)


# The index of a subscriber that misses messages


class Subscriber:
    """Misses some messages, and asks for what it has missed as soon as it sees a gap."""

    def __init__(self, stream: EventStream) -> None:
        self.index = EventIndex()
        self.stream = stream
        self.num_replays = self.num_snapshots = 0

    def receive(self, number: int, payload: bytes) -> None:
        if not self.index.receive(number, payload):
            self.catch_up()
            assert self.index.receive(number, payload)

    def catch_up(self) -> None:
        replayed = self.stream.replay(self.index.next_number)
        if all([self.index.receive(*batch) for batch in replayed]):
            self.num_replays += bool(replayed)
        else:
            self.index.restore(*self.stream.snapshot(1.0))
            self.num_snapshots += 1


class StreamMachine(RuleBasedStateMachine):
    """Traffic of a pool with two groups, and of a tier. Subscribers of which one gets every
    message, and one misses many, know exactly what can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.log = KVEventLog()
        self.pool = BlockPool(8, num_groups=2, events=self.log)
        self.tier: set[bytes] = set()
        self.tier_events: list[KVEvent] = []
        self.stream = stream_of(kv_events_buffer=3)
        self.step = 0
        self.every, self.lossy = Subscriber(self.stream), Subscriber(self.stream)

    @rule(count=st.integers(0, 3))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_free:
            self.pool.free_blocks(self.pool.get_new_blocks(count))

    @rule(
        name=st.sampled_from([b"a", b"b", b"c"]),
        group=st.integers(0, 1),
        block_id=st.integers(1, 7),
    )
    def cache(self, name: bytes, group: int, block_id: int) -> None:
        if self.pool.block_hash(block_id) is None:
            self.step += 1
            if self.pool.get_cached_block(name, [group]) is None:
                parent = {b"b": b"a", b"c": b"b"}.get(name)
                self.log.stored(stored(name, parent, group=group), self.step)
            self.pool.cache_blocks([block_id], [name], group)

    @rule(block_ids=st.lists(st.integers(0, 7), max_size=4))
    def uncache(self, block_ids: list[int]) -> None:
        self.pool.uncache_blocks(block_ids)

    @precondition(lambda self: self.pool.num_free == 7)
    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache()

    @rule(name=st.sampled_from([b"a", b"d"]))
    def store_in_tier(self, name: bytes) -> None:
        self.tier.add(name)
        self.tier_events.append(stored(name, tokens=(), medium="CPU"))

    @rule(name=st.sampled_from([b"a", b"d"]))
    def remove_from_tier(self, name: bytes) -> None:
        self.tier.discard(name)
        self.tier_events.append(BlockRemoved(name, 0, "CPU"))

    @rule()
    def clear_tier(self) -> None:
        self.tier.clear()
        self.tier_events.append(AllBlocksCleared("CPU"))

    @rule(unanswered=st.integers(0, 2), is_lost=st.booleans())
    def publish(self, unanswered: int, is_lost: bool) -> None:
        events = self.log.take(self.step - unanswered) + self.tier_events
        self.tier_events = []
        for batch in self.stream.append(events, 1.0):
            self.every.receive(*batch)
            if not is_lost:
                self.lossy.receive(*batch)

    @invariant()
    def snapshot_is_what_a_subscriber_with_all_messages_knows(self) -> None:
        late = EventIndex()
        late.restore(*self.stream.snapshot(1.0))
        assert late.blocks == self.every.index.blocks
        assert late.next_number == self.every.index.next_number

    def teardown(self) -> None:
        self.publish(unanswered=0, is_lost=True)
        self.lossy.catch_up()
        assert self.every.num_snapshots == self.every.num_replays == 0
        for subscriber in (self.every, self.lossy):
            for group in (0, 1):
                assert subscriber.index.hashes(group) == {
                    name
                    for name in (b"a", b"b", b"c")
                    if self.pool.get_cached_block(name, [group]) is not None
                }
            assert subscriber.index.hashes(medium="CPU") == self.tier


@pytest.mark.req("MET-02")
def test_subscribers_know_exactly_what_is_stored_whatever_they_miss() -> None:
    run_state_machine_as_test(
        StreamMachine,
        settings=settings(max_examples=150, stateful_step_count=40, deadline=None),
    )


def cached_in(driver: Driver) -> set[tuple[int, bytes]]:
    """(group, hash) of everything that a lookup can find."""
    pool = driver.scheduler.kv_cache.pool
    return {
        (pool._group_of(block_id), block_hash)
        for block_id in range(driver.num_blocks)
        if (block_hash := pool.block_hash(block_id)) is not None
    }


class PublishingDriver(Driver):
    """Publishes after every plan and answer; the subscriber misses every `every`-th message."""

    def __init__(self, *specs: KVCacheSpec, every: int, **options: Any) -> None:
        self.stream = stream_of(*specs, kv_events_buffer=4)
        self.subscriber = Subscriber(self.stream)
        self.every = every
        super().__init__(*specs, cache={"enable_kv_cache_events": True}, **options)

    def collect(self) -> None:
        super().collect()
        for batch in self.stream.append(self.scheduler.take_kv_events(), self.now):
            if batch.number % self.every:
                self.subscriber.receive(*batch)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.sampled_from([(full(),), (full(), full()), (full(), window(8)), (full(), chunked(8))]),
    engines,
    events,
    st.integers(2, 5),
)
@pytest.mark.req("MET-02")
def test_index_equals_the_prefix_cache_after_random_runs(
    specs: tuple[KVCacheSpec, ...], engine: dict[str, Any], happenings: list[Any], every: int
) -> None:
    """On a scheduler that preempts, aborts and evicts."""
    engine["num_blocks"] += 14 * (len(specs) - 1)
    driver = PublishingDriver(*specs, every=every, max_model_len=40, **engine)
    play(driver, happenings)
    driver.run()
    driver.subscriber.catch_up()
    known = driver.subscriber.index
    for group in range(len(specs)):
        found = {block_hash for of_group, block_hash in cached_in(driver) if of_group == group}
        assert known.hashes(group) == found


def test_nothing_is_published_before_the_step_that_computes_it_is_answered() -> None:
    driver = Driver(block_size=4, cache={"enable_kv_cache_events": True}, max_steps_in_flight=2)
    stream, index = stream_of(full(4)), EventIndex()
    driver.add("r", [7] * 9, max_tokens=6)
    driver.plan()
    assert len(cached_in(driver)) == 2
    assert stream.append(driver.scheduler.take_kv_events(), 1.0) == []
    driver.answer()
    for batch in stream.append(driver.scheduler.take_kv_events(), 1.0):
        assert index.receive(*batch)
    assert len(index.hashes()) == 2


def test_copy_of_a_block_that_failed_is_not_published_before_its_own_step_is_answered() -> None:
    """The first block with the hash has logits that are not finite; the step that computes the
    second one is not answered yet."""
    driver = Driver(block_size=4, cache={"enable_kv_cache_events": True}, max_steps_in_flight=2)
    stream = stream_of(full(4))
    driver.add("bad", [7] * 9, max_tokens=2)
    driver.plan(nan_ids=["bad"])
    driver.add("good", [7] * 9, max_tokens=2, skip_reading_prefix_cache=True)
    driver.plan()
    driver.answer()
    assert len(cached_in(driver)) == 2
    assert stream.append(driver.scheduler.take_kv_events(), 1.0) == []
    driver.answer()
    assert len(stream.append(driver.scheduler.take_kv_events(), 1.0)) == 1


class TierConnector(AdversarialConnector):
    """Reports a block in host memory with each take."""

    def __init__(self) -> None:
        super().__init__()
        self.num_taken = 0

    def take_events(self) -> list[KVEvent]:
        self.num_taken += 1
        name = b"host %d" % self.num_taken
        return [BlockStored(name, None, EMPTY_INT32, 0, medium="CPU", locality="LOCAL")]


@pytest.mark.req("MET-02", "CON-02")
def test_events_of_tiers_are_in_the_same_sequence() -> None:
    driver = Driver(block_size=4, cache={"enable_kv_cache_events": True}, connector=TierConnector())
    stream, index = stream_of(full(4)), EventIndex()
    driver.add("r", [7] * 9, max_tokens=2)
    driver.run()
    for batch in stream.append(driver.scheduler.take_kv_events(), 1.0):
        assert index.receive(*batch)
    assert len(index.hashes()) == 2
    assert (("CPU", "LOCAL", 0), b"host 1") in index.blocks
    driver.restart_workers()
    for batch in stream.append(driver.scheduler.take_kv_events(), 1.0):
        assert index.receive(*batch)
    assert isinstance(index.batches[-1].events[0], ClearedBlocks)
    assert {block for _, block in index.blocks} == {b"host 1", b"host 2"}
