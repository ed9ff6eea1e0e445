"""The worker's side of CPUOffloadingSpec: copies between the device, host memory and lower tiers.

All copies run on threads of their own, apart from the steps. On CUDA a thread uses a stream of low
priority and waits for it; on a CPU neighbouring blocks are copied with one memory copy, which does
not hold the interpreter's lock.
"""

import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from longshore.connectors.base import (
    KVCaches,
    QueueEvent,
    TransferQueue,
    TransferQueues,
    WorkerConnectorConfig,
)
from longshore.connectors.base.checksum import IDENTITY_DIGEST_BYTES, block_checksum
from longshore.connectors.offloading.copies import (
    Copier,
    Copies,
    HostCopier,
    Int64s,
    divided_at,
    joined,
)
from longshore.connectors.offloading.copy_method import choose_host_copies
from longshore.connectors.offloading.cuda_copies import Direction, cuda_copier, load_runtime
from longshore.connectors.offloading.disk.results import BlockRead, BlockWrite, Outcome
from longshore.connectors.offloading.host_region import HostRegion
from longshore.connectors.offloading.host_spec import CPUOffloadingSpec
from longshore.connectors.offloading.messages import BlockList, LoadJob, StoreJob, TierJob
from longshore.connectors.offloading.pace import Pace
from longshore.connectors.offloading.registration import CHUNK_BYTES, RegisteredMemory
from longshore.connectors.offloading.tier_workers import open_tiers, store_identity
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
from longshore.protocol.errors import LongshoreError
from longshore.protocol.events import Medium
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.statistics import TransferOperation

logger = logging.getLogger(__name__)

OnDone = Callable[[Sequence[int]], None]

SAMPLE_EVERY: Final = 16
"""With verify_kv "sampled", one of this many blocks is verified when it is loaded."""

STAGE_LIMIT_S: Final = 5.0
"""How long a job reads blocks ahead. Other jobs wait for it, and requests need what it has read."""

FLUSH_TIMEOUT_S: Final = 2.0
"""How long jobs begin after `close`: the supervisor kills a worker after 4 s."""


class WorkerStops(LongshoreError):
    """A job has not begun before the worker had to stop."""


class _Handler(NamedTuple):
    """Moves blocks from one place to another.

    source, destination: media, for metrics.
    queue: its jobs, in order.
    move:  of a pair with the device, `Copier.copy`; else `TierWorker.read` or `write`.
    """

    source: Medium
    destination: Medium
    queue: TransferQueue
    move: Callable[..., Any]


class HostHandlers:
    """See OffloadingHandlers. Slots are assigned by the manager, which gives a slot to no other job
    while it is in use."""

    def __init__(
        self,
        spec: CPUOffloadingSpec,
        config: WorkerConnectorConfig,
        kv_caches: KVCaches,
        queues: TransferQueues,
    ) -> None:
        self._ends_s = math.inf  # jobs that have not begun by then fail
        self._factor = spec.groups.factor
        self._verify = spec.options.verify_kv
        self._checked = count(1)  # of both threads that load
        self._rank = config.rank
        # All groups are views of one buffer: a block of any group begins at the same address. The
        # view of a group without layers on this rank is empty, and has no address.
        self._blocks = max(kv_caches.groups, key=lambda group: group.size_bytes).blocks
        self._stride = self._blocks.stride(0)
        self._sizes = np.array([group.size_bytes for group in kv_caches.groups], np.int64)
        self._identity = _identity(spec, config)
        self._region = HostRegion(
            config.shared_memory_fd,
            num_slots=spec.num_slots,
            share_bytes=tuple(self._factor * size for size in config.rank_block_bytes),
            rank=config.rank,
        )
        self._registered: RegisteredMemory | None = None
        if kv_caches.device.type == "cuda":
            self._registered = _register(self._region, kv_caches.device)
        self._operations: deque[TransferOperation] = deque()  # the threads of the queues append
        said = HOST_KEPT if self._region.is_kept else HOST_NEW
        # The threads of the queues append.
        self._messages = deque([msgspec.msgpack.encode(TierMessage(HOST_TIER, said))])
        queues.wake()
        self._tiers = open_tiers(spec, config, queues.wake)
        self._paces = [Pace(f"reads of the {tier.name} tier") for tier in self._tiers]
        page_bytes = int(self._sizes.max())
        directions: tuple[Direction, ...] = ("to host", "to device")
        self._copiers = [
            cuda_copier(kv_caches.device, page_bytes, direction)
            if kv_caches.device.type == "cuda"
            else _host_copier(self._factor * page_bytes, config.state_dir)
            for direction in directions
        ]
        # By source and destination: the device, host memory, or the name of a lower tier.
        to_host, to_device = self._copiers
        self._handlers: dict[tuple[str, str], _Handler] = {
            ("GPU", "CPU"): _Handler(
                "GPU", "CPU", queues.open("offload-stores", on_host=True), to_host.copy
            ),
            ("CPU", "GPU"): _Handler(
                "CPU", "GPU", queues.open("offload-loads", on_host=True), to_device.copy
            ),
        }
        self._commands: list[TransferQueue] = []  # of each lower tier
        for tier in self._tiers:
            stores = queues.open(f"{tier.name}-stores", on_host=True)
            self._handlers["CPU", tier.name] = _Handler("CPU", tier.medium, stores, tier.write)
            loads = queues.open(f"{tier.name}-loads", on_host=True)
            self._handlers[tier.name, "CPU"] = _Handler(tier.medium, "CPU", loads, tier.read)
            own = None if tier.waits_for_writes else f"{tier.name}-commands"
            self._commands.append(stores if own is None else queues.open(own, on_host=True))

    # Jobs

    def load(self, job: LoadJob, on_done: OnDone) -> None:
        failed: list[int] = []
        source = msgspec.msgpack.decode(job.tier_data, type=LoadSource)
        handler = self._handlers["CPU", "GPU"]
        queue = handler.queue
        if source.reads:  # loads from host memory alone do not wait for a lower tier
            lowest = self._tiers[max(tier for _, tier, _ in source.reads)]
            queue = self._handlers[lowest.name, "CPU"].queue
        ends_s = time.monotonic() + job.limit_s
        queue.submit(
            partial(self._load, handler, job, source, failed, ends_s),
            partial(self._report, handler, len(job.blocks.keys), failed, on_done),
        )

    def store(self, job: StoreJob, on_done: OnDone) -> None:
        handler = self._handlers["GPU", "CPU"]
        handler.queue.submit(
            partial(self._store, handler, job),
            partial(self._report, handler, len(job.blocks.keys), [], on_done),
        )

    def run(self, job: TierJob, on_done: OnDone) -> None:
        failed: list[int] = []
        task = msgspec.msgpack.decode(job.tier_data, type=TierTask)
        tier = self._tiers[task.tier]
        handler = self._handlers["CPU", tier.name]
        match task:
            case Spill() as spill:
                handler.queue.submit(
                    partial(self._spill, handler, spill, failed),
                    partial(self._report, handler, len(spill.keys), failed, on_done),
                )
            case Stage() as stage:
                handler = self._handlers[tier.name, "CPU"]
                handler.queue.submit(
                    partial(self._stage, stage, failed),
                    partial(self._report, handler, len(stage.keys), failed, on_done),
                )
            case TierCommand(number, command):
                self._commands[number].submit(
                    partial(tier.run, command), partial(_command_ended, on_done)
                )

    def take_messages(self) -> list[bytes]:
        messages = [self._messages.popleft() for _ in range(len(self._messages))]
        return messages + [
            msgspec.msgpack.encode(TierMessage(number, message))
            for number, tier in enumerate(self._tiers)
            for message in tier.take_messages()
        ]

    def take_operations(self) -> list[TransferOperation]:
        if not self._operations:
            return []
        return [self._operations.popleft() for _ in range(len(self._operations))]

    def close(self) -> None:
        self._ends_s = time.monotonic() + FLUSH_TIMEOUT_S
        queues = (*(each.queue for each in self._handlers.values()), *self._commands)
        ends = [queue.submit(lambda: None) for queue in queues]  # after all that was submitted
        for end in ends:
            end.wait(max(0.0, self._ends_s - time.monotonic()))
        for tier in self._tiers:
            tier.interrupt()
        for end in ends:
            end.wait()
        for tier in self._tiers:
            tier.close()
        for copier in self._copiers:
            copier.close()
        if self._registered is not None:
            self._registered.close()
        self._region.close()

    # On the threads of the queues

    def _check_time(self) -> None:
        """Called when a job begins."""
        if time.monotonic() > self._ends_s:
            raise WorkerStops("the worker stops, and nothing begins any more")

    def _load(
        self,
        handler: _Handler,
        job: LoadJob,
        source: LoadSource,
        failed: list[int],
        ends_s: float,
    ) -> None:
        self._check_time()
        slots = np.frombuffer(source.slots, np.int64)
        keys = job.blocks.keys
        if source.reads:
            failed += self._read(keys, slots, source.reads, ends_s)
        started_s = time.perf_counter()
        num_unread = len(failed)
        verified = {index for index, _, _ in source.reads}
        for index, key in enumerate(keys):
            is_checked = index not in verified and self._is_to_verify()
            if is_checked and not self._is_intact(key, int(slots[index])):
                failed.append(index)
        keep = np.ones(len(slots), np.bool_)
        keep[failed] = False
        copies = self._copies(job.blocks, slots, keep)
        device, host = self._addresses(copies)
        handler.move(device, host, copies.sizes)
        num_corrupt = len(failed) - num_unread
        num_blocks = int(keep.sum())
        self._record(handler, started_s, num_blocks, copies.num_bytes, num_corrupt=num_corrupt)

    def _store(self, handler: _Handler, job: StoreJob) -> None:
        self._check_time()
        started_s = time.perf_counter()
        slots = np.frombuffer(job.tier_data, np.int64)
        copies = self._copies(job.blocks, slots, np.ones(len(slots), np.bool_))
        device, host = self._addresses(copies)
        handler.move(host, device, copies.sizes)
        checksums = self._region.checksums
        for key, slot in zip(job.blocks.keys, slots.tolist(), strict=True):
            checksums[slot, self._rank] = self._checksum(key, slot)
        self._record(handler, started_s, len(slots), copies.num_bytes)

    def _read(
        self,
        keys: Sequence[bytes],
        slots: npt.NDArray[np.int64],
        reads: list[tuple[int, int, int]],
        ends_s: float,
    ) -> list[int]:
        """Read blocks of lower tiers into their host slots. Returns the indices of those that
        failed, or were not read by `ends_s`."""
        failed: list[int] = []
        for number in range(len(self._tiers)):
            of_tier = [(index, slot) for index, source, slot in reads if source == number]
            if of_tier:
                failed += self._read_tier(number, keys, slots, of_tier, ends_s)
        return failed

    def _read_tier(
        self,
        number: int,
        keys: Sequence[bytes],
        slots: npt.NDArray[np.int64],
        reads: list[tuple[int, int]],
        ends_s: float,
    ) -> list[int]:
        handler = self._handlers[self._tiers[number].name, "CPU"]
        started_s = time.perf_counter()
        batch = [
            BlockRead(keys[index], slot, self._share(keys[index], int(slots[index])))
            for index, slot in reads
        ]
        failed: list[int] = []
        num_bytes = num_corrupt = 0
        outcomes = self._read_in_time(number, handler, batch, ends_s)
        for (index, _), read, outcome in zip(reads, batch, outcomes, strict=True):
            if outcome is Outcome.OK:
                slot = int(slots[index])
                self._region.checksums[slot, self._rank] = self._checksum(read.key, slot)
                num_bytes += len(read.buffer)
            else:
                failed.append(index)
                num_corrupt += outcome is Outcome.CORRUPT
        num_read, num_failed = len(reads) - len(failed), len(failed) - num_corrupt
        self._record(handler, started_s, num_read, num_bytes, num_failed, num_corrupt)
        return failed

    def _read_in_time(
        self, number: int, handler: _Handler, batch: list[BlockRead], ends_s: float
    ) -> Sequence[Outcome]:
        """Read, unless the tier has been too slow. A job without a limit reads in any case."""
        outcomes: Sequence[Outcome] = [Outcome.LATE] * len(batch)
        pace = self._paces[number]
        if ends_s == math.inf:
            outcomes = handler.move(batch, ends_s)
        elif pace.may_begin():
            is_late = True
            try:
                outcomes = handler.move(batch, ends_s)
                is_late = Outcome.LATE in outcomes
            finally:
                pace.ended(is_late=is_late)
        pairs = zip(batch, outcomes, strict=True)
        if late := [read.key for read, outcome in pairs if outcome is Outcome.LATE]:
            self._messages.append(msgspec.msgpack.encode(TierMessage(number, b"", late)))
        return outcomes

    def _stage(self, stage: Stage, failed: list[int]) -> None:
        """Read blocks of a lower tier into host memory."""
        self._check_time()
        slots = np.frombuffer(stage.slots, np.int64).tolist()
        reads = [(index, stage.tier, slot) for index, slot in enumerate(slots)]
        host_slots = np.frombuffer(stage.host_slots, np.int64)
        failed += self._read(stage.keys, host_slots, reads, time.monotonic() + STAGE_LIMIT_S)

    def _spill(self, handler: _Handler, spill: Spill, failed: list[int]) -> None:
        """Write blocks from host memory to a lower tier."""
        self._check_time()
        started_s = time.perf_counter()
        host_slots = np.frombuffer(spill.host_slots, np.int64).tolist()
        slots = np.frombuffer(spill.slots, np.int64).tolist()
        checksums = self._region.checksums[host_slots, self._rank].tolist()
        batch = [
            BlockWrite(key, slot, self._share(key, host_slot), checksum)
            for key, host_slot, slot, checksum in zip(
                spill.keys, host_slots, slots, checksums, strict=True
            )
        ]
        outcomes = handler.move(batch)
        failed += [index for index, outcome in enumerate(outcomes) if outcome is not Outcome.OK]
        pairs = zip(batch, outcomes, strict=True)
        written = [len(write.buffer) for write, outcome in pairs if outcome is Outcome.OK]
        self._record(handler, started_s, len(written), sum(written), len(failed))

    # Statistics

    def _record(
        self,
        handler: _Handler,
        started_s: float,
        num_blocks: int,
        num_bytes: int,
        num_failed: int = 0,
        num_corrupt: int = 0,
    ) -> None:
        """An operation has ended. It includes its checksums, because a transfer takes that long."""
        seconds = time.perf_counter() - started_s
        self._operations.append(
            TransferOperation(
                handler.source,
                handler.destination,
                num_blocks,
                num_bytes,
                seconds,
                num_failed,
                num_corrupt,
            )
        )

    def _report(
        self,
        handler: _Handler,
        num_blocks: int,
        failed: list[int],
        on_done: OnDone,
        event: QueueEvent,
    ) -> None:
        """Report a job. One that raised has copied nothing for certain."""
        if event.error is not None:
            self._operations.append(
                TransferOperation(
                    handler.source, handler.destination, 0, 0, event.elapsed_s, num_blocks
                )
            )
        on_done(range(num_blocks) if event.error is not None else failed)

    # Integrity

    def _is_to_verify(self) -> bool:
        if self._verify != "sampled":
            return self._verify == "always"
        return next(self._checked) % SAMPLE_EVERY == 0

    def _checksum(self, key: bytes, slot: int) -> int:
        return block_checksum(self._share(key, slot), self._identity, key)

    def _share(self, key: bytes, slot: int) -> npt.NDArray[np.uint8]:
        """This rank's bytes of a block; one byte if it has no layer of the block's group."""
        num_bytes = self._factor * int(self._sizes[key[-1]])
        return self._region.share(slot, max(num_bytes, 1))

    def _is_intact(self, key: bytes, slot: int) -> bool:
        if int(self._region.checksums[slot, self._rank]) == self._checksum(key, slot):
            return True
        logger.warning(
            "block %s in slot %d of host memory is damaged; it counts as a miss",
            key.hex()[:16],
            slot,
        )
        return False

    # Copies

    def _copies(
        self, blocks: BlockList, slots: npt.NDArray[np.int64], keep: npt.NDArray[np.bool_]
    ) -> Copies:
        """The copies of all kept blocks, neighbours joined, but not across registered chunks."""
        ids = blocks.ids(self._factor)[keep].astype(np.int64)
        sizes = self._sizes[np.frombuffer(blocks.groups, np.uint8)[keep]]
        host = slots[keep] * self._region.slot_bytes + self._region.offset(0)
        within = np.arange(self._factor) * sizes[:, None]  # one group, if there are several
        is_copied = ids.ravel() != NULL_BLOCK
        copies = joined(
            Copies(
                (ids * self._stride).ravel()[is_copied],
                (host[:, None] + within).ravel()[is_copied],
                np.repeat(sizes, self._factor)[is_copied],
            )
        )
        return copies if self._registered is None else divided_at(copies, CHUNK_BYTES)

    def _addresses(self, copies: Copies) -> tuple[Int64s, Int64s]:
        """On the device and in host memory."""
        return copies.device + self._blocks.data_ptr(), copies.host + self._region.address


def _host_copier(block_bytes: int, state_dir: str | None) -> Copier:
    speed = choose_host_copies(block_bytes, None if state_dir is None else Path(state_dir))
    return HostCopier(speed.num_threads)


def _register(region: HostRegion, device: torch.device) -> RegisteredMemory:
    """See RegisteredMemory."""
    with torch.cuda.device(device):
        return RegisteredMemory(load_runtime(), region.address, region.memory.nbytes)


def _identity(spec: CPUOffloadingSpec, config: WorkerConnectorConfig) -> bytes:
    """The identity in the checksums of this rank's blocks, in all tiers."""
    if config.identity is not None:
        return store_identity(spec, config).rank_digest(config.rank)
    name = f"{config.namespace}:{config.rank}".encode()  # of a test without an engine
    return hashlib.sha256(name).digest()[:IDENTITY_DIGEST_BYTES]


def _command_ended(on_done: OnDone, event: QueueEvent) -> None:
    on_done([] if event.error is None else [0])
