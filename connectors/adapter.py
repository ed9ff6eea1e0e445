"""Adapter for connectors of one class with a role argument, as in vLLM.

Such a class is constructed once per process, with the role it has there, and returns tuples.
`OneClassAdapter` wraps its scheduler half as a `SchedulerConnector`.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from longshore.connectors.base import (
    AskLater,
    BlockHolds,
    ConnectorConfig,
    ConnectorOutput,
    FinishAction,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
)
from longshore.protocol.arrays import Int32Array


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
    """Scheduler hooks of a connector of one class. See the hook of the same name of
    `SchedulerConnector` for when each is called, and who owns the blocks before and after."""

    def __init__(self, config: ConnectorConfig, role: ConnectorRole) -> None:
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

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """The workers' report of an answered plan or of ended transfers."""

    def request_finished(
        self, request: RequestView, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(whether to free the blocks only after `finished_sending`, parameters for the client)."""
        return False, None

    def load_abandoned(self, request_id: str) -> None:
        """The request no longer waits for its load."""

    @property
    def has_pending_work(self) -> bool:
        """Whether an idle engine must send another plan."""
        return False

    def take_events(self) -> list[Any]:
        """Events of the connector's tiers since the last call."""
        return []

    def reset_cache(self) -> bool:
        """Evict everything stored. Returns False if that is not possible now."""
        return True

    def on_new_epoch(self, epoch: int) -> None:
        """All workers were replaced."""

    def shutdown(self) -> None:
        """The engine stops."""


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

    def update_connector_output(self, output: ConnectorOutput) -> None:
        self.connector.update_connector_output(output)

    def load_abandoned(self, request_id: str) -> None:
        self.connector.load_abandoned(request_id)

    @property
    def has_pending_work(self) -> bool:
        return self.connector.has_pending_work

    def take_events(self) -> list[Any]:
        return self.connector.take_events()

    def reset_cache(self) -> bool:
        return self.connector.reset_cache()

    def on_new_epoch(self, epoch: int) -> None:
        self.connector.on_new_epoch(epoch)

    def shutdown(self) -> None:
        self.connector.shutdown()


def _lists(block_ids: Sequence[Int32Array]) -> tuple[list[int], ...]:
    return tuple(ids.tolist() for ids in block_ids)
