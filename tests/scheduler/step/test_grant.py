"""The tokens of one step, granted in admission order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longshore.scheduler.step.running import RunningTable


def table_with_order(order: list[int]) -> RunningTable:
    """Rows admitted in this order."""
    running = RunningTable(len(order), 64)
    for generation, row in enumerate(order, 1):
        running.generation[row] = generation
    return running


def test_tokens_are_cut_in_admission_order_whatever_the_rows_are() -> None:
    running = table_with_order([2, 0, 3, 1])
    granted = running.grant(np.array([4, 5, 4, 5]), 10)
    np.testing.assert_array_equal(granted, [4, 0, 4, 2])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.permutations(range(5)),
    st.lists(st.integers(0, 9), min_size=5, max_size=5),
    st.integers(0, 50),
)
@pytest.mark.req("SCH-02")
def test_a_cut_is_what_one_request_after_the_other_would_take(
    order: list[int], wanted: list[int], num_total: int
) -> None:
    left, expected = num_total, [0] * 5
    for row in order:
        expected[row] = min(wanted[row], left)
        left -= expected[row]
    granted = table_with_order(order).grant(np.array(wanted), num_total)
    assert granted.tolist() == expected
    assert num_total - int(granted.sum()) == left >= 0
