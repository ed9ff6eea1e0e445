"""The smallest pool that a model with states starts with is enough for its longest request."""

import pytest

from longshore.protocol.kv_cache_spec import KVCacheSpec, LongestRequest
from tests.harness.driver import Driver
from tests.harness.kv_groups import full, state
from tests.harness.tokens import expected_output, prompt_of


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3, 5])
@pytest.mark.parametrize("budget", [4, 7, 64])
@pytest.mark.parametrize("specs", [(state(),), (state(), full(4))], ids=["alone", "hybrid"])
def test_a_prompt_of_many_blocks_is_computed_on_the_fewest_blocks(
    specs: tuple[KVCacheSpec, ...], steps_in_flight: int, budget: int
) -> None:
    """All steps write to the same state."""
    longest = LongestRequest(100, steps_in_flight * budget, steps_in_flight)
    driver = Driver(
        *specs,
        max_model_len=100,
        num_blocks=1 + sum(spec.max_blocks(longest) for spec in specs),
        max_num_batched_tokens=budget,
        max_steps_in_flight=steps_in_flight,
        feed_back_tokens=steps_in_flight > 2,  # as many pipeline stages
        enable_prefix_caching=False,
    )
    key = driver.add("r", prompt_of(90), max_tokens=9)
    for _ in range(200):
        while driver.plan() is not None:
            pass
        if key in driver.finished:
            break
        driver.answer()
    assert driver.received[key] == expected_output("r", 9)
    assert driver.scheduler.make_stats().num_preemptions == 0
