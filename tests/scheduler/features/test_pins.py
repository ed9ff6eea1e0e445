"""Pins: what is kept between the turns of a job, for how long, and what ends it."""

import gc
import weakref
from typing import Any

import pytest

from longshore.connectors.base import (
    BlockHolds,
    FinishAction,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    SwapSize,
)
from longshore.protocol.arrays import Int32Array
from longshore.protocol.outputs import FinishReason
from longshore.protocol.statistics import TransferOperation
from longshore.scheduler.queue.policies import POLICIES
from longshore.scheduler.step.planner import PauseState
from tests.harness.clients import RequestKey
from tests.harness.driver import Driver
from tests.harness.shared_drivers import connected
from tests.harness.tokens import prompt_of


def continuum(**settings: Any) -> Driver:
    """Blocks of four tokens, without gates; each plan and each request takes a second."""
    defaults: dict[str, Any] = {
        "cache": {"watermark": 0.0, "preempt_threshold": 1.0},
        "max_tokens": 1,
    }
    return Driver(policy="continuum", **(defaults | settings))


def turn(
    driver: Driver, job: str, prompt: list[int], *, last: bool = False, runs: bool = True, **f: Any
) -> RequestKey:
    """A turn of one output token, until it has ended."""
    name = f"{job}{len(driver.names)}"
    key = driver.add(name, prompt, job_id=job, is_last_step=last, **f)
    if runs:
        driver.run()
    return key


def keep(driver: Driver) -> None:
    """No pin expires during the test."""
    for pin in driver.scheduler.pins or ():
        pin.expires_at_s += 1000.0
    rank_anew(driver)


def rank_anew(driver: Driver) -> None:
    """The test has changed pins."""
    assert driver.scheduler.pins is not None
    for job_id, pin in driver.scheduler.pins._pins.items():
        driver.scheduler.pins._rank(job_id, pin)


def pinned(driver: Driver) -> list[str]:
    assert driver.scheduler.pins is not None
    return list(driver.scheduler.pins.job_ids)


def num_held(driver: Driver) -> int:
    return driver.num_blocks - 1 - driver.num_free_blocks


@pytest.mark.req("CTM-02", "CTM-08")
def test_the_full_blocks_of_a_turn_are_kept_and_its_request_ends() -> None:
    driver = continuum()
    key = turn(driver, "job", prompt_of(16))
    assert driver.reason(key) is FinishReason.LENGTH_CAPPED
    assert not driver.scheduler.has_unfinished_requests()
    assert pinned(driver) == ["job"]
    assert num_held(driver) == 4  # the KV of 16 of 17 tokens
    stats = driver.scheduler.make_stats()
    assert (stats.num_pins, stats.num_pinned_blocks) == (1, 4)
    report = driver.scheduler.make_report(driver.now, "engine")
    assert (report.num_pins, report.num_pinned_blocks) == (1, 4)


def test_a_turn_that_is_not_stored_leaves_no_pin() -> None:
    driver = continuum()
    turn(driver, "job", prompt_of(16), no_store=True)
    assert pinned(driver) == []
    assert num_held(driver) == 0


@pytest.mark.req("CTM-02")
def test_a_last_turn_a_request_without_job_and_an_aborted_one_leave_no_pin() -> None:
    driver = continuum()
    turn(driver, "job", prompt_of(16), last=True)
    driver.add("no job", prompt_of(16, 20), is_last_step=False)
    driver.run()
    key = turn(driver, "aborted", prompt_of(16, 40), runs=False, max_tokens=8)
    driver.step()
    driver.abort(key)
    assert pinned(driver) == []
    assert num_held(driver) == 0


@pytest.mark.req("CTM-01")
@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"continuum"}))
def test_other_policies_keep_nothing(policy: str) -> None:
    driver = Driver(policy=policy)
    turn(driver, "job", prompt_of(16))
    assert driver.scheduler.pins is None
    assert num_held(driver) == 0


@pytest.mark.req("CTM-01", "ERR-35")
def test_without_a_prefix_cache_or_with_a_limit_of_zero_nothing_is_kept() -> None:
    assert continuum(max_pin_s=0.0).scheduler.pins is None
    assert continuum(enable_prefix_caching=False).scheduler.pins is None


@pytest.mark.req("CTM-05")
def test_a_job_has_one_pin_and_shared_blocks_stay() -> None:
    driver = continuum()
    turn(driver, "one", prompt_of(16))
    turn(driver, "two", [*prompt_of(8), *prompt_of(8, 50)])
    assert pinned(driver) == ["one", "two"]
    assert num_held(driver) == 6  # two blocks are shared
    turn(driver, "one", prompt_of(20, 60))  # it has nothing in common with the first turn
    assert pinned(driver) == ["two", "one"]
    assert num_held(driver) == 4 + 5
    driver.scheduler.check()


@pytest.mark.req("CTM-05")
def test_the_pin_of_a_turn_replaces_that_of_one_which_ran_beside_it() -> None:
    """Neither was admitted while the job had a pin, so none has been taken over."""
    driver = continuum()
    turn(driver, "job", prompt_of(16), runs=False, max_tokens=2)
    turn(driver, "job", prompt_of(16, 60), runs=False, max_tokens=6)
    driver.steps(3)
    assert num_held(driver) > 4, "the second one still runs"
    assert pinned(driver) == ["job"]
    driver.run()
    assert pinned(driver) == ["job"]
    assert num_held(driver) == 5, "the KV of the second turn's 21 tokens"
    driver.scheduler.check()


@pytest.mark.req("CTM-06", "CTM-07", "CTM-09", "ERR-36")
def test_a_pin_ends_with_its_time_to_live_before_blocks_are_allocated() -> None:
    driver = continuum(num_blocks=9, max_model_len=32)
    turn(driver, "job", prompt_of(16))
    (pin,) = driver.scheduler.pins or ()
    ended_at = driver.now
    assert pin.expires_at_s - 10.0 <= ended_at
    driver.now = pin.expires_at_s - 2.0
    driver.plan()
    assert pinned(driver) == ["job"]
    driver.plan()
    assert driver.now == pin.expires_at_s
    assert pinned(driver) == []
    assert num_held(driver) == 0
    assert driver.scheduler.make_stats().num_pins_expired == 1


def test_a_pin_lasts_while_the_next_turn_waits() -> None:
    driver = continuum(max_num_seqs=1)
    turn(driver, "job", prompt_of(16))
    driver.add("runs", prompt_of(16, 50), max_tokens=40)
    driver.step()
    turn(driver, "job", prompt_of(16), runs=False)
    driver.steps(30)
    assert pinned(driver) == ["job"]
    driver.run()
    assert driver.scheduler.make_stats().num_pin_hits == 1


@pytest.mark.req("CTM-12")
def test_the_next_turn_takes_over_the_pin() -> None:
    driver = continuum()
    key = turn(driver, "job", prompt_of(16))
    conversation = [*prompt_of(16), *driver.received[key], 90]
    turn(driver, "job", conversation, runs=False, max_tokens=8)
    assert pinned(driver) == ["job"]
    driver.step()
    assert pinned(driver) == []
    assert driver.requests[driver.running[0]].num_cached_tokens == 16
    driver.run()
    driver.scheduler.check()


@pytest.mark.req("CTM-12")
def test_abort_reset_disconnection_shutdown_and_a_new_epoch_end_pins() -> None:
    driver = continuum()

    def abort() -> None:
        driver.abort(turn(driver, "job", prompt_of(16), runs=False))

    for end in (
        abort,
        lambda: driver.scheduler.reset_prefix_cache(driver.now),
        lambda: driver.scheduler.abort_client(0, driver.now),
        driver.restart_workers,
        lambda: turn(driver, "job", prompt_of(16), last=True),
        driver.scheduler.shutdown,
    ):
        turn(driver, "job", prompt_of(16))
        assert pinned(driver) == ["job"]
        end()
        assert pinned(driver) == []
        assert num_held(driver) == 0
        driver.scheduler.check()


class HoldsTheEnded(SchedulerConnector):
    """Holds the blocks of ended requests for ever, as a store of them does for some time."""

    chunk_blocks = 0

    def bind_blocks(self, holds: BlockHolds) -> None:
        self._holds = holds

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        return Matched(0)

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        self._holds.hold(block_ids[0].tolist())
        return FinishAction()


def test_blocks_of_a_turn_are_its_own_although_the_connector_holds_them_at_its_end() -> None:
    driver = continuum(connector=HoldsTheEnded())
    turn(driver, "job", prompt_of(16))
    (pin,) = driver.scheduler.pins or ()
    assert pin.num_own_blocks == 4


@pytest.mark.req("CTM-11")
def test_pins_yield_before_a_running_request_is_preempted_the_least_valuable_first() -> None:
    driver = continuum(num_blocks=13, max_model_len=48)
    turn(driver, "long", prompt_of(24))  # 6 blocks
    turn(driver, "short", prompt_of(16, 50))  # 4
    keep(driver)
    pins = list(driver.scheduler.pins or ())
    assert [pin.num_own_blocks for pin in pins] == [6, 4]
    pins[0].value *= 2
    rank_anew(driver)
    driver.add("grows", prompt_of(5, 70), max_tokens=6)
    driver.steps(5)
    assert pinned(driver) == ["long"]
    driver.run()
    stats = driver.scheduler.make_stats()
    assert (stats.num_preemptions, stats.num_pins_yielded) == (0, 1)


@pytest.mark.req("CTM-11")
def test_a_pool_full_of_pins_stops_no_request() -> None:
    driver = continuum(num_blocks=13, max_model_len=48)
    for index in range(3):
        turn(driver, f"job{index}", prompt_of(16, 20 * index))
        keep(driver)
    assert num_held(driver) == 12
    key = driver.add("large", prompt_of(38, 30))
    driver.run(limit=20)
    driver.check_complete(key)


@pytest.mark.req("CTM-11")
def test_while_others_run_only_pins_of_later_jobs_yield_to_an_admission() -> None:
    driver = continuum(num_blocks=13, max_model_len=48)
    turn(driver, "first", prompt_of(16))
    keep(driver)
    driver.add("runs", prompt_of(13, 40), max_tokens=3)
    driver.step()
    turn(driver, "new", prompt_of(20, 60), runs=False)  # 5 or 6 blocks, and 4 are free
    driver.step()
    assert (pinned(driver), driver.running) == (["first"], ["runs"])
    driver.run()
    assert pinned(driver) == ["first", "new"]
    keep(driver)

    driver.add("runs again", prompt_of(8, 40), max_tokens=3)
    driver.step()
    turn(driver, "first", [*prompt_of(16), *prompt_of(8, 90)], runs=False, max_tokens=5)
    driver.step()  # 2 blocks, and none is free: the pin of the later job yields
    assert pinned(driver) == []
    assert driver.running == ["runs again", "first4"]
    driver.run()
    assert driver.scheduler.make_stats().num_pins_yielded == 1


@pytest.mark.req("CTM-10")
def test_a_turn_that_was_admitted_on_the_pin_of_its_job_is_preempted_last() -> None:
    """Two turns of different jobs run; the older one would not be the victim otherwise."""
    driver = continuum(num_blocks=13, max_model_len=48)
    key = turn(driver, "job", prompt_of(12))
    driver.add("older", prompt_of(16, 50), max_tokens=20)
    driver.step()
    conversation = [*prompt_of(12), *driver.received[key], 90, 91, 92, 93]
    turn(driver, "job", conversation, runs=False, max_tokens=20)
    while not driver.scheduler.make_stats().num_preemptions:
        driver.step()
    assert driver.running == ["job2"]
    driver.run()
    assert driver.requests["older"].num_preemptions == 1
    assert driver.requests["job2"].num_preemptions == 0
    driver.scheduler.check()


@pytest.mark.req("CTM-10")
def test_the_policy_knows_which_jobs_have_a_pin() -> None:
    driver = continuum()
    for name, job in (("of b", "b"), ("of c", "c")):
        driver.add(name, prompt_of(5, 50), job_id=job, is_last_step=False, max_tokens=30)
    driver.add("third", prompt_of(5, 60), max_tokens=30)
    driver.step()
    driver.steps(2)
    turn(driver, "c", prompt_of(16, 70), runs=False, max_tokens=1)  # a second turn of c ends
    driver.steps(2)
    assert pinned(driver) == ["c"]
    policy = driver.scheduler._planner.policy
    running = driver.scheduler.running.requests_in_order()
    assert [request.request_id for request in running] == ["of b", "of c", "third"]
    assert policy.pick_victim(running[:2]) == 0


@pytest.mark.req("ERR-36")
def test_a_send_and_a_pin_both_hold_the_blocks() -> None:
    driver = connected(policy="continuum", rules={"depart": lambda request: FinishAction(True)})
    turn(driver, "job", prompt_of(16), runs=False)
    driver.run_until_idle()
    (pin,) = driver.scheduler.pins or ()
    references = driver.scheduler.kv_cache.pool.references()
    assert references[pin.blocks.block_ids[0]].tolist() == [2] * len(pin.blocks.block_ids[0])
    driver.scheduler.reset_prefix_cache()
    assert pinned(driver) == []
    assert num_held(driver) > 0
    for request_id in list(driver.transfers.sending):
        driver.ranks.end_send(request_id, 0)
    assert num_held(driver) == 0


# What host memory has


def with_host_memory(bandwidth: float, num_blocks: int = 13) -> Driver:
    """All KV of jobs whose name begins with `stored` is in host memory; a turn's KV has a megabyte.
    The driver has measured this bandwidth, and a prefill of 16 tokens per second."""
    driver = connected(
        policy="continuum",
        num_blocks=num_blocks,
        max_model_len=48,
        max_steps_in_flight=1,
        cache={"watermark": 0.0, "preempt_threshold": 1.0},
    )

    def swap_size(request: RequestView, block_ids: Any, num_tokens: int) -> SwapSize:
        if request.job_id is not None and request.job_id.startswith("stored"):
            return SwapSize(0, 10**6, num_found_tokens=num_tokens, found_bytes=10**6)
        return SwapSize(10**6, 10**6)

    driver.adversary.swap_size = swap_size  # type: ignore[method-assign]
    operation = TransferOperation("CPU", "GPU", 1, 10**6, 10**6 / bandwidth)
    driver.scheduler._transfers.statistics.add(operation)
    driver.add("measures the prefill", prompt_of(16, 100), max_tokens=1)
    driver.plan()
    driver.now += 1.0
    driver.answer()
    driver.run()
    assert driver.scheduler.pins is not None
    assert driver.scheduler.pins.prefill_rate.tokens_per_s == 16
    return driver


@pytest.mark.parametrize(("bandwidth", "yields"), [(1e9, "stored"), (1e5, "lost")])
def test_of_two_pins_the_one_that_is_restored_sooner_yields_first(
    bandwidth: float, yields: str
) -> None:
    """Computing 16 tokens takes a second, and loading them a millisecond or ten seconds."""
    driver = with_host_memory(bandwidth)
    turn(driver, "lost", prompt_of(16), max_tokens=1)
    turn(driver, "stored", prompt_of(16, 50), max_tokens=1)
    keep(driver)
    driver.add("grows", prompt_of(17, 70), max_tokens=1)
    driver.run()
    (left,) = pinned(driver)
    assert {left, yields} == {"lost", "stored"}


@pytest.mark.parametrize(
    ("job", "bandwidth", "is_pinned"),
    [("stored", 1e9, False), ("stored", 1e5, True), ("lost", 1e9, True)],
)
def test_kv_that_host_memory_restores_at_once_is_not_pinned(
    job: str, bandwidth: float, is_pinned: bool
) -> None:
    """Once five gaps are known: until then, a pin lasts as long whatever it saves."""
    driver = with_host_memory(bandwidth, num_blocks=101)
    for index in range(6):
        assert bool(pinned(driver)) == bool(index)
        turn(driver, job, prompt_of(16), max_tokens=1)
    assert bool(pinned(driver)) == is_pinned


def test_a_pin_does_not_expire_while_a_turn_waits_that_came_before_it() -> None:
    driver = continuum(max_num_seqs=1, num_blocks=40)
    driver.add("t1", prompt_of(16), job_id="job", is_last_step=False, max_tokens=3)
    driver.step()
    driver.add("t2", prompt_of(16), job_id="job", is_last_step=False, max_tokens=1)
    driver.scheduler.set_pause(PauseState.PAUSED_NEW)
    for _ in range(6):
        driver.step()
    driver.now += 1000.0
    driver.plan()
    assert pinned(driver) == ["job"]
    driver.scheduler.set_pause(PauseState.UNPAUSED)
    driver.run()
    assert driver.scheduler.pins is not None
    assert (driver.scheduler.pins.num_hits, driver.scheduler.pins.num_expired) == (1, 0)


def test_nothing_of_an_ended_request_is_kept() -> None:
    driver = continuum(num_blocks=40)
    for number in range(10):
        driver.add(f"r{number}", prompt_of(16, number), job_id=f"j{number}", max_tokens=1)
    requests = [weakref.ref(each) for each in driver.requests.values()]
    driver.run()
    driver.requests.clear()
    gc.collect()
    assert [each() for each in requests] == [None] * 10
