"""What one step gives to whom, and what is true when it has been planned: requirements SCH."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.requests import (
    LoRARequest,
    MultimodalFeature,
    StructuredOutput,
)
from tests.harness.driver import Driver
from tests.harness.grammar import FakeCompiler
from tests.harness.tokens import expected_output, prompt_of

WRONG = [3, 4, 5]
"""Drafts that no request samples."""


def right_drafts(name: str, position: int) -> list[int]:
    """Two drafts that are what the worker samples."""
    return expected_output(name, position + 2)[position:]


def drafting(*at: tuple[str, int]) -> Callable[[str, int], list[int]]:
    """Three wrong drafts for these output positions of these requests."""
    return lambda name, position: WRONG if (name, position) in at else []


# Gaps


@pytest.mark.req("SCH-01")
def test_prefill_chunk_decode_and_speculation_are_gaps_of_different_size() -> None:
    driver = Driver(max_num_batched_tokens=8, num_speculative_tokens=2, draft=right_drafts)
    key = driver.add("r", prompt_of(20), max_tokens=8)
    # Chunks that the budget caps, the rest of the prompt, gaps of 1 + 2, and the last token.
    assert driver.tokens_per_step("r") == [8, 8, 4, 3, 3, 1]
    assert driver.received[key] == expected_output("r", 8)
    plain = Driver(max_num_batched_tokens=8)
    plain.add("decodes", prompt_of(5), max_tokens=8)
    plain.step()
    plain.add("fills", prompt_of(20, 40), max_tokens=1)
    for expected in (7, 7, 6):
        plain.step()
        assert plain.scheduled == {"decodes": 1, "fills": expected}


@pytest.mark.req("SCH-01")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_step_with_room_for_all_leaves_nothing_to_catch_up_with(steps_in_flight: int) -> None:
    driver = Driver(
        max_steps_in_flight=steps_in_flight, num_speculative_tokens=2, draft=right_drafts
    )
    for index in range(4):
        driver.add(f"r{index}", prompt_of(3 + 5 * index, 20 * index), max_tokens=7 + index)
    running = driver.scheduler.running
    gaps = set()
    while driver.scheduler.has_unfinished_requests():
        known = running.num_tokens + running.num_placeholders + running.num_drafts
        goal = np.minimum(known, running.last_computed)
        generations, before = running.generation.copy(), running.num_computed.copy()
        plan = driver.plan()
        if plan is not None:
            held = (generations > 0) & (running.generation == generations)
            assert (running.num_computed[held] == goal[held]).all()
            gaps |= set((running.num_computed - before)[held].tolist())
        if driver.unanswered and (plan is None or len(driver.unanswered) >= steps_in_flight):
            driver.answer()
    assert {1, 3} <= gaps


# Caps of a running request


@pytest.mark.req("SCH-04")
@pytest.mark.parametrize(
    ("threshold", "budget", "expected"),
    [(0, 64, 4), (3, 64, 3), (5, 64, 4), (0, 2, 2), (3, 2, 2), (2, 3, 2)],
)
def test_a_running_request_gets_its_gap_cut_to_threshold_and_budget(
    threshold: int, budget: int, expected: int
) -> None:
    driver = Driver(
        max_num_scheduled_tokens=budget,
        long_prefill_token_threshold=threshold,
        num_speculative_tokens=3,
        draft=drafting(("r", 1)),
    )
    driver.add("r", prompt_of(6), max_tokens=8)
    row = 0
    while driver.scheduler.running.num_tokens[row] < 7:
        driver.step()
    plan = driver.plan()  # 7 tokens and 3 drafts, of which 6 are computed
    assert plan is not None
    assert driver.scheduled == {"r": expected}
    assert plan.draft_tokens.tolist() == WRONG[: expected - 1]


@pytest.mark.req("SCH-04")
def test_placeholders_count_as_tokens_to_compute() -> None:
    driver = Driver(max_steps_in_flight=2)
    driver.add("r", prompt_of(6), max_tokens=8)
    driver.plan()
    running = driver.scheduler.running
    assert (int(running.num_tokens[0]), int(running.num_placeholders[0])) == (6, 1)
    driver.plan()
    assert driver.scheduled == {"r": 1}


@pytest.mark.req("SCH-04")
def test_nothing_is_computed_at_the_models_last_position() -> None:
    driver = Driver(
        max_model_len=20, num_speculative_tokens=3, draft=drafting(("r", 1), ("r", 2), ("r", 3))
    )
    key = driver.add("r", prompt_of(17), max_tokens=None)
    # 17 + 1 known and 3 drafts: up to position 18, the last but one; then that one alone
    assert driver.tokens_per_step("r") == [17, 2, 1]
    assert len(driver.received[key]) == 3


@pytest.mark.req("SCH-04")
def test_a_request_at_the_models_length_takes_no_budget_for_what_it_cannot_compute() -> None:
    others = "abcde"
    driver = Driver(
        max_model_len=20,
        max_num_batched_tokens=21,
        long_prefill_token_threshold=6,
        num_speculative_tokens=3,
        draft=drafting(("ends", 1), ("a", 3), ("b", 3), ("c", 3), ("d", 2), ("e", 2)),
    )
    driver.add("ends", prompt_of(17), max_tokens=None)
    for index, name in enumerate(others):
        driver.add(name, prompt_of(4, 20 + 10 * index), max_tokens=None)
    driver.step()
    assert driver.scheduled == {"ends": 6, "a": 4, "b": 4, "c": 4, "d": 3}
    driver.step()
    assert driver.scheduled == {"ends": 6, "a": 1, "b": 1, "c": 1, "d": 1, "e": 4}
    driver.step()
    assert driver.scheduled == {"ends": 5, "a": 1, "b": 1, "c": 1, "d": 1, "e": 1}
    driver.step()
    assert driver.scheduled == {"ends": 2, "a": 4, "b": 4, "c": 4, "d": 4, "e": 3}


# When a step has been planned


@pytest.mark.req("SCH-18")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_counters_advance_when_the_plan_has_been_built(steps_in_flight: int) -> None:
    grammars = FakeCompiler()
    driver = Driver(
        verify_plan=True,
        max_steps_in_flight=steps_in_flight,
        max_num_batched_tokens=8,
        max_num_encoder_input_tokens=4,
        grammars=grammars,
    )
    gone = driver.add("gone", prompt_of(1, 80), max_tokens=9)
    driver.step()
    while driver.unanswered:
        driver.answer()
    driver.abort(gone)
    driver.add(
        "r",
        prompt_of(12),
        multimodal=(MultimodalFeature("image", 5, 3),),
    )
    driver.add("s", prompt_of(8, 40), structured_output=StructuredOutput("regex", "g"))
    scheduler, running = driver.scheduler, driver.scheduler.running
    first = scheduler.schedule(10.0)  # the object itself, not a copy that was sent
    assert first is not None
    assert first.full_state is not None
    # As it was while the plan was built; as it is when the caller gets it.
    assert [state.num_computed_tokens for state in first.full_state] == [0]
    row = driver.requests["r"].row
    assert int(running.num_computed[row]) == 8
    assert int(running.num_placeholders[row]) == 0  # a chunk that samples nothing
    assert not first.has_structured_output
    assert scheduler.reset_encoder_cache()  # its item is behind it
    assert first.finished_rows.tolist() == [0]
    grammars.ready.add("g")
    answer(scheduler, first)
    second = scheduler.schedule(11.0)
    assert second is not None
    assert (int(running.num_computed[row]), int(running.num_placeholders[row])) == (12, 1)
    assert not second.has_structured_output  # four of the eight tokens of `s`
    answer(scheduler, second, 50)
    third = scheduler.schedule(12.0)
    assert third is not None
    assert third.has_structured_output
    assert (first.finished_rows.tolist(), second.finished_rows.tolist()) == ([0], [])


def answer(scheduler: Any, plan: SchedulerOutput, *tokens: int) -> None:
    output = ModelRunnerOutput(1, plan.step, sampled_tokens=np.array(tokens, np.int32))
    scheduler.update_from_output(output, 20.0)


@pytest.mark.req("SCH-19")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_plan_lists_the_blocks_allocated_in_its_step_and_no_others(
    steps_in_flight: int,
) -> None:
    driver = Driver(num_groups=2, max_steps_in_flight=steps_in_flight, max_num_batched_tokens=8)
    driver.add("r", prompt_of(10), max_tokens=9)
    listed = []
    while driver.scheduler.has_unfinished_requests():
        plan = driver.step()
        if plan is not None and plan.num_scheduled_tokens:
            starts = [ids.tolist() for start in plan.added for ids in start.block_ids]
            listed.append(starts or [ids.block_ids.tolist() for ids in plan.appended])
    # 8 + 2 tokens of the prompt, then 8 one by one: positions 12 and 16 begin blocks.
    assert listed[:2] == [[[1, 2], [3, 4]], [[5], [6]]]
    assert listed[2:] == [[], [], [[7], [8]], [], [], [], [[9], [10]], []]


@pytest.mark.req("SCH-21")
def test_common_prefix_blocks_are_those_of_all_running_requests_in_each_group() -> None:
    driver = Driver(num_groups=2)
    listed = []

    def step() -> tuple[int, ...]:
        plan = driver.step()
        assert plan is not None
        listed.append(plan.common_prefix_blocks)
        return plan.common_prefix_blocks

    a = driver.add("a", prompt_of(11), max_tokens=20)
    assert step() == (3, 3)  # alone: all of its blocks
    assert step() == ()
    assert step() == ()  # a fourth block is its own: membership is unchanged
    assert len(driver.table("a")) == 4
    b = driver.add("b", [*prompt_of(10), 7, 7, 7], max_tokens=20)
    assert step() == (2, 2)
    c = driver.add("c", [*prompt_of(5), 8, 8, 8], max_tokens=20)
    assert step() == (1, 1)
    d = driver.add("d", prompt_of(6, 60), max_tokens=20)
    assert step() == (0, 0)
    driver.abort(d)
    assert step() == (1, 1)
    driver.abort(c)
    assert step() == (2, 2)
    driver.abort(a)
    assert step() == (len(driver.table("b")),) * 2
    driver.abort(b)
    assert step() == (0, 0)


# Invariants under every policy


def features_of(chance: random.Random, number: int) -> dict[str, Any]:
    """What a random request asks for, beside its tokens."""
    fields: dict[str, Any] = {}
    if chance.random() < 0.3:
        fields["lora"] = LoRARequest(chance.choice("pqr"))
    kind = chance.randrange(5)
    if kind == 0:
        fields["multimodal"] = (MultimodalFeature(f"i{number % 5}", 0, 2),)
    elif kind == 1:
        fields["structured_output"] = StructuredOutput("regex", "g")
    return fields


@pytest.mark.req("SCH-17", "ERR-34", "ERR-38")
@pytest.mark.parametrize("policy", ["fcfs", "priority", "continuum"])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_every_step_stays_within_its_bounds_and_passes_over_no_request(
    policy: str, steps_in_flight: int, is_plain: bool, seed: int
) -> None:
    chance = random.Random(f"{policy} {steps_in_flight} {seed}")
    features: dict[str, Any] = {
        "max_loras": 2,
        "max_num_encoder_input_tokens": 4,
        "num_speculative_tokens": 2,
        "draft": lambda name, first: right_drafts(name, first) if first % 3 else WRONG[:2],
        "grammars": FakeCompiler({"g"}),
    }
    driver = Driver(
        num_blocks=13,
        max_model_len=40,
        max_num_seqs=5,
        max_num_batched_tokens=24,
        max_num_scheduled_tokens=17,
        policy=policy,
        max_steps_in_flight=steps_in_flight,
        verify_plan=not is_plain,
        **({} if is_plain else features),
    )
    running = driver.scheduler.running

    def step() -> None:
        wanted, generations = running.wanted(), running.generation.copy()
        plan = driver.plan()
        if plan is not None:
            check_bounds(driver, plan)
            check_nobody_is_passed_over(driver, plan, wanted, generations)
        if driver.unanswered and (plan is None or len(driver.unanswered) >= steps_in_flight):
            driver.answer()

    for number in range(60):
        prompt = [7] * chance.randrange(12) + [20 + number] * chance.randrange(2, 14)
        fields = {"priority": chance.randrange(3), "job_id": chance.choice([None, "x", "y", "z"])}
        if not is_plain:
            fields |= features_of(chance, number)
        driver.add(f"r{number}", prompt, max_tokens=chance.randrange(1, 14), **fields)
        driver.scheduler.waiting.update_pinned_state(chance.sample("xyz", chance.randrange(3)))
        for _ in range(chance.randrange(4)):
            step()
    while driver.scheduler.has_unfinished_requests() or driver.unanswered:
        step()
    assert len(driver.finished) == 60
    assert driver.scheduler.make_stats().num_preemptions > 5
    assert driver.num_free_blocks == 12


def check_bounds(driver: Driver, plan: SchedulerOutput) -> None:
    counts = driver.scheduled
    assert sum(counts.values()) == plan.num_scheduled_tokens <= 17
    assert plan.num_rows == len(driver.running) <= 5
    assert set(counts) <= set(driver.running)
    assert {start.request_id for start in plan.added} <= set(driver.running)
    assert len(counts) <= plan.num_rows
    if counts:
        assert driver.scheduler.idle_s(driver.now) == 0.0  # a request has advanced


def check_nobody_is_passed_over(
    driver: Driver, plan: SchedulerOutput, wanted: np.ndarray, generations: np.ndarray
) -> None:
    """Who ran, still runs and had something to compute got some, while there was budget."""
    running = driver.scheduler.running
    for row in np.flatnonzero((generations > 0) & (wanted > 0)).tolist():
        if running.generation[row] == generations[row]:
            request = running.request_on(row)
            waits_for_encoder = bool(request.options.multimodal)
            is_spent = plan.num_scheduled_tokens == 17
            assert request.request_id in driver.scheduled or waits_for_encoder or is_spent
