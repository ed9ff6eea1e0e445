"""Rejected drafts: the scheduler learns of them from answers, and its next plan tells the workers,
of which not all know what was sampled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.protocol.errors import PlanMismatch
from longshore.protocol.plan import Rewind
from longshore.protocol.rows import PlanFollower, RowTable
from tests.protocol.test_rows import NUM_ROWS, Planner, replace, send, start_of


def pair() -> tuple[Planner, PlanFollower]:
    """Both sides after a first plan: rows 0 and 2 have caught up."""
    planner, follower = Planner(), PlanFollower(RowTable(NUM_ROWS), epoch=1)
    added = (start_of(0, 1, limit=40), start_of(2, 2, limit=40))
    follower.apply(send(planner.plan({0: 4, 2: 4}, added=added)))
    return planner, follower


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


def test_rejections_apply_before_all_else_in_their_plan() -> None:
    planner, follower = pair()
    follower.apply(send(planner.plan({0: 4})))  # one token and three drafts
    assert computed(follower) == [8, 0, 5, 0]
    follower.apply(send(planner.plan({0: 4}, rejected={0: 2})))
    assert computed(follower) == [10, 0, 6, 0]
    follower.apply(send(planner.plan()))
    assert computed(follower) == [11, 0, 7, 0]


def test_a_row_may_be_corrected_and_rewound_or_dropped_by_one_plan() -> None:
    planner, follower = pair()
    follower.apply(send(planner.plan({0: 4, 2: 4})))
    rewind = Rewind(0, 4, num_known_tokens=5)
    changes = {"rejected": {0: 3, 2: 1}, "rewound": (rewind,), "finished_rows": (2,)}
    follower.apply(send(planner.plan({0: 1}, **changes)))
    np.testing.assert_array_equal(follower.rows.num_computed, planner.rows.num_computed)
    assert computed(follower) == [5, 0, 0, 0]


@pytest.mark.parametrize(
    ("rows", "counts"),
    [([0, 0], [1, 1]), ([0], [0]), ([0], [8]), ([0, 2], [1]), ([], [1]), ([0], [-1])],
)
def test_impossible_rejections_are_a_mismatch(rows: list[int], counts: list[int]) -> None:
    planner, follower = pair()
    follower.apply(send(planner.plan({0: 4})))
    plan = planner.plan(rejected_rows=rows, rejected_tokens=counts)
    with pytest.raises(PlanMismatch, match="rejects"):
        follower.apply(send(plan))


@pytest.mark.parametrize("row", [1, -1, NUM_ROWS])
def test_rejections_of_a_row_that_is_not_in_use_are_a_mismatch(row: int) -> None:
    planner, follower = pair()
    plan = planner.plan(rejected_rows=[row], rejected_tokens=[1])
    with pytest.raises(PlanMismatch, match="corrected"):
        follower.apply(send(plan))


def test_the_digest_covers_rejections() -> None:
    planner, follower = pair()
    follower.apply(send(planner.plan({0: 4})))
    plan = planner.plan(rejected={0: 2})
    changed = replace(plan, rejected_tokens=np.array([1], np.int32))
    with pytest.raises(PlanMismatch, match="digest"):
        follower.apply(send(changed))


@given(st.data())
def test_both_sides_agree_however_late_the_answers_are(data: st.DataObject) -> None:
    planner, follower = Planner(), PlanFollower(RowTable(NUM_ROWS), epoch=1)
    rows = range(NUM_ROWS)
    added = tuple(start_of(row, row + 1, limit=10_000) for row in rows)
    follower.apply(send(planner.plan(dict.fromkeys(rows, 4), added=added)))
    unanswered: list[tuple[np.ndarray, np.ndarray]] = []
    generation = NUM_ROWS
    for _ in range(data.draw(st.integers(1, 12))):
        total = np.zeros(NUM_ROWS, np.int64)
        while unanswered and data.draw(st.booleans()):
            generations, rejected = unanswered.pop(0)
            total += np.where(planner.rows.generation == generations, rejected, 0)
        changes = {"rejected": {row: total[row] for row in rows if total[row]}}
        if data.draw(st.booleans()):
            generation += 1
            row = data.draw(st.sampled_from(rows))
            changes |= {
                "preempted_rows": (row,),
                "added": (start_of(row, generation, prompt=1, limit=10_000),),
            }
        wanted = {row: 1 + data.draw(st.integers(0, 3)) for row in rows}
        follower.apply(send(planner.plan(wanted, **changes)))
        np.testing.assert_array_equal(follower.rows.num_computed, planner.rows.num_computed)
        rejected = np.array([data.draw(st.integers(0, wanted[row] - 1)) for row in rows])
        unanswered.append((planner.rows.generation.copy(), rejected))
