"""Fitting a cost model to measured times."""

import numpy as np
import pytest

from longshore.deploy.bench.fit_cost import (
    Point,
    decode_point,
    fit,
    mixed_point,
    nonnegative_least_squares,
    prefill_point,
)
from longshore.deploy.bench.options import FitCostOptions
from longshore.deploy.bench.serve import Measured
from longshore.deploy.simulator.cost_model import HostTimes, StepTerms, StepWork
from longshore.protocol.errors import ConfigError

TERMS = StepTerms(
    per_step_s=2e-3, per_token_s=1e-5, per_attended_s=1e-9, per_context_s=3e-8, per_row_s=1e-4
)
PER_REQUEST_S = 4e-3


def exact_points() -> list[Point]:
    """What a noiseless engine with TERMS would measure."""
    points = []
    for num_prompt in (16, 100, 700, 1500, 3000):
        point = prefill_point(num_prompt, [1.0], 1024)
        per_step_s = TERMS.per_step_s * (point.num_steps - 1)
        seconds = TERMS.seconds(point.work) + per_step_s + PER_REQUEST_S
        points.append(Point(point.name, seconds, point.work, point.num_steps, 1))
    for batch_size in (1, 4, 16):
        for context in (100, 1000):
            tokens = batch_size * context
            work = StepWork(batch_size, tokens, tokens, batch_size, batch_size)
            points.append(Point("decode", TERMS.seconds(work), work, 1, 0))
    return points


def test_the_terms_of_a_linear_engine_are_found() -> None:
    model, report = fit(exact_points(), FitCostOptions())
    assert model.overhead.per_step_s == pytest.approx(TERMS.per_step_s, rel=1e-6)
    assert model.overhead.per_row_s == pytest.approx(TERMS.per_row_s, rel=1e-6)
    assert model.overhead.per_attended_s == pytest.approx(TERMS.per_attended_s, rel=1e-4)
    assert model.host == HostTimes(
        arrival_s=pytest.approx(PER_REQUEST_S / 2), output_s=pytest.approx(PER_REQUEST_S / 2)
    )
    assert report["largest_error"] < 1e-6
    assert len(report["points"]) == 11


def test_no_term_is_negative() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    falling = np.array([3.0, 2.0, 1.0])
    assert nonnegative_least_squares(matrix, falling) == pytest.approx([2.0, 0.0])
    assert nonnegative_least_squares(matrix, -falling) == pytest.approx([0.0, 0.0])
    assert nonnegative_least_squares(matrix, np.array([2.0, 3.0, 4.0])) == pytest.approx([1, 1])


def test_a_prompt_is_divided_into_steps() -> None:
    point = prefill_point(250, [3.0, 1.0, 2.0], 100)
    assert (point.seconds, point.num_steps) == (2.0, 3)
    assert point.work == StepWork(250, 250 * 251 // 2, 100 + 200 + 250, 3, 1)


def test_a_mixed_step_is_the_one_that_ends_with_the_first_token_of_the_new_request() -> None:
    gaps_s = [1.0, 1.0, 4.0, 1.0]
    decodes = [Measured(0.0, first_s, 0.0, gaps_s, 5, 0) for first_s in (1.0, 1.5)]
    new = Measured(3.2, 3.9, 3.9, [], 1, 0)  # at 7.1
    late = Measured(20.0, 1.0, 1.0, [], 1, 0)
    (point,) = mixed_point(50, 10, [(decodes, new), (decodes, late)])
    assert point.seconds == 4.0
    context = 2 * (10 + 3)
    assert point.work == StepWork(52, 50 * 51 // 2 + context, 50 + context, 3, 3)
    assert mixed_point(50, 10, [(decodes, late)]) == []


def test_a_first_token_may_arrive_after_the_next_step_of_the_others() -> None:
    decode = Measured(0.0, 1.0, 0.0, [1.0, 4.0, 0.5, 1.0], 5, 0)  # tokens at 1, 2, 6, 6.5 and 7.5
    slow = Measured(3.2, 3.2, 3.2, [], 1, 0)  # at 6.4, of the step that ended at 6
    (point,) = mixed_point(50, 10, [([decode], slow)])
    assert (point.seconds, point.work.num_context) == (4.0, 50 + 10 + 2)
    first = Measured(0.0, 1.2, 1.2, [], 1, 0)  # nothing is before the first step
    assert mixed_point(50, 10, [([decode], first)])[0].seconds == 1.0


def test_a_decode_counts_only_while_all_requests_decode() -> None:
    first = Measured(0.0, 1.0, 11.0, [1.0] * 10, 11, 0)  # tokens at 1, 2, ... 11
    second = Measured(0.0, 5.0, 14.0, [1.0, 1.0, 1.0, 2.0, 2.0, 2.0], 7, 0)
    point = decode_point(100, [[first, second]])
    # Between 5 and 11 the first has a token per second, the second 5 in 5 seconds.
    assert point.seconds == pytest.approx((1.0 + 5 / 4) / 2)
    assert (point.work.num_rows, point.work.num_tokens) == (2, 2)
    with pytest.raises(ConfigError, match="Raise output_len"):
        decode_point(100, [[first, Measured(0.0, 10.5, 12.0, [1.5], 2, 0)]])
