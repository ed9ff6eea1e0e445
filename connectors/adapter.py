"""Adapter for connectors of one class with a role argument, as in vLLM.

Such a class is constructed once per process, with the role it has there, and returns tuples.
`OneClassAdapter` wraps its scheduler half as a `SchedulerConnector`, `OneClassWorkerAdapter` its
worker half as a `WorkerConnector`.
"""

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from longshore.connectors.base import (
    CONTRACT_VERSION,
    AskLater,
    BlockHolds,
    ConnectorConfig,
    ConnectorOutput,
    FinishAction,
    FinishedTransfers,
    KVCaches,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepTokens,
    StepView,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.protocol.arrays import Int32Array
from longshore.protocol.events import KVEvent

if TYPE_CHECKING:
    import torch


class ConnectorRole(enum.Enum):
    """The process that an instance runs in; it sets up only that half."""

    SCHEDULER = 0
    WORKER = 1


@dataclass(frozen=True, slots=True)
class AllocatedBlocks:
    """The block table of one request per KV cache group."""

    block_ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.block_ids


class OneClassConnector:
    """The hooks of a connector of one class, those of the scheduler first. See the hook of the same
    name of `SchedulerConnector` and `WorkerConnector` for when each is called, and who owns the
    blocks before and after.

    In a worker, the metadata of a plan is bound during its step: `bind_connector_metadata`,
    `start_load_kv`, the layers, `wait_for_save` and `clear_connector_metadata` follow each other on
    the compute queue, and loads of the step have ended when `start_load_kv` returns, or with
    `has_layer_hooks` when `wait_for_layer_load` does. No two hooks run at the same time.

    metadata_type: Struct that `build_connector_meta` returns; workers get it decoded. None: bytes.
    """

    contract_version: ClassVar[int] = CONTRACT_VERSION
    metadata_type: ClassVar[type[msgspec.Struct] | None] = None
    needs_every_step: bool = True  # as in vLLM, which has no `has_pending_work`
    chunk_blocks: int = 1
    min_wait_s: float = 0.0
    has_layer_hooks: bool = False
    has_hidden_states_hook: bool = False
    poll_interval_s: float | None = 0.05

    def __init__(self, config: ConnectorConfig, role: ConnectorRole) -> None:
        """config: a WorkerConnectorConfig in a worker."""
        self.config = config
        self.role = role

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(number of tokens after `num_computed_tokens`, whether they load in the background). None
        as the number: ask again later."""
        return 0, False

    def update_state_after_alloc(
        self, request: RequestView, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """Blocks of the request were allocated."""

    def build_connector_meta(self, step: StepView) -> bytes | msgspec.Struct:
        """Instructions for the worker half; a Struct is sent as msgpack."""
        return b""

    def bind_blocks(self, holds: BlockHolds) -> None:
        """Called once, before any other hook."""

    def on_new_request(self, request: RequestView) -> None:
        """A request was queued."""

    def skips_prefix_cache(self, request: RequestView) -> bool:
        """Whether the request must not begin with cached blocks of other requests."""
        return False

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """The workers' report of an answered plan or of ended transfers."""

    def request_finished(
        self, request: RequestView, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(whether to free the blocks only after `finished_sending`, parameters for the client)."""
        return False, None

    def load_abandoned(self, request_id: str) -> None:
        """The request no longer waits for its load."""

    def load_expired(self, request_id: str) -> None:
        """The load has taken too long; called in place of `load_abandoned`."""
        self.load_abandoned(request_id)

    @property
    def has_pending_work(self) -> bool:
        """Whether an idle engine must send another plan."""
        return False

    def take_events(self) -> list[KVEvent]:
        """Events of the connector's tiers since the last call."""
        return []

    def reset_cache(self) -> bool:
        """Evict everything stored. Returns False if that is not possible now."""
        return True

    def on_new_epoch(self, epoch: int) -> None:
        """All workers were replaced."""

    def shutdown(self) -> None:
        """The engine or the worker stops."""

    # Worker

    def register_kv_caches(
        self, kv_caches: "Mapping[str, torch.Tensor | tuple[torch.Tensor, ...]]"
    ) -> None:
        """The blocks of every layer of this rank, by layer name."""

    def bind_connector_metadata(self, metadata: Any) -> None:
        """The metadata of the step that begins."""
        self.connector_metadata = metadata

    def clear_connector_metadata(self) -> None:
        """The step has ended."""
        self.connector_metadata = None

    def handle_preemptions(self, metadata: Any) -> None:
        """The step may write blocks of preempted requests."""

    def start_load_kv(self) -> None:
        """Begin the loads of the bound metadata."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """With `has_layer_hooks`: return when the layer's loads have ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor | tuple[torch.Tensor, ...]"
    ) -> None:
        """With `has_layer_hooks`: the layer's KV of this step is in the cache."""

    def save_hidden_states(self, tokens: StepTokens, hidden_states: "torch.Tensor") -> None:
        """With `has_hidden_states_hook`: the output of the last layer."""

    def wait_for_save(self) -> None:
        """Begin or end the stores of the step."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose (send, asynchronous load) has ended on this rank since the last call."""
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that loads since the last call did not fill."""
        return set()

    def build_connector_worker_meta(self) -> bytes:
        """A message for `update_connector_output`; empty: none."""
        return b""


class SupportsHMA(ABC):
    """Mixin for a connector that supports several KV cache groups."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: RequestView, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`request_finished` with the blocks of every group."""


class OneClassAdapter(SchedulerConnector):
    """Wraps a `OneClassConnector` as a `SchedulerConnector`: converts the hooks with tuples or
    lists, and passes the others through."""

    def __init__(self, connector: OneClassConnector, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.connector = connector
        self.supports_hma = isinstance(connector, SupportsHMA)
        self.needs_every_step = connector.needs_every_step
        self.chunk_blocks = connector.chunk_blocks
        self.min_wait_s = connector.min_wait_s

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        num_tokens, is_async = self.connector.get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return AskLater() if num_tokens is None else Matched(num_tokens, is_async)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        blocks = AllocatedBlocks(_lists(block_ids))
        self.connector.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, step: StepView) -> bytes:
        metadata = self.connector.build_connector_meta(step)
        return metadata if isinstance(metadata, bytes) else msgspec.msgpack.encode(metadata)

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        groups = _lists(block_ids)
        if isinstance(self.connector, SupportsHMA):
            return FinishAction(*self.connector.request_finished_all_groups(request, groups))
        return FinishAction(*self.connector.request_finished(request, groups[0] if groups else []))

    # Hooks that are the same on both sides

    def bind_blocks(self, holds: BlockHolds) -> None:
        self.connector.bind_blocks(holds)

    def on_new_request(self, request: RequestView) -> None:
        self.connector.on_new_request(request)

    def skips_prefix_cache(self, request: RequestView) -> bool:
        return self.connector.skips_prefix_cache(request)

    def update_connector_output(self, output: ConnectorOutput) -> None:
        self.connector.update_connector_output(output)

    def load_abandoned(self, request_id: str) -> None:
        self.connector.load_abandoned(request_id)

    def load_expired(self, request_id: str) -> None:
        self.connector.load_expired(request_id)

    @property
    def has_pending_work(self) -> bool:
        return self.connector.has_pending_work

    def take_events(self) -> list[KVEvent]:
        return self.connector.take_events()

    def reset_cache(self) -> bool:
        return self.connector.reset_cache()

    def on_new_epoch(self, epoch: int) -> None:
        self.connector.on_new_epoch(epoch)

    def shutdown(self) -> None:
        self.connector.shutdown()


def _lists(block_ids: Sequence[Int32Array]) -> tuple[list[int], ...]:
    return tuple(ids.tolist() for ids in block_ids)


@dataclass(slots=True)
class _BoundMetadata:
    """The metadata of one step. failed: block ids of its loads."""

    metadata: Any
    has_preemptions: bool = False
    failed: Sequence[int] = ()


class OneClassWorkerAdapter(WorkerConnector[_BoundMetadata]):
    """Wraps a `OneClassConnector` as a `WorkerConnector`. All hooks of a step run on the compute
    queue, as in an engine without overlapping steps; a lock keeps `get_finished`, which is called
    on another thread, apart from them."""

    def __init__(self, connector: OneClassConnector, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self.connector = connector
        self.has_layer_hooks = connector.has_layer_hooks
        self.has_hidden_states_hook = connector.has_hidden_states_hook
        self.poll_interval_s = connector.poll_interval_s
        self._lock = threading.Lock()

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        layers = {name: layer for group in kv_caches.groups for name, layer in group.layers.items()}
        self.connector.register_kv_caches(layers)

    def bind_connector_metadata(self, data: bytes) -> _BoundMetadata:
        metadata_type = self.connector.metadata_type
        if metadata_type is None:
            return _BoundMetadata(data)
        return _BoundMetadata(msgspec.msgpack.decode(data, type=metadata_type))

    def handle_preemptions(self, metadata: _BoundMetadata) -> None:
        metadata.has_preemptions = True

    def wait_for_load(self, metadata: _BoundMetadata) -> None:
        with self._lock:
            self.connector.bind_connector_metadata(metadata.metadata)
            if metadata.has_preemptions:
                self.connector.handle_preemptions(metadata.metadata)
            self.connector.start_load_kv()

    def wait_for_layer_load(self, metadata: _BoundMetadata, layer_name: str) -> None:
        with self._lock:
            self.connector.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self,
        metadata: _BoundMetadata,
        layer_name: str,
        kv_layer: "torch.Tensor | tuple[torch.Tensor, ...]",
    ) -> None:
        with self._lock:
            self.connector.save_kv_layer(layer_name, kv_layer)

    def save_hidden_states(
        self, metadata: _BoundMetadata, tokens: StepTokens, hidden_states: "torch.Tensor"
    ) -> None:
        with self._lock:
            self.connector.save_hidden_states(tokens, hidden_states)

    def wait_for_save(self, metadata: _BoundMetadata) -> None:
        with self._lock:
            self.connector.wait_for_save()
            metadata.failed = sorted(self.connector.get_block_ids_with_load_errors())
            self.connector.clear_connector_metadata()

    def get_block_ids_with_load_errors(self, metadata: _BoundMetadata) -> Sequence[int]:
        return metadata.failed

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        with self._lock:
            sent, received = self.connector.get_finished(set(finished_request_ids))
            failed = self.connector.get_block_ids_with_load_errors() if received else set()
        return FinishedTransfers(sorted(sent or ()), sorted(received or ()), sorted(failed))

    def build_connector_worker_meta(self) -> bytes:
        with self._lock:
            return self.connector.build_connector_worker_meta()

    def shutdown(self) -> None:
        with self._lock:
            self.connector.shutdown()
