"""Plans without an answer, and who had left when it came."""

import numpy as np
import pytest

from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.step.in_flight import (
    PastOccupant,
    PlannedStep,
    SamplingRows,
    StepsInFlight,
)
from longshore.scheduler.step.running import RunningTable
from tests.scheduler.test_request import make_request


def planned(step: int) -> PlannedStep:
    return PlannedStep(
        step, SamplingRows(RunningTable(3, 8), np.array([0, 2])), np.array([1, 0, 1])
    )


def test_outputs_arrive_in_the_order_of_the_plans() -> None:
    running = RunningTable(3, 8)
    steps = StepsInFlight(running)
    assert (list(steps.steps), steps.newest_step) == ([], 0)
    first, second = planned(1), planned(2)
    steps.steps.append(first)
    steps.steps.append(second)
    assert (list(steps.steps), steps.newest_step) == ([first, second], 2)
    steps.answered()
    assert (list(steps.steps), steps.last_answered_step, steps.newest_step) == ([second], 1, 2)
    steps.answered()
    assert (list(steps.steps), steps.last_answered_step, steps.newest_step) == ([], 2, 2)


def test_a_departed_request_is_known_until_the_last_plan_made_before_is_answered() -> None:
    running = RunningTable(3, 8)
    steps = StepsInFlight(running)
    steps.steps.append(planned(1))
    steps.steps.append(planned(2))
    request = make_request()
    request.row = 0
    running.generation[0], running.num_placeholders[0], running.void_through[0] = 4, 1, 1
    tables = (np.array([7, 8], np.int32),)
    steps.note_vacated([request], [HeldBlocks(tables)], is_void=False)
    running.generation[0] = 5
    assert request.resume_after_step == 2
    steps.steps.append(planned(3))
    steps.answered()
    left = steps.occupant(0, 4)
    assert isinstance(left, PastOccupant)
    assert (left.request, left.tables, left.void_through) == (request, tables, 1)
    assert steps.past_occupants() == [(4, left)]
    steps.void_past_occupants()
    assert steps.occupant(0, 4).void_through == 2
    steps.answered()
    with pytest.raises(KeyError):
        steps.occupant(0, 4)


def test_a_request_without_valid_tokens_on_their_way_may_come_back_at_once() -> None:
    running = RunningTable(3, 8)
    steps = StepsInFlight(running)
    steps.steps.append(planned(1))
    for num_expected, void_through, is_void in ((0, 0, False), (1, 1, False), (1, 0, True)):
        request = make_request()
        request.row = 0
        running.generation[0] = 4
        running.num_placeholders[0], running.void_through[0] = num_expected, void_through
        steps.note_vacated([request], [HeldBlocks(())], is_void=is_void)
        assert request.resume_after_step == 0
