"""When a connector may store a block: the one place of this rule.

A newly cached block may be stored when the plan that computes it has been answered, unless it was
uncached meanwhile: its content is wrong then, or is computed once more. Until then it is held, so
that it is not allocated again.
"""

from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import TypeAlias

from longshore.connectors.base import BlockHolds, StorableBlocks
from longshore.protocol.kv_cache_spec import NULL_BLOCK

PlanHold: TypeAlias = tuple[int, list[int]]
"""The id of a hold, and the blocks of a plan that it holds."""


class UnansweredBlocks:
    """Newly cached blocks of unanswered plans, which are held. last_step: the last of these plans;
    0: there is none."""

    def __init__(self, holds: BlockHolds) -> None:
        self._holds = holds
        self._plans: deque[tuple[int, PlanHold, list[StorableBlocks]]] = deque()  # oldest first

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def last_step(self) -> int:
        return self._plans[-1][0] if self._plans else 0

    def are_storable(self, answered_step: int) -> bool:
        """Whether `take` would return some."""
        return bool(self._plans) and self._plans[0][0] <= answered_step

    def add(self, step: int, cached: list[StorableBlocks]) -> None:
        """Hold the blocks that plan `step` has cached."""
        if not cached:
            return
        block_ids = list(chain.from_iterable([each.block_ids for each in cached]))
        if earlier := [each.earlier_ids for each in cached if each.earlier_ids]:
            held = dict.fromkeys(chain(*earlier, block_ids))  # chunks may begin with the same ones
            held.pop(NULL_BLOCK, None)
            block_ids = list(held)
        self._plans.append((step, (self._holds.hold(block_ids), block_ids), cached))

    def remove(self, uncached: Iterable[int]) -> None:
        """Blocks have been uncached. What was computed from them has been, too, so the others are
        right."""
        wrong = set(uncached)
        plans, self._plans = self._plans, deque()
        for step, plan_hold, blocks in plans:
            right = [left for each in blocks if (left := _without(each, wrong)) is not None]
            if right:
                self._plans.append((step, plan_hold, right))
            else:
                self._holds.release(plan_hold[0])

    def take(self, answered_step: int) -> tuple[list[StorableBlocks], list[PlanHold]]:
        """The blocks of answered plans, in order, and their holds, which the caller releases."""
        plans = self._plans
        storable: list[StorableBlocks] = []
        plan_holds = []
        while plans and plans[0][0] <= answered_step:
            _, plan_hold, blocks = plans.popleft()
            storable += blocks
            plan_holds.append(plan_hold)
        return storable, plan_holds

    def clear(self) -> None:
        """A new epoch: all holds are void."""
        self._plans.clear()


def _without(blocks: StorableBlocks, wrong: set[int]) -> StorableBlocks | None:
    """Those of these blocks that are right; None if there are none."""
    if wrong.isdisjoint(blocks.block_ids) and wrong.isdisjoint(blocks.earlier_ids):
        return blocks
    return blocks.only(lambda block_id, _: block_id not in wrong)
