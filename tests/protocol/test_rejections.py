"""Rejected drafts: the worker knows them at once, the scheduler learns them from the answer, and
both must subtract them before the same plan."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.protocol.errors import PlanMismatch
from longshore.protocol.plan import Rewind
from longshore.protocol.rows import PlanFollower, RowTable
from tests.protocol.test_rows import NUM_ROWS, Planner, send, start_of


def pair() -> tuple[Planner, PlanFollower]:
    """Both sides after a first plan: rows 0 and 2 have caught up."""
    planner, follower = Planner(), PlanFollower(RowTable(NUM_ROWS), epoch=1)
    added = (start_of(0, 1, limit=40), start_of(2, 2, limit=40))
    follower.apply(send(planner.plan({0: 4, 2: 4}, added=added)))
    return planner, follower


def note(follower: PlanFollower, step: int, rows: np.ndarray, num_rejected: np.ndarray) -> None:
    """The worker learns of rejections before it receives the next plan."""
    follower.note_rejected(step, rows, follower.rows.generation[rows].copy(), num_rejected)


def computed(follower: PlanFollower) -> list[int]:
    return follower.rows.num_computed.tolist()


def test_rejected_drafts_are_subtracted_from_the_computed_count_of_their_rows() -> None:
    rows = RowTable(4)
    for row in (0, 2, 3):
        rows.start(start_of(row, row + 1, limit=30))
    rows.advance(np.array([8, 0, 8, 8]))
    rows.reject(np.array([0, 3]), np.array([2, 1]))
    assert rows.num_computed.tolist() == [6, 0, 8, 7]
    assert rows.expected().tolist() == [1, 0, 1, 1]
    assert rows.num_known.tolist() == [4, 0, 4, 4]


def test_a_rejection_applies_from_the_plan_that_was_made_with_its_answer() -> None:
    planner, follower = pair()
    follower.apply(send(planner.plan({0: 4})))  # step 2: one token and three drafts
    assert computed(follower) == [8, 0, 5, 0]
    note(follower, 2, np.array([0]), np.array([2]))
    follower.apply(send(planner.plan({0: 4}, answered_step=1)))  # step 3 was made without it
    assert computed(follower) == [12, 0, 6, 0]
    planner.rows.reject(np.array([0]), np.array([2]))
    follower.apply(send(planner.plan({0: 4}, answered_step=2)))
    assert computed(follower) == [14, 0, 7, 0]
    follower.apply(send(planner.plan(answered_step=2)))  # not a second time
    assert computed(follower) == [15, 0, 8, 0]


def test_several_rejections_that_apply_with_one_plan_add_up() -> None:
    planner, follower = pair()
    for step in (2, 3):
        follower.apply(send(planner.plan({0: 3, 2: 3}, answered_step=1)))
        note(follower, step, np.array([0, 2]), np.array([2, 1]))
    planner.rows.reject(np.array([0, 2]), np.array([4, 2]))
    follower.apply(send(planner.plan(answered_step=3)))
    assert computed(follower) == [4 + 6 - 4 + 1, 0, 4 + 6 - 2 + 1, 0]


def test_a_rejection_does_not_touch_the_next_occupant_of_its_row() -> None:
    planner, follower = pair()
    follower.apply(send(planner.plan({0: 4})))
    note(follower, 2, np.array([0, 2]), np.array([3, 0]))
    plan = planner.plan({0: 4}, finished_rows=(0,), added=(start_of(0, 3),), answered_step=1)
    follower.apply(send(plan))
    follower.apply(send(planner.plan({0: 1}, answered_step=2)))
    assert computed(follower) == [5, 0, 7, 0]


def test_a_rejection_is_void_for_a_row_that_is_dropped_in_the_plan_that_applies_it() -> None:
    planner, follower = pair()
    follower.apply(send(planner.plan({0: 4})))
    note(follower, 2, np.array([0]), np.array([3]))
    follower.apply(send(planner.plan(finished_rows=(0,), answered_step=2)))
    assert computed(follower) == [0, 0, 6, 0]


def test_rejections_in_flight_are_void_once_their_row_is_rewound() -> None:
    """The answer to step 3 has tokens that a rewind discarded; its rejections are void as well."""
    planner, follower = pair()
    follower.apply(send(planner.plan({0: 4})))
    follower.apply(send(planner.plan({0: 4}, answered_step=1)))
    note(follower, 3, np.array([0]), np.array([3]))
    rewind = Rewind(0, 4, num_known_tokens=5)
    follower.apply(send(planner.plan({0: 1}, rewound=(rewind,), answered_step=2)))
    follower.apply(send(planner.plan({0: 1}, answered_step=3)))
    np.testing.assert_array_equal(follower.rows.num_computed, planner.rows.num_computed)


def test_rejections_of_a_former_occupant_do_not_touch_the_next_one() -> None:
    """The worker learns of step 2's rejections after the plan of step 3 has dropped the row."""
    planner, follower = pair()
    follower.apply(send(planner.plan({0: 4})))
    generations = follower.rows.generation[[0]].copy()
    follower.apply(send(planner.plan(finished_rows=(0,), answered_step=1)))
    follower.note_rejected(2, np.array([0]), generations, np.array([3]))
    follower.apply(send(planner.plan(answered_step=2)))
    np.testing.assert_array_equal(follower.rows.num_computed, planner.rows.num_computed)


def test_a_plan_that_misses_a_rejection_does_not_match_its_totals() -> None:
    planner, follower = pair()
    follower.apply(send(planner.plan({0: 36})))  # up to its last token
    note(follower, 2, np.array([0]), np.array([2]))
    with pytest.raises(PlanMismatch, match="step 3 has 1 tokens, but the worker counts 2"):
        follower.apply(send(planner.plan(answered_step=2)))


@given(st.data())
def test_both_sides_agree_however_late_the_answers_are(data: st.DataObject) -> None:
    planner, follower = Planner(), PlanFollower(RowTable(NUM_ROWS), epoch=1)
    rows = range(NUM_ROWS)
    added = tuple(start_of(row, row + 1, limit=10_000) for row in rows)
    follower.apply(send(planner.plan(dict.fromkeys(rows, 4), added=added)))
    unanswered: list[tuple[int, np.ndarray, np.ndarray]] = []
    answered_step = generation = 0
    generation = NUM_ROWS
    for _ in range(data.draw(st.integers(1, 12))):
        while unanswered and data.draw(st.booleans()):
            answered_step, generations, rejected = unanswered.pop(0)
            still = np.flatnonzero(planner.rows.generation == generations)
            planner.rows.reject(still, rejected[still])
        changes = {}
        if data.draw(st.booleans()):
            generation += 1
            row = data.draw(st.sampled_from(rows))
            changes = {
                "preempted_rows": (row,),
                "added": (start_of(row, generation, prompt=1, limit=10_000),),
            }
        wanted = {row: 1 + data.draw(st.integers(0, 3)) for row in rows}
        plan = planner.plan(wanted, answered_step=answered_step, **changes)
        follower.apply(send(plan))
        np.testing.assert_array_equal(follower.rows.num_computed, planner.rows.num_computed)
        rejected = np.array([data.draw(st.integers(0, wanted[row] - 1)) for row in rows])
        note(follower, plan.step, np.arange(NUM_ROWS), rejected)
        unanswered.append((plan.step, planner.rows.generation.copy(), rejected))
