"""A worker that computes nothing: it follows the plans, and says what each computes and samples."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from longshore.deploy.simulator.cost_model import StepWork
from longshore.protocol.arrays import Int32Array
from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.rows import RowTable


class SimulatedStep(NamedTuple):
    """The work of a plan, and the tokens of its sampling rows, in row order."""

    work: StepWork
    sampled_tokens: Int32Array


class SimulatedWorker:
    """Follows the plans of one scheduler as a worker's `PlanFollower` does, without its checks of
    lost messages.

    token_of: the token that a request samples, always the same one, by request id.
    """

    def __init__(self, max_num_seqs: int, token_of: Callable[[str], int]) -> None:
        self._rows = RowTable(max_num_seqs)
        self._token_of = token_of
        self._tokens: Int32Array = np.zeros(max_num_seqs, np.int32)  # by row

    def execute(self, plan: SchedulerOutput) -> SimulatedStep:
        """Apply the plan."""
        rows = self._rows
        for row in (*plan.finished_rows.tolist(), *plan.preempted_rows.tolist()):
            rows.drop(row)
        for rewind in plan.rewound:
            rows.rewind(rewind)
        for start in plan.added:
            rows.start(start)
            self._tokens[start.row] = self._token_of(start.request_id)
        num_scheduled = rows.expected()
        num_scheduled[plan.scheduled_rows] = plan.scheduled_tokens
        rows.advance(num_scheduled)
        computes = num_scheduled > 0
        samples = computes & (rows.num_computed >= rows.num_known)
        last = rows.num_computed
        # A row that computes n tokens up to its e-th attends to e, e - 1, ..., e - n + 1 positions.
        num_tokens = plan.num_scheduled_tokens
        skipped = int(num_scheduled @ num_scheduled) - num_tokens
        tokens = self._tokens[samples]
        work = StepWork(
            num_tokens,
            int(num_scheduled @ last) - skipped // 2,
            int(computes @ last),
            int(np.count_nonzero(computes)),
            len(tokens),
        )
        return SimulatedStep(work, tokens)
