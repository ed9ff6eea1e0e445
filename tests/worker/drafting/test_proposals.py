"""How many drafts a row gets, and that a drafter learns of every change of its row."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.plan import Rewind, SchedulerOutput
from longshore.protocol.requests import PoolingParams
from longshore.worker.drafting.config import SpeculativeConfig
from longshore.worker.drafting.drafter import Drafter
from longshore.worker.drafting.proposals import MAX_PAUSE, Proposals, SampledTokens, StepCosts
from tests.worker.plans import Entry, Planner

MAX_DRAFTS = 8


class Counting(Drafter):
    """Proposes the next numbers, always as many as it may."""

    def __init__(self, config: SpeculativeConfig | None = None) -> None:
        self.rows: dict[int, list[int]] = {}
        self.finished: list[tuple[int, bool]] = []

    def start(self, row: int, token_ids: Int32Array, num_prompt: int) -> None:
        assert row not in self.rows
        self.rows[row] = token_ids.tolist()

    def append(self, row: int, token_ids: Sequence[int]) -> None:
        self.rows[row] += token_ids

    def rewind(self, row: int, num_tokens: int) -> None:
        del self.rows[row][num_tokens:]

    def propose(self, row: int, max_tokens: int) -> Sequence[int]:
        assert max_tokens > 0
        last = self.rows[row][-1]
        return [last + 1 + place for place in range(max_tokens)]

    def end(self, row: int, *, is_finished: bool) -> None:
        del self.rows[row]
        self.finished.append((row, is_finished))


class Rows:
    """Proposals for rows whose drafts are accepted as a test says."""

    def __init__(self, num_rows: int = 1) -> None:
        self.drafter = Counting()
        self.proposals = Proposals(self.drafter, max_drafts=MAX_DRAFTS, vocab_size=1000)
        self.plans = Planner(num_blocks=100, block_size=4)
        entries = [Entry(row, [row + 1] * 3) for row in range(num_rows)]
        self.proposals.begin(self.plans.plan(dict.fromkeys(range(num_rows), 3), added=entries))
        self.num_drafts = np.zeros(num_rows, np.int64)

    def step(self, *num_accepted: int) -> list[int]:
        """Each row accepts so many of its drafts, or all; returns the new numbers of drafts."""
        accepted = np.minimum(num_accepted, self.num_drafts)
        rows = np.arange(len(self.num_drafts))
        ids = np.full(int((accepted + 1).sum()), 7, np.int32)
        draft_rows, draft_ids = self.proposals.propose(
            SampledTokens(rows, self.num_drafts, accepted + 1, ids)
        )
        assert len(draft_rows) == len(draft_ids)
        self.num_drafts = np.bincount(draft_rows, minlength=len(rows))
        return self.num_drafts.tolist()


def test_a_row_whose_drafts_are_right_gets_all_that_it_may() -> None:
    rows = Rows()
    for _ in range(20):
        assert rows.step(MAX_DRAFTS) == [MAX_DRAFTS]


def test_a_row_whose_drafts_are_always_wrong_gets_them_in_fewer_and_fewer_steps() -> None:
    rows = Rows()
    numbers = [rows.step(0)[0] for _ in range(400)]
    tried = [step for step, number in enumerate(numbers) if number]
    gaps = np.diff(tried).tolist()
    assert gaps[:6] == [2, 4, 8, 16, 32, 64]
    assert set(gaps[6:]) == {MAX_PAUSE + 1}


def test_one_right_draft_ends_the_pauses() -> None:
    rows = Rows()
    while rows.step(0) != [0]:
        pass
    for _ in range(40):
        rows.step(0)
    while not rows.num_drafts[0]:
        rows.step(0)
    assert rows.step(1)[0] > 0
    assert rows.step(1)[0] > 0


@pytest.mark.parametrize(("acceptance", "most"), [(1, MAX_DRAFTS), (0.5, 2)])
def test_where_tokens_cost_time_rows_get_the_drafts_that_pay(acceptance: float, most: int) -> None:
    """A token costs a quarter of the time per output token."""
    rows = Rows()
    chance = np.random.default_rng(0)
    for _ in range(300):
        for num_tokens in (1, 9):
            rows.proposals.costs.measured(num_tokens, 0.75 + 0.25 * num_tokens)
        num_right = 0
        while num_right < MAX_DRAFTS and chance.random() < acceptance:
            num_right += 1
        number = rows.step(num_right)[0]
    assert number == most if acceptance == 1 else number <= most + 2


def test_the_price_of_a_token_is_its_share_of_the_time_per_output() -> None:
    costs = StepCosts()
    assert costs.price(4, 2) == 0
    for num_tokens in (8, 12, 16, 8, 20):
        costs.measured(num_tokens, 2.0 + 0.5 * num_tokens)
    weight, tokens, _, seconds, _ = costs._sums
    assert costs.price(4, 2) == pytest.approx(0.5 * 4 / (seconds / weight))
    assert 0 < tokens / weight < 20


def test_a_drafter_with_weights_has_a_price_per_draft_that_rows_share() -> None:
    costs = StepCosts()
    for num_tokens in (2, 4, 2, 4):
        costs.measured(num_tokens, 1.0)
    costs.drafted(4, 0.8)
    assert costs.price(4, 1) == pytest.approx(0.2 * 4)
    assert costs.price(4, 4) == pytest.approx(0.2 * 4 / 4)
    costs.drafted(2, 0.8)
    assert costs.price(4, 1) == pytest.approx((0.9 * 0.2 + 0.1 * 0.4) * 4)


def test_a_drafter_in_the_step_is_told_before_how_many_drafts_are_wanted() -> None:
    """The row gets as many; one that is not known yet may want all."""
    rows = Rows()
    numbers = []
    for _ in range(100):
        numbers.append(rows.proposals.num_wanted([0]))
        assert rows.step(0) == numbers[-1:]
    assert numbers[0] == MAX_DRAFTS
    assert numbers.count(0) > 80
    assert rows.proposals.num_wanted([0, 5]) == MAX_DRAFTS


def test_steps_of_one_size_do_not_show_the_price() -> None:
    costs = StepCosts()
    for seconds in (1.0, 1.1, 0.9):
        costs.measured(64, seconds)
    assert costs.price(64, 64) == 0


def test_a_drafter_learns_of_every_change_of_its_rows() -> None:
    rows = Rows(num_rows=3)
    plans, drafter = rows.plans, rows.drafter
    rows.step(0, 0, 0)
    changes: dict[str, Any] = {
        "finished": [0],
        "preempted": [1],
        "rewound": [Rewind(2, 1, num_known_tokens=2)],
        "added": [Entry(0, [5], (6,)), Entry(4, [8], pooling=PoolingParams())],
    }
    rows.proposals.begin(plans.plan({0: 2, 2: 1, 4: 1}, **changes))
    assert drafter.finished == [(0, True), (1, False)]
    assert drafter.rows == {0: [5, 6], 2: [3, 3]}
    sampled = SampledTokens(np.array([4]), np.zeros(1, int), np.ones(1, int), int32_array([0]))
    assert not len(rows.proposals.propose(sampled)[0])  # no drafts for a pooling request
    rows.proposals.begin(plans.plan({2: 0}, finished=[4]))
    assert drafter.finished == [(0, True), (1, False)]


def test_a_drafter_that_proposes_too_many_is_cut() -> None:
    class Eager(Counting):
        def propose(self, row: int, max_tokens: int) -> Sequence[int]:
            return range(100)

    proposals = Proposals(Eager(), max_drafts=3, vocab_size=1000)
    plan: SchedulerOutput = Planner(num_blocks=9, block_size=4).plan({0: 1}, added=[Entry(0, [1])])
    proposals.begin(msgspec.structs.replace(plan))
    one = np.ones(1, np.int64)
    sampled = SampledTokens(np.zeros(1, np.int64), 0 * one, one, int32_array([4]))
    assert proposals.propose(sampled)[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("failing", ["start", "append", "propose", "a wrong id"])
def test_a_drafter_that_fails_costs_drafts_and_no_stream(
    failing: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Counting):
        num_calls = 0

        def start(self, row: int, token_ids: Int32Array, num_prompt: int) -> None:
            super().start(row, token_ids, num_prompt)
            self._call("start")

        def append(self, row: int, token_ids: Sequence[int]) -> None:
            self._call("append")

        def propose(self, row: int, max_tokens: int) -> Sequence[int]:
            self._call("propose")
            return [1000] if failing == "a wrong id" else [1]

        def _call(self, name: str) -> None:
            self.num_calls += 1
            if name == failing:
                raise RuntimeError("no luck")

    drafter = Failing()
    proposals = Proposals(drafter, max_drafts=3, vocab_size=1000)
    plans = Planner(num_blocks=9, block_size=4)
    proposals.begin(plans.plan({0: 1}, added=[Entry(0, [1])]))
    one = np.ones(1, np.int64)
    sampled = SampledTokens(np.zeros(1, np.int64), 0 * one, one, int32_array([4]))
    num_drafts = len(proposals.propose(sampled)[0])
    num_calls = drafter.num_calls
    assert (num_drafts, len(proposals.propose(sampled)[0])) == (0, 0)
    proposals.begin(plans.plan(finished=[0]))
    assert drafter.num_calls == num_calls
    assert caplog.text.count("the drafter Failing has failed; there are no drafts") == 1
