"""The worker half: fills blocks at the start of the step that computes on them."""

from typing import ClassVar, TypeAlias

import msgspec
import torch
from torch import Tensor

from longshore.connectors.base import (
    GroupBlocks,
    KVCaches,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.decode_bench.scheduler import DecodeBenchSettings, settings_of
from longshore.protocol.kv_cache_spec import StateSpec

Fills: TypeAlias = list[list[int]]
"""Ids of the blocks to fill, by group."""


class DecodeBenchWorker(WorkerConnector[Fills]):
    """Copies one dummy block per group into every block of a plan. The copies are part of the step,
    so nothing has to be waited for, and nothing can fail."""

    contract_version: ClassVar[int] = 2
    stores_within_step = False

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self._settings = settings_of(config)
        self._dummies: list[tuple[Tensor, Tensor]] = []  # by group: all blocks, the dummy block

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        generator = torch.Generator().manual_seed(self._settings.seed * 1009 + self.config.rank)
        self._dummies = [
            (group.blocks, _dummy_block(group, self._settings, generator))
            for group in kv_caches.groups
        ]

    def bind_connector_metadata(self, data: bytes) -> Fills:
        return msgspec.msgpack.decode(data, type=Fills)

    def wait_for_load(self, metadata: Fills) -> None:
        for (blocks, dummy), block_ids in zip(self._dummies, metadata, strict=True):
            if block_ids:
                blocks[torch.tensor(block_ids, device=blocks.device)] = dummy


def _dummy_block(
    group: GroupBlocks, settings: DecodeBenchSettings, generator: torch.Generator
) -> Tensor:
    """(size_bytes,) uint8: a block of dummy values in the layers' layout and dtype. A page of a
    state has no part for each layer, so it is zeros. No step has begun, so the block is written in
    the memory of the last one."""
    block = group.blocks[-1]
    if isinstance(group.spec, StateSpec):
        return torch.zeros_like(block)
    before = block.clone()
    for layer in group.layers.values():
        for part in layer if isinstance(layer, tuple) else (layer,):
            values = torch.full(part.shape[1:], settings.fill_mean)
            if settings.fill_std:
                values += settings.fill_std * torch.randn(part.shape[1:], generator=generator)
            part[-1].copy_(values.to(part.dtype))
    dummy = block.clone()
    block.copy_(before)
    return dummy
