"""Steps for a pipeline of stages: several in flight, and sampled ids for the first stage."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.rows import PlanFollower, RowTable
from tests.scheduler.driver import Driver, expected_output, prompt_of
from tests.scheduler.test_random_runs import engines, events, play


class FirstStageDriver(Driver):
    """Has a first stage beside its worker, which knows of sampled tokens what plans bring.

    num_stages: 1 has no use for them, and leaves the settings alone.
    nan_every:  of so many answers one has a row whose logits are not finite; 0: none.
    """

    def __init__(self, num_stages: int, *, nan_every: int = 0, **settings: Any) -> None:
        self._nan_every = nan_every
        self.sampling_rows: dict[int, list[int]] = {}
        if num_stages > 1:
            settings |= {"max_steps_in_flight": num_stages, "feed_back_tokens": True}
        super().__init__(**settings)

    def _start_workers(self, epoch: int) -> None:
        super()._start_workers(epoch)
        self._stage_rows = RowTable(self.config.max_num_seqs)
        self._stage = PlanFollower(self._stage_rows, epoch=epoch)
        self._stage_tokens: dict[int, dict[int, int]] = {}

    def _run(self, plan: SchedulerOutput) -> None:
        super()._run(plan)
        rows = self._stage_rows
        num_scheduled = self._stage.apply(plan)
        self.sampling_rows[plan.step] = np.flatnonzero(rows.samples(num_scheduled)).tolist()
        if not self.config.feed_back_tokens:
            assert (len(plan.sampled_rows), len(plan.sampled_tokens)) == (0, 0)
            return
        for start in plan.added:
            known = [*start.prompt_token_ids.tolist(), *start.output_token_ids.tolist()]
            self._stage_tokens[start.row] = dict(enumerate(known))
        starts = rows.num_computed - num_scheduled
        rewound = {rewind.row for rewind in plan.rewound}
        for row, token in zip(
            plan.sampled_rows.tolist(), plan.sampled_tokens.tolist(), strict=True
        ):
            position = rows.num_known[row] - 1 if row in rewound else starts[row]
            self._stage_tokens[row][int(position)] = token
        for row in np.flatnonzero(num_scheduled).tolist():
            for position in range(starts[row], rows.num_computed[row]):
                assert self._stage_tokens[row].get(position) == self._held[row].tokens[position]

    def answer(self, nan_rows: Sequence[int] = (), *, with_drafts: bool = True) -> None:
        step = self.pending[0].step
        if self._nan_every and step % self._nan_every == 0:
            nan_rows = self.sampling_rows[step][:1]
        super().answer(nan_rows, with_drafts=with_drafts)


def decoding(num_stages: int, num_requests: int, max_tokens: int = 20) -> FirstStageDriver:
    """Requests that have all been prefilled, by an answered step."""
    driver = FirstStageDriver(num_stages, num_blocks=120, max_num_seqs=num_requests)
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
    driver = FirstStageDriver(3, max_num_batched_tokens=8)
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
    driver = FirstStageDriver(num_stages, nan_every=nan_every, max_model_len=40, **engine)
    names = play(driver, happenings)
    driver.run()
    for key, (name, max_tokens) in names.items():
        received = driver.received[key]
        assert received == expected_output(name, len(received))
        assert len(received) <= max_tokens
    assert driver.num_free_blocks == driver.num_blocks - 1


@pytest.mark.req("OUT-04")
@given(engine=engines, happenings=events)
def test_without_stages_no_token_is_sent_back(
    engine: dict[str, Any], happenings: list[Any]
) -> None:
    driver = FirstStageDriver(1, max_model_len=40, **engine)
    play(driver, happenings)
    driver.run()


@pytest.mark.req("OUT-04")
@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_the_first_stage_learns_the_last_token_of_a_row_that_is_sent_back(
    num_in_flight: int,
) -> None:
    driver = FirstStageDriver(2, num_blocks=60)
    bad = driver.add("bad", prompt_of(9), max_tokens=12)
    driver.plan()
    driver.answer()
    late = driver.add("late", [*prompt_of(9), 5, 6], max_tokens=12)
    while not (driver.scheduled == {"bad": 1} and len(driver.received[late]) == 3):
        driver.step()
    while len(driver.pending) < num_in_flight and driver.plan() is not None:
        continue
    while driver.pending and bad not in driver.finished:
        is_bad = 0 in driver.sampling_rows[driver.pending[0].step]
        driver.answer(nan_rows=[0] if is_bad else [])
    driver.run()
    assert sum(len(plan.rewound) for plan in driver.plans) == 1
    assert driver.received[late] == expected_output("late", 12)
