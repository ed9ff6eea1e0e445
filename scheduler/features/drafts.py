"""Speculative decoding in the scheduler: drafts that a plan verifies.

A drafter proposes tokens for the next step of a row; the step computes them and accepts the leading
ones that match. Drafts count as placeholders until the output says how many were accepted. With two
steps in flight only the workers know the next drafts, and the scheduler plans with their number.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, Int64Array, int32_array
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.rows import EMPTY_ROW
from longshore.scheduler.features.grammar import Grammars
from longshore.scheduler.hooks import PlanChanges, SchedulerFeature
from longshore.scheduler.step.in_flight import PlannedStep, SamplingRows
from longshore.scheduler.step.running import RunningTable


@dataclass(slots=True, eq=False)
class Drafts(SchedulerFeature):
    """Drafts of all running rows.

    is_async: more than one step in flight.
    num_invalid_draft_tokens: rejected by a grammar; num_invalid_in_step: those since the last plan.
    """

    running: RunningTable
    grammars: Grammars | None
    is_async: bool
    num_invalid_in_step: int = 0
    num_invalid_draft_tokens: int = 0
    _in_plan: Int64Array = field(init=False)  # by row, of the plan that is being made

    def fields(
        self, plan: PlanChanges, num_scheduled: Int64Array, answered_step: int
    ) -> dict[str, Any]:
        """The drafts that the plan verifies, a row listed once per draft."""
        self._in_plan = self.running.num_drafts_in(num_scheduled)
        rows, token_ids = self._listed(self._in_plan)
        num_invalid, self.num_invalid_in_step = self.num_invalid_in_step, 0
        return {
            "draft_rows": rows,
            "draft_tokens": token_ids,
            "num_invalid_draft_tokens": num_invalid,
        }

    def built(self, plan: SchedulerOutput, planned: PlannedStep, now: float) -> None:
        """The plan's drafts are placeholders until its output says how many were accepted."""
        rows = planned.sampling.rows
        if len(plan.draft_rows):
            planned.num_drafts, planned.drafts = self._in_plan[rows], plan.draft_tokens
        self._consume(planned.num_scheduled, rows, self._in_plan)

    def answered(self, output: ModelRunnerOutput, planned: PlannedStep, now: float) -> None:
        """The output may have drafts for the next step."""
        self.receive(output.draft_rows, output.draft_tokens, planned)

    def begin_epoch(self, epoch: int) -> None:
        """No plan was made yet."""
        self.num_invalid_in_step = 0

    def _listed(self, counts: Int64Array) -> tuple[Int32Array, Int32Array]:
        drafts, rows = self.running.drafts, np.flatnonzero(counts)
        if not len(rows):
            return EMPTY_INT32, EMPTY_INT32
        numbers = counts[rows]
        is_listed = np.arange(drafts.shape[1]) < numbers[:, np.newaxis]
        return int32_array(rows.repeat(numbers)), drafts[rows][is_listed]

    def _consume(self, num_scheduled: Int64Array, rows: Int64Array, num_drafts: Int64Array) -> None:
        """A plan verifies `num_drafts` (max_num_seqs,) drafts; `rows` sample in it."""
        running = self.running
        running.num_placeholders += num_drafts
        running.num_drafts[num_scheduled > 0] = 0
        if self.is_async:
            rows = rows[~running.has_grammar[rows]]
            running.num_drafts[rows] = running.drafts.shape[1]
            running.drafts[rows] = -1

    def receive(
        self, rows: Int32Array, token_ids: Int32Array, planned: PlannedStep | None = None
    ) -> None:
        """Receive drafts for the next step of rows that decode; drafts after the first one that a
        grammar rejects are dropped.

        planned: the plan whose output has them; rows with another occupant since are skipped.
        """
        if len(rows) == 0 or self.is_async:
            return
        running = self.running
        if planned is not None and self._all_have_drafts(rows, planned.sampling):
            shape = -1, running.drafts.shape[1]
            running.drafts[planned.sampling.index] = token_ids.reshape(shape)
            running.num_drafts[planned.sampling.index] = shape[1]
            return
        if np.count_nonzero(rows[1:] < rows[:-1]):
            order = rows.argsort(kind="stable")
            rows, token_ids = rows[order], token_ids[order]
        firsts = np.append(True, rows[1:] != rows[:-1]).nonzero()[0]
        listed, counts = rows[firsts], np.diff(firsts, append=len(rows))
        can_draft = (listed >= 0) & (listed < running.max_num_seqs)
        listed, firsts, counts = listed[can_draft], firsts[can_draft], counts[can_draft]
        can_draft = running.num_computed[listed] >= running.num_known[listed]
        can_draft &= running.generation[listed] != EMPTY_ROW
        if planned is not None:
            sampled_in = np.full(running.max_num_seqs, EMPTY_ROW)
            sampled_in[planned.sampling.rows] = planned.sampling.generations
            can_draft &= sampled_in[listed] == running.generation[listed]
        listed, firsts, counts = listed[can_draft], firsts[can_draft], counts[can_draft]
        places = np.arange(running.drafts.shape[1])
        chosen = np.minimum(firsts[:, np.newaxis] + places, len(rows) - 1)
        running.drafts[listed] = token_ids[chosen]
        running.num_drafts[listed] = np.minimum(counts, len(places))
        for row in listed[running.is_special[listed]].tolist():
            self._check(row)

    def _all_have_drafts(self, rows: Int32Array, sampling: SamplingRows) -> bool:
        """Whether every row that sampled still has its occupant, needs no check and has as many
        drafts as it may have."""
        running = self.running
        if sampling.version != running.version or not sampling.is_plain:
            return False
        num_drafts = running.drafts.shape[1]
        if len(rows) != len(sampling.rows) * num_drafts:
            return False
        return not np.count_nonzero(rows.reshape(-1, num_drafts) != sampling.rows[:, np.newaxis])

    def _check(self, row: int) -> None:
        """Drop the drafts of a row from the first one that its grammar rejects, or all if it does
        not generate."""
        running, request = self.running, self.running.request_on(row)
        if request.options.pooling is not None:
            running.num_drafts[row] = 0
        elif self.grammars is not None:
            num_drafts = int(running.num_drafts[row])
            ids: list[int] = running.drafts[row, :num_drafts].tolist()
            running.num_drafts[row] = num_valid = self.grammars.num_valid(request, ids)
            num_invalid = num_drafts - num_valid
            request.num_invalid_draft_tokens += num_invalid
            self.num_invalid_draft_tokens += num_invalid
            self.num_invalid_in_step += num_invalid

    def counts(self) -> dict[str, Any]:
        """Fields of SchedulerStats."""
        by_position = self.running.accepted_by_position.tolist()
        return {
            "num_drafted_rows": self.running.num_drafted_rows,
            "num_draft_tokens": self.running.num_draft_tokens,
            "num_accepted_tokens": sum(by_position),
            "accepted_by_position": tuple(by_position),
            "num_invalid_draft_tokens": self.num_invalid_draft_tokens,
        }
