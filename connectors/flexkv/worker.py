"""The worker half: FlexKV's manager, on rank 0, and its registration of the KV cache of each rank.

FlexKV's own processes copy the blocks, on all ranks, from and to the device memory that the ranks
have registered (CUDA IPC). So only rank 0 looks up, loads and stores; the others report at once.
A block of a rank is, for FlexKV, one layer with one head, whose bytes have no structure.
"""

import hashlib
import os
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from longshore.connectors.base import KVCaches, WorkerConnectorConfig
from longshore.connectors.base.lookup_worker import TransferStuck
from longshore.connectors.base.prefix_store.messages import Prefix, Store
from longshore.connectors.base.prefix_store.store import (
    PrefixStore,
    StoreError,
    stand_in_tokens,
)
from longshore.connectors.base.prefix_store.worker import PrefixStoreWorker
from longshore.connectors.flexkv.scheduler import NAME, FlexKVOptions, read_options
from longshore.connectors.options import make_folder
from longshore.protocol.arrays import Int64Array
from longshore.protocol.errors import ConfigError

POLL_INTERVAL_S: Final = 0.001

DEVICE_TYPE: Final = "cuda"
"""FlexKV gets the memory of the blocks as a CUDA IPC handle."""

READY_TIMEOUT_S: Final = 120.0

SOCKETS: Final = Path(f"/tmp/longshore-flexkv-{os.geteuid()}")
"""The folder of FlexKV's sockets, in which only this user can make files."""


class FlexKVWorker(PrefixStoreWorker):
    def make_store(self, kv_caches: KVCaches) -> PrefixStore:
        return FlexKVStore(self.config, kv_caches)


class _Library:
    """The modules of FlexKV that are used. Raises ConfigError if FlexKV is not installed."""

    def __init__(self) -> None:
        try:
            self.manager: Any = import_module("flexkv.kvmanager")
            self.client: Any = import_module("flexkv.server.client")
            self.config: Any = import_module("flexkv.common.config")
            self.layout: Any = import_module("flexkv.common.storage")
            self.request: Any = import_module("flexkv.common.request")
        except ImportError as error:
            raise ConfigError(
                f"--kv-connector {NAME} needs FlexKV, which cannot be imported ({error}). Install "
                "it: pip install 'git+https://github.com/taco-project/FlexKV'"
            ) from error


class FlexKVStore:
    """See `PrefixStore`. Raises ConfigError if FlexKV cannot be used."""

    def __init__(self, config: WorkerConnectorConfig, kv_caches: KVCaches) -> None:
        self._library = _Library()
        self._options = options = read_options(config.options)
        self._namespace = config.namespace
        self._block_size = config.specs[0].block_size
        self._lock = threading.Lock()  # of the manager
        self._lookups: dict[int, tuple[Prefix, int]] = {}  # and the task
        self._manager: Any = None
        self._device = kv_caches.device
        (group,) = kv_caches.groups
        head_size = self._head_size(group.blocks)
        # Unique to this engine, and equal on its ranks, which have one parent.
        name = f"{os.getppid()} {config.engine_id}"
        make_folder(NAME, SOCKETS)
        self._port = f"ipc://{SOCKETS}/{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        if options.ssd_path:
            make_folder(NAME, Path(options.ssd_path))
        if config.rank == 0:
            self._start_manager(config, options, head_size)
        layouts = self._library.layout
        layout = layouts.KVCacheLayout(
            type=layouts.KVCacheLayoutType.BLOCKFIRST,
            num_layer=1,
            num_block=len(group.blocks),
            tokens_per_block=self._block_size,
            num_head=1,
            head_size=head_size,
            is_mla=False,
        )
        client = self._library.client.KVTPClient(f"{self._port}_gpu", 0, self._device.index or 0)
        client.register_to_server([group.blocks], layout)
        self._wait_until_ready()

    def _head_size(self, blocks: torch.Tensor) -> int:
        """Bytes per token, head, and one of keys and values."""
        if self._device.type != DEVICE_TYPE:
            raise ConfigError(
                f"--kv-connector {NAME} needs a GPU: FlexKV copies from and to CUDA memory, and "
                "this engine computes on the CPU. Use offloading, lmcache or lmcache_mp."
            )
        size_bytes = blocks.shape[1]
        if not blocks.is_contiguous():
            raise ConfigError(f"--kv-connector {NAME} needs blocks without padding between them")
        head_size, rest = divmod(size_bytes, 2 * self._block_size)
        if rest:
            raise ConfigError(
                f"--kv-connector {NAME} cannot divide a block of {size_bytes} bytes into "
                f"{self._block_size} tokens"
            )
        return head_size

    def _start_manager(
        self, config: WorkerConnectorConfig, options: FlexKVOptions, head_size: int
    ) -> None:
        settings = self._library.config
        block_bytes = 2 * self._block_size * head_size * config.num_ranks
        model = settings.ModelConfig(
            num_layers=1,
            num_kv_heads=config.num_ranks,
            head_size=head_size,
            use_mla=False,
            dtype=torch.uint8,
            tp_size=config.num_ranks,
            dp_size=1,
        )
        cache = settings.CacheConfig(
            tokens_per_block=self._block_size,
            enable_cpu=True,
            enable_ssd=bool(options.ssd_bytes),
            enable_remote=bool(options.remote),
            num_cpu_blocks=max(1, options.cpu_bytes // block_bytes),
            num_ssd_blocks=max(1, options.ssd_bytes // block_bytes),
            ssd_cache_dir=options.ssd_path or None,
            **options.remote,
        )
        self._manager = self._library.manager.KVManager(
            model_config=model,
            cache_config=cache,
            server_recv_port=self._port,
            gpu_register_port=f"{self._port}_gpu",
        )
        self._manager.start()

    def _wait_until_ready(self) -> None:
        """FlexKV is ready when all ranks have registered, so only its manager's rank can wait."""
        if self._manager is None:
            return
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while not self._manager.is_ready():
            if time.monotonic() >= deadline_s:
                raise ConfigError(
                    f"--kv-connector {NAME}: FlexKV was not ready within {READY_TIMEOUT_S:g} s; "
                    "its log says why"
                )
            time.sleep(0.1)

    def _tokens(self, prefix: Prefix) -> Int64Array:
        return stand_in_tokens(prefix.hashes, self._block_size)

    def _namespaces(self, prefix: Prefix) -> list[str]:
        return [self._namespace, *filter(None, (prefix.salt,))]

    def lookup(self, lookup_id: int, prefix: Prefix) -> int:
        if self._manager is None:
            return len(prefix.hashes)  # rank 0 decides
        task, num_blocks = self._match("get_match", prefix, 0)
        self._lookups[lookup_id] = prefix, task  # FlexKV keeps what the task has matched
        return num_blocks

    def _match(self, operation: str, prefix: Prefix, first_block: int) -> tuple[int, int]:
        """A task that is not launched, and the number of blocks from `first_block` on that it
        would copy."""
        tokens = self._tokens(prefix)
        mask = np.arange(len(tokens)) >= first_block * self._block_size
        with self._lock:
            task, found = getattr(self._manager, operation)(
                token_ids=tokens, token_mask=mask, namespace=self._namespaces(prefix)
            )
        return task, int(np.count_nonzero(found)) // self._block_size

    def release(self, lookup_id: int) -> None:
        _, task = self._lookups.pop(lookup_id, (None, None))
        if task is not None:
            self._cancel(task)

    def _cancel(self, task: int) -> None:
        with self._lock:
            self._manager.cancel([task])

    def load(self, lookup_id: int, first_block: int, block_ids: Sequence[int]) -> Sequence[int]:
        if self._manager is None:
            return []
        prefix, lookup = self._lookups.pop(lookup_id)
        wanted = Prefix(prefix.hashes[: first_block + len(block_ids)], prefix.salt)
        task, num_blocks = self._match("get_match", wanted, first_block)
        self._cancel(lookup)
        loaded = block_ids[:num_blocks]
        is_done = self._copy(task, loaded)
        return block_ids[len(loaded) :] if is_done else block_ids

    def store(self, store: Store) -> None:
        if self._manager is None:
            return
        task, num_blocks = self._match("put_match", store.prefix, 0)
        if num_blocks > len(store.block_ids):
            self._cancel(task)
            raise StoreError("FlexKV has evicted blocks before those to store")
        if not self._copy(task, store.block_ids[len(store.block_ids) - num_blocks :]):
            raise StoreError("FlexKV did not copy the blocks; its log says why")

    def _copy(self, task: int, block_ids: Sequence[int]) -> bool:
        """Launch a task for these blocks and wait for its end. Returns whether it has succeeded."""
        if not block_ids:
            self._cancel(task)
            return True
        firsts = np.array(block_ids, np.int64)[:, None] * self._block_size
        slots = (firsts + np.arange(self._block_size)).ravel()
        with self._lock:
            self._manager.launch([task], [slots])
        deadline_s = time.monotonic() + self._options.timeout_s
        while time.monotonic() < deadline_s:
            with self._lock:
                ended = self._manager.try_wait([task])
            if task in ended:
                return bool(ended[task].status == self._library.request.KVResponseStatus.SUCCESS)
            time.sleep(POLL_INTERVAL_S)
        raise TransferStuck(f"a transfer of FlexKV took over {self._options.timeout_s:g} s")

    def close(self) -> None:
        if self._manager is not None:
            self._manager.shutdown()
