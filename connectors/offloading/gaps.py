"""Blocks that could not be stored when they were computed, because there was no room."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from longshore.connectors.base.groups import StoredGroups


class NewBlocks(msgspec.Struct, frozen=True):
    """Offloaded blocks of one request and group that have been computed, in order.

    step:      the plan that computed them.
    block_ids: the device's blocks of each key, one key after the other.
    position:  index of the first in the request.
    """

    request_id: str
    step: int
    group: int
    keys: list[bytes]
    block_ids: list[int]
    position: int

    def without(self, uncached: set[int]) -> "NewBlocks":
        """The leading blocks before the first uncached one: a later one would not be found."""
        ids = self.block_ids
        if uncached.isdisjoint(ids):
            return self
        factor = len(ids) // len(self.keys)
        end = next(index for index, each in enumerate(ids) if each in uncached) // factor
        return msgspec.structs.replace(self, keys=self.keys[:end], block_ids=ids[: end * factor])


@dataclass(slots=True)
class _Gap:
    """A request's blocks of one group are stored only before `position`.

    blocks: that follow, to be stored as soon as there is room. Empty after a preemption.
    """

    position: int
    blocks: list[NewBlocks] = field(default_factory=list)


class Gaps:
    """A hit would end at a gap, so blocks after it are stored after those in it: while their
    request has them, or when it has computed them once more."""

    def __init__(self, groups: StoredGroups) -> None:
        self._groups = groups.groups
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self._first_steps: dict[str, float] = {}  # of requests that began; infinity without a row
        self._gaps: dict[tuple[str, int], _Gap] = {}  # by request and group

    def __len__(self) -> int:
        return len(self._gaps)

    def request_admitted(self, request_id: str, step: int) -> None:
        """step: from this plan on, the request owns the blocks that it computes."""
        self._first_steps[request_id] = step

    def request_stopped(self, request_id: str) -> None:
        """The request has lost its row, or is a session that has paused; it owns its blocks no
        longer."""
        if request_id in self._first_steps:
            self._first_steps[request_id] = math.inf
        for group in range(len(self._groups) if self._gaps else 0):
            if (request_id, group) in self._gaps:
                self._gaps[request_id, group].blocks.clear()

    def request_finished(self, request_id: str) -> None:
        self.close(request_id)
        self._first_steps.pop(request_id, None)

    def close(self, request_id: str) -> None:
        """All blocks of the request are stored, or need not be."""
        for group in range(len(self._groups) if self._gaps else 0):
            self._gaps.pop((request_id, group), None)

    def is_next(self, blocks: NewBlocks) -> bool:
        """Whether no earlier block of the request is still to be stored. If not, these follow."""
        gap = self._gaps.get((blocks.request_id, blocks.group))
        if gap is None:
            return True
        if blocks.position <= gap.position:  # the request has computed them once more
            del self._gaps[blocks.request_id, blocks.group]
            return True
        self.leave(blocks)
        return False

    def leave(self, blocks: NewBlocks) -> None:
        """Leave these blocks out, for which there is no room. They are stored later if their
        request still has them then; those after them are not stored before."""
        first_step = self._first_steps.get(blocks.request_id)
        needs_all = self._groups[blocks.group].needs_all
        if first_step is None or not (needs_all and blocks.keys):
            return
        gap = self._gaps.setdefault((blocks.request_id, blocks.group), _Gap(blocks.position))
        if blocks.step >= first_step:
            gap.blocks.append(blocks)

    def take(self) -> Iterable[list[NewBlocks]]:
        """Blocks that can be tried again, by request and group. They are in no gap any more."""
        gaps = self._gaps
        self._gaps = {key: gap for key, gap in gaps.items() if not gap.blocks}
        return [gap.blocks for gap in gaps.values() if gap.blocks]

    def drop(self, uncached: set[int]) -> None:
        """Blocks of earlier plans have turned out to be wrong."""
        for gap in self._gaps.values():
            kept: list[NewBlocks] = []
            for blocks in gap.blocks:
                kept.append(blocks.without(uncached))
                if len(kept[-1].keys) < len(blocks.keys):
                    break  # those after it are computed once more
            gap.blocks = kept
