"""States for forks whose parents run, in models with recurrent states.

The state of a row moves on with each of its tokens, so a fork can only begin with it where a copy
was made. The plan that computes the last token which a fork has in common with its parent keeps the
state after it, in blocks that the fork holds until it begins. A fork whose parent is already past
this token begins like any other request.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from longshore.protocol.arrays import Int32Array, Int64Array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.plan import KeptState
from longshore.protocol.statistics import BlockState
from longshore.scheduler.features.forks import Forks
from longshore.scheduler.hooks import PlanChanges, SchedulerFeature, Yielded
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.request import Request
from longshore.scheduler.step.running import RunningTable


@dataclass(slots=True, eq=False)
class ForkStates(SchedulerFeature):
    """Plans which states the workers keep for forks, and owns their blocks.

    of_fork: the state after the tokens that a waiting fork shares with its parent.
    """

    forks: Forks
    running: RunningTable
    kv_cache: KVCacheManager
    of_fork: dict[Request, HeldBlocks] = field(default_factory=dict)

    def is_eventful(self) -> bool:
        """A steady decode may compute what a fork waits for."""
        return any(len(family.ahead) for family in self.forks.pending.values())

    def fields(
        self, plan: PlanChanges, num_scheduled: Int64Array, answered_step: int
    ) -> dict[str, Any]:
        parents = list(self.forks.pending)
        kept = {(s.row, s.num_tokens): s.block_ids for s in (plan.kept_states if parents else ())}
        for parent in parents:
            row = parent.row
            if row < 0:
                continue
            first = int(self.running.num_computed[row])
            end = first + int(num_scheduled[row])
            for fork in self.forks.plan_through(parent, end, plan.step):
                held = None
                if fork.num_common > first:
                    held = self._keep(kept, row, fork.num_common, plan)
                if held is None:
                    self.forks.miss(fork)
                else:
                    self.of_fork[fork.request] = held
        return {}

    def _keep(
        self,
        kept: dict[tuple[int, int], Int32Array],
        row: int,
        num_tokens: int,
        plan: PlanChanges,
    ) -> HeldBlocks | None:
        """References to the blocks in which the plan keeps this state; None if there are none.
        kept: the blocks of all states that it keeps, by row and number of tokens."""
        if (pages := kept.get((row, num_tokens))) is not None:
            held = self.kv_cache.state_in(pages)
            self.kv_cache.share(held)
            return held
        new = self.kv_cache.new_state(plan.step)
        if new is not None:
            pages = kept[row, num_tokens] = self.kv_cache.pages_of(new)
            plan.kept_states.append(KeptState(row, num_tokens, pages))
        return new

    def release(self, request: Request) -> None:
        """A fork has begun, has ended, or must wait for its parent again. The plans that write or
        copy its state have fenced the blocks."""
        held = self.of_fork.pop(request, None)
        if held is not None:
            self.kv_cache.release(held)

    def vacated(self, request: Request, blocks: HeldBlocks | None) -> None:
        """A parent computes everything again."""
        for fork in self.forks.parents.get(request, ()):
            if blocks is None:
                self.of_fork.pop(fork.request, None)
            else:
                self.release(fork.request)

    def yield_blocks(self, to: Request | None, besides: Request | None) -> Yielded:
        """A fork can begin without the state that it waits for; the last one yields first."""
        if to is not None or not self.of_fork:
            return Yielded.NOTHING
        self.forks.miss(self.forks.waiting[next(reversed(self.of_fork))])
        return Yielded.BLOCKS

    def begin_epoch(self, epoch: int) -> None:
        self.of_fork.clear()

    def owners(self) -> Iterator[tuple[BlockState, str, HeldBlocks]]:
        """The states, with the forks that wait for them."""
        for request, held in self.of_fork.items():
            yield BlockState.KEPT, request.request_id, held

    def check(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """Raise LongshoreError unless the states are of waiting forks whose parents run."""
        for request in self.of_fork:
            fork = self.forks.waiting.get(request)
            if fork is None or fork.parent.row < 0 or fork.step is None:
                raise LongshoreError(f"{request.request_id} holds a state that it cannot use")
