"""Whether there is room to admit a request: watermark, memory pressure, room for the whole input.

What runs already may use every block; these keep admissions from taking the last ones, because a
request admitted into a full pool is soon preempted and computed twice.
"""

from longshore.scheduler.config import CacheConfig


class MemoryPressure:
    """Closes above one share of held blocks, opens below another, and stays as it is between.

    The share is 1 - free / usable, cached blocks that nobody holds being free.
    """

    def __init__(self, *, preempt_threshold: float, admit_threshold: float) -> None:
        self._preempt_threshold = preempt_threshold
        self._admit_threshold = admit_threshold
        self.is_closed = False

    def update(self, usage: float) -> bool:
        """Whether admissions are closed at this share of held blocks, given what was before."""
        if usage > self._preempt_threshold:
            self.is_closed = True
        elif usage < self._admit_threshold:
            self.is_closed = False
        return self.is_closed


class AdmissionGates:
    """What an admission must leave free. Off while nothing runs: the head of the queue would wait
    for ever for blocks that nobody gives back."""

    def __init__(self, cache: CacheConfig, num_blocks: int) -> None:
        self.watermark_blocks = int(num_blocks * cache.watermark)
        self._pressure = MemoryPressure(
            preempt_threshold=cache.preempt_threshold, admit_threshold=cache.admit_threshold
        )

    @property
    def is_closed(self) -> bool:
        """Memory pressure keeps admissions out."""
        return self._pressure.is_closed

    def has_room(self, num_needed: int, *, num_free: int, usage: float, nothing_runs: bool) -> bool:
        """Whether a request that takes `num_needed` of `num_free` blocks may be admitted."""
        is_closed = self._pressure.update(usage)
        if nothing_runs:
            return num_needed <= num_free
        return not is_closed and num_free - num_needed >= self.watermark_blocks
