"""Ranks with real memory: their KV caches, handlers of the host tier, and transfer queues."""

import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from longshore.connectors.base import ConnectorConfig, GroupBlocks, KVCaches, WorkerConnectorConfig
from longshore.connectors.base.groups import StoredGroups
from longshore.connectors.offloading.host_handlers import HostHandlers
from longshore.connectors.offloading.host_spec import CPUOffloadingSpec
from longshore.connectors.offloading.messages import (
    BlockList,
    LoadJob,
    StoreJob,
    TierJob,
    block_list,
)
from longshore.connectors.offloading.options import read_options
from longshore.connectors.offloading.tiers import LoadSource, Spill, TierCommand
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.kv_cache_spec import KVCacheConfig, KVCacheGroup, KVCacheSpec
from longshore.worker.kv_cache.buffer import KVCache
from longshore.worker.queues.compute_queue import CpuComputeQueue
from longshore.worker.queues.transfer_queues import WorkerQueues

CPU = torch.device("cpu")
IDENTITY = EngineIdentity("model", "float32", 16, 64, 4, 64, "seed")
PATIENCE_S = 60.0


def cache_of(num_blocks: int, specs: Sequence[KVCacheSpec], num_layers: Sequence[int]) -> KVCache:
    """A cache with this number of layers per group."""
    groups = tuple(
        KVCacheGroup(tuple(f"{number}.{layer}" for layer in range(count)), spec)
        for number, (spec, count) in enumerate(zip(specs, num_layers, strict=True))
    )
    return KVCache(KVCacheConfig(num_blocks, groups, "float32"), dtype=torch.float32, device=CPU)


def caches_of(cache: KVCache) -> KVCaches:
    return KVCaches(
        tuple(
            GroupBlocks(
                group.spec, group.layer_names, cache.buffer[:, : group.block_size_bytes], {}
            )
            for group in cache.groups
        ),
        cache.device,
    )


def configs_of(
    caches: Sequence[KVCache], *, fd: int | None = None, namespace: str = "ours", **options: Any
) -> list[WorkerConnectorConfig]:
    """Configuration of each rank's worker half."""
    specs = tuple(group.spec for group in caches[0].groups)
    return [
        WorkerConnectorConfig(
            {"cpu_bytes_to_use": 1 << 16} | options,
            block_size=specs[0].block_size,
            num_blocks=caches[0].num_blocks,
            num_groups=len(specs),
            specs=specs,
            num_ranks=len(caches),
            rank_block_bytes=tuple(cache.block_size_bytes for cache in caches),
            model_name="tiny",
            identity=IDENTITY,
            kv_dtype="float32",
            kv_layout="blocks first",
            namespace=namespace,
            rank=rank,
            shared_memory_fd=fd,
        )
        for rank in range(len(caches))
    ]


def scheduler_config(config: WorkerConnectorConfig) -> ConnectorConfig:
    """The configuration of the scheduler half that belongs to a rank's."""
    fields = {name: getattr(config, name) for name in ConnectorConfig.__dataclass_fields__}
    fields["hash_block_size"] = min(spec.block_size for spec in config.specs)
    return ConnectorConfig(**fields)


def delays(seed: int) -> Callable[[], None]:
    """Delays operations of transfer queues at random."""
    chance = random.Random(seed)
    return lambda: time.sleep(chance.choice([0.0, 0.0, 0.001]))


class Rank:
    """One rank's handlers. ended: failed indices of the jobs that have ended, by name."""

    def __init__(self, cache: KVCache, config: WorkerConnectorConfig, seed: int = 0) -> None:
        self.cache = cache
        self.compute = CpuComputeQueue()
        self.num_wakes = 0
        self.is_closed = False
        self.queues = WorkerQueues(CPU, self.compute, self._wake, delays(seed))
        options = read_options(config.options)
        self.spec = CPUOffloadingSpec(config, options, StoredGroups(config, options.block_size))
        handlers = self.spec.make_handlers(config, caches_of(cache), self.queues)
        assert isinstance(handlers, HostHandlers)
        self.handlers = handlers
        self.ended: dict[str, list[int]] = {}

    def _wake(self) -> None:
        self.num_wakes += 1

    def close(self) -> None:
        """End all jobs. May be called twice."""
        if not self.is_closed:
            self.is_closed = True
            self.handlers.close()
            self.queues.close()
            self.compute.close()

    def done(self, name: str) -> Callable[[Sequence[int]], None]:
        def on_done(failed: Sequence[int]) -> None:
            assert name not in self.ended, "a job has ended twice"
            self.ended[name] = sorted(failed)

        return on_done

    def store(self, name: str, blocks: BlockList, slots: Sequence[int]) -> None:
        job = StoreJob(1, blocks, np.array(slots, np.int64).tobytes())
        self.handlers.store(job, self.done(name))

    def load(
        self,
        name: str,
        blocks: BlockList,
        slots: Sequence[int],
        reads: Sequence[tuple[int, int]] = (),
        limit_s: float = math.inf,
    ) -> None:
        source = LoadSource(
            np.array(slots, np.int64).tobytes(), [(index, 0, slot) for index, slot in reads]
        )
        job = LoadJob(name, blocks, msgspec.msgpack.encode(source), limit_s=limit_s)
        self.handlers.load(job, self.done(name))

    def spill(self, name: str, blocks: BlockList, host: Sequence[int], disk: Sequence[int]) -> None:
        slots = [np.array(each, np.int64).tobytes() for each in (host, disk)]
        spill = Spill(0, blocks.keys, blocks.groups, *slots)
        self.handlers.run(TierJob(1, msgspec.msgpack.encode(spill)), self.done(name))

    def command(self, name: str, command: bytes) -> None:
        """A command of the disk tier."""
        task = TierCommand(0, command)
        self.handlers.run(TierJob(1, msgspec.msgpack.encode(task)), self.done(name))

    def wait(self) -> dict[str, list[int]]:
        """End all jobs; returns what has ended since the last call."""
        for queue in self.queues._opened:
            assert queue.submit(lambda: None).wait(PATIENCE_S)
        ended, self.ended = self.ended, {}
        return ended

    def content(self, blocks: BlockList) -> list[bytes]:
        """The bytes of each offloaded block on the device."""
        ids = blocks.ids(self.spec.groups.factor)
        sizes = [group.block_size_bytes for group in self.cache.groups]
        return [
            b"".join(
                self.cache.buffer[block_id, : sizes[group]].numpy().tobytes() for block_id in row
            )
            for row, group in zip(ids.tolist(), blocks.groups, strict=True)
        ]

    def fill(self, chance: random.Random) -> None:
        """New random content in every block but the null block."""
        size = self.cache.buffer[1:].numel()
        noise = np.frombuffer(chance.randbytes(size), np.uint8)
        self.cache.buffer[1:] = torch.from_numpy(
            noise.reshape(len(self.cache.buffer) - 1, -1).copy()
        )


def blocks_of(
    groups: Sequence[int], block_ids: Sequence[Sequence[int]], tag: str = ""
) -> BlockList:
    """Offloaded blocks with these groups and ids on the device."""
    keys = [f"{tag}{number}".encode() + bytes((group,)) for number, group in enumerate(groups)]
    return block_list(keys, bytes(groups), np.array(block_ids, np.int32))


def disk_options(path: Path, disk_bytes: int | str = "1MiB") -> dict[str, Any]:
    return {"disk_path": str(path), "disk_bytes": disk_bytes, "disk_io": "threads"}
