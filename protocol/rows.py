"""The table of rows that scheduler and worker both keep, and what each expects of the other.

One predictor for both sides: a row that still has known tokens to compute (a prefill) is expected
to compute none until told, a row that has caught up computes one token per step until its last.
A plan lists only the rows for which that is not what happens.
"""

from collections import deque
from typing import Final

import numpy as np

from longshore.protocol.arrays import BoolArray, Int64Array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.plan import Rewind, RowStart, SchedulerOutput, plan_digest

EMPTY_ROW: Final = 0
"""Generation of a row that nobody holds."""


class RowTable:
    """Columns indexed by row, each (max_num_seqs,) int64.

    generation:    EMPTY_ROW or the occupant's.
    num_computed:  tokens whose KV exists once the plans so far have run.
    num_known:     token ids present at admission: below it the row is prefilling and samples
                   nothing.
    last_computed: the row never computes beyond it.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.generation: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.num_computed: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.num_known: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.last_computed: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.num_rows = 0

    def start(self, start: RowStart) -> None:
        """Put a request on an empty row."""
        row = start.row
        self.generation[row] = start.generation
        self.num_computed[row] = start.num_computed_tokens
        self.num_known[row] = start.num_known_tokens
        self.last_computed[row] = start.last_computed
        self.num_rows += 1

    def drop(self, row: int) -> None:
        """Empty a held row. An empty row has caught up with nothing, so it expects no tokens."""
        self.generation[row] = EMPTY_ROW
        self.num_computed[row] = 0
        self.num_known[row] = 0
        self.last_computed[row] = 0
        self.num_rows -= 1

    def rewind(self, rewind: Rewind) -> None:
        """The computed count falls, and what is known is a prompt to compute."""
        self.num_known[rewind.row] = rewind.num_known_tokens
        self.num_computed[rewind.row] = rewind.num_computed_tokens

    def reject(self, rows: Int64Array, num_rejected: Int64Array) -> None:
        """Drafts that `rows`, all different, had computed proved wrong."""
        self.num_computed[rows] -= num_rejected

    def expected(self) -> Int64Array:
        """(max_num_seqs,) tokens each row computes in the next step unless a plan says else."""
        one_more = self.num_computed < self.last_computed
        return (one_more & (self.num_computed >= self.num_known)).astype(np.int64)

    def advance(self, num_scheduled: Int64Array) -> None:
        """A step with these counts has been planned."""
        self.num_computed += num_scheduled

    def samples(self, num_scheduled: Int64Array) -> BoolArray:
        """(max_num_seqs,) rows that sample in the step just advanced by `num_scheduled`: those
        that computed something and have no known token left. They are answered in row order."""
        return (num_scheduled > 0) & (self.num_computed >= self.num_known)


class PlanFollower:
    """The worker's side of delta integrity: applies plans to a RowTable, or refuses them.

    A refused plan may have been applied in part: the caller must give up its epoch.
    """

    def __init__(self, rows: RowTable, *, epoch: int) -> None:
        self.rows = rows
        self._epoch = epoch
        self._last_step = 0
        self._digest = 0
        # By row: rejections in steps up to this one are void, because the row was rewound.
        self._void_through: Int64Array = np.zeros(rows.max_num_seqs, np.int64)
        # (step, rows, generations, rejected drafts), oldest first
        self._rejected: deque[tuple[int, Int64Array, Int64Array, Int64Array]] = deque()

    def note_rejected(
        self, step: int, rows: Int64Array, generations: Int64Array, num_rejected: Int64Array
    ) -> None:
        """Step `step` rejected drafts of `rows`, which were held under `generations` when it was
        planned. The scheduler learns it from the answer, and its plans say in `answered_step` from
        when on they count with it."""
        self._rejected.append((step, rows, generations, num_rejected))

    def is_repeat(self, plan: SchedulerOutput) -> bool:
        """The plan is the one applied last, sent again: nothing must happen."""
        return (
            plan.epoch == self._epoch
            and plan.step == self._last_step
            and plan.digest == self._digest
        )

    def apply(self, plan: SchedulerOutput) -> Int64Array:
        """Apply the plan's row changes; return the (max_num_seqs,) tokens each row computes.

        Raises PlanMismatch when the plan is of another epoch, leaves a gap, names a row that
        cannot be, or does not add up to its own totals and digest.
        """
        self._check_sequence(plan)
        self._settle_rejected(plan.answered_step)
        rows = self.rows
        for row in (*plan.finished_rows.tolist(), *plan.preempted_rows.tolist()):
            self._check_held(row, "dropped")
            rows.drop(row)
        for rewind in plan.rewound:
            self._check_held(rewind.row, "rewound")
            rows.rewind(rewind)
            self._void_through[rewind.row] = plan.previous_step
        for start in plan.added:
            if not 0 <= start.row < rows.max_num_seqs or rows.generation[start.row] != EMPTY_ROW:
                raise PlanMismatch(f"step {plan.step} adds row {start.row}, which is not free")
            rows.start(start)
        for blocks in plan.appended:
            self._check_all_held(blocks.rows.astype(np.int64), "extended")
            if len(blocks.rows) != len(blocks.block_ids):
                raise PlanMismatch(f"step {plan.step} appends {len(blocks.rows)} rows by halves")
        num_scheduled = rows.expected()
        changed = plan.scheduled_rows.astype(np.int64)
        self._check_all_held(changed, "scheduled")
        if len(changed) != len(plan.scheduled_tokens):
            raise PlanMismatch(f"step {plan.step} schedules {len(changed)} rows by halves")
        num_scheduled[changed] = plan.scheduled_tokens
        rows.advance(num_scheduled)
        self._check_totals(plan, num_scheduled)
        self._last_step = plan.step
        self._digest = plan.digest
        return num_scheduled

    def _settle_rejected(self, answered_step: int) -> None:
        while self._rejected and self._rejected[0][0] <= answered_step:
            step, rows, generations, num_rejected = self._rejected.popleft()
            still = self.rows.generation[rows] == generations
            still &= self._void_through[rows] < step
            self.rows.reject(rows[still], num_rejected[still])

    def _check_sequence(self, plan: SchedulerOutput) -> None:
        if plan.epoch != self._epoch:
            raise PlanMismatch(f"a plan of epoch {plan.epoch} reached epoch {self._epoch}")
        if plan.previous_step != self._last_step or plan.step <= plan.previous_step:
            raise PlanMismatch(
                f"step {plan.step} follows step {plan.previous_step}, "
                f"but the last one here was {self._last_step}"
            )
        if plan_digest(self._digest, plan) != plan.digest:
            raise PlanMismatch(f"step {plan.step} does not have the digest it was sent with")

    def _check_held(self, row: int, verb: str) -> None:
        if not 0 <= row < self.rows.max_num_seqs or self.rows.generation[row] == EMPTY_ROW:
            raise PlanMismatch(f"row {row} is {verb}, but nobody holds it")

    def _check_all_held(self, rows: Int64Array, verb: str) -> None:
        if len(rows) == 0:
            return
        if rows.min() < 0 or rows.max() >= self.rows.max_num_seqs:
            raise PlanMismatch(f"a row outside 0..{self.rows.max_num_seqs - 1} is {verb}")
        if not self.rows.generation[rows].all():
            raise PlanMismatch(f"a row that nobody holds is {verb}")

    def _check_totals(self, plan: SchedulerOutput, num_scheduled: Int64Array) -> None:
        rows = self.rows
        if plan.num_rows != rows.num_rows:
            raise PlanMismatch(
                f"step {plan.step} counts {plan.num_rows} rows, here are {rows.num_rows}"
            )
        total = int(num_scheduled.sum())
        if plan.num_scheduled_tokens != total:
            raise PlanMismatch(
                f"step {plan.step} counts {plan.num_scheduled_tokens} tokens, here are {total}"
            )
        if (rows.num_computed > rows.last_computed).any() or num_scheduled.min(initial=0) < 0:
            raise PlanMismatch(f"step {plan.step} computes a row beyond its last token")
        for state in plan.full_state or ():
            self._check_held(state.row, "compared")
            held = (int(rows.generation[state.row]), int(rows.num_computed[state.row]))
            wanted = (state.generation, state.num_computed_tokens + state.num_scheduled_tokens)
            if held != wanted or num_scheduled[state.row] != state.num_scheduled_tokens:
                raise PlanMismatch(
                    f"step {plan.step}, row {state.row}: the scheduler holds (generation, "
                    f"computed) {wanted}, the worker {held}"
                )
