"""One rank's blocks in LMCache: a StorageManager, which keeps them in host memory ("L1") and copies
them to its adapters ("L2") in the background.

An object is the bytes of a block, then its checksum. This is the only module that imports LMCache.
"""

import argparse
import hashlib
import json
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from longshore.connectors.base import WorkerConnectorConfig
from longshore.connectors.base.checksum import IDENTITY_DIGEST_BYTES, block_checksum
from longshore.connectors.base.groups import StoredGroup
from longshore.connectors.lmcache.options import LMCacheOptions, install_lmcache
from longshore.connectors.options import make_folder
from longshore.protocol.errors import ConfigError

try:
    from lmcache.v1.distributed.api import (
        GroupedObjectKeys,
        MemoryLayoutDesc,
        ObjectKey,
        PrefetchHandle,
        PrefetchResult,
        PrefetchTaskSpec,
    )
    from lmcache.v1.distributed.config import (
        EvictionConfig,
        L1ManagerConfig,
        L1MemoryManagerConfig,
        StorageManagerConfig,
    )
    from lmcache.v1.distributed.l2_adapters.config import (
        L2AdaptersConfig,
        parse_args_to_l2_adapters_config,
    )
    from lmcache.v1.distributed.storage_manager import StorageManager
except ImportError as error:
    raise ConfigError(
        f"--kv-connector lmcache: LMCache cannot be imported: {error}. Install it with the "
        f"packages that it needs: {install_lmcache()}"
    ) from error

logger = logging.getLogger(__name__)

CHECKSUM_BYTES: Final = 8

ALIGN_BYTES: Final = 64
"""Of objects in host memory. LMCache's default of 4 KiB would waste much with small blocks."""

READ_TTL_S: Final = 30 * 86_400
"""LMCache unlocks what was locked for reading after this time. We always unlock, and a block must
not be evicted while it is read, so it is long."""

PAUSE_S: Final = 30.0
"""How long L2 is not asked after a lookup that it did not answer in time."""

CONNECT_TIMEOUT_S: Final = 5.0

FLUSH_TIMEOUT_S: Final = 2.0
"""How long `close` waits for L2 writes: the supervisor kills a worker after 4 s."""


class StoredBlock(NamedTuple):
    """(KV cache group, key hash): names the object of a block on this rank."""

    group: int
    key_hash: bytes


class Storage:
    """All methods may block, and may be called on any thread.

    block_bytes: of this rank's share of a block, by KV cache group.
    """

    def __init__(
        self,
        options: LMCacheOptions,
        config: WorkerConnectorConfig,
        groups: Sequence[StoredGroup],
        block_bytes: Sequence[int],
    ) -> None:
        self._needs_all = [group.needs_all for group in groups]
        self._timeout_s = options.lookup_timeout_s
        self._model_name = f"longshore-{config.namespace}"
        self._rank = config.rank
        self._identity = hashlib.sha256(f"{config.namespace}:{config.rank}".encode()).digest()[
            :IDENTITY_DIGEST_BYTES
        ]
        self._layouts = [
            MemoryLayoutDesc([torch.Size([size + CHECKSUM_BYTES])], [torch.uint8])
            for size in block_bytes
        ]
        self._late: list[tuple[PrefetchHandle, list[ObjectKey]]] = []
        self._late_lock = threading.Lock()
        self._has_l2 = bool(options.l2_adapters)
        self._paused_until_s = 0.0  # L2, on the monotonic clock
        adapters = _adapters(options)
        _adopt_loggers()
        try:
            self._storage = StorageManager(
                StorageManagerConfig(
                    L1ManagerConfig(
                        L1MemoryManagerConfig(
                            options.rank_cpu_bytes(config, config.rank),
                            use_lazy=False,
                            align_bytes=ALIGN_BYTES,
                            shm_name="",
                        ),
                        read_ttl_seconds=READ_TTL_S,
                    ),
                    EvictionConfig(options.eviction_policy),
                    adapters,
                    prefetch_policy="retain",  # what was read from L2 stays in host memory
                )
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"--kv-connector lmcache: LMCache cannot open its storage: {error}. Check "
                "'l2_adapters' and 'cpu_bytes_to_use' in --kv-connector-config."
            ) from error
        _adopt_loggers()  # those of modules that it has imported meanwhile

    # Lookups

    def lock(self, groups: Sequence[Sequence[bytes]]) -> list[list[int]]:
        """Which of these blocks are in host memory now, and locked until `release`.

        groups: key hashes of each KV cache group, in the order of the prefix.

        Of a group that needs all blocks of a prefix, only leading ones are locked. What takes
        longer than the timeout is not found.
        """
        self._collect_late()
        found = [self._in_host_memory(group, hashes) for group, hashes in enumerate(groups)]
        if not self._has_l2 or time.monotonic() < self._paused_until_s:
            return found
        missing = [
            self._missing(group, hashes, present)
            for group, (hashes, present) in enumerate(zip(groups, found, strict=True))
        ]
        tasks = [
            (group, indices, *self._prefetch(group, [groups[group][index] for index in indices]))
            for group, indices in enumerate(missing)
            if indices
        ]
        deadline_s = time.monotonic() + self._timeout_s
        for group, indices, handle, keys in tasks:
            remaining_s = max(0.0, deadline_s - time.monotonic())
            if self._storage.wait_prefetch_status(handle, remaining_s):
                result = self._storage.query_prefetch_status(handle)
                found[group] += [indices[index] for index in _indices(result)]
            else:
                self._is_late(handle, keys)
        return found

    def _in_host_memory(self, group: int, hashes: Sequence[bytes]) -> list[int]:
        """Lock what needs no adapter, without waiting."""
        if not hashes:
            return []
        handle, _ = self._prefetch(group, hashes, skip_l2=True)
        return _indices(self._storage.query_prefetch_status(handle))

    def _missing(self, group: int, hashes: Sequence[bytes], present: list[int]) -> list[int]:
        """Which blocks to ask the adapters for."""
        if self._needs_all[group]:
            return list(range(len(present), len(hashes)))
        return sorted(set(range(len(hashes))) - set(present))

    def _prefetch(
        self, group: int, hashes: Sequence[bytes], *, skip_l2: bool = False
    ) -> tuple[PrefetchHandle, list[ObjectKey]]:
        keys = [self._key(StoredBlock(group, key_hash)) for key_hash in hashes]
        row = GroupedObjectKeys(keys, group, self._layouts[group])
        policy = "prefix" if self._needs_all[group] else "full"
        task = PrefetchTaskSpec([row], fetching_policy=policy)
        return self._storage.submit_prefetch_task(task, skip_l2=skip_l2), keys

    def _is_late(self, handle: PrefetchHandle, keys: list[ObjectKey]) -> None:
        logger.warning(
            "LMCache did not answer a lookup of %d blocks within %g s, which counts as a miss; "
            "only host memory is asked for the next %g s",
            len(keys),
            self._timeout_s,
            PAUSE_S,
        )
        self._paused_until_s = time.monotonic() + PAUSE_S
        with self._late_lock:
            self._late.append((handle, keys))

    def _collect_late(self) -> None:
        """Release what lookups have locked that were answered too late."""
        with self._late_lock:
            late, self._late = self._late, []
        for handle, keys in late:
            result = self._storage.query_prefetch_status(handle)
            if result is None:
                with self._late_lock:
                    self._late.append((handle, keys))
            elif indices := _indices(result):
                self._storage.finish_read_prefetched([keys[index] for index in indices])

    def release(self, blocks: Sequence[StoredBlock]) -> None:
        """Unlock blocks, once for each `lock`."""
        if blocks:
            self._storage.finish_read_prefetched([self._key(block) for block in blocks])

    # Blocks

    def read(self, blocks: Sequence[StoredBlock]) -> list[torch.Tensor | None]:
        """The bytes of locked blocks, in host memory: do not use them after `release`. None: the
        block is not there, or it is damaged."""
        keys = [self._key(block) for block in blocks]
        found = dict(zip(*self._storage.unsafe_read(keys), strict=True))
        return [
            self._verified(block, found[key].tensor) if key in found else None
            for block, key in zip(blocks, keys, strict=True)
        ]

    def _verified(self, block: StoredBlock, content: torch.Tensor | None) -> torch.Tensor | None:
        assert content is not None
        stored = int.from_bytes(content[-CHECKSUM_BYTES:].numpy().tobytes(), "little")
        if stored == self._checksum(block, content):
            return content[:-CHECKSUM_BYTES]
        logger.warning(
            "block %s in LMCache is damaged; it is deleted and counts as a miss",
            block.key_hash.hex()[:16],
        )
        return None

    def _checksum(self, block: StoredBlock, content: torch.Tensor) -> int:
        key = block.key_hash + bytes((block.group,))
        return block_checksum(content[:-CHECKSUM_BYTES].numpy(), self._identity, key)

    def reserve(self, group: int, hashes: Sequence[bytes]) -> dict[bytes, torch.Tensor]:
        """Objects for those blocks of one group that are not stored yet, as far as there is room.
        Fill them except for the last CHECKSUM_BYTES, then call `publish`."""
        keys = {self._key(StoredBlock(group, key_hash)): key_hash for key_hash in hashes}
        objects = self._storage.reserve_write(list(keys), self._layouts[group])
        if objects or len(hashes) < 2:
            return {keys[key]: reserved.tensor for key, reserved in objects.items()}
        # All of them are stored, or memory is short: then none is reserved. The first blocks of a
        # prompt are worth more than those after them.
        return self.reserve(group, hashes[: len(hashes) // 2])

    def publish(self, group: int, contents: Mapping[bytes, torch.Tensor]) -> None:
        """Objects that `reserve` returned are filled, and can be found from now on."""
        for key_hash, content in contents.items():
            checksum = self._checksum(StoredBlock(group, key_hash), content)
            content[-CHECKSUM_BYTES:].numpy().view("<u8")[0] = checksum
        if contents:
            keys = [self._key(StoredBlock(group, key_hash)) for key_hash in contents]
            self._storage.finish_write(keys)

    def delete(self, blocks: Sequence[StoredBlock]) -> None:
        """Delete blocks that nothing has locked."""
        keys = [self._key(block) for block in blocks]
        if keys:
            self._storage.delete_l1_keys(keys)
            for _, adapter in self._storage.l2_adapters():
                adapter.delete(keys)

    def close(self) -> None:
        """Wait for writes to L2, at most FLUSH_TIMEOUT_S, then close."""
        deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
        num_idle = 0
        while num_idle < 2 and time.monotonic() < deadline_s:
            status = self._storage.report_status()["store_controller"]
            is_idle = not (status["pending_keys_count"] or status["in_flight_task_count"])
            num_idle = num_idle + 1 if is_idle else 0
            time.sleep(0.01)
        self._storage.close()

    def _key(self, block: StoredBlock) -> ObjectKey:
        return ObjectKey(block.key_hash, self._model_name, self._rank, block.group)


def _indices(result: PrefetchResult | None) -> list[int]:
    indices: list[int] = [] if result is None else result.hit_cells[0].get_indices_list()
    return indices


def _adapters(options: LMCacheOptions) -> L2AdaptersConfig:
    """Raises ConfigError."""
    for adapter in options.l2_adapters:
        path = adapter.get("base_path")
        if isinstance(path, str) and path:  # LMCache would let everybody read it
            make_folder("lmcache", Path(path), "base_path")
        if adapter["type"] == "resp":
            _check_reachable(adapter)
    arguments = argparse.Namespace(l2_adapter=[json.dumps(each) for each in options.l2_adapters])
    try:
        return parse_args_to_l2_adapters_config(arguments)
    except ValueError as error:
        raise ConfigError(f"--kv-connector-config of the lmcache connector: {error}") from None


def _check_reachable(adapter: Mapping[str, Any]) -> None:
    """LMCache does not say so if there is no server, and each lookup would wait for the timeout."""
    host, port = adapter.get("host"), adapter.get("port")
    if not (isinstance(host, str) and isinstance(port, int)):
        return  # LMCache names what is missing
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"l2_adapters: there is no Redis server at {host}:{port}: {error}. Start it, or "
            "correct 'host' and 'port'."
        ) from None


def _adopt_loggers() -> None:
    """LMCache gives each of its loggers a handler of its own. Use ours instead, for warnings."""
    loggers: dict[str, Any] = logging.root.manager.loggerDict
    for name, each in list(loggers.items()):
        if name.startswith("lmcache") and isinstance(each, logging.Logger):
            each.handlers.clear()
            each.propagate = True
            each.setLevel(logging.WARNING)
    # It warns of every block for which there is no room.
    logging.getLogger("lmcache.v1.memory_management").setLevel(logging.ERROR)
