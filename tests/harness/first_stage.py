"""The first stage of a pipeline: it samples nothing, and knows only the tokens that plans bring."""

from collections.abc import Sequence

import numpy as np

from longshore.protocol.plan import SchedulerOutput
from longshore.protocol.rows import PlanFollower, RowTable


class FirstStage:
    """Follows the plans beside the last stage. Must know every token that a step computes."""

    def __init__(self, max_num_seqs: int, *, epoch: int) -> None:
        self._rows = RowTable(max_num_seqs)
        self._follower = PlanFollower(self._rows, epoch=epoch)
        self._tokens: dict[int, dict[int, int]] = {}

    def execute(self, plan: SchedulerOutput, tokens: dict[int, Sequence[int]]) -> None:
        """Run a step. tokens: by row, those that the last stage knows."""
        rows = self._rows
        num_scheduled = self._follower.apply(plan)
        for start in plan.added:
            known = [*start.prompt_token_ids.tolist(), *start.output_token_ids.tolist()]
            self._tokens[start.row] = dict(enumerate(known))
        starts = rows.num_computed - num_scheduled
        rewound = {rewind.row for rewind in plan.rewound}
        for row, token in zip(
            plan.sampled_rows.tolist(), plan.sampled_tokens.tolist(), strict=True
        ):
            position = rows.num_known[row] - 1 if row in rewound else starts[row]
            self._tokens[row][int(position)] = token
        for row in np.flatnonzero(num_scheduled).tolist():
            for position in range(starts[row], rows.num_computed[row]):
                assert self._tokens[row].get(position) == tokens[row][position]
