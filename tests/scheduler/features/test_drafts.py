"""Speculation: how many drafts a step verifies, and what the books say once some were wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.protocol.arrays import EMPTY_INT32, int32_array
from longshore.protocol.outputs import FinishReason, ModelRunnerOutput
from longshore.scheduler.features.drafts import Drafts
from longshore.scheduler.request import RequestStatus
from longshore.scheduler.step.in_flight import PlannedStep, SamplingRows
from longshore.scheduler.step.output_validator import InvalidOutput
from longshore.scheduler.step.running import RunningTable
from tests.harness.driver import Driver
from tests.harness.shared_drivers import pressed
from tests.harness.tokens import EOS, VOCAB_SIZE, expected_output, prompt_of, steady_token
from tests.scheduler.test_request import make_request

WRONG = 5
"""No request ever samples it."""


def drafter(num_drafts: int, num_right: Callable[[str, int], int]) -> Callable[..., list[int]]:
    """Proposes `num_drafts` tokens, the first `num_right(request_id, position)` of them right."""

    def propose(request_id: str, position: int) -> list[int]:
        right = num_right(request_id, position)
        return [
            steady_token(request_id, position + index) if index < right else WRONG
            for index in range(num_drafts)
        ]

    return propose


def drafting(num_drafts: int, num_right: int = 0, **settings: Any) -> Driver:
    """A driver with a drafter whose first `num_right` drafts are right."""
    return Driver(
        num_speculative_tokens=num_drafts,
        draft=drafter(num_drafts, lambda name, position: num_right),
        **settings,
    )


def books(driver: Driver, name: str) -> tuple[int, int, int]:
    """(tokens, computed, placeholders) of a running request."""
    running, row = driver.scheduler.running, driver.requests[name].row
    columns = (running.num_tokens, running.num_computed, running.num_placeholders)
    return tuple(int(column[row]) for column in columns)


@pytest.mark.req("SPD-03", "NUM-14")
def test_of_three_drafts_and_two_generated_tokens_one_is_accepted_and_two_are_rejected() -> None:
    driver = drafting(3, num_right=1)
    key = driver.add("r", prompt_of(10), max_tokens=20)
    driver.step()
    assert books(driver, "r") == (11, 10, 0)
    plan = driver.plan()
    assert plan is not None
    assert plan.draft_rows.tolist() == [0, 0, 0]
    assert plan.draft_tokens.tolist() == [steady_token("r", 1), WRONG, WRONG]
    assert driver.scheduled == {"r": 4}
    assert books(driver, "r") == (11, 14, 4)
    driver.answer()
    assert driver.received[key] == expected_output("r", 3)
    assert books(driver, "r") == (13, 12, 0)  # 14 - 2
    driver.run()
    assert driver.received[key] == expected_output("r", 20)


@pytest.mark.req("SPD-03")
def test_placeholders_fall_by_rejected_drafts_while_another_step_is_in_flight() -> None:
    driver = drafting(3, num_right=1, max_steps_in_flight=2)
    key = driver.add("r", prompt_of(10), max_tokens=30)
    driver.plan()  # the prompt: 1 placeholder
    driver.plan()  # 1 + 3 drafts
    assert books(driver, "r") == (10, 14, 5)
    driver.answer()
    assert books(driver, "r") == (11, 14, 4)
    driver.plan()
    assert books(driver, "r") == (11, 18, 8)
    driver.answer()  # 2 of 4 came: 2 rejected
    assert books(driver, "r") == (13, 16, 4)
    plan = driver.plan()
    assert plan is not None
    assert plan.answered_step == 2
    assert plan.draft_tokens.tolist() == [-1, -1, -1]
    driver.run()
    assert driver.received[key] == expected_output("r", 30)


@pytest.mark.req("SPD-02")
@pytest.mark.parametrize(
    ("budget", "num_scheduled", "num_drafts"), [(64, 5, 4), (5, 5, 4), (4, 4, 3), (1, 1, 0)]
)
def test_drafts_that_the_step_has_no_tokens_for_are_trimmed_from_the_end(
    budget: int, num_scheduled: int, num_drafts: int
) -> None:
    driver = drafting(4, num_right=4, max_num_batched_tokens=64, max_num_scheduled_tokens=budget)
    key = driver.add("r", prompt_of(1), max_tokens=20)
    driver.step()
    plan = driver.plan()
    assert plan is not None
    assert driver.scheduled == {"r": num_scheduled}
    assert plan.draft_tokens.tolist() == expected_output("r", 5)[1 : 1 + num_drafts]
    driver.answer()
    assert len(driver.received[key]) == 1 + num_scheduled
    driver.run()
    assert driver.received[key] == expected_output("r", 20)


@pytest.mark.req("SPD-02")
def test_a_limit_per_request_trims_drafts_too() -> None:
    driver = drafting(4, num_right=4, long_prefill_token_threshold=3)
    driver.add("r", prompt_of(3), max_tokens=20)
    driver.step()
    plan = driver.plan()
    assert plan is not None
    assert (driver.scheduled, len(plan.draft_tokens)) == ({"r": 3}, 2)


@pytest.mark.req("SPD-02", "REQ-10")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_no_draft_is_verified_that_no_output_can_need(steps_in_flight: int) -> None:
    driver = drafting(4, num_right=4, max_steps_in_flight=steps_in_flight)
    key = driver.add("r", prompt_of(6), max_tokens=3)
    driver.run()
    # One token comes with the prompt; of the two left the last is sampled, not verified.
    decode = driver.plans[1]
    assert (decode.num_scheduled_tokens, len(decode.draft_rows)) == (2, 1)
    assert driver.received[key] == expected_output("r", 3)
    assert sum(plan.num_scheduled_tokens for plan in driver.plans) == 8


@pytest.mark.req("SPD-02")
def test_drafts_are_consumed_by_the_plan_that_verifies_them() -> None:
    driver = drafting(3, num_right=3)
    driver.add("r", prompt_of(6), max_tokens=30)
    driver.step()
    driver.plan()
    assert driver.scheduled == {"r": 4}
    driver.answer(with_drafts=False)
    plan = driver.plan()
    assert plan is not None
    assert (driver.scheduled, len(plan.draft_rows)) == ({"r": 1}, 0)


@pytest.mark.req("SPD-02")
def test_drafts_that_waited_for_want_of_budget_are_dropped_not_kept_for_later() -> None:
    driver = drafting(3, num_right=3, max_num_scheduled_tokens=2)
    driver.add("r", prompt_of(1), max_tokens=30)
    driver.step()
    driver.plan()
    assert driver.scheduled == {"r": 2}
    assert driver.scheduler.running.num_drafts[0] == 0
    driver.answer(with_drafts=False)
    driver.plan()
    assert driver.scheduled == {"r": 1}


@pytest.mark.req("SPD-02")
def test_more_drafts_than_the_engine_takes_are_cut_from_the_end() -> None:
    driver = Driver(num_speculative_tokens=2, draft=drafter(5, lambda name, position: 5))
    key = driver.add("r", prompt_of(6), max_tokens=20)
    driver.step()
    driver.step()
    assert driver.scheduled == {"r": 3}
    assert driver.plans[-1].draft_tokens.tolist() == expected_output("r", 3)[1:]
    driver.run()
    assert driver.received[key] == expected_output("r", 20)


@pytest.mark.req("SPD-04")
def test_drafts_may_come_apart_from_the_answer() -> None:
    driver = Driver(num_speculative_tokens=3)
    key = driver.add("r", prompt_of(6), max_tokens=20)
    driver.step()
    drafts = [steady_token("r", 1), WRONG, WRONG]
    driver.scheduler.update_drafts(int32_array([0, 0, 0]), int32_array(drafts))
    plan = driver.plan()
    assert plan is not None
    assert plan.draft_tokens.tolist() == drafts
    driver.answer()
    assert driver.received[key] == expected_output("r", 3)
    driver.run()
    assert driver.received[key] == expected_output("r", 20)


@pytest.mark.req("SPD-04")
def test_a_later_word_about_drafts_replaces_an_earlier_one() -> None:
    driver = drafting(3, num_right=3)
    driver.add("r", prompt_of(6), max_tokens=20)
    driver.step()
    driver.scheduler.update_drafts(int32_array([0]), int32_array([WRONG]))
    plan = driver.plan()
    assert plan is not None
    assert plan.draft_tokens.tolist() == [WRONG]
    driver.answer()


@pytest.mark.parametrize("drafts", [[9, VOCAB_SIZE], [-1, 9], [9], [9, 9, 9]])
def test_drafts_that_are_not_one_token_id_per_row_are_rejected(drafts: list[int]) -> None:
    driver = drafting(3, num_right=1)
    driver.add("r", prompt_of(6), max_tokens=20)
    driver.step()
    kept = driver.scheduler.running.drafts.copy()
    with pytest.raises(InvalidOutput, match="one per draft row"):
        driver.scheduler.update_drafts(int32_array([0, 0]), int32_array(drafts))
    assert (driver.scheduler.running.drafts == kept).all()
    driver.run()


def test_drafts_for_empty_or_prefilling_rows_are_ignored() -> None:
    driver = Driver(num_speculative_tokens=3, max_num_batched_tokens=8)
    driver.add("r", prompt_of(20), max_tokens=20)
    driver.step()
    driver.scheduler.update_drafts(int32_array([0, 1, 99, -1]), int32_array([9, 9, 9, 9]))
    for count in (8, 4, 1):
        plan = driver.step()
        assert plan is not None
        assert (driver.scheduled, len(plan.draft_rows)) == ({"r": count}, 0)


def test_drafts_of_a_plan_are_not_for_a_later_occupant_of_the_row() -> None:
    running = RunningTable(1, 64, num_speculative_tokens=3)
    earlier, later = make_request("earlier"), make_request("later")
    tables = (EMPTY_INT32,)
    running.admit(earlier, 4, tables)
    planned = PlannedStep(1, SamplingRows(running, np.array([0])), np.array([1]))
    running.release([earlier])
    running.admit(later, 4, tables)
    running.advance(np.array([1]))
    drafts = Drafts(running, grammars=None, is_async=False)
    drafts.receive(int32_array([0]), int32_array([9]), planned)
    assert running.num_drafts.tolist() == [0]
    drafts.receive(int32_array([0]), int32_array([9]))
    assert running.num_drafts.tolist() == [1]


@pytest.mark.req("SPD-05")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_was_drafted_and_accepted_is_counted_per_request(steps_in_flight: int) -> None:
    driver = Driver(
        num_speculative_tokens=2,
        draft=drafter(2, lambda name, position: {"good": 2, "bad": 0}[name]),
        max_steps_in_flight=steps_in_flight,
    )
    good = driver.add("good", prompt_of(6), max_tokens=10)
    bad = driver.add("bad", prompt_of(6, 40), max_tokens=4)
    driver.run()
    # good: 1 with its prompt, then 3 a step: 3 steps of 2 drafts, all accepted.
    end = driver.finished[good]
    assert (end.num_draft_tokens, end.num_accepted_tokens) == (6, 6)
    # bad: 3 more tokens, one a step; for the last two, only as many are drafted as could be needed.
    end = driver.finished[bad]
    assert end.num_accepted_tokens == 0
    assert end.num_draft_tokens == 2 + 1
    stats = driver.scheduler.make_stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (9, 6)
    assert (stats.num_drafted_rows, stats.accepted_by_position) == (5, (3, 3))
    assert stats.num_invalid_draft_tokens == 0


@pytest.mark.req("SPD-01")
@pytest.mark.parametrize(("lookahead", "num_blocks"), [(0, 2), (1, 3), (4, 3), (5, 4)])
def test_slots_for_drafts_are_reserved_at_admission(lookahead: int, num_blocks: int) -> None:
    driver = Driver(num_lookahead_tokens=lookahead)
    driver.add("r", prompt_of(8), max_tokens=20)
    driver.step()
    assert len(driver.table("r")) == num_blocks


@pytest.mark.req("SPD-01")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_slots_for_drafts_are_reserved_after_every_step_but_not_after_the_models_length(
    steps_in_flight: int,
) -> None:
    driver = Driver(num_lookahead_tokens=3, max_model_len=24, max_steps_in_flight=steps_in_flight)
    driver.add("r", prompt_of(5), max_tokens=None)
    num_blocks = set()
    while not driver.finished:
        plan = driver.plan()
        if plan is not None and driver.scheduled.get("r"):
            row = driver.requests["r"].row
            num_tokens = int(driver.scheduler.running.num_computed[row]) + 3
            num_blocks.add(len(driver.table("r")))
            assert len(driver.table("r")) == -(-min(num_tokens, 24) // 4)
        if plan is None or len(driver.unanswered) == steps_in_flight:
            driver.answer()
    assert num_blocks == {2, 3, 4, 5, 6}


def test_a_request_preempts_for_its_lookahead_slots_as_for_any_other() -> None:
    """Nine tokens and their lookahead do not fit beside a neighbour, so the younger one goes."""
    driver = pressed(num_lookahead_tokens=4, enable_prefix_caching=False)
    driver.add("old", prompt_of(10, 0), max_tokens=8)
    driver.add("young", prompt_of(10, 40), max_tokens=8)
    driver.step()
    assert [len(driver.table(name)) for name in ("old", "young")] == [4, 4]
    while not driver.scheduler.make_stats().num_preemptions:
        driver.step()
    assert driver.running == ["old"]
    driver.run()
    assert len(driver.finished) == 2


@pytest.mark.req("SPD-06")
@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_a_request_that_may_be_finished_is_skipped_and_younger_ones_continue(
    num_right: int,
) -> None:
    """With 3 drafts in flight `short` might have all its tokens; if they are wrong it goes on."""
    driver = Driver(
        num_speculative_tokens=3,
        draft=drafter(3, lambda name, position: num_right if name == "short" else 0),
        max_steps_in_flight=2,
    )
    short = driver.add("short", prompt_of(6), max_tokens=5)
    young = driver.add("young", prompt_of(6, 40), max_tokens=12)
    driver.plan()
    driver.plan()
    assert driver.scheduled == {"short": 4, "young": 4}  # computed is 10: the fifth is sampled
    driver.answer()
    driver.plan()
    assert driver.scheduled == {"young": 4}
    driver.answer()
    assert len(driver.received[short]) == 2 + num_right
    assert (short in driver.finished) is (num_right == 3)
    driver.run()
    assert driver.received[short] == expected_output("short", 5)
    assert driver.received[young] == expected_output("young", 12)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_tokens_after_the_one_that_stops_are_dropped(steps_in_flight: int) -> None:
    def sample(name: str, position: int) -> int:
        return EOS if position == 2 else 50 + position

    driver = Driver(
        num_speculative_tokens=4,
        sample=sample,
        draft=lambda name, position: [sample(name, position + index) for index in range(4)],
        max_steps_in_flight=steps_in_flight,
    )
    key = driver.add("r", prompt_of(6), max_tokens=20)
    driver.run()
    assert driver.received[key] == [50, 51, EOS]
    end = driver.finished[key]
    assert (end.reason, end.num_output_tokens) == (FinishReason.STOPPED, 3)
    assert driver.scheduler.make_stats().num_stale_tokens >= 3
    assert driver.num_free_blocks == 39


@pytest.mark.req("SPD-07")
def test_drafts_in_flight_for_an_aborted_request_are_discarded() -> None:
    driver = drafting(3, num_right=2, max_steps_in_flight=2)
    key = driver.add("r", prompt_of(6), max_tokens=30)
    other = driver.add("other", prompt_of(6, 40), max_tokens=12)
    driver.steps(3)
    received = list(driver.received[key])
    driver.abort(key)
    driver.run()
    assert driver.received[key] == received
    assert driver.received[other] == expected_output("other", 12)
    assert driver.scheduler.make_stats().num_stale_tokens > 0


@pytest.mark.req("SPD-07")
def test_accepted_drafts_of_a_request_preempted_in_flight_are_delivered_once() -> None:
    driver = pressed(
        enable_prefix_caching=False,
        max_steps_in_flight=2,
        num_speculative_tokens=2,
        draft=drafter(2, lambda name, position: 1),
    )
    driver.add("old", prompt_of(11, 0), max_tokens=12)
    young = driver.add("young", prompt_of(11, 40), max_tokens=12)
    while driver.requests["young"].status is not RequestStatus.PREEMPTED:
        driver.step()
    driver.run()
    assert driver.received[young] == expected_output("young", 12)
    assert driver.finished[young].num_preemptions >= 1


def test_preemption_drops_drafts() -> None:
    driver = pressed(
        enable_prefix_caching=False,
        num_speculative_tokens=2,
        draft=drafter(2, lambda name, position: 2),
    )
    driver.add("old", prompt_of(11, 0), max_tokens=12)
    driver.add("young", prompt_of(11, 40), max_tokens=12)
    while driver.requests["young"].status is not RequestStatus.PREEMPTED:
        driver.step()
    driver.run()
    (resumed,) = [plan for plan in driver.plans if any(start.resumed for start in plan.added)]
    (start,) = resumed.added
    assert start.row not in resumed.draft_rows.tolist()


@pytest.mark.parametrize(
    ("num_sampled", "num_tokens"), [([5], 5), ([0], 0), ([2, 2], 4), ([2], 3), ([-1], 1)]
)
def test_an_output_with_more_tokens_than_drafts_allow_is_rejected_and_changes_nothing(
    num_sampled: list[int], num_tokens: int
) -> None:
    driver = drafting(3, num_right=1)
    key = driver.add("r", prompt_of(6), max_tokens=20)
    driver.step()
    driver.plan()
    before = books(driver, "r")
    answer = ModelRunnerOutput(
        1,
        2,
        sampled_tokens=int32_array([9] * num_tokens) if num_tokens else EMPTY_INT32,
        num_sampled=int32_array(num_sampled),
    )
    with pytest.raises(InvalidOutput):
        driver.scheduler.update_from_output(answer, driver.now)
    assert books(driver, "r") == before
    driver.run()
    assert driver.received[key] == expected_output("r", 20)


def test_blocks_that_hold_drafts_are_not_cached_before_the_drafts_are_verified() -> None:
    driver = drafting(5, num_right=2, max_steps_in_flight=2)
    driver.add("r", prompt_of(6), max_tokens=40)
    pool, running = driver.scheduler.kv_cache.pool, driver.scheduler.running
    for _ in range(12):
        driver.step()
        num_cached_blocks = sum(
            pool.block_hash(block_id) is not None for block_id in driver.table("r")
        )
        assert 4 * num_cached_blocks <= int(running.num_tokens[0])
    assert num_cached_blocks > 3
    driver.run()


@settings(max_examples=60)
@given(st.data())
def test_speculation_changes_no_token_and_loses_no_block(data: st.DataObject) -> None:
    right = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))
    num_drafts = data.draw(st.integers(1, 4))
    driver = Driver(
        num_blocks=data.draw(st.integers(14, 30)),
        max_model_len=48,
        max_num_seqs=data.draw(st.integers(1, 4)),
        max_num_scheduled_tokens=data.draw(st.integers(1, 30)),
        max_steps_in_flight=data.draw(st.integers(1, 2)),
        num_lookahead_tokens=data.draw(st.integers(0, 4)),
        num_speculative_tokens=num_drafts,
        draft=drafter(num_drafts, lambda name, position: right[position % len(right)]),
        policy=data.draw(st.sampled_from(["fcfs", "priority"])),
    )
    keys = {}
    for index in range(data.draw(st.integers(1, 5))):
        name, count = f"r{index}", data.draw(st.integers(1, 14))
        prompt = prompt_of(data.draw(st.integers(1, 20)), 5 * data.draw(st.integers(0, 3)))
        keys[driver.add(name, prompt, max_tokens=count, priority=index % 2)] = (name, count)
        driver.steps(data.draw(st.integers(0, 3)))
    driver.run()
    for key, (name, count) in keys.items():
        assert driver.received[key] == expected_output(name, count)
        end = driver.finished[key]
        assert 0 <= end.num_accepted_tokens <= end.num_draft_tokens
    assert driver.num_free_blocks == driver.num_blocks - 1
    np.testing.assert_array_equal(driver.scheduler.running.num_placeholders, 0)


def test_a_row_that_is_rewound_with_drafts_in_flight_computes_right() -> None:
    driver = drafting(3, num_right=1, max_steps_in_flight=2)
    bad = driver.add("bad", prompt_of(12), max_tokens=20)
    key = driver.add("r", prompt_of(12), max_tokens=20)  # on blocks that `bad` computes
    driver.plan()
    driver.plan()
    driver.answer(nan_rows=[0])
    assert driver.reason(bad) is FinishReason.ERROR
    plan = driver.plan()
    assert plan is not None
    assert [rewind.row for rewind in plan.rewound] == [1]
    driver.run()
    assert driver.received[key] == expected_output("r", 20)
