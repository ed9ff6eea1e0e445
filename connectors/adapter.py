"""Connectors in the style of one class with a role: constructed once per process with the role it
plays there, answering in tuples. `OneClassAdapter` makes the scheduler's side of one a
`SchedulerConnector`, so the scheduler knows a single contract.
"""

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from longshore.connectors.base import (
    AskLater,
    BlockHolder,
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
    """In which process an instance lives; it builds only that half of itself."""

    SCHEDULER = 0
    WORKER = 1


@dataclass(frozen=True, slots=True)
class AllocatedBlocks:
    """The blocks of one request, per group, in order of position."""

    block_ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.block_ids


class OneClassConnector:
    """Scheduler's hooks of a connector with a role. When each is called, and who owns the blocks
    before and after, is said at `SchedulerConnector`'s hook of the same name."""

    def __init__(self, config: ConnectorConfig, role: ConnectorRole) -> None:
        self.config = config
        self.role = role

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(tokens beyond `num_computed_tokens`, whether they load in the background). None instead
        of a number: ask again later."""
        return 0, False

    def update_state_after_alloc(
        self, request: RequestView, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """The request got blocks."""

    def build_connector_meta(self, step: StepView) -> bytes | msgspec.Struct:
        """For the worker half; a Struct travels as msgpack."""
        return b""

    def bind_blocks(self, holder: BlockHolder) -> None:
        """Called once, before everything else."""

    def on_new_request(self, request: RequestView) -> None:
        """A request was queued."""

    def update_connector_output(self, output: ConnectorOutput) -> None:
        """What the workers reported."""

    def request_finished(
        self, request: RequestView, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(keep the blocks until the send is reported, parameters for the client)."""
        return False, None

    def load_abandoned(self, request_id: str) -> None:
        """Nobody waits for this request's load any more."""

    @property
    def has_pending_work(self) -> bool:
        """An idle engine must make one more plan."""
        return False

    def take_events(self) -> list[Any]:
        """Events of its tiers since the last call."""
        return []

    def reset_cache(self) -> bool:
        """Forget everything stored; False if it cannot now."""
        return True

    def on_new_epoch(self, epoch: int) -> None:
        """All workers are new."""

    def shutdown(self) -> None:
        """The engine stops."""


class SupportsHMA(ABC):
    """Mixin of a connector that serves models with several KV cache groups."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: RequestView, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`request_finished` with the blocks of every group."""


class OneClassAdapter(SchedulerConnector):
    """The scheduler's side of a `OneClassConnector`: translates the hooks that answer in tuples or
    take lists; the others are the connector's own."""

    PASSED_ON: Final = (
        "bind_blocks",
        "on_new_request",
        "update_connector_output",
        "load_abandoned",
        "take_events",
        "reset_cache",
        "on_new_epoch",
        "shutdown",
    )

    def __init__(self, connector: OneClassConnector, config: ConnectorConfig) -> None:
        super().__init__(config)
        self.connector = connector
        self.supports_hma = isinstance(connector, SupportsHMA)
        for hook in self.PASSED_ON:
            setattr(self, hook, getattr(connector, hook))

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

    @property
    def has_pending_work(self) -> bool:
        return self.connector.has_pending_work


def _lists(block_ids: Sequence[Int32Array]) -> tuple[list[int], ...]:
    return tuple(ids.tolist() for ids in block_ids)
