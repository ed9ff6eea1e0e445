"""What preemption takes back, under every policy: requirements PRE and what follows from them."""

from typing import Any

import pytest

from longshore.protocol.requests import MultimodalFeature
from longshore.scheduler.queue.policies import Order, OrderedPolicy, PolicyRequest
from longshore.scheduler.request import IllegalTransition, RequestStatus
from tests.harness.driver import Driver
from tests.harness.tokens import expected_output, prompt_of


class VictimLast(OrderedPolicy):
    """A policy from elsewhere: first come, first served, and `victim` after all others."""

    def order(self, request: PolicyRequest) -> Order:
        return request.request_id == "victim", request.arrival_time


POLICIES = ["priority", "continuum", "elsewhere"]
ITEM_OFFSETS = {"victim": 16, "last": 3}
PRIORITIES = {"victim": 9, "keeps": 2, "urgent": 0, "last": 1}


def driver_under(policy: str, **settings: Any) -> Driver:
    """`victim` is always preempted first; 4 tokens per prompt and step."""
    if policy == "elsewhere":
        settings["scheduler"] = {"policy": VictimLast()}
    else:
        settings["policy"] = policy
    driver = Driver(
        max_model_len=32,
        long_prefill_token_threshold=4,
        enable_prefix_caching=False,
        cache={"preempt_threshold": 1.0},
        **settings,
    )
    driver.scheduler.waiting.update_pinned_state(["keeps", "urgent", "last"])
    return driver


def admit(driver: Driver, name: str, prompt: list[int], **fields: Any) -> tuple[int, int]:
    """One more runs, after those that do."""
    priority = PRIORITIES[name]
    key = driver.add(name, prompt, max_tokens=8, priority=priority, job_id=name, **fields)
    driver.step()
    assert driver.running[-1] == name
    return key


@pytest.mark.req("PRE-03", "ERR-34", "SCH-17")
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_blocks_and_drafts_that_a_victim_took_in_the_step_are_taken_back(
    policy: str,
) -> None:
    driver = driver_under(
        policy,
        num_blocks=9,
        max_num_batched_tokens=9,
        num_speculative_tokens=2,
        draft=lambda name, position: [50, 51] if (name, position) == ("victim", 4) else [],
    )
    admit(driver, "victim", prompt_of(4, 0))
    admit(driver, "keeps", prompt_of(6, 20))
    admit(driver, "urgent", prompt_of(24, 40))
    admit(driver, "last", prompt_of(24, 70))
    assert driver.scheduled == {"victim": 1, "keeps": 1, "urgent": 4, "last": 3}
    rows = {name: driver.requests[name].row for name in PRIORITIES}
    computed = driver.scheduler.running.num_computed
    assert [int(computed[row]) for row in rows.values()] == [7, 7, 8, 3]
    assert driver.num_free_blocks == 1

    # The victim takes three tokens (two of them drafts) and the last block; urgent needs one too.
    plan = driver.plan()
    assert plan is not None
    assert plan.preempted_rows.tolist() == [rows["victim"]]
    # Without the victim's tokens one would be left for `last`; with a wrong index it had none.
    assert driver.scheduled == {"keeps": 1, "urgent": 4, "last": 4}
    assert plan.num_scheduled_tokens == 9
    assert (plan.draft_rows.size, plan.draft_tokens.size) == (0, 0)
    (appended,) = plan.appended
    assert appended.rows.tolist() == [rows["urgent"], rows["last"]]
    assert driver.num_free_blocks == 1  # `keeps` has 2, `urgent` 3, `last` 2
    driver.answer()
    driver.run()
    assert [len(driver.received[key]) for key in driver.finished] == [8] * 4


@pytest.mark.req("PRE-03", "ERR-34")
@pytest.mark.parametrize("policy", POLICIES)
def test_encoder_inputs_and_budget_that_a_victim_took_in_the_step_are_taken_back(
    policy: str,
) -> None:
    driver = driver_under(
        policy,
        num_blocks=11,
        max_num_batched_tokens=12,
        max_num_encoder_input_tokens=4,
        encoder_cache_size=12,
    )
    items = {name: (MultimodalFeature(name, offset, 4),) for name, offset in ITEM_OFFSETS.items()}
    admit(driver, "victim", prompt_of(24, 0), multimodal=items["victim"])
    admit(driver, "keeps", prompt_of(6, 20))
    admit(driver, "urgent", prompt_of(24, 40))
    admit(driver, "last", prompt_of(24, 70), multimodal=items["last"])
    assert driver.scheduled == {"victim": 4, "keeps": 1, "urgent": 4, "last": 3}
    assert driver.num_free_blocks == 1
    assert all(plan.encoder_inputs == () for plan in driver.plans)
    rows = {name: driver.requests[name].row for name in PRIORITIES}

    # The victim's chunk begins with its item, which takes the whole encoder budget.
    plan = driver.plan()
    assert plan is not None
    assert plan.preempted_rows.tolist() == [rows["victim"]]
    assert plan.encoder_inputs == ((rows["last"], 0),)
    assert driver.scheduled == {"keeps": 1, "urgent": 4, "last": 4}
    driver.answer()
    driver.run()
    # The victim's item was encoded when its turn had come, once.
    assert sum(len(plan.encoder_inputs) for plan in driver.plans) == 2
    assert len(driver.finished) == 4


@pytest.mark.req("PRE-04")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_preempted_request_keeps_its_tokens_and_nothing_else(steps_in_flight: int) -> None:
    driver = Driver(
        num_blocks=9,
        max_model_len=32,
        max_steps_in_flight=steps_in_flight,
        num_speculative_tokens=2,
        max_num_encoder_input_tokens=4,
        enable_prefix_caching=False,
        cache={"preempt_threshold": 1.0},
        draft=lambda name, position: [50, 51],
    )
    driver.add("old", prompt_of(12, 0), max_tokens=16)
    items = (MultimodalFeature("image", 4, 4),)
    key = driver.add("young", prompt_of(12, 40), max_tokens=16, multimodal=items)
    driver.plan()
    driver.add("waits", prompt_of(2, 80))
    young = driver.requests["young"]
    while not young.num_preemptions:
        assert young.status is RequestStatus.RUNNING
        while driver.unanswered:
            driver.answer()
        num_held, num_free = len(driver.table("young")), driver.num_free_blocks
        plan = driver.plan()
    assert plan is not None
    num_taken = sum(len(blocks.block_ids) for blocks in plan.appended)
    assert driver.num_free_blocks == num_free + num_held - num_taken
    assert (young.status, young.row, young.num_preemptions) == (RequestStatus.PREEMPTED, -1, 1)
    assert young.num_computed_tokens == 0
    assert driver.scheduler.waiting.peek() is young  # before `waits`
    assert driver.scheduler.reset_encoder_cache()  # no request refers to its item any more
    while driver.unanswered:
        driver.answer()
    num_tokens = young.num_tokens
    assert num_tokens == 12 + len(driver.received[key])
    while young.row < 0:
        driver.plan()
        plan = driver.plans[-1]
        if young.row < 0:
            driver.answer()
    (start,) = [start for start in plan.added if start.request_id == "young"]
    assert (start.resumed, start.num_computed_tokens) == (True, 0)
    assert driver.scheduled["young"] == num_tokens  # no draft of its former life
    assert start.row not in plan.draft_rows.tolist()
    assert plan.encoder_inputs == ((start.row, 0),)
    driver.run()
    assert driver.received[key] == expected_output("young", 16)


@pytest.mark.req("PRE-04")
def test_only_a_running_request_can_be_preempted() -> None:
    driver = Driver()
    driver.add("runs", prompt_of(5))
    driver.step()
    driver.add("waits", prompt_of(5, 30))
    waits = driver.requests["waits"]
    with pytest.raises(IllegalTransition):
        driver.scheduler._lifecycle.preempt(waits, driver.now)
    assert driver.running == ["runs"]
    assert waits.num_preemptions == 0
    driver.run()
    assert len(driver.finished) == 2
