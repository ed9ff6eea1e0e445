"""Two row tables that exchange only differences, and the plans that the worker rejects."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.handshake import ToWorker
from longshore.protocol.plan import (
    AppendedBlocks,
    Rewind,
    RowStart,
    RowState,
    SchedulerOutput,
    plan_digest,
)
from longshore.protocol.rows import EMPTY_ROW, PlanFollower, RowTable
from longshore.protocol.sampling import SamplingParams
from longshore.protocol.transport.codec import Decoder, Encoder
from tests.protocol.messages import as_received

NUM_ROWS = 4
replace = msgspec.structs.replace


def start_of(row: int, generation: int, *, computed: int = 0, prompt: int = 4, limit: int = 9):
    return RowStart(
        row=row,
        generation=generation,
        request_id=f"g{generation}",
        num_computed_tokens=computed,
        last_computed=limit,
        prompt_token_ids=int32_array(range(prompt)),
        block_ids=(int32_array([generation]),),
        sampling=SamplingParams(),
    )


class Planner:
    """The scheduler's side: changes a table, and plans only what differs from the prediction."""

    def __init__(self, epoch: int = 1) -> None:
        self.rows = RowTable(NUM_ROWS)
        self.step = 0
        self._epoch = epoch
        self._digest = 0

    def plan(self, wanted: dict[int, int] | None = None, **changes: Any) -> SchedulerOutput:
        """Apply changes; rows compute `wanted` tokens, others as predicted. Returns the plan.
        rejected: drafts that answers have rejected, by row."""
        rows = self.rows
        rejected = changes.pop("rejected", {})
        if rejected:
            changes["rejected_rows"] = list(rejected)
            changes["rejected_tokens"] = list(rejected.values())
            rows.reject(np.array(list(rejected)), np.array(list(rejected.values())))
        for field in ("rejected_rows", "rejected_tokens"):
            if field in changes:
                changes[field] = int32_array(changes[field])
        for field in ("finished_rows", "preempted_rows"):
            for row in changes.get(field, ()):
                rows.drop(row)
            changes[field] = int32_array(list(changes.get(field, ())))
        for rewind in changes.get("rewound", ()):
            rows.rewind(rewind)
        for start in changes.get("added", ()):
            rows.start(start)
        expected = rows.expected()
        counts = expected.copy()
        for row, count in (wanted or {}).items():
            counts[row] = count
        changed = np.flatnonzero(counts != expected)
        rows.advance(counts)
        self.step += 1
        plan = SchedulerOutput(
            epoch=self._epoch,
            step=self.step,
            previous_step=self.step - 1,
            num_rows=rows.num_rows,
            num_scheduled_tokens=int(counts.sum()),
            digest=0,
            scheduled_rows=int32_array(changed),
            scheduled_tokens=int32_array(counts[changed]),
            **changes,
        )
        self._digest = plan_digest(self._digest, plan)
        self.counts = counts
        return replace(plan, digest=self._digest)


def send(plan: SchedulerOutput) -> SchedulerOutput:
    """The plan as the worker receives it."""
    received = Decoder[ToWorker](ToWorker).decode(as_received(Encoder[ToWorker]().encode(plan)))
    assert isinstance(received, SchedulerOutput)
    return received


class RowsMachine(RuleBasedStateMachine):
    """Rows start, run, pause, rewind and end; each plan is encoded and decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.planner = Planner()
        self.worker = RowTable(NUM_ROWS)
        self.follower = PlanFollower(self.worker, epoch=1)
        self.changes: dict[str, list[Any]] = {}
        self.generation = 0
        self.left: set[int] = set()
        self.taken: set[int] = set()

    @initialize()
    def begin(self) -> None:
        self.changes = {"finished_rows": [], "preempted_rows": [], "rewound": [], "added": []}

    def held(self) -> list[int]:
        return [
            row
            for row in range(NUM_ROWS)
            if self.planner.rows.generation[row] != EMPTY_ROW and row not in self.left
        ]

    @precondition(lambda self: len(self.held()) + len(self.taken) < NUM_ROWS)
    @rule(data=st.data(), prompt=st.integers(1, 6), more=st.integers(0, 5))
    def start(self, data: st.DataObject, prompt: int, more: int) -> None:
        free = sorted(set(range(NUM_ROWS)) - set(self.held()) - self.taken)
        row = data.draw(st.sampled_from(free))
        self.generation += 1
        computed = data.draw(st.integers(0, prompt - 1))
        start = start_of(
            row, self.generation, computed=computed, prompt=prompt, limit=prompt + more
        )
        self.changes["added"].append(start)
        self.taken.add(row)

    @precondition(lambda self: self.held())
    @rule(data=st.data(), field=st.sampled_from(["finished_rows", "preempted_rows"]))
    def drop(self, data: st.DataObject, field: str) -> None:
        row = data.draw(st.sampled_from(self.held()))
        rewound = [rewind for rewind in self.changes["rewound"] if rewind.row != row]
        self.changes["rewound"] = rewound
        self.changes[field].append(row)
        self.left.add(row)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.held()))
        rows = self.planner.rows
        if any(rewind.row == row for rewind in self.changes["rewound"]):
            return
        computed, known = int(rows.num_computed[row]), int(rows.num_known[row])
        target = data.draw(st.integers(0, computed))
        known = data.draw(st.integers(known, max(known, computed + 1)))
        self.changes["rewound"].append(Rewind(row, target, known))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        starts = {start.row: start for start in self.changes["added"]}
        limits = {row: int(self.planner.rows.last_computed[row]) for row in self.held()}
        computed = {row: int(self.planner.rows.num_computed[row]) for row in self.held()}
        for rewind in self.changes["rewound"]:
            computed[rewind.row] = rewind.num_computed_tokens
        for row, start in starts.items():
            limits[row], computed[row] = start.last_computed, start.num_computed_tokens
        wanted = {}
        for row in limits:
            if data.draw(st.booleans()):
                wanted[row] = data.draw(st.integers(0, limits[row] - computed[row]))
        plan = self.planner.plan(wanted, **{k: tuple(v) for k, v in self.changes.items()})
        received = send(plan)
        counts = self.follower.apply(received)
        np.testing.assert_array_equal(counts, self.planner.counts)
        assert self.follower.is_repeat(received)
        self.changes = {field: [] for field in self.changes}
        self.left, self.taken = set(), set()

    @invariant()
    def both_sides_hold_the_same(self) -> None:
        for column in ("generation", "num_computed", "num_known", "last_computed"):
            np.testing.assert_array_equal(
                getattr(self.planner.rows, column), getattr(self.worker, column)
            )
        assert self.planner.rows.num_rows == self.worker.num_rows
        assert (self.worker.num_computed <= self.worker.last_computed).all()


def test_two_tables_stay_equal_whatever_starts_ends_rewinds_or_pauses() -> None:
    run_state_machine_as_test(
        RowsMachine,
        settings=settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True),
    )


# The predictor


def test_a_prefilling_row_computes_only_what_is_planned_and_a_decoding_row_one_token() -> None:
    rows = RowTable(2)
    rows.start(start_of(0, 1, prompt=4, limit=6))
    assert rows.expected().tolist() == [0, 0]
    first = np.array([3, 0])
    rows.advance(first)
    assert not rows.samples(first).any()
    assert rows.expected().tolist() == [0, 0]
    second = np.array([1, 0])
    rows.advance(second)
    assert rows.samples(second).tolist() == [True, False]
    for count in (1, 1, 0):  # two more tokens are computed, the last is only sampled
        assert rows.expected().tolist() == [count, 0]
        rows.advance(rows.expected())
    assert rows.num_computed[0] == 6


def test_a_rewound_row_computes_only_what_is_planned_until_it_has_caught_up() -> None:
    rows = RowTable(1)
    rows.start(start_of(0, 1, prompt=4, limit=20))
    rows.advance(np.array([4]))
    for _ in range(3):
        rows.advance(rows.expected())
    rows.rewind(Rewind(0, 2, num_known_tokens=6))
    assert (int(rows.num_computed[0]), int(rows.num_known[0])) == (2, 6)
    assert rows.expected().tolist() == [0]
    rows.advance(np.array([4]))
    assert rows.expected().tolist() == [1]


# Plans that are rejected


@pytest.fixture
def follower() -> PlanFollower:
    """A worker with row 0 prefilled to its first sample and row 2 in the middle of its prompt."""
    follower = PlanFollower(RowTable(NUM_ROWS), epoch=1)
    follower.apply(send(first_plan()))
    return follower


def first_plan() -> SchedulerOutput:
    return Planner().plan({0: 4, 2: 2}, added=(start_of(0, 1), start_of(2, 2)))


def second_plan(**fields: Any) -> SchedulerOutput:
    """A valid second plan with some fields replaced, and a digest that fits them."""
    plan = SchedulerOutput(1, 2, 1, num_rows=2, num_scheduled_tokens=1, digest=0)
    plan = replace(plan, **fields)
    return replace(plan, digest=fields.get("digest", plan_digest(first_plan().digest, plan)))


def test_the_second_plan_of_these_tests_is_valid(follower: PlanFollower) -> None:
    assert follower.apply(send(second_plan())).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epoch": 2}, "the plan is of epoch 2, but the worker is in epoch 1"),
        ({"step": 3, "previous_step": 2}, "step 3 follows step 2, but the last one here was 1"),
        ({"step": 1, "previous_step": 0}, "step 1 follows step 0, but the last one here was 1"),
        ({"step": 1, "previous_step": 1}, "step 1 follows step 1"),
        ({"digest": 12345}, "the digest of step 2 does not match its content"),
        ({"num_rows": 3}, "has 3 rows, but the worker has 2"),
        ({"num_scheduled_tokens": 2}, "has 2 tokens, but the worker counts 1"),
        ({"finished_rows": int32_array([1])}, "row 1 is dropped, but it is not in use"),
        ({"finished_rows": int32_array([4])}, "row 4 is dropped, but it is not in use"),
        ({"preempted_rows": int32_array([-1])}, "row -1 is dropped, but it is not in use"),
        ({"finished_rows": int32_array([0, 0])}, "row 0 is dropped, but it is not in use"),
        (
            {"finished_rows": int32_array([0]), "preempted_rows": int32_array([0])},
            "row 0 is dropped, but it is not in use",
        ),
        ({"rewound": (Rewind(1, 0, 0),)}, "row 1 is rewound, but it is not in use"),
        ({"rewound": (Rewind(99, 0, 0),)}, "row 99 is rewound, but it is not in use"),
        ({"added": (start_of(0, 3),)}, "adds row 0, which is in use or out of range"),
        ({"added": (start_of(4, 3),)}, "adds row 4, which is in use or out of range"),
        ({"added": (start_of(-1, 3),)}, "adds row -1, which is in use or out of range"),
        (
            {"added": (start_of(1, 3), start_of(1, 4))},
            "adds row 1, which is in use or out of range",
        ),
        (
            {"appended": (AppendedBlocks(0, int32_array([1]), int32_array([7])),)},
            "a row that is not in use is extended",
        ),
        (
            {"appended": (AppendedBlocks(0, int32_array([0, 2]), int32_array([7])),)},
            "step 2 appends 1 blocks to 2 rows",
        ),
        (
            {"scheduled_rows": int32_array([1]), "scheduled_tokens": int32_array([1])},
            "a row that is not in use is scheduled",
        ),
        (
            {"scheduled_rows": int32_array([4]), "scheduled_tokens": int32_array([1])},
            r"a row outside 0\.\.3 is scheduled",
        ),
        (
            {"scheduled_rows": int32_array([-1]), "scheduled_tokens": int32_array([1])},
            r"a row outside 0\.\.3 is scheduled",
        ),
        ({"scheduled_rows": int32_array([2])}, "step 2 has 0 token counts for 1 rows"),
        (
            {
                "scheduled_rows": int32_array([2]),
                "scheduled_tokens": int32_array([8]),
                "num_scheduled_tokens": 9,
            },
            "computes a row beyond its last token",
        ),
        (
            {
                "scheduled_rows": int32_array([2]),
                "scheduled_tokens": int32_array([-1]),
                "num_scheduled_tokens": 0,
            },
            "beyond its last token",
        ),
        ({"full_state": (RowState(0, 9, 4, 1, ()),)}, "row 0: the scheduler holds"),
        ({"full_state": (RowState(0, 1, 5, 1, ()),)}, "row 0: the scheduler holds"),
        ({"full_state": (RowState(0, 1, 5, 0, ()),)}, "row 0: the scheduler holds"),
        ({"full_state": (RowState(1, 0, 0, 0, ()),)}, "row 1 is compared, but it is not in use"),
        ({"full_state": (RowState(77, 1, 0, 0, ()),)}, "row 77 is compared"),
    ],
)
def test_a_plan_that_does_not_continue_the_state_of_the_worker_is_a_mismatch(
    follower: PlanFollower, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanMismatch, match=message):
        follower.apply(send(second_plan(**fields)))


def test_a_row_may_be_dropped_and_added_again_in_one_plan(follower: PlanFollower) -> None:
    plan = second_plan(
        finished_rows=int32_array([0]),
        added=(start_of(0, 3),),
        scheduled_rows=int32_array([0]),
        scheduled_tokens=int32_array([4]),
        num_scheduled_tokens=4,
        full_state=(RowState(0, 3, 0, 4, ()), RowState(2, 2, 2, 0, ())),
    )
    assert follower.apply(send(plan)).tolist() == [4, 0, 0, 0]
    assert int(follower.rows.generation[0]) == 3


def test_only_the_exact_last_plan_is_a_repeat(follower: PlanFollower) -> None:
    first, second = first_plan(), second_plan()
    assert follower.is_repeat(send(first))
    assert not follower.is_repeat(second)
    assert not follower.is_repeat(replace(first, digest=first.digest ^ 1))
    assert not follower.is_repeat(replace(first, epoch=2))
    follower.apply(send(second))
    assert follower.is_repeat(second)
    assert not follower.is_repeat(first)


def test_a_lost_plan_is_noticed_at_the_next_one() -> None:
    planner, follower = Planner(), PlanFollower(RowTable(NUM_ROWS), epoch=1)
    follower.apply(send(planner.plan({0: 4}, added=(start_of(0, 1),))))
    planner.plan()
    with pytest.raises(PlanMismatch, match="step 3 follows step 2, but the last one here was 1"):
        follower.apply(send(planner.plan()))


def test_a_plan_that_only_looks_like_the_next_one_has_the_wrong_digest() -> None:
    ours, theirs = Planner(), Planner()
    follower = PlanFollower(RowTable(NUM_ROWS), epoch=1)
    follower.apply(send(ours.plan({0: 4}, added=(start_of(0, 1),))))
    theirs.plan({0: 4}, added=(start_of(0, 2),))
    with pytest.raises(PlanMismatch, match="digest"):
        follower.apply(send(theirs.plan()))
