"""Requests whose KV comes from elsewhere, among others that wait: requirements of several
sections, whose connector does what the test says."""

from typing import Any

import numpy as np
import pytest

from longshore.connectors.base import FinishAction, RequestView
from longshore.protocol.requests import LoRARequest, StructuredOutput
from longshore.scheduler.request import NOT_SCHEDULED, Request, RequestStatus
from tests.harness.connector import has_stored
from tests.harness.driver import Driver
from tests.harness.grammar import FakeCompiler
from tests.harness.shared_drivers import connected
from tests.harness.tokens import expected_output, prompt_of


def make_driver(
    matches: dict[str, int | None] | None = None, *, is_async: bool = True, **settings: Any
) -> Driver:
    """An engine that compiles no grammar.

    matches: by request id, how many leading tokens there are to load; None: not known yet.
    """
    match = has_stored({} if matches is None else matches, is_async=is_async)
    rules = {"match": match} | settings.pop("rules", {})
    return connected(rules=rules, grammars=FakeCompiler(), **settings)


def request_of(driver: Driver, key: tuple[int, int]) -> Request:
    request = driver.scheduler._lifecycle.get(*key)
    assert request is not None
    return request


def admitted(driver: Driver) -> list[str]:
    """In the latest plan."""
    return [start.request_id for start in driver.plans[-1].added]


def settle(driver: Driver) -> None:
    """Everything ends, and nothing remains."""
    for _ in range(20):
        driver.ranks.end_all()
        driver.run_until_idle()
        if driver.transfers.is_idle:
            break
    driver.check_idle()


# What a load leaves to compute


@pytest.mark.req("SCH-06", "ERR-37")
@pytest.mark.parametrize("length", [8, 11])
def test_a_background_load_of_everything_schedules_nothing_now_and_one_token_later(
    length: int,
) -> None:
    driver = make_driver({"r": 100})
    key = driver.add("r", prompt_of(length))
    plan = driver.plan()
    assert plan is not None
    assert (plan.num_scheduled_tokens, plan.num_rows, plan.added) == (0, 0, ())
    assert request_of(driver, key).status is RequestStatus.WAITING_FOR_REMOTE_KVS
    driver.ranks.end_load("r")
    driver.answer()
    plan = driver.plan()
    assert plan is not None
    assert (admitted(driver), plan.num_scheduled_tokens) == (["r"], 1)
    assert plan.added[0].num_computed_tokens == length - 1
    settle(driver)
    driver.check_complete(key)


@pytest.mark.req("SCH-06", "ERR-37")
@pytest.mark.parametrize("num_external", [8, 11, 40])
def test_a_load_within_the_step_leaves_at_least_the_last_token(num_external: int) -> None:
    driver = make_driver({"r": num_external}, is_async=False)
    key = driver.add("r", prompt_of(11))
    plan = driver.plan()
    assert plan is not None
    assert plan.num_scheduled_tokens == max(11 - num_external, 1)
    settle(driver)
    driver.check_complete(key)


@pytest.mark.req("SCH-12")
def test_a_request_that_was_loaded_uses_its_own_count_and_looks_nothing_up() -> None:
    driver = make_driver({"r": 8}, max_steps_in_flight=1)
    key = driver.add("r", prompt_of(18))
    driver.step()
    (load,) = driver.adversary.loads_begun
    twin = driver.add("twin", prompt_of(18))
    driver.step()  # the first 16 tokens can be found now
    twin_row = request_of(driver, twin).row
    found = driver.scheduler.kv_cache.get_computed_blocks(request_of(driver, key))
    assert found.num_tokens == 16
    num_queried = driver.scheduler.make_stats().num_prefix_queried_tokens
    assert num_queried == 2 * 18
    driver.ranks.end_load("r")
    plan = driver.plan()
    assert plan is not None
    (start,) = plan.added
    assert (start.request_id, start.num_computed_tokens) == ("r", 8)
    assert start.block_ids[0][:2].tolist() == load.block_ids[0][:2]
    assert not set(start.block_ids[0].tolist()) & set(
        driver.scheduler.kv_cache.block_ids(twin_row)[0].tolist()
    )
    assert driver.adversary.asked == {"r": 1, "twin": 1}
    assert driver.scheduler.make_stats().num_prefix_queried_tokens == num_queried
    settle(driver)
    driver.check_complete(key, twin)


# Starvation


OBSTACLES = ["grammar", "adapter", "later", "load", "session"]


@pytest.mark.req("SCH-25")
@pytest.mark.parametrize("policy", ["fcfs", "priority", "continuum"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("obstacles", [*([each] for each in OBSTACLES), OBSTACLES])
def test_a_loaded_request_is_not_held_up_by_one_ahead_of_it_that_cannot_be_scheduled(
    policy: str, steps_in_flight: int, obstacles: list[str]
) -> None:
    driver = make_driver(
        {"ready": 8, "load": 8, "later": None},
        policy=policy,
        max_steps_in_flight=steps_in_flight,
        max_loras=1,
    )
    fields: dict[str, dict[str, Any]] = {
        "grammar": {"structured_output": StructuredOutput("regex", "never")},
        "adapter": {"lora": LoRARequest("b")},
        "session": {"resumable": True, "max_tokens": 1},
    }
    runs = driver.add("runs", prompt_of(5, 70), max_tokens=40, lora=LoRARequest("a"))
    if "session" in obstacles:
        driver.add("session", prompt_of(5, 30), **fields["session"])
    for _ in range(3):
        driver.step()
    driver.finished.clear()  # the end of the session's first output
    for name in obstacles:
        if name != "session":
            driver.now += 1.0
            driver.add(name, prompt_of(9, 30), **fields.get(name, {}))
    driver.now += 1.0
    ready = driver.add("ready", prompt_of(13), priority=1)
    driver.step()
    request = request_of(driver, ready)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    order = [waiting.request_id for waiting in driver.scheduler.waiting]
    assert order.index("ready") == len(obstacles) == len(order) - 1
    driver.ranks.end_load("ready")
    driver.step()
    if request.row < 0:  # with two in flight the step had been planned already
        driver.step()
    assert request.row >= 0
    while driver.finished.get(ready) is None:
        driver.step()
    assert driver.received[ready] == expected_output("ready", 4)
    assert request_of(driver, runs).row >= 0  # none of the obstacles has gone


@pytest.mark.req("SCH-25")
@pytest.mark.parametrize("policy", ["fcfs", "priority", "continuum"])
def test_a_loaded_request_finishes_although_a_bigger_one_is_ahead_of_it(policy: str) -> None:
    driver = make_driver({"ready": 8}, num_blocks=9, max_model_len=32, policy=policy)
    runs = driver.add("runs", prompt_of(9, 60), max_tokens=8)
    driver.step()
    big = driver.add("big", prompt_of(27), max_tokens=5)
    driver.now += 1.0
    ready = driver.add("ready", prompt_of(13, 30), priority=1)
    for _ in range(2):
        driver.step()
        driver.ranks.end_all()
    settle(driver)
    driver.check_complete(runs)
    driver.check_complete(big)
    driver.check_complete(ready)


# States


@pytest.mark.req("ERR-30")
def test_each_of_the_three_ways_to_be_blocked_has_one_status() -> None:
    driver = make_driver({"load": 8}, max_steps_in_flight=1)
    grammar = StructuredOutput("regex", "never")
    keys = {
        "grammar": driver.add("grammar", prompt_of(5), structured_output=grammar),
        "load": driver.add("load", prompt_of(9)),
        "session": driver.add("session", prompt_of(5, 30), resumable=True, max_tokens=1),
    }
    driver.run_until_idle()
    statuses = {name: request_of(driver, key).status for name, key in keys.items()}
    assert statuses == {
        "grammar": RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        "load": RequestStatus.WAITING_FOR_REMOTE_KVS,
        "session": RequestStatus.WAITING_FOR_STREAMING_REQ,
    }
    blocked = {status for status in RequestStatus if status.name.startswith("WAITING_FOR_")}
    assert set(statuses.values()) == blocked
    assert {request.request_id for request in driver.scheduler.waiting} == set(keys)


@pytest.mark.req("REQ-04")
def test_counters_of_a_request_follow_it_from_its_arrival_to_its_preemption() -> None:
    matches: dict[str, int | None] = {"r": 8}
    driver = make_driver(
        matches,
        is_async=False,
        num_blocks=9, max_model_len=32,
        cache={"enable_prefix_caching": False, "preempt_threshold": 1.0},
    )  # fmt: skip
    driver.add("old", prompt_of(12, 50), max_tokens=12)
    driver.plan()
    key = driver.add("r", prompt_of(13), max_tokens=12)
    request, running = request_of(driver, key), driver.scheduler.running
    assert (request.num_cached_tokens, request.num_external_tokens) == (NOT_SCHEDULED, 0)
    assert (request.num_computed_tokens, request.num_preemptions) == (0, 0)
    assert NOT_SCHEDULED == -1
    driver.plan()
    row = request.row
    # The driver's workers check that the KV of [0, num_computed) is there and right.
    assert (int(running.num_computed[row]), int(running.num_placeholders[row])) == (13, 1)
    assert (request.num_cached_tokens, request.num_external_tokens) == (8, 8)
    driver.answer()
    driver.plan()
    assert (int(running.num_computed[row]), int(running.num_placeholders[row])) == (14, 2)
    driver.answer()
    assert (int(running.num_tokens[row]), int(running.num_placeholders[row])) == (14, 1)
    while not request.num_preemptions:
        driver.step()
    assert (request.num_computed_tokens, request.num_preemptions) == (0, 1)
    matches["r"] = 4
    settle(driver)
    assert request.num_external_tokens == 4  # of its last admission
    assert request.num_cached_tokens == 8  # of its first
    assert driver.finished[key].num_cached_tokens == 8
    assert driver.finished[key].num_preemptions == request.num_preemptions


# Resetting the prefix cache


@pytest.mark.req("ERR-40", "POO-09")
@pytest.mark.parametrize("holder", ["load", "loaded", "quarantine", "send", "hold"])
def test_the_prefix_cache_is_not_reset_while_a_waiting_request_or_transfer_holds_blocks(
    holder: str,
) -> None:
    def depart(request: RequestView) -> FinishAction:
        return FinishAction(holder == "send" and request.request_id == "sends", None)

    stores = {"stores": lambda: holder == "hold"}
    driver = make_driver({"r": 8}, rules={"depart": depart} | stores, max_num_seqs=1)
    sends = driver.add("sends", prompt_of(9, 40), max_tokens=1)
    driver.run_until_idle()
    driver.check_complete(sends)
    driver.scheduler.reset_prefix_cache()
    if holder in ("load", "loaded", "quarantine"):
        key = driver.add("r", prompt_of(9))
        driver.run_until_idle()
        if holder == "quarantine":
            driver.abort(key)
        if holder == "loaded":
            driver.ranks.end_load("r")
    assert driver.scheduler.get_request_counts()[0] == 0
    assert driver.num_free_blocks < driver.num_blocks - 1
    assert driver.scheduler.reset_prefix_cache() is False
    was_loaded = holder == "loaded"  # the request recomputes, or loads again
    assert driver.scheduler.reset_prefix_cache(9.0, reset_running_requests=True) is was_loaded
    assert (driver.num_free_blocks == driver.num_blocks - 1) is was_loaded
    if holder == "send":
        driver.ranks.end_send("sends")
    settle(driver)
    driver.run_until_idle()
    assert driver.num_free_blocks == driver.num_blocks - 1
    assert driver.scheduler.reset_prefix_cache() is True


# Transfers beside the steps


@pytest.mark.req("ERR-38")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_steps_continue_while_transfers_do_not_end(steps_in_flight: int) -> None:
    driver = make_driver(
        {"loads": 8},
        rules={"depart": lambda request: FinishAction(request.request_id == "sends", None)},
        max_steps_in_flight=steps_in_flight,
    )
    sends = driver.add("sends", prompt_of(9, 60), max_tokens=1)
    driver.add("loads", prompt_of(9))
    runs = driver.add("runs", prompt_of(9, 30), max_tokens=30)
    while driver.finished.get(runs) is None:
        plan = driver.step()
        assert plan is None or np.isin(plan.num_scheduled_tokens, [0, 1, 18])
    assert set(driver.transfers.loading) == {"loads"}
    assert set(driver.transfers.sending) == {"sends"}
    driver.check_complete(sends)
    driver.check_complete(runs)
    settle(driver)
