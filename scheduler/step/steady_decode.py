"""A step that is like the one before: every running row computes the one token expected of it.

Most steps of a decode are so. While the table's membership stands, what such a step computes is
known without looking at a row, and between two block borders it changes nothing at all: its plan is
a number.
"""

import numpy as np

from longshore.protocol.arrays import Int64Array
from longshore.scheduler.step.in_flight import PlannedStep
from longshore.scheduler.step.running import RunningTable


class SteadyDecode:
    """True of the plan `planned`, which has just been built, and of the next ones while it `holds`.

    sampling:      all running rows.
    scored:        those that are to be scored, if any.
    num_scheduled: (max_num_seqs,) int64, 1 for each of them.
    """

    def __init__(
        self, running: RunningTable, planned: PlannedStep, num_scheduled: Int64Array
    ) -> None:
        rows = planned.rows
        self.sampling, self.scored = planned.sampling, planned.scored
        self.num_scheduled = num_scheduled
        self.num_tokens = len(rows)
        left = running.last_computed[rows] - running.num_computed[rows]
        self._last_step = planned.step + int(left.min())
        self._no_block_through = planned.step

    def holds(self, running: RunningTable, step: int) -> bool:
        """Whether the plan `step`, which comes next, is such a one again: the same requests run,
        and none has reached its last token."""
        return self.sampling.version == running.version and step <= self._last_step

    def needs_no_block(self, step: int) -> bool:
        """Whether no row needs a block in the plan `step`, nor completes one to be named."""
        return step <= self._no_block_through

    def look_ahead(
        self, running: RunningTable, block_sizes: tuple[int, ...], *, num_lookahead: int, step: int
    ) -> None:
        """The plan `step` has just been built, and needed and named no block: find for how many
        plans that stays so. `num_lookahead`: slots that a row needs behind what it computes."""
        rows = self.sampling.rows
        num_computed = running.num_computed[rows]
        num_verified = np.minimum(running.num_tokens[rows], num_computed)
        num_slots = num_computed + num_lookahead
        num_steps = min(
            int(steps.min())
            for size in block_sizes
            for steps in (
                # A block is named once it is full and verified; what is verified lags behind.
                num_verified - num_verified % size + size - 1 - num_computed,
                -num_slots % size,
            )
        )
        self._no_block_through = step + max(num_steps, 0)
