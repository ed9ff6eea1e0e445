"""The table of rows that scheduler and worker both keep, with a shared predictor.

The predictor says how many tokens each row computes in the next step: none while it still has known
tokens to compute (prefill), then one per step until its last (decode). A plan lists only the rows
that deviate from this.
"""

from typing import Final

import numpy as np

from longshore.protocol.arrays import BoolArray, Int64Array
from longshore.protocol.errors import PlanMismatch
from longshore.protocol.plan import Rewind, RowStart, SchedulerOutput, plan_digest

EMPTY_ROW: Final = 0
"""Generation of a row that is not in use."""


class RowTable:
    """Columns indexed by row, each (max_num_seqs,) int64.

    generation:    EMPTY_ROW, or the generation of the occupant.
    num_computed:  tokens whose KV exists after all plans so far.
    num_known:     token ids known at admission. Below this count the row is prefilling and samples
                   nothing.
    last_computed: maximum of num_computed.
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
        """Empty a row in use. The predictor gives an empty row no tokens, as all counts are 0."""
        self.generation[row] = EMPTY_ROW
        self.num_computed[row] = 0
        self.num_known[row] = 0
        self.last_computed[row] = 0
        self.num_rows -= 1

    def rewind(self, rewind: Rewind) -> None:
        """Lower the computed count; the row prefills again up to its known tokens."""
        self.num_known[rewind.row] = rewind.num_known_tokens
        self.num_computed[rewind.row] = rewind.num_computed_tokens

    def reject(self, rows: Int64Array, num_rejected: Int64Array) -> None:
        """Subtract rejected drafts from the computed counts of `rows`, which are distinct."""
        self.num_computed[rows] -= num_rejected

    def expected(self) -> Int64Array:
        """(max_num_seqs,) tokens that each row computes next, unless the plan says otherwise."""
        one_more = self.num_computed < self.last_computed
        return (one_more & (self.num_computed >= self.num_known)).astype(np.int64)

    def advance(self, num_scheduled: Int64Array) -> None:
        """Add the tokens of a planned step to the computed counts."""
        self.num_computed += num_scheduled

    def samples(self, num_scheduled: Int64Array) -> BoolArray:
        """(max_num_seqs,) rows that sample in the step just added by `advance`: those that compute
        tokens in it and have no known tokens left. Answers list them in row order."""
        return (num_scheduled > 0) & (self.num_computed >= self.num_known)


class PlanFollower:
    """The worker's side of delta integrity: verifies plans and applies them to a RowTable.

    A plan that raises PlanMismatch may be applied in part: the caller must end its epoch.
    """

    def __init__(self, rows: RowTable, *, epoch: int) -> None:
        self.rows = rows
        self._epoch = epoch
        self._last_step = 0
        self._digest = 0

    def is_repeat(self, plan: SchedulerOutput) -> bool:
        """Whether this is the last applied plan again, which must not be applied twice."""
        return (
            plan.epoch == self._epoch
            and plan.step == self._last_step
            and plan.digest == self._digest
        )

    def apply(self, plan: SchedulerOutput) -> Int64Array:
        """Apply the plan's row changes; return the (max_num_seqs,) tokens each row computes.

        Raises PlanMismatch if the plan is of another epoch, leaves a gap, refers to an impossible
        row, or does not match its own totals and digest.
        """
        self._check_sequence(plan)
        self._reject(plan)
        rows = self.rows
        for row in (*plan.finished_rows.tolist(), *plan.preempted_rows.tolist()):
            self._check_held(row, "dropped")
            rows.drop(row)
        for rewind in plan.rewound:
            self._check_held(rewind.row, "rewound")
            rows.rewind(rewind)
        for start in plan.added:
            if not 0 <= start.row < rows.max_num_seqs or rows.generation[start.row] != EMPTY_ROW:
                raise PlanMismatch(
                    f"step {plan.step} adds row {start.row}, which is in use or out of range"
                )
            rows.start(start)
        for blocks in plan.appended:
            self._check_all_held(blocks.rows.astype(np.int64), "extended")
            if len(blocks.rows) != len(blocks.block_ids):
                raise PlanMismatch(
                    f"step {plan.step} appends {len(blocks.block_ids)} blocks to "
                    f"{len(blocks.rows)} rows"
                )
        num_scheduled = rows.expected()
        changed = plan.scheduled_rows.astype(np.int64)
        self._check_all_held(changed, "scheduled")
        if len(changed) != len(plan.scheduled_tokens):
            raise PlanMismatch(
                f"step {plan.step} has {len(plan.scheduled_tokens)} token counts for "
                f"{len(changed)} rows"
            )
        num_scheduled[changed] = plan.scheduled_tokens
        rows.advance(num_scheduled)
        self._check_totals(plan, num_scheduled)
        self._last_step = plan.step
        self._digest = plan.digest
        return num_scheduled

    def _reject(self, plan: SchedulerOutput) -> None:
        rows, num_rejected = plan.rejected_rows.astype(np.int64), plan.rejected_tokens
        if not len(rows) and not len(num_rejected):
            return
        self._check_all_held(rows, "corrected")
        is_right = len(rows) == len(num_rejected) == len(np.unique(rows))
        if (
            not is_right
            or (num_rejected < 1).any()
            or (num_rejected >= self.rows.num_computed[rows]).any()
        ):
            raise PlanMismatch(
                f"step {plan.step} rejects {num_rejected.tolist()} drafts of rows {rows.tolist()}; "
                "each row is listed once, and must have computed more tokens"
            )
        self.rows.reject(rows, num_rejected.astype(np.int64))

    def _check_sequence(self, plan: SchedulerOutput) -> None:
        if plan.epoch != self._epoch:
            raise PlanMismatch(
                f"the plan is of epoch {plan.epoch}, but the worker is in epoch {self._epoch}"
            )
        if plan.previous_step != self._last_step or plan.step <= plan.previous_step:
            raise PlanMismatch(
                f"step {plan.step} follows step {plan.previous_step}, "
                f"but the last one here was {self._last_step}"
            )
        if plan_digest(self._digest, plan) != plan.digest:
            raise PlanMismatch(f"the digest of step {plan.step} does not match its content")

    def _check_held(self, row: int, verb: str) -> None:
        if not 0 <= row < self.rows.max_num_seqs or self.rows.generation[row] == EMPTY_ROW:
            raise PlanMismatch(f"row {row} is {verb}, but it is not in use")

    def _check_all_held(self, rows: Int64Array, verb: str) -> None:
        if len(rows) == 0:
            return
        if rows.min() < 0 or rows.max() >= self.rows.max_num_seqs:
            raise PlanMismatch(f"a row outside 0..{self.rows.max_num_seqs - 1} is {verb}")
        if not self.rows.generation[rows].all():
            raise PlanMismatch(f"a row that is not in use is {verb}")

    def _check_totals(self, plan: SchedulerOutput, num_scheduled: Int64Array) -> None:
        rows = self.rows
        if plan.num_rows != rows.num_rows:
            raise PlanMismatch(
                f"step {plan.step} has {plan.num_rows} rows, but the worker has {rows.num_rows}"
            )
        total = int(num_scheduled.sum())
        if plan.num_scheduled_tokens != total:
            raise PlanMismatch(
                f"step {plan.step} has {plan.num_scheduled_tokens} tokens, but the worker counts "
                f"{total}"
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
