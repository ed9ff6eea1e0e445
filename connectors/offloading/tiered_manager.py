"""The manager of CPUOffloadingSpec: host memory, and the tiers below it.

Blocks are stored from the device to host memory and, once they are there, written behind to the
lower tiers. A load reads blocks that only a lower tier has into host memory first, so that they are
in both afterwards.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from itertools import chain

import msgspec

from longshore.connectors.base import ConnectorStats
from longshore.connectors.base.groups import StoredGroup, is_private
from longshore.connectors.offloading.ledger import (
    KeysStored,
    LedgerEvent,
    OffloadLedger,
    PreparedStore,
    complete_stores,
)
from longshore.connectors.offloading.messages import TierJob
from longshore.connectors.offloading.reuse_filter import ReuseFilter
from longshore.connectors.offloading.spec import HintedKeys, PreparedBlocks, PreparedLoad
from longshore.connectors.offloading.spilling import Below, Counts, count_displaced
from longshore.connectors.offloading.staging import Staging
from longshore.connectors.offloading.tiers import (
    HOST_KEPT,
    HOST_TIER,
    LoadSource,
    LowerTier,
    TierCommand,
    TierMessage,
    TierTask,
    int64s,
)
from longshore.protocol.arrays import EMPTY_INT32
from longshore.protocol.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    Locality,
    Medium,
)
from longshore.protocol.statistics import TierStats


class TieredManager:
    """See OffloadingManager."""

    def __init__(
        self,
        host: OffloadLedger,
        tiers: Sequence[LowerTier],
        reuse_filter: ReuseFilter | None = None,
        *,
        writes_back: bool = False,
        max_wait_s: float | None = None,
        num_ranks: int = 1,
        counted_group: StoredGroup | None = None,
        publishes_events: bool = False,
    ) -> None:
        """tiers: below host memory, the fastest first.

        writes_back:   blocks are written to the fastest lower tier when host memory evicts them,
                       and are in one of both. They are written through to the others.
        max_wait_s:    how long a request waits for blocks in lower tiers, see `prefetch` in
                       OffloadingOptions; None: its load reads them.
        counted_group: the group whose loaded blocks are counted as hit tokens; the blocks of others
                       belong to the same tokens.
        """
        self._host = host
        self._below = [
            Below(number, tier, host, len(tiers), writes_back=writes_back and number == 0)
            for number, tier in enumerate(tiers)
        ]
        self._filter = reuse_filter
        self._staging = Staging(host, self._below, max_wait_s)
        self._num_ranks = num_ranks
        self._publishes_events = publishes_events
        self._events: list[KVEvent] = []
        self._counted_group = counted_group
        self._host_counts = Counts()
        self._commands: dict[int, TierCommand] = {}  # in progress, by job
        self._late: set[bytes] = set()  # not read in time by some rank, in jobs that have not ended
        self._unconfirmed: set[int] = set()  # new ranks: do they see the memory of the old ones?

    # Loads

    def lookup(self, keys: Sequence[bytes], waiting_s: float = 0.0) -> int | None:
        if self._unconfirmed:
            return None
        num_found = self._host.lookup(keys)
        if not self._below or num_found is None or num_found == len(keys):
            return num_found
        is_known = True
        for index in range(num_found, len(keys)):
            found = self._staging.may_load(keys[index], waiting_s)
            if found is None:
                is_known = False  # ask for all that follow as well
            elif not found:
                return index if is_known else None
        return len(keys) if is_known else None

    def read_ahead(self, request_id: str, keys: Sequence[bytes]) -> None:
        self._staging.read_ahead(request_id, keys)

    def end_read_ahead(self, request_id: str, *, is_over: bool) -> None:
        self._staging.end_read_ahead(request_id, is_over=is_over)

    def num_without_room(self, keys: Sequence[bytes]) -> int:
        if all(key in self._host for key in keys):
            return 0
        num_slots = sum(not self._host.is_loading(key) for key in keys)
        return max(0, num_slots - self._host.num_unused)

    def touch(self, keys: Sequence[bytes], position: int = 0) -> None:
        if self._filter is not None:
            self._filter.count(keys)
        self._host.touch(keys, position)
        for below in self._below:
            below.tier.touch(keys, position)

    def refresh(self, keys: Sequence[bytes]) -> None:
        self._host.refresh(keys)
        for below in self._below:
            below.tier.refresh(keys)

    def retain(self, hinted: HintedKeys) -> None:
        self._host.retain(hinted)
        for below in self._below:
            below.tier.retain(hinted)

    def expire(self, now: float) -> None:
        self._host.expire(now)
        for below in self._below:
            below.tier.expire(now)

    def prepare_load(self, keys: Sequence[bytes]) -> PreparedLoad:
        sources: dict[int, int] = {}  # tier by index
        for index, key in enumerate(keys):
            if key not in self._host:
                tier = self._staging.source_of(key)
                if tier is None:
                    keys = keys[:index]
                    break
                sources[index] = tier
        ready = [key for index, key in enumerate(keys) if index not in sources]
        slots = dict(zip(ready, self._host.prepare_load(ready), strict=True))
        staged = [keys[index] for index in sources]
        prepared = None
        if staged:
            prepared = count_displaced(self._host.prepare_store(staged), self._below)
        if prepared is not None:
            slots.update(zip(prepared.keys, prepared.slots, strict=True))
        elif staged:  # host memory is full of blocks in use: load what it has
            first = next(iter(sources))
            self._host.complete_load(ready[first:])
            keys, sources = keys[:first], {}
        reads = self._staging.begin(keys, sources)
        self._count_hits(keys, sources)
        source = LoadSource(int64s([slots[key] for key in keys]), reads)
        return PreparedLoad(len(keys), msgspec.msgpack.encode(source))

    def _count_hits(self, keys: Sequence[bytes], sources: dict[int, int]) -> None:
        group = self._counted_group
        if group is None:
            return
        for index, key in enumerate(keys):
            if key[-1] == group.number:
                tier = sources.get(index)
                counts = self._host_counts if tier is None else self._below[tier].counts
                counts.num_hit_tokens += group.block_size

    def load_abandoned(self, keys: Sequence[bytes]) -> None:
        self._staging.abandon(keys)

    def load_expired(self, keys: Sequence[bytes]) -> None:
        self._staging.abandon(keys, is_late=True)

    def complete_load(self, keys: Sequence[bytes], failed: Sequence[bytes]) -> None:
        staged = [key for key in keys if key in self._staging]
        self._host.complete_load([key for key in keys if key not in self._staging])
        self._staging.end(staged, failed)
        self._remove(failed)
        for below in self._written_through:  # used again, but evicted there meanwhile
            below.write_behind(below.tier.missing(keys))

    def _remove(self, keys: Sequence[bytes]) -> None:
        """These blocks could not be read. A tier still has those that it has not read in time."""
        if keys:
            self._host.remove(keys)
            lost = [key for key in keys if key not in self._late]
            self._late.difference_update(keys)
            shared = [key for key in lost if not is_private(key)]
            for below in self._below:
                below.tier.remove(shared)

    # Stores

    def prepare_store(self, keys: Sequence[bytes], position: int = 0) -> PreparedBlocks | None:
        wanted = keys if self._filter is None else self._filter.worth_storing(keys)
        prepared = count_displaced(self._host.prepare_store(wanted, position), self._below)
        if prepared is None:
            self._host_counts.num_dropped_blocks += len(wanted)
            return None
        return _prepared_blocks(prepared, keys)

    def prepare_stores(self, runs: Sequence[tuple[Sequence[bytes], int]]) -> PreparedBlocks | None:
        keys = list(chain.from_iterable(run for run, _ in runs))
        if self._filter is not None:
            worth = self._filter.worth_storing
            runs = [(worth(run), position) for run, position in runs]
        prepared = count_displaced(self._host.prepare_stores(runs), self._below)
        return None if prepared is None else _prepared_blocks(prepared, keys)

    def complete_store(self, keys: Sequence[bytes], failed: Sequence[bytes]) -> None:
        complete_stores(self._host, keys, failed)
        for below in self._below:
            if below.writes_back:  # they were computed again
                below.tier.remove([key for key in keys if key in self._host])
            else:
                below.counts.num_dropped_blocks += below.write_behind(keys)

    @property
    def _written_through(self) -> list[Below]:
        return [below for below in self._below if not below.writes_back]

    # Swapped requests, which only host memory keeps

    def prepare_swap(self, keys: Sequence[bytes]) -> PreparedBlocks | None:
        host = self._host
        prepared = count_displaced(host.prepare_store(keys), self._below)
        if prepared is None:
            return None
        if not host.has_slots(keys):  # one was removed, and its last load is still in progress
            host.complete_store(prepared.keys, success=False)
            return None
        host.pin(keys)
        return _prepared_blocks(prepared, keys)

    def lookup_swap(self, keys: Sequence[bytes]) -> bool | None:
        if self._unconfirmed:
            return None
        if self._host.lookup(keys) == len(keys):
            return True
        return None if self._host.has_slots(keys) else False

    def release_swap(self, keys: Sequence[bytes]) -> None:
        self._host.unpin(keys)
        self._host.remove(filter(is_private, keys))

    # Jobs

    @property
    def has_jobs(self) -> bool:
        return any(below.tier.has_commands for below in self._below) or (
            not self._unconfirmed
            and (self._staging.may_begin_jobs or any(below.has_spills for below in self._below))
        )

    def take_jobs(self, next_id: Callable[[], int]) -> list[TierJob]:
        jobs: list[TierJob] = []
        if not self._unconfirmed:
            jobs += (_tier_job(*begun) for begun in self._staging.begin_jobs(next_id))
        for number, below in enumerate(self._below):
            for command in below.tier.take_commands():
                task = TierCommand(number, command)
                jobs.append(_tier_job(next_id(), task))
                self._commands[jobs[-1].job_id] = task
            if not self._unconfirmed:
                jobs += (_tier_job(*begun) for begun in below.begin_spills(next_id))
        return jobs

    def job_ended(self, job_id: int, failed: Sequence[int]) -> None:
        command = self._commands.pop(job_id, None)
        if command is not None:
            tier = self._below[command.tier].tier
            tier.command_ended(command.command, is_failed=bool(failed))
            return
        self._staging.changed()
        if self._staging.has_job(job_id):
            self._remove(self._staging.job_ended(job_id, failed))
            return
        below = next(below for below in self._below if below.is_spilling(job_id))
        below.spill_ended(job_id, failed)

    def receive(self, rank: int, tier_data: bytes) -> None:
        self._staging.changed()
        read = msgspec.msgpack.decode(tier_data, type=TierMessage)
        if read.late:
            self._late.update(filter(self._staging.__contains__, read.late))
        elif read.tier != HOST_TIER:
            self._below[read.tier].tier.receive(rank, read.message)
        elif rank in self._unconfirmed:
            self._unconfirmed.remove(rank)
            if read.message != HOST_KEPT:
                self._host.clear()
                self._unconfirmed.clear()

    # All of them

    def end_step(self) -> None:
        self._drain_events()

    def take_events(self) -> list[KVEvent]:
        self._drain_events()
        events, self._events = self._events, []
        return events

    def _drain_events(self) -> None:
        """Take the tiers' events, which would else grow without limit."""
        self._publish(self._host.take_events(), "CPU")
        for below in self._below:
            self._publish(below.tier.take_events(), below.tier.medium, below.tier.locality)

    def _publish(
        self, events: Iterable[LedgerEvent], medium: Medium, locality: Locality | None = None
    ) -> None:
        if self._publishes_events:
            for event in events:
                is_stored = isinstance(event, KeysStored)
                self._events += [
                    _event(key, medium, locality, is_stored)
                    for key in event.keys
                    if not is_private(key)
                ]

    def stats(self) -> ConnectorStats:
        host = TierStats(
            "CPU", self._host.num_ready, self._host.capacity, *astuple(self._host_counts)
        )
        tiers, queued = [host], Counter[tuple[Medium, Medium]]()
        staging = self._staging.num_blocks()
        for number, below in enumerate(self._below):
            tier, counts = below.tier, below.counts
            stats = TierStats(
                tier.medium,
                tier.num_blocks,
                tier.capacity_blocks,
                *astuple(counts),
                **msgspec.structs.asdict(tier.faults),
            )
            tiers.append(stats)
            queued["CPU", tier.medium] += below.num_queued
            queued[tier.medium, "CPU"] += staging[number]
        return ConnectorStats(tiers, queued)

    def reset(self) -> bool:
        is_copying = self._staging.num_blocks() or any(each.num_spilling for each in self._below)
        if is_copying or self._commands or self._host.num_storing or self._host.num_loading:
            return False
        self._host.clear()
        self._staging.reset()
        for below in self._below:
            below.reset()
        return True

    def begin_epoch(self) -> None:
        self._host.end_transfers()
        self._host.remove(list(filter(is_private, self._host)))
        if self._unconfirmed:  # the new ranks cannot know what the former ones saw
            self._host.clear()
        self._staging.begin_epoch()
        self._late.clear()
        self._commands.clear()
        for below in self._below:
            below.begin_epoch()
        self._unconfirmed = set(range(self._num_ranks)) if self._host.num_ready else set()
        self._host.take_events()
        if self._publishes_events:
            media: list[Medium] = ["CPU", *(below.tier.medium for below in self._below)]
            self._events = [AllBlocksCleared(medium) for medium in media]
            self._publish([KeysStored(list(self._host))], "CPU")

    def check(self) -> None:
        self._host.check()
        for below in self._below:
            below.tier.check()


def _tier_job(job_id: int, task: TierTask) -> TierJob:
    return TierJob(job_id, msgspec.msgpack.encode(task))


def _prepared_blocks(prepared: PreparedStore, keys: Sequence[bytes]) -> PreparedBlocks:
    """What is stored of `keys`."""
    if len(prepared.keys) == len(keys):
        return PreparedBlocks(range(len(keys)), int64s(prepared.slots))
    index_of = {key: index for index, key in enumerate(keys)}
    return PreparedBlocks([index_of[key] for key in prepared.keys], int64s(prepared.slots))


def _event(key: bytes, medium: Medium, locality: Locality | None, is_stored: bool) -> KVEvent:
    block_hash, group = key[:-1], key[-1]
    if is_stored:
        return BlockStored(block_hash, None, EMPTY_INT32, group, medium=medium, locality=locality)
    return BlockRemoved(block_hash, group, medium, locality)
