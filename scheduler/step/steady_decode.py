"""A steady decode step: the same rows run as in the last plan, and each computes one token.

Most steps are steady. While the running requests stay the same, such a step is known without
reading a row. Unless a row needs or completes a block, its plan is only a step number.
"""

import numpy as np

from longshore.protocol.arrays import Int64Array
from longshore.scheduler.step.in_flight import PlannedStep
from longshore.scheduler.step.running import RunningTable


class SteadyDecode:
    """Describes `planned`, a plan that was just built, and the next ones while it `holds`.

    sampling:      all running rows.
    scored:        rows with log probabilities, if any.
    num_scheduled: (max_num_seqs,) int64, 1 for each running row.
    """

    def __init__(
        self, running: RunningTable, planned: PlannedStep, num_scheduled: Int64Array
    ) -> None:
        self.sampling, self.scored = planned.sampling, planned.scored
        rows = self.sampling.rows
        self.num_scheduled = num_scheduled
        self.num_tokens = len(rows)
        left = running.last_computed[rows] - running.num_computed[rows]
        self._last_step = planned.step + int(left.min())
        self._no_block_through = planned.step

    def holds(self, running: RunningTable, step: int) -> bool:
        """Whether the next plan, `step`, is steady too: the same requests run, and none has
        reached its last token."""
        return self.sampling.version == running.version and step <= self._last_step

    def needs_no_block(self, step: int) -> bool:
        """Whether no row needs or completes a block in plan `step`."""
        return step <= self._no_block_through

    def look_ahead(
        self, running: RunningTable, block_sizes: tuple[int, ...], *, num_lookahead: int, step: int
    ) -> None:
        """Plan `step`, which was just built, neither gave a row a block nor completed one: find for
        how many of the next plans this holds. num_lookahead: slots that a row needs after its
        computed tokens."""
        rows = self.sampling.rows
        num_computed = running.num_computed[rows]
        num_verified = np.minimum(running.num_tokens[rows], num_computed)
        num_slots = num_computed + num_lookahead
        num_steps = min(
            int(steps.min())
            for size in block_sizes
            for steps in (
                # A block is cached once it is full and verified, which is after it is computed.
                num_verified - num_verified % size + size - 1 - num_computed,
                -num_slots % size,
            )
        )
        self._no_block_through = step + max(num_steps, 0)
