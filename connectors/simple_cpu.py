"""The simple_cpu connector: full blocks in host memory, evicted in LRU order; both halves.

`--kv-connector simple_cpu --kv-connector-config '{"cpu_bytes_to_use": "8GiB"}'`. Each rank has the
same number of slots and stores its share of a block in the slot that the scheduler half chooses.
Loads and stores are asynchronous. The `offloading` connector has more tiers and policies; this one
is to be read.
"""

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from longshore.connectors.base import (
    BlockHolds,
    ConnectorConfig,
    ConnectorOutput,
    ConnectorStats,
    FinishAction,
    FinishedTransfers,
    KVCaches,
    Match,
    Matched,
    QueueEvent,
    RequestView,
    SchedulerConnector,
    StepView,
    StorableBlocks,
    TransferQueue,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.options import Options
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import Medium
from longshore.protocol.kv_cache_spec import (
    NULL_BLOCK,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    StateSpec,
    page_hashes,
)
from longshore.protocol.statistics import TierStats, TransferOperation

if TYPE_CHECKING:
    from torch import Tensor

Key: TypeAlias = tuple[int, bytes]
"""KV cache group and block hash: the identity of a block's content."""

Slots: TypeAlias = list[tuple[int, int, int]]
"""(group, block id, slot) of each block of a transfer."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Fill the blocks from the slots while the request waits."""

    request_id: str
    slots: Slots


class Store(msgspec.Struct, frozen=True, array_like=True):
    """Copy the blocks to the slots, and report `hold_id`."""

    hold_id: int
    slots: Slots


class Commands(msgspec.Struct, frozen=True):
    """Metadata of a plan."""

    loads: list[Load] = []
    stores: list[Store] = []


class Report(msgspec.Struct, frozen=True):
    """Metadata of a report of one rank: hold ids of stores that have ended."""

    stored: list[int] = []
    failed: list[int] = []


def num_skipped_tokens(spec: KVCacheSpec, num_tokens: int) -> int:
    """Leading tokens that the token after `num_tokens` others does not read. Raises ConfigError for
    a kind of attention that is not supported."""
    match spec:
        case FullAttentionSpec() | MLAAttentionSpec() | SinkFullAttentionSpec():
            return 0
        case SlidingWindowSpec(sliding_window=window):
            return max(num_tokens - window + 1, 0)
        case ChunkedLocalAttentionSpec(attention_chunk_size=size):
            return num_tokens // size * size
        case StateSpec():
            return max(num_tokens - 1, 0)
    raise ConfigError(
        f"--kv-connector simple_cpu does not support a {type(spec).__name__}: equal tokens need "
        "not have equal KV. Use a model without it, or no connector."
    )


class HostSlots:
    """Which blocks are in host memory. A block whose slot is read or written cannot be evicted; the
    others are evicted in the order in which they were last used."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._slots: dict[Key, int] = {}  # blocks that can be loaded
        self._idle: OrderedDict[Key, None] = OrderedDict()  # those that are not being loaded
        self._num_loads: Counter[Key] = Counter()

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    def take_slot(self) -> int | None:
        """A slot to store a block in; evicts one if necessary. None if all are in use."""
        if not self._free and self._idle:
            evicted, _ = self._idle.popitem(last=False)
            self._free.append(self._slots.pop(evicted))
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """The block was not stored."""
        self._free.append(slot)

    def add(self, key: Key, slot: int) -> None:
        """The block is stored in this slot."""
        assert key not in self._slots
        self._slots[key] = slot
        self._idle[key] = None

    def touch(self, keys: Iterable[Key]) -> None:
        """The blocks are used, the last one first in the order of eviction."""
        for key in keys:
            if key in self._idle:
                self._idle.move_to_end(key)

    def begin_load(self, key: Key) -> int:
        """The block's slot, which keeps it until `end_load`."""
        self._num_loads[key] += 1
        self._idle.pop(key, None)
        return self._slots[key]

    def end_load(self, key: Key) -> None:
        self._num_loads[key] -= 1
        if self._num_loads[key] == 0:
            del self._num_loads[key]
            self._idle[key] = None

    def clear(self) -> None:
        """Evict every block that is not being loaded."""
        for key in self._idle:
            self._free.append(self._slots.pop(key))
        self._idle.clear()


@dataclass(slots=True)
class _Store:
    """Blocks that are held until they are stored. slots: of `keys`."""

    keys: list[Key]
    slots: list[int]
    has_failed: bool = False


class SimpleCPUConnector(SchedulerConnector):
    """Decides which blocks are in which slots.

    A prefix can be loaded if every group has the blocks that the token after it reads: all blocks
    of full attention, the last ones of a window or chunk, one snapshot of a state.
    """

    contract_version: ClassVar[int] = 2
    supports_hma = True
    opens_nothing: ClassVar[bool] = True
    worker_half: ClassVar[str] = "longshore.connectors.simple_cpu:SimpleCPUWorker"

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        host_bytes(options)

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        num_slots(config)
        for spec in config.specs:
            num_skipped_tokens(spec, 0)
        self._alignment = math.lcm(*(spec.block_size for spec in config.specs))
        self._holds: BlockHolds
        self._num_hit_tokens = 0
        self._begin()

    def _begin(self) -> None:
        self._host = HostSlots(num_slots(self.config))
        self._num_local: dict[str, int] = {}  # at the last lookup, by request id
        self._loading: dict[str, list[Key]] = {}
        self._storing: dict[int, _Store] = {}
        self._storing_keys: set[Key] = set()
        self._commands = Commands()

    def bind_blocks(self, holds: BlockHolds) -> None:
        self._holds = holds

    # Loads

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        self._num_local[request.request_id] = num_computed_tokens
        last = self._longest_hit(request, num_computed_tokens)
        return Matched(max(last - num_computed_tokens, 0), is_async=True)

    def _longest_hit(self, request: RequestView, num_local: int) -> int:
        """The most tokens, not the last one of the request, after which it can begin."""
        last, accepted = request.num_tokens - 1, -1
        while last > num_local and last != accepted:
            last -= last % self._alignment
            accepted = last
            for group in range(len(self.config.specs)):
                last = self._shorten(request, group, num_local, last)
        return last

    def _shorten(self, request: RequestView, group: int, num_local: int, last: int) -> int:
        """`last`, or the end of the block before the first missing one."""
        size = self.config.specs[group].block_size
        for index in self._needed(group, num_local, last):
            if not all(key in self._host for key in self._keys(request, group, index)):
                return index * size
        return last

    def _needed(self, group: int, first: int, last: int) -> range:
        """Blocks of the group that a request with `first` tokens lacks to begin after `last`."""
        spec = self.config.specs[group]
        begin = max(num_skipped_tokens(spec, last), first)
        return range(begin // spec.block_size, last // spec.block_size)

    def _keys(self, request: RequestView, group: int, index: int) -> list[Key]:
        """Of a block, or of the pages of the state after it."""
        spec = self.config.specs[group]
        per_block = spec.block_size // self.config.hash_block_size
        block_hash = request.block_hashes[(index + 1) * per_block - 1]
        if isinstance(spec, StateSpec):
            return [(group, page_hash) for page_hash in page_hashes(block_hash, spec.num_pages)]
        return [(group, block_hash)]

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        first = self._num_local.pop(request.request_id)
        last = first + num_external_tokens
        self._num_hit_tokens += num_external_tokens
        slots: Slots = []
        keys: list[Key] = []
        for group, table in enumerate(block_ids):
            is_state = isinstance(self.config.specs[group], StateSpec)
            for index in self._needed(group, first, last):
                of_block = self._keys(request, group, index)
                block_ids_of = table if is_state else table[index : index + 1]
                for key, block_id in zip(of_block, block_ids_of.tolist(), strict=True):
                    assert block_id != NULL_BLOCK
                    keys.append(key)
                    slots.append((group, block_id, self._host.begin_load(key)))
        self._loading[request.request_id] = keys
        self._commands.loads.append(Load(request.request_id, slots))

    # Stores

    def build_connector_meta(self, step: StepView) -> bytes:
        if step.storable:
            self._begin_store(step.storable)
        if self._commands == Commands():
            return b""
        commands, self._commands = self._commands, Commands()
        return msgspec.msgpack.encode(commands)

    def _begin_store(self, storable: Sequence[StorableBlocks]) -> None:
        """Store the blocks that are not stored yet."""
        slots: Slots = []
        keys: list[Key] = []
        for blocks in storable:
            all_keys = [(blocks.group, block_hash) for block_hash in blocks.block_hashes]
            self._host.touch(reversed(all_keys))
            for key, block_id in zip(all_keys, blocks.block_ids, strict=True):
                if key in self._host or key in self._storing_keys:
                    continue
                slot = self._host.take_slot()
                if slot is None:  # the start of a prompt is worth more than its end
                    break
                keys.append(key)
                self._storing_keys.add(key)
                slots.append((key[0], block_id, slot))
        if not keys:
            return
        hold_id = self._holds.hold([block_id for _, block_id, _ in slots])
        self._storing[hold_id] = _Store(keys, [slot for _, _, slot in slots])
        self._commands.stores.append(Store(hold_id, slots))

    @property
    def has_pending_work(self) -> bool:
        return self._commands != Commands()

    # Reports

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for request_id in output.finished_receiving:
            for key in self._loading.pop(request_id):
                self._host.end_load(key)
        for metadata in output.metadata:
            report = msgspec.msgpack.decode(metadata, type=Report)
            for hold_id in report.failed:
                self._storing[hold_id].has_failed = True
            for hold_id in (*report.stored, *report.failed):
                if self._holds.release_rank(hold_id, output.rank):
                    self._store_ended(self._storing.pop(hold_id))

    def _store_ended(self, store: _Store) -> None:
        """All ranks have ended the store: if each has stored its share, the blocks can be
        loaded."""
        self._storing_keys.difference_update(store.keys)
        # Last block first: it is evicted first.
        for key, slot in reversed(list(zip(store.keys, store.slots, strict=True))):
            if store.has_failed:
                self._host.give_back(slot)
            else:
                self._host.add(key, slot)

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        self._num_local.pop(request.request_id, None)
        return FinishAction()

    def get_kv_connector_stats(self) -> ConnectorStats:
        tier = TierStats("CPU", len(self._host), self._host.num_slots, self._num_hit_tokens)
        num_storing = sum(len(store.slots) for store in self._storing.values())
        num_loading = sum(map(len, self._loading.values()))
        return ConnectorStats([tier], {("GPU", "CPU"): num_storing, ("CPU", "GPU"): num_loading})

    def reset_cache(self) -> bool:
        if self._loading or self._storing:
            return False
        self._host.clear()
        return True

    def on_new_epoch(self, epoch: int) -> None:
        self._begin()  # the memory belonged to the workers


def host_bytes(options: Mapping[str, Any]) -> int:
    """The option `cpu_bytes_to_use`. Raises ConfigError."""
    return Options("simple_cpu", options, ("cpu_bytes_to_use",)).size_bytes("cpu_bytes_to_use")


def num_slots(config: ConnectorConfig) -> int:
    """Slots of each rank; all ranks together use `cpu_bytes_to_use`. Raises ConfigError."""
    size_bytes, block_bytes = host_bytes(config.options), sum(config.rank_block_bytes)
    if size_bytes < block_bytes:
        raise ConfigError(
            "--kv-connector-config: the connector simple_cpu needs 'cpu_bytes_to_use' of at least "
            f"{block_bytes}, the size of one block; it is {size_bytes}"
        )
    return size_bytes // block_bytes


class SimpleCPUWorker(WorkerConnector[Commands]):
    """Copies this rank's share of each block. Two queues: a load never waits for a store."""

    contract_version: ClassVar[int] = 2
    stores_within_step = False

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self._num_slots = num_slots(config)
        self._groups: list[Tensor] = []
        self._slots: Tensor
        self._load_queue: TransferQueue
        self._store_queue: TransferQueue
        self._wake: Callable[[], None]
        self._lock = threading.Lock()  # the threads of the queues write what follows
        self._report = Report()
        self._received: list[str] = []
        self._failed_block_ids: list[int] = []
        self._operations: list[TransferOperation] = []

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        import torch  # not needed by the scheduler half

        self._groups = [group.blocks for group in kv_caches.groups]
        slot_bytes = max(group.size_bytes for group in kv_caches.groups)
        self._slots = torch.empty(
            (self._num_slots, slot_bytes),
            dtype=torch.uint8,
            pin_memory=kv_caches.device.type == "cuda",
        )
        self._load_queue = queues.open("simple-cpu-loads")
        self._store_queue = queues.open("simple-cpu-stores")
        self._wake = queues.wake

    def bind_connector_metadata(self, data: bytes) -> Commands:
        return msgspec.msgpack.decode(data, type=Commands)

    def start_load_kv(self, metadata: Commands) -> None:
        for load in metadata.loads:
            self._load_queue.submit(
                partial(self._copy, load.slots, is_load=True), partial(self._load_ended, load)
            )
        for store in metadata.stores:
            self._store_queue.submit(
                partial(self._copy, store.slots, is_load=False), partial(self._store_ended, store)
            )

    def _copy(self, slots: Slots, *, is_load: bool) -> None:
        for group, block_id, slot in slots:
            block = self._groups[group][block_id]
            stored = self._slots[slot, : len(block)]
            if is_load:
                block.copy_(stored, non_blocking=True)
            else:
                stored.copy_(block, non_blocking=True)

    def _load_ended(self, load: Load, event: QueueEvent) -> None:
        with self._lock:
            self._operations.append(self._operation("CPU", "GPU", load.slots, event))
            self._received.append(load.request_id)
            if event.error is not None:
                self._failed_block_ids += [block_id for _, block_id, _ in load.slots]
        self._wake()

    def _store_ended(self, store: Store, event: QueueEvent) -> None:
        with self._lock:
            self._operations.append(self._operation("GPU", "CPU", store.slots, event))
            ended = self._report.stored if event.error is None else self._report.failed
            ended.append(store.hold_id)
        self._wake()

    def _operation(
        self, source: Medium, destination: Medium, slots: Slots, event: QueueEvent
    ) -> TransferOperation:
        if event.error is not None:
            return TransferOperation(source, destination, 0, 0, event.elapsed_s, len(slots))
        num_bytes = sum(self._groups[group].shape[1] for group, _, _ in slots)
        return TransferOperation(source, destination, len(slots), num_bytes, event.elapsed_s)

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        with self._lock:
            received, self._received = self._received, []
            failed, self._failed_block_ids = self._failed_block_ids, []
        return FinishedTransfers(received=received, failed_block_ids=failed)

    def build_connector_worker_meta(self) -> bytes:
        with self._lock:
            report, self._report = self._report, Report()
        return b"" if report == Report() else msgspec.msgpack.encode(report)

    def get_kv_connector_stats(self) -> Sequence[TransferOperation]:
        with self._lock:
            operations, self._operations = self._operations, []
        return operations
