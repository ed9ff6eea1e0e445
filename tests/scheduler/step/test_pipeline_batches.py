"""Steps for a pipeline of stages: several in flight, and sampled ids for the first stage."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.driver import Driver
from tests.harness.tokens import expected_output, prompt_of
from tests.scheduler.test_random_runs import engines, events, play


class StagesDriver(Driver):
    """Of a pipeline with `num_stages` stages; 1 leaves the settings alone.

    nan_every: one of this many outputs has a row whose logits are not finite; 0: none.
    """

    def __init__(self, num_stages: int, *, nan_every: int = 0, **settings: Any) -> None:
        self._nan_every = nan_every
        if num_stages > 1:
            settings |= {"max_steps_in_flight": num_stages, "feed_back_tokens": True}
        super().__init__(**settings)

    def answer(self, nan_rows: Sequence[int] = (), *, with_drafts: bool = True) -> None:
        oldest = self.unanswered[0]
        if self._nan_every and oldest.plan.step % self._nan_every == 0:
            nan_rows = oldest.samples[:1]
        super().answer(nan_rows, with_drafts=with_drafts)


def decoding(num_stages: int, num_requests: int, max_tokens: int = 20) -> StagesDriver:
    """Requests that have all been prefilled, by an answered step."""
    driver = StagesDriver(num_stages, num_blocks=120, max_num_seqs=num_requests)
    for index in range(num_requests):
        driver.add(f"r{index}", prompt_of(4, index), max_tokens=max_tokens)
    driver.plan()
    driver.answer()
    return driver


@pytest.mark.req("FEA-07")
@pytest.mark.parametrize(("num_stages", "num_requests"), [(2, 6), (2, 7), (3, 6), (4, 5), (3, 2)])
def test_requests_that_decode_are_shared_out_among_as_many_steps_as_stages(
    num_stages: int, num_requests: int
) -> None:
    driver = decoding(num_stages, num_requests)
    share = -(-num_requests // num_stages)
    in_flight: list[dict[str, int]] = []
    for _ in range(12):
        while driver.plan() is not None:
            in_flight.append(driver.scheduled)
        busy = [name for step in in_flight for name in step]
        assert len(busy) == len(set(busy)) == num_requests
        assert len(in_flight) == -(-num_requests // share)
        assert max(map(len, in_flight)) == share
        driver.answer()
        del in_flight[0]


def test_a_request_alone_waits_for_its_token() -> None:
    driver = decoding(2, 1)
    assert driver.plan() is not None
    assert driver.plan() is None
    driver.answer()
    assert driver.plan() is not None


@pytest.mark.req("FEA-07")
def test_chunks_of_one_prompt_follow_each_other_without_waiting() -> None:
    driver = StagesDriver(3, max_num_batched_tokens=8)
    driver.add("long", prompt_of(24), max_tokens=3)
    for _ in range(3):
        driver.plan()
        assert driver.scheduled == {"long": 8}
    assert driver.plan() is None
    driver.run()
    assert driver.received[0, 0] == expected_output("long", 3)


@pytest.mark.req("OUT-04", "FEA-07")
@given(
    engine=engines,
    num_stages=st.integers(2, 4),
    nan_every=st.sampled_from([0, 0, 3, 7]),
    happenings=events,
)
def test_the_first_stage_knows_every_token_it_computes(
    engine: dict[str, Any], num_stages: int, nan_every: int, happenings: list[Any]
) -> None:
    driver = StagesDriver(num_stages, nan_every=nan_every, max_model_len=40, **engine)
    names = play(driver, happenings)
    driver.run()
    for key, (name, max_tokens) in names.items():
        received = driver.received[key]
        assert received == expected_output(name, len(received))
        assert len(received) <= max_tokens
    assert driver.num_free_blocks == driver.num_blocks - 1


@pytest.mark.req("OUT-04")
@given(engine=engines, happenings=events)
def test_without_stages_no_token_is_fed_back(engine: dict[str, Any], happenings: list[Any]) -> None:
    driver = StagesDriver(1, max_model_len=40, **engine)
    play(driver, happenings)
    driver.run()


@pytest.mark.req("OUT-04")
@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_the_first_stage_gets_the_last_token_of_a_rewound_row(
    num_in_flight: int,
) -> None:
    driver = StagesDriver(2, num_blocks=60)
    bad = driver.add("bad", prompt_of(9), max_tokens=12)
    driver.plan()
    driver.answer()
    late = driver.add("late", [*prompt_of(9), 5, 6], max_tokens=12)
    while not (driver.scheduled == {"bad": 1} and len(driver.received[late]) == 3):
        driver.step()
    while len(driver.unanswered) < num_in_flight and driver.plan() is not None:
        continue
    while driver.unanswered and bad not in driver.finished:
        is_bad = 0 in driver.unanswered[0].samples
        driver.answer(nan_rows=[0] if is_bad else [])
    driver.run()
    assert sum(len(plan.rewound) for plan in driver.plans) == 1
    assert driver.received[late] == expected_output("late", 12)
