"""What a gateway expects an engine to find is what the engine finds, for groups of any kinds."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, run_state_machine_as_test

from longshore.deploy.gateway.router.block_index import BlockIndex
from longshore.deploy.gateway.router.event_follower import EventFollower
from longshore.deploy.gateway.router.policies import PrefixAware, RoutedPrompt
from longshore.protocol.arrays import EMPTY_INT32
from longshore.protocol.events import (
    AllBlocksCleared,
    BlockStored,
    KVEvent,
    KVEventsConfig,
    sequence_frame,
)
from longshore.protocol.kv_cache_spec import ChunkedLocalAttentionSpec, KVCacheSpec, StateSpec
from longshore.protocol.transport.channel import Endpoint
from longshore.scheduler.kv_cache.block_hash import BlockHasher
from longshore.scheduler.kv_events.stream import EventStream
from tests.harness.kv_groups import chunked, config_of, full, latent, state, window
from tests.scheduler.kv_cache.test_hybrid_groups import HybridMachine, make_manager, request_of

NOWHERE = Endpoint("inproc://nowhere")
TOKENS_PER_HASH = 2
PROBES = [[7] * shared + own for shared in (0, 8, 16, 24, 40) for own in ([], [1] * 12, [2, 1] * 4)]


class FollowedMachine(HybridMachine):
    """An engine whose events a gateway follows."""

    @initialize(
        specs=st.lists(
            st.one_of(
                st.builds(full, st.sampled_from([4, 8])),
                st.builds(latent),
                st.builds(window, st.integers(2, 14), st.sampled_from([2, 4])),
                st.builds(chunked, st.integers(1, 14), st.sampled_from([2, 4])),
                st.builds(state, st.integers(1, 3)),
            ),
            min_size=1,
            max_size=4,
        ),
    )
    def begin(self, specs: list[KVCacheSpec]) -> None:
        states = [spec for spec in specs if isinstance(spec, StateSpec)]
        self.specs = specs = [spec for spec in specs if spec not in states] + states[:1]
        self.num_blocks = 1 + 14 * len(specs)
        self.manager = make_manager(*specs, num_blocks=self.num_blocks, enable_kv_cache_events=True)
        config = KVEventsConfig(endpoint=NOWHERE, replay_endpoint=NOWHERE)
        kv_cache = config_of(self.num_blocks, *specs)
        self.stream = EventStream(config, kv_cache, publisher_id=bytes(16))
        cleared: list[KVEvent] = [AllBlocksCleared()]
        self.stream.append(cleared, 0.0)
        index = BlockIndex(1, tokens_per_hash=TOKENS_PER_HASH, max_hashes=10_000)
        self.follower = EventFollower(index, 0, lambda request: None)
        self.policy = PrefixAware(index, BlockHasher(TOKENS_PER_HASH, b"seed"))
        self.follower.begin(0.0)
        self.follower.receive_answer((b"", sequence_frame(0), bytes(16)), 0.0)
        # A gateway knows a group from its first block on.
        self.publish([BlockStored(b"other", None, EMPTY_INT32, g) for g in range(len(specs))])

    def publish(self, events: Sequence[KVEvent]) -> None:
        for number, payload in self.stream.append(events, 0.0):
            self.follower.receive((b"", sequence_frame(number), payload), 0.0)
        while self.follower.has_work:
            self.follower.work(0.0)

    @invariant()
    def the_gateway_expects_what_the_engine_finds(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.publish(self.manager.take_events(self.step))
        assert self.follower.is_current
        is_exact = not any(isinstance(spec, ChunkedLocalAttentionSpec) for spec in self.specs)
        for tokens in PROBES:
            if tokens:
                found = self.manager.get_computed_blocks(request_of(tokens)).num_tokens
                decision = self.policy.choose(RoutedPrompt(tokens), [0], [0.0])
                assert decision.num_cached_tokens <= found
                assert decision.num_cached_tokens == found or not is_exact


@pytest.mark.timeout(600)
@pytest.mark.req("MET-02")
def test_a_gateway_expects_the_prefix_that_the_engine_finds() -> None:
    run_state_machine_as_test(
        FollowedMachine,
        settings=settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True),
    )
