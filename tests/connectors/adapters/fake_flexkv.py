"""The published interface of FlexKV, as far as the connector uses it, over memory of this process.
`install` puts it where the library would be. Blocks are copied when a task is launched."""

import sys
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch


class KVResponseStatus(Enum):
    SUCCESS = "success"
    FAILED = "failed"


@dataclass
class KVResponse:
    status: KVResponseStatus


class KVCacheLayoutType(Enum):
    BLOCKFIRST = "BLOCKFIRST"


@dataclass
class KVCacheLayout:
    type: KVCacheLayoutType
    num_layer: int
    num_block: int
    tokens_per_block: int
    num_head: int
    head_size: int
    is_mla: bool = False


@dataclass
class ModelConfig:
    num_layers: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    use_mla: bool = False
    dtype: torch.dtype = torch.bfloat16
    tp_size: int = 1
    dp_size: int = 1


@dataclass
class CacheConfig:
    tokens_per_block: int = 16
    enable_cpu: bool = True
    enable_ssd: bool = False
    enable_remote: bool = False
    num_cpu_blocks: int = 0
    num_ssd_blocks: int = 0
    ssd_cache_dir: Any = None
    remote_cache_path: Any = None


registered: dict[str, list[torch.Tensor]] = {}
"""Blocks of the ranks, by the address at which they were registered."""


class KVTPClient:
    def __init__(self, gpu_register_port: str, dp_client_id: int, device_id: int) -> None:
        self.port = gpu_register_port

    def register_to_server(self, kv_caches: list[torch.Tensor], kv_layout: KVCacheLayout) -> None:
        (blocks,) = kv_caches
        block = 2 * kv_layout.tokens_per_block * kv_layout.num_head * kv_layout.head_size
        assert blocks.shape == (kv_layout.num_block, block * kv_layout.num_layer)
        registered.setdefault(self.port, []).append(blocks)


@dataclass
class _Task:
    """keys: of all blocks of the request. mask: by block, those to copy."""

    is_get: bool
    keys: list[bytes]
    mask: list[bool]
    status: KVResponseStatus | None = None


@dataclass
class KVManager:
    """fails: what is launched fails. hangs: what is launched never ends."""

    model_config: ModelConfig
    cache_config: CacheConfig
    server_recv_port: str = ""
    gpu_register_port: str = ""
    fails: bool = False
    hangs: bool = False
    stored: dict[bytes, list[torch.Tensor]] = field(default_factory=dict)
    tasks: dict[int, _Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ids = count()
        self.is_open = False
        made.append(self)

    def start(self) -> None:
        self.is_open = True

    def is_ready(self) -> bool:
        return len(registered.get(self.gpu_register_port, [])) == self.model_config.tp_size

    def shutdown(self) -> None:
        self.is_open = False

    def _task(self, is_get: bool, tokens: Any, mask: Any, namespace: Any) -> tuple[int, Any]:
        assert self.is_open
        size = self.cache_config.tokens_per_block
        name = repr(namespace).encode()
        ends = range(size, len(tokens) + 1, size)
        keys = [name + np.asarray(tokens[:end]).tobytes() for end in ends]
        num_stored = next((n for n, key in enumerate(keys) if key not in self.stored), len(keys))
        wanted = np.asarray(mask).reshape(-1, size).all(axis=1)
        of_blocks = [
            bool(wanted[index]) and (index < num_stored) == is_get for index in range(len(keys))
        ]
        task = next(self._ids)
        self.tasks[task] = _Task(is_get, keys, of_blocks)
        return task, np.repeat(of_blocks, size)

    def get_match(
        self, token_ids: Any, token_mask: Any = None, namespace: list[str] | None = None
    ) -> tuple[int, Any]:
        return self._task(True, token_ids, token_mask, namespace)

    def put_match(
        self, token_ids: Any, token_mask: Any = None, namespace: list[str] | None = None
    ) -> tuple[int, Any]:
        return self._task(False, token_ids, token_mask, namespace)

    def cancel(self, task_ids: list[int]) -> None:
        for task in task_ids:
            del self.tasks[task]

    def launch(self, task_ids: list[int], slot_mappings: list[Any]) -> list[int]:
        size = self.cache_config.tokens_per_block
        for number, slots in zip(task_ids, slot_mappings, strict=True):
            task = self.tasks[number]
            keys = [key for key, is_in in zip(task.keys, task.mask, strict=True) if is_in]
            assert len(slots) == len(keys) * size
            if self.hangs:
                continue
            task.status = KVResponseStatus.FAILED if self.fails else KVResponseStatus.SUCCESS
            for key, slot in zip(keys, slots[::size].tolist(), strict=True):
                if self.fails:
                    continue
                ranks = registered[self.gpu_register_port]
                if task.is_get:
                    for rank, content in zip(ranks, self.stored[key], strict=True):
                        rank[slot // size] = content
                else:
                    self.stored[key] = [rank[slot // size].clone() for rank in ranks]
        return task_ids

    def try_wait(self, task_ids: list[int]) -> dict[int, KVResponse]:
        ended = [task for task in task_ids if self.tasks[task].status is not None]
        return {task: KVResponse(self.tasks.pop(task).status) for task in ended}  # type: ignore[arg-type]


made: list[KVManager] = []


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    registered.clear()
    made.clear()
    for name, names in {
        "flexkv": (),
        "flexkv.kvmanager": (KVManager,),
        "flexkv.server": (),
        "flexkv.server.client": (KVTPClient,),
        "flexkv.common": (),
        "flexkv.common.config": (ModelConfig, CacheConfig),
        "flexkv.common.storage": (KVCacheLayout, KVCacheLayoutType),
        "flexkv.common.request": (KVResponseStatus, KVResponse),
    }.items():
        module = ModuleType(name)
        vars(module).update({each.__name__: each for each in names})
        monkeypatch.setitem(sys.modules, name, module)
