"""The prompts that a gateway sends to a prefill engine are those whose KV that engine can offer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from longshore.connectors.base import FinishAction, RequestView
from longshore.protocol.arrays import Int32Array
from longshore.protocol.kv_cache_spec import KVCacheSpec, KVCapacity, StateSpec
from longshore.protocol.outputs import FinishReason
from tests.connectors.pull.test_scheduler_half import half_of
from tests.deploy.gateway.engines.test_split_requests import Split
from tests.harness.connector import AdversarialConnector
from tests.harness.driver import Driver
from tests.harness.kv_groups import chunked, full, latent, state, window

MAX_PROMPT = 60
NUM_BLOCKS = 120


class Offers(AdversarialConnector):
    """Asks a pull connector that leases nothing else which ended requests it offers.

    offered: by request id.
    """

    def __init__(self, specs: Sequence[KVCacheSpec], share: float) -> None:
        super().__init__()
        self.offered: dict[str, bool] = {}
        self._settings: dict[str, Any] = {"specs": specs, "num_blocks": NUM_BLOCKS}
        self._settings["max_leased_share"] = share
        self.num_leasable_blocks = half_of(1, **self._settings).num_leasable_blocks

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        asks = {"do_remote_decode": True}
        action = half_of(1, **self._settings).request_finished(
            replace(request, kv_transfer_params=asks), block_ids
        )
        assert request.finish_reason is FinishReason.LENGTH_CAPPED
        self.offered[request.request_id] = action.params is not None
        return super().request_finished(request, block_ids)


def is_sent(capacity: KVCapacity, prompt: list[int]) -> bool:
    """Whether a gateway has the prompt computed by a prefill engine of this capacity."""
    split = Split("prefill", "decode", capacity=capacity, disaggregation_min_tokens=1)
    live = split.submit(prompt)
    assert split.requests.skips.total() == (live.engine == 1) == split.requests.skips["too_large"]
    return live.engine == 0


GROUPS: dict[str, list[KVCacheSpec]] = {
    "full": [full()],
    "hybrid": [full(), state(5)],
    "windows": [full(), window(9), window(9)],
}


@pytest.mark.parametrize("kind", GROUPS)
def test_the_longest_prompt_that_is_sent_is_offered(kind: str) -> None:
    """Counted in tokens of one group, more would be sent."""
    connector = Offers(GROUPS[kind], 0.1)
    driver = Driver(*GROUPS[kind], num_blocks=NUM_BLOCKS, connector=connector)
    sent = 0
    for length in range(1, MAX_PROMPT + 1):
        prompt = [10 + length] * length
        driver.add(f"r{length}", prompt, max_tokens=1)
        driver.run()
        if is_sent(driver.scheduler.capacity, prompt):
            sent = length
            assert connector.offered[f"r{length}"]
    num_leasable_tokens = connector.num_leasable_blocks * 4
    assert (sent == num_leasable_tokens) is (kind == "full")
    assert connector.offered[f"r{num_leasable_tokens}"] is (kind == "full")


specs = st.lists(
    st.one_of(
        st.builds(full, st.sampled_from([2, 4, 8])),
        st.builds(latent, st.sampled_from([4, 8])),
        st.builds(window, st.integers(1, 20), st.sampled_from([2, 4, 8])),
        st.builds(chunked, st.integers(1, 20), st.sampled_from([2, 4, 8])),
    ),
    min_size=1,
    max_size=4,
)
with_state = st.builds(
    lambda others, num_pages: [*others, state(num_pages, 2)], specs, st.integers(1, 4)
)


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(specs, with_state),
    st.floats(0.05, 0.5),
    st.lists(st.tuples(st.integers(1, MAX_PROMPT), st.integers(0, 2)), min_size=1, max_size=5),
    st.fixed_dictionaries(
        {
            "max_steps_in_flight": st.integers(1, 2),
            "max_num_batched_tokens": st.integers(4, 64),
            "num_lookahead_tokens": st.sampled_from([0, 0, 3]),
            "enable_prefix_caching": st.booleans(),
        }
    ),
)
def test_whatever_groups_there_are_a_prompt_that_is_sent_is_offered(
    groups: list[KVCacheSpec],
    share: float,
    prompts: list[tuple[int, int]],
    engine: dict[str, Any],
) -> None:
    """Prompts of the same kind share their prefixes. A prompt that needs all blocks of its length
    is offered only if it is sent."""
    if any(isinstance(spec, StateSpec) for spec in groups):
        engine |= {"num_lookahead_tokens": 0}
    connector = Offers(groups, share)
    cache = {"hash_block_size": 2}
    driver = Driver(
        *groups,
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_PROMPT + 4,
        connector=connector,
        cache=cache,
        **engine,
    )
    capacity = driver.scheduler.capacity
    keeps_all = not driver.scheduler.kv_cache.frees_skipped
    for number, (length, kind) in enumerate(prompts):
        prompt = [10 + kind] * length
        driver.add(f"r{number}", prompt, max_tokens=1)
        driver.run()
        sent, offered = is_sent(capacity, prompt), connector.offered[f"r{number}"]
        assert offered or not sent
        assert sent or not (offered and keeps_all)
