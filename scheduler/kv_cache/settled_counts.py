"""How many tokens of each running row nothing can take back any more."""

from collections import deque

import numpy as np

from longshore.protocol.arrays import Int64Array


class SettledCounts:
    """Remembers what was computed before each plan that is not answered.

    Settled is what was computed before the oldest of them, as far as it is verified: a rejected
    draft or a step that failed takes the row back no further than that, or to its start.
    """

    def __init__(self) -> None:
        self._before: deque[tuple[int, Int64Array, Int64Array]] = deque()

    def before_plan(
        self,
        num_computed: Int64Array,
        num_verified: Int64Array,
        generation: Int64Array,
        *,
        step: int,
        answered_step: int,
    ) -> Int64Array:
        """(max_num_seqs,) settled tokens of each row, when plan `step` is about to be made and all
        plans up to `answered_step` are answered. The columns are the rows' at this moment."""
        before = self._before
        before.append((step, num_computed.copy(), generation.copy()))
        while len(before) > 1 and before[1][0] <= answered_step + 1:
            before.popleft()
        _, then_computed, then_generation = before[0]
        settled = np.minimum(np.minimum(num_computed, num_verified), then_computed)
        settled[generation != then_generation] = 0
        return settled

    def clear(self) -> None:
        """A new epoch counts its plans from the first."""
        self._before.clear()
