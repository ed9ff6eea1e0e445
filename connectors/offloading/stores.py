"""When blocks are stored: held while their plan is unanswered, then copied out if there is room."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import numpy as np

from longshore.connectors.base import BlockHolds, CachedBlocks, StepView
from longshore.connectors.offloading.gaps import Gaps, NewBlocks
from longshore.connectors.offloading.groups import StoredGroups
from longshore.connectors.offloading.jobs import Jobs
from longshore.connectors.offloading.spec import OffloadingManager, PreparedBlocks
from longshore.protocol.kv_cache_spec import NULL_BLOCK

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
        holds: BlockHolds,
        jobs: Jobs,
        num_blocks: int,
    ) -> None:
        self._groups = groups.groups
        self._factor = groups.factor
        self._manager = manager
        self._holds = holds
        self._jobs = jobs
        self._max_storing = MAX_STORING_SHARE * num_blocks
        self.num_dropped = 0
        self.gaps = Gaps(groups)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """All holds are void."""
        self._tables: dict[str, list[int]] = {}  # of running requests, if factor > 1
        self._unproven: deque[tuple[int, int, list[NewBlocks]]] = deque()  # step, hold id, blocks
        self._has_new_room = False  # since the gaps were tried
        self.gaps.begin_epoch()

    @property
    def last_step(self) -> int:
        """The last step whose blocks are held because it is unanswered; 0: none."""
        return self._unproven[-1][0] if self._unproven else 0

    @property
    def has_work(self) -> bool:
        """Whether stores may begin with the next plan."""
        return bool(self._unproven or (self._has_new_room and self.gaps))

    def room_was_freed(self) -> None:
        self._has_new_room = True

    def follow_requests(self, step: StepView) -> None:
        for request_id in (*step.preempted, *step.finished):  # or a session that has paused
            self._tables.pop(request_id, None)
            self.gaps.request_stopped(request_id)
        for request in step.admitted:  # perhaps one with the id of one that has finished
            self.gaps.request_admitted(request.request_id)
            if self._factor > 1:
                self._tables[request.request_id] = request.block_ids[0].tolist()

    def drop(self, uncached: set[int]) -> None:
        """Blocks of earlier plans have turned out to be wrong."""
        self._unproven = deque(
            (step, hold_id, [blocks.without(uncached) for blocks in new])
            for step, hold_id, new in self._unproven
        )
        self.gaps.drop(uncached)

    def begin(self, answered_step: int) -> None:
        """Store the blocks of answered plans, after those of gaps for which there may be room."""
        if self._has_new_room and self.gaps:
            self._has_new_room = False
            for blocks in self.gaps.take():
                self._begin(blocks)
        while self._unproven and self._unproven[0][0] <= answered_step:
            _, hold_id, new = self._unproven.popleft()
            self._begin(new, hold_id)

    def hold(self, step: int, cached: Iterable[CachedBlocks]) -> None:
        """Keep newly cached blocks until their plan is answered."""
        new_blocks = self._new_blocks if self._factor == 1 else self._completed
        new = [blocks for each in cached if (blocks := new_blocks(each)) is not None]
        if new:
            ids = list(chain.from_iterable(blocks.block_ids for blocks in new))
            self._unproven.append((step, self._holds.hold(ids), new))

    def _new_blocks(self, cached: CachedBlocks) -> NewBlocks:
        suffix = bytes((cached.group,))
        keys = [block_hash + suffix for block_hash in cached.block_hashes]
        return self._blocks_of(cached, keys, list(cached.block_ids), cached.positions[0])

    def _completed(self, cached: CachedBlocks) -> NewBlocks | None:
        """The offloaded blocks that are complete with these blocks."""
        factor, table = self._factor, self._tables.get(cached.request_id)
        if table is None:  # the request has ended meanwhile
            return None
        for position, block_id in zip(cached.positions, cached.block_ids, strict=True):
            table += [NULL_BLOCK] * (position + 1 - len(table))
            table[position] = block_id
        group = self._groups[cached.group]
        keys: list[bytes] = []
        ids: list[int] = []
        first = 0
        for position, block_hash in zip(cached.positions, cached.block_hashes, strict=True):
            if (position + 1) % factor == 0:
                row = table[position + 1 - factor : position + 1]
                if NULL_BLOCK not in row:
                    first = first if keys else position // factor
                    keys.append(group.key(block_hash))
                    ids += row
        return self._blocks_of(cached, keys, ids, first) if keys else None

    def _blocks_of(
        self, cached: CachedBlocks, keys: list[bytes], block_ids: list[int], position: int
    ) -> NewBlocks:
        life = self.gaps.life_of(cached.request_id)
        return NewBlocks(cached.request_id, life, cached.group, keys, block_ids, position)

    def _begin(self, new: list[NewBlocks], hold_id: int = 0) -> None:
        """Copy out those of these blocks that the manager wants.

        hold_id: of all of them; 0: their requests own them.
        """
        num_new = sum(len(blocks.block_ids) for blocks in new)
        if self.gaps:
            new = [blocks for blocks in new if self.gaps.is_next(blocks)]
        copies = self._prepare(new, is_held=bool(hold_id))
        has_all = len(copies.block_ids) == num_new
        if copies.keys:
            ids = np.array(copies.block_ids, np.int32)
            groups, tier_data = bytes(copies.groups), bytes(copies.tier_data)
            kept = hold_id if has_all else 0
            self._jobs.begin_store(copies.keys, groups, ids, tier_data, kept)
        if hold_id and not (copies.keys and has_all):
            self._holds.release(hold_id)

    def _prepare(self, new: Sequence[NewBlocks], *, is_held: bool) -> _Copies:
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
                self.num_dropped += len(blocks.keys) if is_full and is_held else 0
            else:
                copies.add([blocks], prepared)
        return copies
