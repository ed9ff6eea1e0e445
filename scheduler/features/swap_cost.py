"""Whether it is cheaper to swap a request out and in again, or to recompute its KV.

Seconds of both: bytes over bandwidth in each direction, with what is queued on the link before
them, against tokens over the prefill rate. All rates are measured; bytes and bandwidths are those
of one rank, because all ranks copy at the same time.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np

from longshore.connectors.base import SwapSize
from longshore.protocol.outputs import ModelRunnerOutput
from longshore.protocol.plan import SchedulerOutput
from longshore.scheduler.hooks import SchedulerFeature
from longshore.scheduler.step.in_flight import PlannedStep

SET_UP_S: Final = 0.0005
"""Per transfer, until its first byte moves: a plan, a queue, a thread."""

OLD_SHARE: Final = 0.9
"""Weight of all earlier steps in the prefill rate, per large step: the last 10 count most."""

ASSUMED_STEP_TOKENS: Final = 256
"""What `PrefillRate.estimate` assumes counts as much as one step of this size."""

MIN_TOKENS_PER_ROW: Final = 4
"""A step with fewer tokens per row is mostly decode, which says nothing about prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCost:
    """store_bandwidth, load_bandwidth: bytes per second from the device and to it.
    prefill_rate: tokens per second."""

    store_bandwidth: float
    load_bandwidth: float
    prefill_rate: float
    set_up_s: float = SET_UP_S

    def swap_s(self, size: SwapSize) -> float:
        """Seconds that transfers take, out and in. A direction that moves nothing costs nothing."""
        store_s = load_s = 0.0
        if size.store_bytes:
            num_bytes = size.queued_store_bytes + size.store_bytes
            store_s = self.set_up_s + num_bytes / self.store_bandwidth
        if size.load_bytes:
            load_s = self._load_s(size.queued_load_bytes + size.load_bytes)
        return store_s + load_s

    def recompute_s(self, size: SwapSize, num_tokens: int) -> float:
        """Seconds until a preempted request has the KV of `num_tokens` tokens again: it loads what
        is stored anyway, and computes the rest."""
        load_s = 0.0
        if size.found_bytes:
            load_s = self._load_s(size.queued_load_bytes + size.found_bytes)
        return load_s + (num_tokens - size.num_found_tokens) / self.prefill_rate

    def prefers_swap(self, size: SwapSize, num_tokens: int) -> bool:
        return self.swap_s(size) < self.recompute_s(size, num_tokens)

    def _load_s(self, num_bytes: int) -> float:
        return self.set_up_s + num_bytes / self.load_bandwidth


class PrefillRate:
    """Tokens per second of the steps that mostly prefill.

    A step begins when it is planned, or when the step before it is answered, if that is later.
    A step counts by the square of its tokens: small ones are slow per token, because each step has
    a fixed cost, and where prompts are loaded, nearly all steps are small.
    """

    def __init__(self) -> None:
        self._planned: deque[tuple[int, int, float]] = deque()  # step, its tokens or 0, time
        self._answered_at = 0.0
        self._num_tokens = self._seconds = 0.0  # sums over steps, weighted
        self._largest = 0.0  # of the recent steps

    def planned(self, step: int, num_tokens: int, num_rows: int, now: float) -> None:
        """A plan with tokens of `num_rows` rows has been made."""
        is_prefill = num_tokens >= MIN_TOKENS_PER_ROW * max(num_rows, 1)
        self._planned.append((step, num_tokens if is_prefill else 0, now))

    def answered(self, step: int, now: float) -> None:
        """The output of a plan has been applied."""
        while self._planned and self._planned[0][0] <= step:
            _, num_tokens, planned_at = self._planned.popleft()
            began_at = max(planned_at, self._answered_at)
            if num_tokens and now > began_at:
                self._largest = max(self._largest, float(num_tokens))
                old_share = OLD_SHARE ** (num_tokens / self._largest)
                self._largest = max(old_share * self._largest, float(num_tokens))
                weight = num_tokens**2
                self._num_tokens = old_share * self._num_tokens + weight * num_tokens
                self._seconds = old_share * self._seconds + weight * (now - began_at)
        self._answered_at = now

    @property
    def tokens_per_s(self) -> float | None:
        """The measured rate; None: not measured yet."""
        return self._num_tokens / self._seconds if self._seconds else None

    def estimate(self, assumed_token_s: float) -> float:
        """The rate, if it is to be used before it has been measured by large steps.
        assumed_token_s: seconds per token."""
        assumed = ASSUMED_STEP_TOKENS**3
        return (self._num_tokens + assumed) / (self._seconds + assumed * assumed_token_s)

    def begin_epoch(self) -> None:
        """Unanswered plans get no answer."""
        self._planned.clear()


@dataclass(frozen=True, slots=True, eq=False)
class PrefillMeter(SchedulerFeature):
    """Measures the prefill rate, for decisions against other ways to get KV."""

    rate: PrefillRate

    def built(self, plan: SchedulerOutput, planned: PlannedStep, now: float) -> None:
        """A step of so many rows and tokens begins."""
        num_rows = int(np.count_nonzero(planned.num_scheduled))
        self.rate.planned(plan.step, plan.num_scheduled_tokens, num_rows, now)

    def answered(self, output: ModelRunnerOutput, planned: PlannedStep, now: float) -> None:
        """The step is over."""
        self.rate.answered(output.step, now)

    def begin_epoch(self, epoch: int) -> None:
        """Unanswered plans get no answer."""
        self.rate.begin_epoch()
