"""The worker half: passes hooks on, and combines the children's reports into one per transfer."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import msgspec
from torch import Tensor

from longshore.connectors.base import (
    FinishedTransfers,
    KVCaches,
    StepTokens,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.multi.scheduler import Commands, children_of
from longshore.connectors.registry import load_worker_connector
from longshore.protocol.logs.records import fields
from longshore.protocol.statistics import TransferOperation

logger = logging.getLogger(__name__)

Bound: TypeAlias = list[tuple[WorkerConnector[Any], Any]]
"""The children that have metadata in a plan, with that metadata."""


class MultiWorker(WorkerConnector[Bound]):
    """A child's hooks of a step are called only if it has metadata in the plan, and those for
    layers and hidden states only if it has them."""

    contract_version: ClassVar[int] = 2

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self.children = [
            load_worker_connector(child.name, replace(config, options=child.options))
            for child in children_of(config)
        ]
        self.has_layer_hooks = any(child.has_layer_hooks for child in self.children)
        self.has_hidden_states_hook = any(child.has_hidden_states_hook for child in self.children)
        self.stores_within_step = any(child.stores_within_step for child in self.children)
        intervals = [child.poll_interval_s for child in self.children]
        self.poll_interval_s = min((each for each in intervals if each is not None), default=None)
        self._loading: dict[str, int] = {}  # which child loads in the background
        self._sending: dict[str, set[int]] = {}  # which children have not sent yet

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        for child in self.children:
            child.register_kv_caches(kv_caches, queues)

    def bind_connector_metadata(self, data: bytes) -> Bound:
        commands = msgspec.msgpack.decode(data, type=Commands)
        self._loading |= commands.loads
        for request_id, sending in commands.sends.items():
            self._sending[request_id] = set(sending)
        return [
            (child, child.bind_connector_metadata(part))
            for child, part in zip(self.children, commands.children, strict=True)
            if part
        ]

    def handle_preemptions(self, metadata: Bound) -> None:
        for child, of_child in metadata:
            child.handle_preemptions(of_child)

    def start_load_kv(self, metadata: Bound) -> None:
        for child, of_child in metadata:
            child.start_load_kv(of_child)

    def wait_for_load(self, metadata: Bound) -> None:
        for child, of_child in metadata:
            child.wait_for_load(of_child)

    def wait_for_layer_load(self, metadata: Bound, layer_name: str) -> None:
        for child, of_child in metadata:
            if child.has_layer_hooks:
                child.wait_for_layer_load(of_child, layer_name)

    def save_kv_layer(
        self, metadata: Bound, layer_name: str, kv_layer: Tensor | tuple[Tensor, ...]
    ) -> None:
        for child, of_child in metadata:
            if child.has_layer_hooks:
                child.save_kv_layer(of_child, layer_name, kv_layer)

    def save_hidden_states(
        self, metadata: Bound, tokens: StepTokens, hidden_states: Tensor
    ) -> None:
        for child, of_child in metadata:
            if child.has_hidden_states_hook:
                child.save_hidden_states(of_child, tokens, hidden_states)

    def wait_for_save(self, metadata: Bound) -> None:
        for child, of_child in metadata:
            child.wait_for_save(of_child)

    def get_block_ids_with_load_errors(self, metadata: Bound) -> Sequence[int]:
        return [
            block_id
            for child, of_child in metadata
            for block_id in child.get_block_ids_with_load_errors(of_child)
        ]

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        sent: list[str] = []
        received: list[str] = []
        failed_block_ids: list[int] = []
        for index, child in enumerate(self.children):
            ended = child.get_finished(finished_request_ids)
            sent += [each for each in ended.sent if self._has_sent(index, each)]
            received += [each for each in ended.received if self._has_received(index, each)]
            failed_block_ids += ended.failed_block_ids
        return FinishedTransfers(sent, received, failed_block_ids)

    def _has_sent(self, index: int, request_id: str) -> bool:
        """A child has reported a send. Whether it was the last child to send this request."""
        waiting = self._sending.get(request_id, set())
        if index not in waiting:
            _warn("send", index, request_id)
            return False
        waiting.remove(index)
        if waiting:
            return False
        del self._sending[request_id]
        return True

    def _has_received(self, index: int, request_id: str) -> bool:
        """A child has reported a load. Whether it is the one that loads this request."""
        if self._loading.get(request_id) != index:
            _warn("load", index, request_id)
            return False
        del self._loading[request_id]
        return True

    def build_connector_worker_meta(self) -> bytes:
        parts = [child.build_connector_worker_meta() for child in self.children]
        return msgspec.msgpack.encode(parts) if any(parts) else b""

    def get_kv_connector_stats(self) -> Sequence[TransferOperation]:
        return [each for child in self.children for each in child.get_kv_connector_stats()]

    def shutdown(self) -> None:
        errors: list[Exception] = []
        for child in self.children:  # all of them, also if one raises
            try:
                child.shutdown()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _warn(kind: str, index: int, request_id: str) -> None:
    about = fields(request_id=request_id)
    logger.warning(
        "connectors[%d] of multi reported an unknown or duplicate %s", index, kind, extra=about
    )
