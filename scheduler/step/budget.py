"""The tokens one step may compute, drawn on alike by running and waiting requests."""

import numpy as np

from longshore.protocol.arrays import Int64Array
from longshore.scheduler.step.running import RunningTable


class StepBudget:
    """`num_total` tokens, of which `num_left` remain; `threshold` tokens per request at most if
    it is above 0."""

    def __init__(self, num_total: int, threshold: int) -> None:
        self.num_total = num_total
        self.num_left = num_total
        self._threshold = threshold

    def cap(self, wanted: Int64Array) -> Int64Array:
        """`wanted` tokens per row, each at most the threshold."""
        return np.minimum(wanted, self._threshold) if self._threshold else wanted

    def cap_one(self, wanted: int) -> int:
        """The same for one request."""
        return min(wanted, self._threshold) if self._threshold else wanted

    def cut(self, wanted: Int64Array, running: RunningTable) -> Int64Array:
        """What of `wanted` the tokens left allow, spent in admission order. Spends nothing."""
        if int(wanted.sum()) <= self.num_left:
            return wanted
        order = running.order
        before = np.cumsum(wanted[order]) - wanted[order]
        granted = np.zeros_like(wanted)
        granted[order] = np.clip(self.num_left - before, 0, wanted[order])
        return granted

    @property
    def num_spent(self) -> int:
        """Tokens that the step computes so far."""
        return self.num_total - self.num_left

    def spend(self, num_tokens: int) -> None:
        assert num_tokens <= self.num_left
        self.num_left -= num_tokens

    def refund(self, num_tokens: int) -> None:
        """A request that had been given tokens in this step does not run after all."""
        self.num_left += num_tokens
