"""The policy `fair` in the scheduler: what its `Shares` learn of rows, and what they decide."""

from dataclasses import dataclass

from longshore.scheduler.hooks import SchedulerFeature
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.queue.queues import WaitingRequests
from longshore.scheduler.queue.shares import Shares
from longshore.scheduler.request import Outcome, Request
from longshore.scheduler.step.running import RunningTable
from longshore.scheduler.step.token_budget import TokenBudget


@dataclass(frozen=True, slots=True, eq=False)
class FairShares(SchedulerFeature):
    """Attached if the policy is `fair`, which has the same `shares`."""

    shares: Shares
    running: RunningTable
    waiting: WaitingRequests
    budget: TokenBudget

    def gate(self, request: Request) -> None:
        """Its tenant may hold less than its share."""
        request.is_owed = self.shares.is_owed(request.options.tenant.name)

    def admitted(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """The request's tenant pays for its input."""
        self.shares.admitted(request, num_computed)

    def ended(
        self, request: Request, blocks: HeldBlocks | None, outcome: Outcome, now: float
    ) -> None:
        """The request's tenant pays for its output."""
        self.shares.ended(request)

    def is_eventful(self) -> bool:
        """Not by itself, but a row may have become free for a request that waits."""
        if len(self.waiting) and self.running.num_rows < self.running.max_num_seqs:
            self._count_rows()
        return False

    def begin_step(self, step: int, budget: int, now: float) -> None:
        """A tenant that is owed a row finds tokens left."""
        self._count_rows()
        self.budget.max_chunk = self.shares.chunk_limit(budget) or 0

    def _count_rows(self) -> None:
        self.shares.begin_step(self.running.generation, self.running.num_computed)
