"""A gateway that follows an engine's KV events: lost, repeated and reordered ones, and restarts."""

import uuid
from collections.abc import Iterable, Sequence
from typing import Final

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from longshore.deploy.gateway.router.block_index import BlockIndex, PromptHashes
from longshore.deploy.gateway.router.event_follower import (
    ANSWER_TIMEOUT_S,
    MAX_HELD,
    PROBE_AFTER_S,
    EventFollower,
)
from longshore.protocol.arrays import EMPTY_INT32
from longshore.protocol.events import (
    END_OF_REPLAY,
    SNAPSHOT_REQUEST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventsConfig,
    sequence_frame,
)
from longshore.protocol.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from longshore.protocol.transport.channel import Endpoint
from longshore.scheduler.kv_events.stream import EventStream

BLOCK_SIZE: Final = 4
SPEC: Final = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype_bytes=4)
KV_CACHE: Final = KVCacheConfig(10, (KVCacheGroup(("layer",), SPEC),), dtype="float32")
NOWHERE: Final = Endpoint("inproc://nowhere")
HASHES: Final = [bytes([number]) * 32 for number in range(1, 9)]

Frames = tuple[bytes, ...]


def stored(number: int, medium: str = "GPU", locality: str | None = None) -> BlockStored:
    tokens = np.full(BLOCK_SIZE, number, np.int32) if medium == "GPU" else EMPTY_INT32
    parent = HASHES[number - 1] if number else None
    return BlockStored(HASHES[number], parent, tokens, 0, None, medium, locality)  # type: ignore[arg-type]


class Publisher:
    """What an engine sends, in the order in which it sends it."""

    def __init__(self, num_buffered: int = 1000) -> None:
        config = KVEventsConfig(
            endpoint=NOWHERE, replay_endpoint=NOWHERE, kv_events_buffer=num_buffered
        )
        self.stream = EventStream(config, KV_CACHE, publisher_id=uuid.uuid4().bytes)
        self.held: set[tuple[str, bytes]] = set()
        self.first = self.publish(AllBlocksCleared())

    def publish(self, *events: KVEvent) -> list[Frames]:
        for event in events:
            match event:
                case BlockStored():
                    self.held.add((event.medium, event.block_hash))
                case BlockRemoved():
                    self.held.discard((event.medium, event.block_hash))
                case AllBlocksCleared(medium):
                    self.held = {each for each in self.held if each[0] != medium}
        batches = self.stream.append(events, 0.0)
        return [(b"kv-events", sequence_frame(number), payload) for number, payload in batches]

    def answer(self, request: bytes) -> list[Frames]:
        if request == SNAPSHOT_REQUEST:
            number, parts = self.stream.snapshot(0.0)
            return [(b"", sequence_frame(number), self.stream.publisher_id, *parts)]
        replayed = self.stream.replay(int.from_bytes(request, "big"))
        return [
            *((b"", b"kv-events", sequence_frame(number), payload) for number, payload in replayed),
            (b"", b"", END_OF_REPLAY, b""),
        ]


class Gateway:
    """A follower, its index, and the requests that it has sent."""

    def __init__(self) -> None:
        self.index = BlockIndex(1, tokens_per_hash=BLOCK_SIZE, max_hashes=1000)
        self.requests: list[bytes] = []
        self.follower = EventFollower(self.index, 0, self.requests.append)
        self.now_s = 0.0

    def receive(self, messages: Iterable[Frames]) -> None:
        for frames in messages:
            self.follower.receive(frames, self.now_s)
        self.work()

    def work(self) -> None:
        while self.follower.has_work:
            self.follower.work(self.now_s)

    def ask(self, publisher: Publisher) -> None:
        """Exchange requests and answers until none is left."""
        while self.requests:
            for frames in publisher.answer(self.requests.pop(0)):
                self.follower.receive_answer(frames, self.now_s)
            self.work()

    def follow(self, publisher: Publisher) -> None:
        self.follower.begin(self.now_s)
        self.ask(publisher)

    def known(self) -> set[bytes]:
        return {each for each in HASHES if self.knows([each])}

    def knows(self, hashes: Sequence[bytes]) -> bool:
        chain = PromptHashes(
            len(hashes), lambda made, count: made.extend(hashes[len(made) : count])
        )
        return self.index.match(chain, [0]) == {0: BLOCK_SIZE * len(hashes)}


def following() -> tuple[Publisher, Gateway]:
    publisher, gateway = Publisher(), Gateway()
    gateway.follow(publisher)
    return publisher, gateway


def held_by(publisher: Publisher) -> set[bytes]:
    return {block_hash for _, block_hash in publisher.held}


def test_a_follower_begins_with_a_snapshot_and_goes_on_with_events() -> None:
    publisher = Publisher()
    early = publisher.publish(stored(0), stored(1))
    gateway = Gateway()
    gateway.follower.begin(0.0)
    assert gateway.requests == [SNAPSHOT_REQUEST]
    assert not gateway.follower.is_current
    gateway.receive(early)  # which the snapshot has, too
    gateway.ask(publisher)
    assert gateway.follower.is_current
    assert gateway.known() == set(HASHES[:2])
    gateway.receive(publisher.publish(stored(2), BlockRemoved(HASHES[0], 0)))
    assert gateway.known() == set(HASHES[1:3])
    assert (gateway.follower.num_gaps, gateway.follower.num_snapshots) == (0, 1)


def test_a_gap_is_closed_by_a_replay_and_knowledge_stays_in_use_meanwhile() -> None:
    publisher, gateway = following()
    gateway.receive(publisher.publish(stored(0)))
    publisher.publish(stored(1))  # lost
    gateway.receive(publisher.publish(stored(2)))
    assert gateway.requests == [sequence_frame(2)]
    assert gateway.known() == set(HASHES[:1])
    assert not gateway.follower.is_current
    gateway.receive(publisher.publish(stored(3)))
    gateway.ask(publisher)
    assert gateway.known() == set(HASHES[:4])
    assert gateway.follower.is_current
    assert (gateway.follower.num_gaps, gateway.follower.num_snapshots) == (1, 1)


def test_a_gap_that_the_buffer_cannot_close_ends_with_a_snapshot() -> None:
    publisher, gateway = Publisher(num_buffered=2), Gateway()
    gateway.follow(publisher)
    for number in range(4):
        publisher.publish(stored(number))  # lost
    gateway.receive(publisher.publish(BlockRemoved(HASHES[0], 0)))
    gateway.ask(publisher)
    assert gateway.known() == set(HASHES[1:4])
    assert gateway.follower.num_snapshots == 2


def test_batches_that_are_repeated_or_come_in_another_order_change_nothing() -> None:
    publisher, gateway = following()
    messages = [*publisher.publish(stored(0)), *publisher.publish(BlockRemoved(HASHES[0], 0))]
    messages += publisher.publish(stored(1))
    gateway.receive([messages[0], messages[0]])
    gateway.receive([messages[2], messages[1], messages[0]])
    gateway.ask(publisher)
    assert gateway.known() == {HASHES[1]}
    assert gateway.follower.is_current


def test_the_last_batch_is_missed_if_nothing_follows_it() -> None:
    publisher, gateway = following()
    publisher.publish(stored(0))  # lost
    assert gateway.follower.check(PROBE_AFTER_S / 2)
    assert gateway.requests == []
    gateway.now_s = PROBE_AFTER_S
    assert gateway.follower.check(gateway.now_s)
    gateway.ask(publisher)
    assert gateway.known() == {HASHES[0]}
    assert gateway.follower.check(gateway.now_s)
    assert gateway.requests == []  # it has just heard of the engine


@pytest.mark.parametrize("num_lost", [0, 1])
def test_another_start_of_the_engine_voids_what_was_known(num_lost: int) -> None:
    publisher, gateway = following()
    gateway.receive(publisher.publish(stored(0), stored(1)))
    another = Publisher()
    messages = [*another.first, *another.publish(stored(5))]
    gateway.receive(messages[num_lost:])
    assert gateway.known() == set()
    gateway.ask(another)
    assert gateway.known() == {HASHES[5]}
    gateway.receive(another.publish(stored(6)))
    assert gateway.known() == set(HASHES[5:7])


def test_a_late_batch_of_the_former_start_is_no_knowledge_of_the_next() -> None:
    publisher, gateway = following()
    late = publisher.publish(stored(0))
    another = Publisher()
    another.publish(stored(5))
    gateway.follow(another)
    gateway.receive(late)
    gateway.ask(another)
    assert gateway.known() == {HASHES[5]}
    assert gateway.follower.is_current


def test_nothing_is_known_of_a_lost_engine_until_it_is_ready_again() -> None:
    publisher, gateway = following()
    gateway.receive(publisher.publish(stored(0)))
    gateway.follower.end()
    assert gateway.known() == set()
    assert not gateway.follower.is_current
    gateway.receive(publisher.publish(stored(1)))
    assert gateway.known() == set()
    assert gateway.follower.check(100.0)
    assert gateway.requests == []
    gateway.follow(publisher)
    assert gateway.known() == set(HASHES[:2])


def test_new_workers_of_the_engine_begin_with_an_empty_cache() -> None:
    publisher, gateway = following()
    gateway.receive(publisher.publish(stored(0), stored(1, "CPU")))
    gateway.receive(publisher.publish(AllBlocksCleared()))
    assert gateway.known() == {HASHES[1]}  # host memory is not cleared


def test_a_block_counts_as_long_as_some_medium_of_the_engine_has_it() -> None:
    publisher, gateway = following()
    gateway.receive(publisher.publish(stored(0), stored(0, "CPU"), stored(0, "DISK", "LOCAL")))
    for medium in ("GPU", "CPU"):
        gateway.receive(publisher.publish(BlockRemoved(HASHES[0], 0, medium)))  # type: ignore[arg-type]
        assert gateway.known() == {HASHES[0]}
    gateway.receive(publisher.publish(BlockRemoved(HASHES[0], 0, "DISK", "LOCAL")))
    assert gateway.known() == set()


def test_a_store_that_all_engines_share_is_no_reason_to_choose_one() -> None:
    publisher, gateway = following()
    gateway.receive(publisher.publish(stored(0), stored(1, "STORAGE", "REMOTE")))
    assert gateway.known() == {HASHES[0]}
    gateway.receive(publisher.publish(BlockRemoved(HASHES[1], 0, "STORAGE", "REMOTE")))
    assert gateway.follower.is_current


@pytest.mark.parametrize(
    "payload", [b"", b"no msgpack", msgspec.msgpack.encode([0.0, [[1]], 0, b""])]
)
def test_a_malformed_batch_is_counted_and_a_snapshot_follows_later(payload: bytes) -> None:
    publisher, gateway = following()
    gateway.receive(publisher.publish(stored(0)))
    gateway.receive([(b"kv-events", sequence_frame(2), payload)])
    assert gateway.follower.num_bad == 1
    assert gateway.requests == []
    assert not gateway.follower.is_current
    publisher.publish(stored(1))
    assert gateway.follower.check(0.5)
    gateway.ask(publisher)
    assert gateway.known() == set(HASHES[:2])


@pytest.mark.parametrize("frames", [(), (b"",), (b"x", b"", b""), (b"", b"y", b"z", b"")])
def test_malformed_frames_are_counted(frames: Frames) -> None:
    publisher, gateway = following()
    gateway.follower.receive(frames[1:], 0.0)
    gateway.follower.receive_answer(frames, 0.0)
    assert gateway.follower.num_bad == 2
    gateway.receive(publisher.publish(stored(0)))
    assert gateway.known() == {HASHES[0]}


def test_an_answer_that_does_not_come_is_noticed() -> None:
    _, gateway = following()
    gateway.follower.begin(10.0)
    assert gateway.follower.check(10.0 + ANSWER_TIMEOUT_S - 1)
    assert not gateway.follower.check(10.0 + ANSWER_TIMEOUT_S)


def test_too_many_missing_batches_are_restored_from_a_snapshot() -> None:
    publisher, gateway = Publisher(num_buffered=10 * MAX_HELD), Gateway()
    gateway.follow(publisher)
    for _ in range(MAX_HELD // 2 + 1):  # lost
        publisher.publish(stored(0), BlockRemoved(HASHES[0], 0))
    gateway.receive(publisher.publish(stored(1)))
    assert gateway.requests == [SNAPSHOT_REQUEST]
    gateway.ask(publisher)
    assert gateway.known() == {HASHES[1]}


def test_what_is_held_back_is_bounded() -> None:
    publisher, gateway = following()
    publisher.publish(stored(0))
    gateway.receive(publisher.publish(stored(1)))
    assert gateway.requests == [sequence_frame(1)]
    for _ in range(MAX_HELD):
        gateway.receive(publisher.publish(stored(2), BlockRemoved(HASHES[2], 0)))
    gateway.ask(publisher)
    while not gateway.follower.is_current:
        assert gateway.follower.check(gateway.now_s)
        gateway.ask(publisher)
    assert gateway.known() == set(HASHES[:2])


class BadNetwork(RuleBasedStateMachine):
    """Published batches are lost, repeated or late; answers are late; the engine restarts."""

    @initialize(num_buffered=st.integers(1, 8))
    def start(self, num_buffered: int) -> None:
        self.num_buffered = num_buffered
        self.publisher, self.gateway = Publisher(num_buffered), Gateway()
        self.gateway.follower.begin(0.0)
        self.messages: list[Frames] = list(self.publisher.first)
        self.answers: list[Frames] = []

    @rule(numbers=st.lists(st.integers(0, 7), min_size=1, max_size=4), medium=st.booleans())
    def store(self, numbers: list[int], medium: bool) -> None:
        kind = "GPU" if medium else "CPU"
        self.messages += self.publisher.publish(*(stored(each, kind) for each in numbers))

    @rule(numbers=st.lists(st.integers(0, 7), min_size=1, max_size=4))
    def remove(self, numbers: list[int]) -> None:
        self.messages += self.publisher.publish(*(BlockRemoved(HASHES[n], 0) for n in numbers))

    @rule()
    def new_workers(self) -> None:
        self.messages += self.publisher.publish(AllBlocksCleared())

    @rule(place=st.integers(0, 3), copies=st.integers(0, 2))
    def deliver(self, place: int, copies: int) -> None:
        """A message, not always the first; with no copy it is lost."""
        if place < len(self.messages):
            self.gateway.receive([self.messages.pop(place)] * copies)

    @rule()
    def ask(self) -> None:
        if self.gateway.requests:
            self.answers += self.publisher.answer(self.gateway.requests.pop(0))

    @rule(count=st.integers(1, 4))
    def answer(self, count: int) -> None:
        for _ in range(min(count, len(self.answers))):
            self.gateway.follower.receive_answer(self.answers.pop(0), self.gateway.now_s)
        self.gateway.work()

    @rule(seen=st.booleans())
    def restart(self, seen: bool) -> None:
        """The gateway notices it on its connection to the engine, or by the events."""
        self.publisher = Publisher(self.num_buffered)
        self.messages += self.publisher.first
        self.answers.clear()
        if seen or self.gateway.requests:
            self.gateway.requests.clear()
            self.gateway.follower.end()
            self.gateway.follower.begin(self.gateway.now_s)

    def teardown(self) -> None:
        """Once all is quiet, the gateway knows what the engine has."""
        if not hasattr(self, "gateway"):
            return
        follower, gateway = self.gateway.follower, self.gateway
        for frames in self.answers:
            follower.receive_answer(frames, gateway.now_s)
        gateway.receive([*self.messages, *self.publisher.publish(stored(0), stored(1))])
        for _ in range(8):
            gateway.ask(self.publisher)
            gateway.now_s += PROBE_AFTER_S
            if not follower.check(gateway.now_s):
                follower.begin(gateway.now_s)
        gateway.ask(self.publisher)
        assert follower.is_current
        assert gateway.known() == held_by(self.publisher)
        assert follower.num_bad == 0


TestBadNetwork = BadNetwork.TestCase
TestBadNetwork.settings = settings(max_examples=100, stateful_step_count=40)


def test_an_engine_whose_blocks_wait_for_a_slot_is_known_again_from_a_snapshot() -> None:
    publisher, gateway = following()
    num_cleared = 0
    while gateway.index.has_slot(0):
        gateway.receive(publisher.publish(stored(0), AllBlocksCleared(), stored(1)))
        num_cleared += 1
    assert num_cleared > 2
    assert gateway.known() == set()
    assert not gateway.follower.is_current
    assert gateway.follower.check(0.0)
    gateway.ask(publisher)
    assert not gateway.follower.has_work  # the snapshot waits, too
    while gateway.index.collect(1):
        pass
    gateway.work()
    assert gateway.known() == {HASHES[1]}
    gateway.receive(publisher.publish(stored(2)))
    assert gateway.known() == set(HASHES[1:3])
