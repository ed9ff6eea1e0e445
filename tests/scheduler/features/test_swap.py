"""When requests are swapped out, and which. The connector is an `AdversarialConnector`."""

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from longshore.connectors.base import SwapSize
from longshore.protocol.errors import ConfigError
from longshore.protocol.requests import Tenant
from longshore.protocol.statistics import TransferOperation
from longshore.scheduler.features.fair_shares import FairShares
from longshore.scheduler.features.swap import REST_STEPS
from tests.harness.driver import Driver
from tests.harness.shared_drivers import connected
from tests.harness.tokens import prompt_of

CACHE = {"preempt_threshold": 0.8, "admit_threshold": 0.6}


def swapping(mode: str = "swap", **settings: Any) -> Driver:
    """20 usable blocks of four tokens, of which 16 may be held."""
    defaults: dict[str, Any] = {"num_blocks": 21, "max_tokens": 24}
    cache = CACHE | settings.pop("cache", {})
    return connected(preemption_mode=mode, cache=cache, **(defaults | settings))


def two_requests(driver: Driver) -> list[Any]:
    return [driver.add("one", prompt_of(17)), driver.add("two", prompt_of(18, 50))]


def until_swapped(driver: Driver, limit: int = 60) -> None:
    for _ in range(limit):
        driver.step()
        if driver.adversary.swaps_begun:
            return
    raise AssertionError("no request was swapped out")


@pytest.mark.req("CFG-02", "TIE-04")
def test_a_swap_begins_at_the_threshold_and_after_the_last_step_is_answered() -> None:
    """`Driver` checks that no unanswered plan computes the request that is copied."""
    driver = swapping(num_blocks=41, max_tokens=40)
    for name in range(3):
        driver.add(f"r{name}", prompt_of(17 + name, 20 * name))
    num_held = [0]
    while not driver.adversary.swaps_begun:
        num_held.append(40 - driver.num_free_blocks)
        driver.step()
    assert num_held[-4] <= 32 < num_held[-1] < 40, "soon above 80 % of 40 blocks, and never full"
    (swap,) = driver.adversary.swaps_begun
    assert swap.request_id == "r2", "the youngest"
    assert driver.scheduler.make_stats().num_preemptions == 1
    for _ in range(200):
        driver.step()
        driver.ranks.end_all()
    driver.check_idle()
    assert driver.scheduler.make_stats().num_swapped_in >= 1


@pytest.mark.req("TIE-03")
def test_the_blocks_of_a_swapped_request_are_free_when_its_copy_has_ended() -> None:
    driver = swapping()
    two_requests(driver)
    until_swapped(driver)
    (swap,) = driver.ranks.swaps
    driver.steps(3)
    assert swap.sources.isdisjoint(driver.scheduler.kv_cache.pool.free_block_ids())
    driver.ranks.end_swap(swap)
    free = set(driver.scheduler.kv_cache.pool.free_block_ids())
    assert len(swap.sources & free) >= len(swap.sources) - 1, "one may be in use again"


def test_blocks_that_are_being_copied_do_not_call_for_another_victim() -> None:
    driver = swapping(num_blocks=41, max_num_seqs=4, max_tokens=30)
    for name in range(4):
        driver.add(f"r{name}", prompt_of(17, 20 * name))
    until_swapped(driver)
    driver.steps(2)
    assert len(driver.adversary.swaps_begun) == 1
    driver.ranks.end_all()


@pytest.mark.req("TIE-08")
def test_the_lowest_priority_is_swapped_out() -> None:
    driver = swapping(policy="priority")
    driver.add("low", prompt_of(17), priority=5)
    driver.add("high", prompt_of(18, 50), priority=1)
    until_swapped(driver)
    assert driver.adversary.swaps_begun[0].request_id == "low"
    driver.ranks.end_all()


def test_a_tenant_does_not_count_the_row_of_a_victim_in_the_step_that_empties_it() -> None:
    driver = swapping(policy="fair")
    for name, prompt in (("one", prompt_of(17)), ("two", prompt_of(18, 50))):
        driver.add(name, prompt, tenant=Tenant(name))
    until_swapped(driver)
    (fair,) = (each for each in driver.scheduler._hooks.gate if isinstance(each, FairShares))
    accounts = fair.shares._accounts
    victim = driver.adversary.swaps_begun[0].request_id
    assert {name: each.num_rows for name, each in accounts.items()} == {
        name: int(name != victim) for name in ("one", "two")
    }
    driver.ranks.end_all()


def test_a_request_whose_prompt_is_scored_is_not_swapped() -> None:
    """Its KV could not be loaded again, because its prompt must be computed."""
    driver = swapping(max_num_batched_tokens=4, long_prefill_token_threshold=2)
    driver.add("one", prompt_of(17), max_tokens=40)
    driver.add("scored", prompt_of(30, 50), sampling={"prompt_logprobs": 0}, max_tokens=20)
    while driver.requests["scored"].must_compute_prompt:
        driver.step()
        assert not any(s.request_id == "scored" for s in driver.adversary.swaps_begun)
    driver.ranks.end_all()


def test_the_only_running_request_is_not_swapped() -> None:
    driver = swapping()
    driver.add("one", prompt_of(17), max_tokens=47)
    driver.run()
    assert not driver.adversary.swaps_begun


@pytest.mark.req("TIE-04")
def test_without_room_the_victim_runs_on_and_is_not_stopped_in_every_step() -> None:
    refusals: list[int] = []

    def no_room() -> bool:
        refusals.append(driver.scheduler.num_steps)
        return False

    driver = swapping(rules={"swaps": no_room})
    keys = two_requests(driver)
    driver.run()
    driver.check_complete(*keys)
    assert refusals
    assert all(b - a >= REST_STEPS for a, b in pairwise(refusals))
    assert driver.scheduler.make_stats().num_swaps_refused == len(refusals)


def test_a_request_that_ends_before_it_is_swapped_is_not_a_victim() -> None:
    driver = swapping()
    keys = two_requests(driver)
    while driver.scheduler._attached.swaps._victim is None:
        driver.step()
    driver.abort(keys[1])
    driver.run()
    assert not driver.adversary.swaps_begun
    driver.check_complete(keys[0])


def test_a_swapped_request_does_not_return_before_usage_is_low() -> None:
    """It would soon be swapped out again: a shortage closes the admission gates, and they open
    below 20 % of 40 blocks. Room alone, with `preempt_threshold` kept, is not enough."""
    driver = swapping(num_blocks=41, max_model_len=100, cache={"admit_threshold": 0.2})
    driver.add("long", prompt_of(40), max_tokens=40)
    driver.add("short", prompt_of(44, 70), max_tokens=12)
    driver.add("young", prompt_of(33, 35), max_tokens=20)
    until_swapped(driver)
    (swap,) = driver.adversary.swaps_begun
    assert swap.request_id == "young"
    num_needed = len(swap.block_ids[0]) + 1
    most_free = 0
    driver.ranks.end_all()
    while driver.requests["long"].row >= 0:
        assert driver.num_free_blocks > 8, "no other shortage closes the gates"
        most_free = max(most_free, driver.num_free_blocks)
        assert driver.requests["young"].row < 0
        assert not driver.transfers.loading
        driver.step()
        driver.ranks.end_all()
    assert most_free - num_needed > 8
    for _ in range(40):
        driver.step()
        driver.ranks.end_all()
    driver.check_idle()


# The mode auto


def measured(driver: Driver, store: float, load: float) -> None:
    """A rank has moved a megabyte in each direction, at these bytes per second."""
    for source, destination, rate in (("GPU", "CPU", store), ("CPU", "GPU", load)):
        driver.scheduler._transfers.statistics.add(
            TransferOperation(source, destination, 1, 10**6, 10**6 / rate)
        )


@pytest.mark.req("TIE-05", "ERR-09")
@pytest.mark.parametrize(("bandwidth", "is_swapped"), [(1e9, True), (1e3, False)])
def test_auto_swaps_if_the_measured_link_is_faster_than_the_measured_prefill(
    bandwidth: float, is_swapped: bool
) -> None:
    """A plan takes a second here, so 35 tokens prefill in one second."""
    driver = swapping("auto", max_steps_in_flight=1)
    driver.adversary.swap_size = lambda *of: SwapSize(10**6, 10**6)  # type: ignore[method-assign]
    keys = two_requests(driver)
    driver.plan()
    driver.now += 1.0
    driver.answer()
    assert driver.scheduler._attached.swaps.prefill_rate.tokens_per_s == pytest.approx(35)
    measured(driver, bandwidth, bandwidth)
    for _ in range(200):
        if driver.step() is None and not driver.unanswered:
            break
        driver.ranks.end_all()
    driver.check_complete(*keys)
    stats = driver.scheduler.make_stats()
    assert bool(stats.num_swapped_out) is is_swapped
    assert bool(stats.num_swaps_too_slow) is not is_swapped


@pytest.mark.req("TIE-05")
def test_auto_swaps_until_its_rates_are_known() -> None:
    driver = swapping("auto")
    two_requests(driver)
    until_swapped(driver)
    assert driver.scheduler._transfers.statistics.bandwidth("GPU", "CPU") is None
    driver.ranks.end_all()


# Settings


@pytest.mark.req("TIE-04", "ERR-10")
def test_recompute_is_the_default() -> None:
    driver = connected()
    assert driver.config.preemption_mode == "recompute"
    assert driver.scheduler._attached.swaps is None


def test_modes_that_cannot_work_are_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match="preemption_mode=swap needs a connector that can swap"):
        Driver(preemption_mode="swap")
    connector = connected().adversary
    connector.can_swap = False
    with pytest.raises(ConfigError, match="AdversarialConnector cannot keep the KV"):
        Driver(preemption_mode="auto", connector=connector)
    with pytest.raises(ConfigError, match="preempt_threshold=1 disables it"):
        swapping(cache={"preempt_threshold": 1.0})
    with pytest.raises(ConfigError, match="preemption_mode='drop' is unknown"):
        swapping("drop")


def test_a_mode_is_text_in_a_message() -> None:
    config = swapping("auto").config
    assert msgspec.json.decode(msgspec.json.encode(config), type=type(config)) == config
