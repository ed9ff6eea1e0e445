"""A scheduler with the offloading connector, and a worker half that does what the test says.

Every rank has host memory and a disk of numbered slots. A slot has the key and the content of one
offloaded block; a load must find the key there that it asks for. Blocks are read and written when
a rank ends its part of a job, which is the last moment at which it may do so.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import numpy as np

from longshore.connectors.base import ConnectorConfig
from longshore.connectors.base.groups import is_private
from longshore.connectors.offloading.connector import OffloadingConnector
from longshore.connectors.offloading.disk_tier import CLEAR, DiskContents
from longshore.connectors.offloading.messages import (
    BlockList,
    Commands,
    Ended,
    LoadJob,
    Report,
    StoreJob,
    TierJob,
)
from longshore.connectors.offloading.tiers import (
    HOST_KEPT,
    HOST_NEW,
    HOST_TIER,
    LoadSource,
    Spill,
    Stage,
    TierCommand,
    TierMessage,
    TierTask,
)
from longshore.protocol.kv_cache_spec import NULL_BLOCK, KVCacheSpec, StateSpec
from longshore.protocol.plan import SchedulerOutput
from tests.harness import transfers
from tests.harness.driver import Driver
from tests.harness.kv_groups import full
from tests.harness.memory import JUNK
from tests.harness.shared_drivers import CONNECTED

Content: TypeAlias = tuple[tuple[int, ...], ...]
"""Of one offloaded block: what each block of the device has, by offset."""


def int64s(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int64).tolist()


@dataclass
class Job:
    """A job, until all ranks have reported it. name: of a load, its request id; else its job id."""

    command: LoadJob | StoreJob | TierJob
    ranks_left: set[int]

    @property
    def name(self) -> str:
        if isinstance(self.command, LoadJob):
            return self.command.request_id
        return str(self.command.job_id)


@dataclass
class RankTiers:
    """Slots of one rank: key and content."""

    host: dict[int, tuple[bytes, Content]] = field(default_factory=dict)
    disk: dict[int, tuple[bytes, Content]] = field(default_factory=dict)


class OffloadDriver(Driver):
    """options: of the connector; `num_slots` is the size of host memory, `num_disk_slots` that of
    the disk.

    jobs: those in progress, in the order in which they were begun.
    keeps_host: whether host memory survives the workers.
    loaded, stored_keys: keys of all blocks that were loaded and stored.
    """

    def __init__(
        self,
        *specs: KVCacheSpec,
        num_slots: int = 64,
        num_disk_slots: int = 0,
        num_ranks: int = 1,
        num_blocks: int = 40,
        hash_block_size: int = 4,
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        specs = specs or (full(),)
        options = options or {}
        self.factor = (options.get("block_size") or specs[0].block_size) // specs[0].block_size
        if num_disk_slots:
            options = options | {"disk_path": "unused", "disk_bytes": 1}
        config = ConnectorConfig(
            options | {"cpu_bytes_to_use": num_slots * num_ranks * self.factor},
            block_size=specs[0].block_size,
            num_blocks=num_blocks,
            num_groups=len(specs),
            specs=specs,
            hash_block_size=hash_block_size,
            num_ranks=num_ranks,
            rank_block_bytes=(1,) * num_ranks,
        )
        self.offloading = OffloadingConnector(config)
        self.tiers = [RankTiers() for _ in range(num_ranks)]
        self.num_disk_slots = num_disk_slots
        self.jobs: list[Job] = []
        self.said: list[tuple[int, dict[str, Any]]] = []
        self.loaded: list[bytes] = []
        self.stored_keys: list[bytes] = []
        self.read_ahead: list[bytes] = []
        self.contents_of_key: dict[bytes, Content] = {}
        cache = (
            CONNECTED["cache"] | {"hash_block_size": hash_block_size} | settings.pop("cache", {})
        )
        super().__init__(
            *specs,
            connector=self.offloading,
            num_ranks=num_ranks,
            num_blocks=num_blocks,
            **(CONNECTED | {"cache": cache} | settings),
        )
        self.keeps_host = True
        self.say_contents()

    # What ranks say when they start

    def say_contents(self) -> None:
        """Every rank says whether it has the host memory of earlier ranks, and what it has found on
        its disk, in parts."""
        for rank, tiers in enumerate(self.tiers):
            if not self.keeps_host:
                tiers.host.clear()
            kept = TierMessage(HOST_TIER, HOST_KEPT if self.keeps_host else HOST_NEW)
            self._report(rank, Report(tier_data=[msgspec.msgpack.encode(kept)]))
        for rank, tiers in enumerate(self.tiers if self.num_disk_slots else []):
            found = [(key, slot) for slot, (key, _) in tiers.disk.items()]
            for first in range(0, max(len(found), 1), 3):
                part = found[first : first + 3]
                message = DiskContents(
                    self.num_disk_slots,
                    [key for key, _ in part],
                    np.array([slot for _, slot in part], np.int64).tobytes(),
                    is_last=first + 3 >= len(found),
                )
                tier_message = TierMessage(0, msgspec.msgpack.encode(message))
                self._report(rank, Report(tier_data=[msgspec.msgpack.encode(tier_message)]))

    # Jobs

    def commands_of(self, plan: SchedulerOutput) -> transfers.Commands:
        if not plan.connector_metadata:
            return transfers.Commands()
        commands = msgspec.msgpack.decode(plan.connector_metadata, type=Commands)
        for load in commands.loads:
            targets = [*load.blocks.ids(self.factor).ravel().tolist(), *load.missing]
            self.transfers.begin(transfers.Load(load.request_id, True, 0, (targets,), []))
            self.loaded += load.blocks.keys
        for store in commands.stores:
            block_ids = set(store.blocks.ids(self.factor).ravel().tolist())
            assert NULL_BLOCK not in block_ids or any(map(is_private, store.blocks.keys))
            block_ids.discard(NULL_BLOCK)
            self.transfers.holding[-store.job_id] = block_ids
            self.stored_keys += store.blocks.keys
        for command in (*commands.loads, *commands.stores, *commands.tier_jobs):
            self.jobs.append(Job(command, set(range(self.num_ranks))))
        return transfers.Commands()

    def jobs_of(self, kind: type[LoadJob] | type[StoreJob] | type[TierJob]) -> list[Job]:
        return [job for job in self.jobs if isinstance(job.command, kind)]

    def end(self, job: Job, rank: int, failing: Sequence[int] = ()) -> None:
        """A rank has done its part of a job, except for the blocks with these indices."""
        job.ranks_left.remove(rank)
        if not job.ranks_left:
            self.jobs.remove(job)
        match job.command:
            case LoadJob() as load:
                self._end_load(load, rank, failing)
            case StoreJob() as store:
                self._end_store(store, rank, failing)
                if not job.ranks_left:
                    del self.transfers.holding[-store.job_id]
                self._report(rank, Report([Ended(store.job_id, list(failing))]))
            case TierJob() as tier_job:
                failing = self._end_tier_job(tier_job, rank, failing)
                self._report(rank, Report([Ended(tier_job.job_id, list(failing))]))

    def _report(self, rank: int, report: Report = Report(), **fields: Any) -> None:  # noqa: B008
        fields["metadata"] = msgspec.msgpack.encode(report)
        self.said.append((rank, fields))
        self.ranks.report(rank, **fields)

    def repeat(self, index: int) -> None:
        """A rank says again what it has said before."""
        rank, fields = self.said[index]
        if set(fields.get("receiving", ())) & set(self.transfers.loading):
            return  # that would be a true report of another load
        self.ranks.report(rank, **fields)

    def _blocks(self, blocks: BlockList) -> list[tuple[int, bytes, list[int], int]]:
        """(index, key, block ids, slots of one of these blocks)."""
        ids = blocks.ids(self.factor).tolist()
        return [
            (index, key, row, self._num_offsets(group))
            for index, (key, row, group) in enumerate(
                zip(blocks.keys, ids, blocks.groups, strict=True)
            )
        ]

    def _num_offsets(self, group: int) -> int:
        spec = self.specs[group]
        return 1 if isinstance(spec, StateSpec) else spec.block_size

    def _end_store(self, store: StoreJob, rank: int, failing: Sequence[int]) -> None:
        memory, host = self.workers.kv_cache.memory[rank], self.tiers[rank].host
        slots = int64s(store.tier_data)
        for index, key, row, num_offsets in self._blocks(store.blocks):
            host.pop(slots[index], None)
            if index not in failing:
                if is_private(key):  # what follows the tokens of a partial block may differ
                    content = tuple(memory.partial(block_id, num_offsets) for block_id in row)
                else:
                    content = tuple(memory.block(block_id, num_offsets) for block_id in row)
                    assert self.contents_of_key.setdefault(key, content) == content
                host[slots[index]] = key, content

    def _end_tier_job(self, job: TierJob, rank: int, failing: Sequence[int]) -> Sequence[int]:
        """Returns the indices of the blocks that were not copied."""
        task = msgspec.msgpack.decode(job.tier_data, type=TierTask)
        match task:
            case Spill():
                self._end_spill(task, rank, failing)
            case Stage():
                return self._end_stage(task, rank, failing)
            case TierCommand():
                assert task.command == CLEAR
                if not failing:
                    self.tiers[rank].disk.clear()
        return failing

    def _end_spill(self, spill: Spill, rank: int, failing: Sequence[int]) -> None:
        tiers = self.tiers[rank]
        for index, (key, source, target) in enumerate(
            zip(spill.keys, int64s(spill.host_slots), int64s(spill.slots), strict=True)
        ):
            assert tiers.host[source][0] == key
            stale = [slot for slot, entry in tiers.disk.items() if entry[0] == key]
            for slot in (*stale, target):
                tiers.disk.pop(slot, None)
            if index not in failing:
                tiers.disk[target] = tiers.host[source]

    def _end_stage(self, stage: Stage, rank: int, failing: Sequence[int]) -> list[int]:
        tiers, lost = self.tiers[rank], set(failing)
        slots = zip(int64s(stage.host_slots), int64s(stage.slots), strict=True)
        for index, (target, source) in enumerate(slots):
            entry = tiers.disk.get(source)
            if entry is None or entry[0] != stage.keys[index]:
                lost.add(index)
            elif index not in lost:
                tiers.host[target] = entry
                self.read_ahead.append(entry[0])
        return sorted(lost)

    def _end_load(self, load: LoadJob, rank: int, failing: Sequence[int]) -> None:
        memory, tiers = self.workers.kv_cache.memory[rank], self.tiers[rank]
        source = msgspec.msgpack.decode(load.tier_data, type=LoadSource)
        slots, reads = int64s(source.slots), {index: slot for index, _, slot in source.reads}
        lost = set(failing)
        for index, slot in reads.items():
            entry = tiers.disk.get(slot)
            if entry is None or entry[0] != load.blocks.keys[index]:
                lost.add(index)  # this rank could not read it before, and has deleted it
            else:
                tiers.host[slots[index]] = entry
        failed = list(load.missing)
        for index, key, row, _ in self._blocks(load.blocks):
            is_lost = index in lost
            if not is_lost:
                found, content = tiers.host[slots[index]]
                assert found == key, f"slot {slots[index]} has {found.hex()}, not {key.hex()}"
            for number, block_id in enumerate(row):
                if block_id == NULL_BLOCK:
                    continue
                if is_lost:
                    memory.write(block_id, 0, JUNK)
                    failed.append(block_id)
                else:
                    for offset, each in enumerate(content[number]):
                        memory.write(block_id, offset, each)
        self.invalid_ids |= {load.request_id} if failed else set()
        self.transfers.report("load", load.request_id, rank)
        report = Report(failed_loads=[(load.request_id, sorted(lost))] if lost else [])
        self._report(rank, report, receiving=[load.request_id], failed=failed)

    def end_all(self, failing: Sequence[int] = ()) -> None:
        """All jobs end on all ranks."""
        while self.jobs:
            job = self.jobs[0]
            for rank in list(job.ranks_left):
                self.end(job, rank, failing)

    def settle(self) -> None:
        """Until every request and every job has ended."""
        self.run_until_quiet()
        self.check_settled()

    def run_until_quiet(self) -> None:
        """Until nothing but sessions that wait for input is left."""
        for _ in range(1000):
            was_busy = bool(self.unanswered) or bool(self.jobs)
            is_planned = self.step() is not None
            if not (is_planned or was_busy):
                break
            if not is_planned:
                self.end_all()

    def check_settled(self) -> None:
        self.check_idle()
        self.offloading.check()
        assert not self.offloading.has_pending_work

    def restart_workers(
        self, epoch: int | None = None, *, late_outputs: bool = False, keeps_kv: bool = False
    ) -> None:
        self.jobs.clear()
        self.said.clear()
        super().restart_workers(epoch, late_outputs=late_outputs, keeps_kv=keeps_kv)
        self.say_contents()

    def ask(self, request_id: str, prompt: Sequence[int], **fields: Any) -> None:
        """One request, until everything has ended."""
        key = self.add(request_id, prompt, **fields)
        self.settle()
        self.check_complete(key)

    def random_end(self, chance: random.Random, may_fail: bool) -> None:
        """A rank ends a job, sometimes without some of its blocks."""
        if not self.jobs:
            return
        job = chance.choice(self.jobs)
        failing: list[int] = []
        if may_fail and chance.random() < 0.5:
            match job.command:
                case LoadJob(blocks=blocks) | StoreJob(blocks=blocks):
                    keys = blocks.keys
                case TierJob(tier_data=tier_data):
                    task = msgspec.msgpack.decode(tier_data, type=TierTask)
                    keys = [] if isinstance(task, TierCommand) else task.keys
            failing = [index for index in range(len(keys)) if chance.random() < 0.3]
        self.end(job, chance.choice(sorted(job.ranks_left)), failing)
