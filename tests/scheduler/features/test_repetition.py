"""Output that goes round in circles is noticed at the token that closes the last circle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.protocol.arrays import int32_array
from longshore.protocol.outputs import FinishReason
from longshore.protocol.sampling import RepetitionDetection
from longshore.scheduler.features.repetition import is_repeating
from tests.harness.driver import Driver
from tests.harness.shared_drivers import pressed
from tests.harness.tokens import EOS, prompt_of


@pytest.mark.parametrize(
    ("tokens", "detection", "expected"),
    [
        ([1, 1, 1, 1], RepetitionDetection(1), True),
        ([1, 1, 1], RepetitionDetection(1), False),
        ([2, 1, 1, 1, 1], RepetitionDetection(1), True),
        ([1, 1, 1, 1, 2], RepetitionDetection(1), False),
        ([1, 2, 1, 2, 1, 2, 1, 2], RepetitionDetection(1), False),
        ([1, 2, 1, 2, 1, 2, 1, 2], RepetitionDetection(2), True),
        ([2, 1, 2, 1, 2, 1, 2], RepetitionDetection(2), False),
        ([9, 1, 2, 3, 1, 2, 3], RepetitionDetection(3, 3, 2), True),
        ([9, 1, 2, 4, 1, 2, 3], RepetitionDetection(3, 3, 2), False),
        ([1, 1, 1, 1], RepetitionDetection(3, 2, 2), True),  # as the pattern (1, 1)
        ([1, 1, 1, 1], RepetitionDetection(3, 3, 2), False),
        ([], RepetitionDetection(1), False),
    ],
)
def test_the_last_tokens_repeat_or_not(
    tokens: list[int], detection: RepetitionDetection, expected: bool
) -> None:
    assert is_repeating(int32_array(tokens), detection) is expected


@given(
    tokens=st.lists(st.integers(0, 2), max_size=24),
    sizes=st.tuples(st.integers(1, 5), st.integers(0, 4)),
    count=st.integers(2, 4),
)
def test_what_repeats_is_what_plain_comparison_says(
    tokens: list[int], sizes: tuple[int, int], count: int
) -> None:
    least, most = sizes[0], sum(sizes)
    expected = any(
        len(tokens) >= size * count and tokens[-size * count :] == tokens[-size:] * count
        for size in range(least, most + 1)
    )
    detection = RepetitionDetection(most, least, count)
    assert is_repeating(int32_array(tokens), detection) is expected


def circling(name: str, position: int) -> int:
    """Three tokens of its own, then 60, 61, 60, 61 and so on."""
    return 50 + position if position < 3 else 60 + (position - 3) % 2


ASKS = {"repetition": RepetitionDetection(2, 1, 3)}


@pytest.mark.req("REQ-10")
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_request_that_asks_for_it_ends_with_the_third_circle(steps_in_flight: int) -> None:
    driver = Driver(sample=circling, max_steps_in_flight=steps_in_flight)
    asks = driver.add("asks", prompt_of(6), max_tokens=20, sampling=ASKS)
    bears = driver.add("bears", prompt_of(6), max_tokens=20)
    driver.run()
    assert driver.received[asks] == [50, 51, 52, 60, 61, 60, 61, 60, 61]
    assert driver.reason(asks) is FinishReason.REPETITION
    assert driver.finished[asks].num_output_tokens == 9
    assert len(driver.received[bears]) == 20
    assert driver.num_free_blocks == 39


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(9, FinishReason.LENGTH_CAPPED), (10, FinishReason.REPETITION)]
)
def test_the_length_is_looked_at_before_the_circles(
    steps_in_flight: int, max_tokens: int, reason: FinishReason
) -> None:
    driver = Driver(sample=circling, max_steps_in_flight=steps_in_flight)
    key = driver.add("r", prompt_of(6), max_tokens=max_tokens, sampling=ASKS)
    driver.run()
    assert (len(driver.received[key]), driver.reason(key)) == (9, reason)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_stop_id_is_looked_at_before_the_circles(steps_in_flight: int) -> None:
    driver = Driver(sample=lambda name, position: EOS, max_steps_in_flight=steps_in_flight)
    sampling = {"repetition": RepetitionDetection(1, 1, 3), "min_tokens": 3}
    key = driver.add("r", prompt_of(6), sampling=sampling)
    driver.run()
    assert (driver.received[key], driver.reason(key)) == ([EOS] * 3, FinishReason.STOPPED)


def test_repeats_in_the_prompt_do_not_count() -> None:
    driver = Driver(sample=lambda name, position: 60 + position)
    key = driver.add("r", [60] * 12, max_tokens=4, sampling=ASKS)
    driver.run()
    assert driver.reason(key) is FinishReason.LENGTH_CAPPED


def test_drafts_after_the_closing_token_are_dropped() -> None:
    driver = Driver(
        sample=circling,
        num_speculative_tokens=4,
        draft=lambda name, position: [circling(name, position + index) for index in range(4)],
    )
    key = driver.add("r", prompt_of(6), max_tokens=20, sampling=ASKS)
    driver.run()
    assert len(driver.received[key]) == 9
    assert driver.reason(key) is FinishReason.REPETITION


def test_a_token_that_comes_after_the_preemption_may_close_the_circle() -> None:
    driver = pressed(
        enable_prefix_caching=False,
        max_steps_in_flight=2,
        sample=lambda name, position: 60 if name == "young" else 50 + position,
    )
    driver.add("old", prompt_of(15, 0), max_tokens=10)
    sampling = {"repetition": RepetitionDetection(1, 1, 2)}
    young = driver.add("young", prompt_of(15, 40), max_tokens=10, sampling=sampling)
    driver.plan()
    driver.plan()
    driver.answer()
    driver.plan()
    assert driver.requests["young"].num_preemptions == 1
    driver.answer()
    assert (driver.received[young], driver.reason(young)) == ([60, 60], FinishReason.REPETITION)
    driver.run()
