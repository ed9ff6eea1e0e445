"""Which blocks are copied out: those that the manager wants, if there is room."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import numpy as np

from longshore.connectors.base import StepView, StorableBlocks
from longshore.connectors.base.groups import StoredGroups
from longshore.connectors.offloading.gaps import Gaps, NewBlocks
from longshore.connectors.offloading.jobs import Jobs
from longshore.connectors.offloading.spec import OffloadingManager, PreparedBlocks

MAX_STORING_SHARE: Final = 0.25
"""While stores hold this share of the device's blocks, no other store begins: slow memory must not
take the device's blocks from requests."""


@dataclass(slots=True)
class _Copies:
    """Blocks to copy out, as in BlockList."""

    keys: list[bytes] = field(default_factory=list)
    groups: bytearray = field(default_factory=bytearray)
    block_ids: list[int] = field(default_factory=list)
    tier_data: bytearray = field(default_factory=bytearray)

    def add(self, new: Sequence[NewBlocks], prepared: PreparedBlocks) -> None:
        """prepared: which of the blocks, counted over all of `new`."""
        keys = list(chain.from_iterable(blocks.keys for blocks in new))
        ids = list(chain.from_iterable(blocks.block_ids for blocks in new))
        groups = b"".join([bytes((blocks.group,)) * len(blocks.keys) for blocks in new])
        if len(prepared.indices) < len(keys):
            factor = len(ids) // len(keys)
            firsts = [index * factor for index in prepared.indices]
            ids = [block_id for first in firsts for block_id in ids[first : first + factor]]
            groups = bytes([groups[index] for index in prepared.indices])
            keys = [keys[index] for index in prepared.indices]
        self.keys += keys
        self.groups += groups
        self.block_ids += ids
        self.tier_data += prepared.tier_data


class Stores:
    """
    num_blocks:  of the device.
    num_dropped: offloaded blocks that were not stored because of MAX_STORING_SHARE.
    gaps:        blocks for which there was no room.
    """

    def __init__(
        self,
        groups: StoredGroups,
        manager: OffloadingManager,
        jobs: Jobs,
        num_blocks: int,
    ) -> None:
        self._factor = groups.factor
        self._manager = manager
        self._jobs = jobs
        self._max_storing = MAX_STORING_SHARE * num_blocks
        self.num_dropped = 0
        self.gaps = Gaps(groups)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """All holds are void."""
        self._has_new_room = False  # since the gaps were tried
        self.gaps.begin_epoch()

    @property
    def has_work(self) -> bool:
        """Whether stores may begin with the next plan."""
        return bool(self._has_new_room and self.gaps)

    def room_was_freed(self) -> None:
        self._has_new_room = True

    def follow_requests(self, step: StepView) -> None:
        for request_id in (*step.preempted, *step.finished):  # or a session that has paused
            self.gaps.request_stopped(request_id)
        for request in step.admitted:  # perhaps one with the id of one that has finished
            self.gaps.request_admitted(request.request_id, step.step)

    def begin(self, step: StepView) -> None:
        """Store new blocks, after those of gaps for which there may be room."""
        if step.uncached:
            self.gaps.drop(set(step.uncached))
        if self._has_new_room and self.gaps:
            self._has_new_room = False
            for blocks in self.gaps.take():
                self._begin(blocks)
        if step.storable:
            new = map(self._new_blocks, step.storable)
            self._begin([blocks for blocks in new if blocks.keys], are_new=True)

    def _new_blocks(self, storable: StorableBlocks) -> NewBlocks:
        """The offloaded blocks that these blocks complete."""
        hashes, ids, position = storable.block_hashes, storable.block_ids, storable.positions[0]
        if self._factor > 1:
            chunks = storable.chunks(self._factor)
            hashes = [chunk.block_hash for chunk in chunks]
            ids = list(chain.from_iterable(chunk.block_ids for chunk in chunks))
            position = chunks[0].position // self._factor if chunks else 0
        suffix = bytes((storable.group,))
        keys = [block_hash + suffix for block_hash in hashes]
        request_id, group = storable.request_id, storable.group
        return NewBlocks(request_id, storable.step, group, keys, list(ids), position)

    def _begin(self, new: list[NewBlocks], *, are_new: bool = False) -> None:
        """Copy out those of these blocks that the manager wants. are_new: they are in no gap."""
        if self.gaps:
            new = [blocks for blocks in new if self.gaps.is_next(blocks)]
        copies = self._prepare(new, are_new=are_new)
        if copies.keys:
            ids = np.array(copies.block_ids, np.int32)
            groups, tier_data = bytes(copies.groups), bytes(copies.tier_data)
            self._jobs.begin_store(copies.keys, groups, ids, tier_data)

    def _prepare(self, new: Sequence[NewBlocks], *, are_new: bool) -> _Copies:
        """Have the manager choose what to store: for all requests at once if there is room for
        everything, as in most steps, else request by request."""
        copies = _Copies()
        is_full = self._jobs.num_storing >= self._max_storing
        prepared = None
        if not is_full and len(new) > 1:
            prepared = self._manager.prepare_stores(
                [(blocks.keys, blocks.position) for blocks in new]
            )
        if prepared is not None:
            copies.add(new, prepared)
            return copies
        for blocks in new:
            if self.gaps and not self.gaps.is_next(blocks):  # one before it has just been left out
                continue
            if not is_full:
                prepared = self._manager.prepare_store(blocks.keys, blocks.position)
            if prepared is None:
                self.gaps.leave(blocks)
                self.num_dropped += len(blocks.keys) if is_full and are_new else 0
            else:
                copies.add([blocks], prepared)
        return copies
