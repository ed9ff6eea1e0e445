"""What a plan says, and what it leaves out."""

import numpy as np
import pytest

from longshore.protocol.requests import MultimodalFeature
from longshore.scheduler.step import plan_builder
from tests.harness.driver import Driver
from tests.harness.shared_drivers import pressed
from tests.harness.tokens import expected_output, prompt_of


@pytest.mark.req("OUT-01")
def test_everything_about_a_new_request_is_sent_once() -> None:
    driver = Driver()
    prompt = prompt_of(6)
    driver.add("r", prompt, max_tokens=6, sampling={"top_k": 7, "seed": 5})
    driver.run()
    (start,) = driver.plans[0].added
    assert start.request_id == "r"
    assert start.prompt_token_ids.tolist() == prompt
    assert (start.sampling.top_k, start.sampling.seed) == (7, 5)
    assert start.block_ids[0].tolist() == [1, 2]
    assert start.num_computed_tokens == 0
    assert all(plan.added == () for plan in driver.plans[1:])


@pytest.mark.parametrize(
    ("limit", "value", "expected"),
    [
        ("MAX_ADDED_ARRAYS", 6, [2, 2, 2]),
        ("MAX_ADDED_BYTES", 48, [2, 2, 1, 1]),  # also the one that is over the limit by itself
    ],
)
def test_a_plan_adds_no_more_than_a_message_can_carry(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int, expected: list[int]
) -> None:
    monkeypatch.setattr(plan_builder, limit, value)
    driver = Driver()
    for index in range(5):
        driver.add(f"r{index}", prompt_of(6, 10 * index), max_tokens=6)
    driver.add("long", prompt_of(15, 70), max_tokens=2)
    driver.run()
    admitted = [len(plan.added) for plan in driver.plans if plan.added]
    assert admitted == expected


def test_the_bytes_of_multimodal_items_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_builder, "MAX_ADDED_BYTES", 100)
    driver = Driver(max_num_encoder_input_tokens=8)
    for name in ("a", "b"):
        item = MultimodalFeature(name, offset=1, num_tokens=2, data=np.zeros(60, np.uint8))
        driver.add(name, prompt_of(6), multimodal=(item,), max_tokens=2)
    driver.run()
    assert [len(plan.added) for plan in driver.plans if plan.added] == [1, 1]


@pytest.mark.req("OUT-02")
def test_a_request_that_continues_costs_only_its_new_blocks() -> None:
    driver = Driver(verify_plan=False)
    driver.add("r", prompt_of(5), max_tokens=12)
    driver.run()
    running = driver.plans[1:-1]
    assert len(running) == 11
    for plan in running:
        assert (plan.added, len(plan.scheduled_rows), plan.num_scheduled_tokens) == ((), 0, 1)
        assert (len(plan.finished_rows), plan.full_state) == (0, None)
    appended = [blocks.block_ids.tolist() for plan in running for blocks in plan.appended]
    assert appended == [[3], [4]]  # 16 tokens are computed in all: five, then one per step


@pytest.mark.req("OUT-04")
def test_sampled_ids_travel_back_only_when_asked_for() -> None:
    for feed_back in (False, True):
        driver = Driver(feed_back_tokens=feed_back)
        driver.add("a", prompt_of(5, 0), max_tokens=4)
        driver.step()
        driver.add("b", prompt_of(5, 30), max_tokens=4)
        driver.steps(2)
        sent = [
            list(zip(plan.sampled_rows.tolist(), plan.sampled_tokens.tolist(), strict=True))
            for plan in driver.plans
        ]
        a, b = expected_output("a", 2), expected_output("b", 1)
        expected: list[list[tuple[int, int]]] = [[], [(0, a[0])], [(0, a[1]), (1, b[0])]]
        assert sent == (expected if feed_back else [[], [], []])


@pytest.mark.req("OUT-05")
def test_a_plan_has_a_field_for_everything_and_fills_those_in_use() -> None:
    driver = pressed(enable_prefix_caching=False)
    driver.add("old", prompt_of(15, 0), max_tokens=8)
    driver.add("young", prompt_of(16, 40), max_tokens=8)
    driver.steps(2)
    first, second = driver.plans[:2]
    assert first.num_scheduled_tokens == 31
    assert dict(zip(first.scheduled_rows, first.scheduled_tokens, strict=True)) == {0: 15, 1: 16}
    assert second.preempted_rows.tolist() == [1]
    driver.run()
    assert any(plan.finished_rows.size for plan in driver.plans)
    for plan in driver.plans:
        assert (plan.draft_rows.size, plan.draft_tokens.size, plan.encoder_inputs) == (0, 0, ())
        assert plan.freed_encoder_hashes == ()
        assert (plan.zero_block_ids.size, plan.connector_metadata) == (0, b"")
        assert (plan.has_structured_output, plan.num_invalid_draft_tokens) == (False, 0)


@pytest.mark.req("OUT-06")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_next_plan_drops_the_rows_of_requests_that_ended(steps_in_flight: int) -> None:
    driver = Driver(max_steps_in_flight=steps_in_flight)
    gone = driver.add("gone", prompt_of(5, 0))
    driver.add("stays", prompt_of(5, 30))
    driver.step()
    driver.abort(gone)
    while not driver.unanswered or len(driver.unanswered) < steps_in_flight:
        driver.plan()
    assert driver.plans[-1].finished_rows.tolist() == [0]
    assert driver.plans[-1].num_rows == 1
    driver.run()
    assert sum(plan.finished_rows.size for plan in driver.plans) == 2


def test_plans_are_numbered_chained_and_carry_the_full_state_on_request() -> None:
    driver = Driver(verify_plan=True)
    driver.add("r", prompt_of(5), max_tokens=3)
    driver.run()
    steps = [(plan.previous_step, plan.step) for plan in driver.plans]
    assert steps == [(index, index + 1) for index in range(len(steps))]
    assert {plan.epoch for plan in driver.plans} == {1}
    assert len({plan.digest for plan in driver.plans[:-1]}) >= 2
    state = driver.plans[1].full_state
    assert state is not None
    assert [
        (s.row, s.generation, s.num_computed_tokens, s.num_scheduled_tokens) for s in state
    ] == [(0, 1, 5, 1)]
    assert state[0].block_ids[0].tolist() == [1, 2]
