"""Plans without an answer, and who had left when it came."""

import numpy as np
import pytest

from longshore.scheduler.in_flight import PlannedStep, StepsInFlight
from tests.scheduler.test_request import make_request


def planned(step: int) -> PlannedStep:
    return PlannedStep(step, np.array([0, 2]), np.array([4, 5]))


def test_answers_come_in_the_order_of_the_plans() -> None:
    steps = StepsInFlight()
    assert (len(steps), steps.oldest(), steps.newest_step) == (0, None, 0)
    first, second = planned(1), planned(2)
    steps.add(first)
    steps.add(second)
    assert (len(steps), steps.oldest(), steps.newest_step) == (2, first, 2)
    steps.answered()
    assert (steps.oldest(), steps.last_answered_step, steps.newest_step) == (second, 1, 2)
    steps.answered()
    assert (steps.oldest(), steps.last_answered_step, steps.newest_step) == (None, 2, 2)


def test_a_departed_request_is_known_until_the_last_plan_made_before_is_answered() -> None:
    steps = StepsInFlight()
    steps.add(planned(1))
    steps.add(planned(2))
    request = make_request()
    steps.note_departure(request, generation=4)
    assert request.resume_after_step == 2
    steps.add(planned(3))
    steps.answered()
    assert steps.departed_request(4) is request
    steps.answered()
    with pytest.raises(KeyError):
        steps.departed_request(4)
