"""The scheduler half of connectors whose workers look up what is stored, because a lookup may read
files or wait for another process.

A request waits (`AskLater`) until all ranks have answered, and other requests are scheduled
meanwhile. What a lookup has found stays locked on every rank until a load has read it or the lookup
is released: each lookup ends with exactly one of the two.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from longshore.connectors.base.scheduler_half import SchedulerConnector
from longshore.connectors.base.views import (
    AskLater,
    BlockHolds,
    ConnectorConfig,
    ConnectorOutput,
    FinishAction,
    Match,
    Matched,
    RequestView,
    StepView,
    StorableBlocks,
)
from longshore.protocol.arrays import Int32Array

LookupT = TypeVar("LookupT")
LoadT = TypeVar("LoadT")
StoreT = TypeVar("StoreT")
FoundT = TypeVar("FoundT")


class LookupCommands(msgspec.Struct, Generic[LookupT, LoadT, StoreT], frozen=True):
    """Metadata of a plan. released: lookups of which nothing is loaded."""

    lookups: list[LookupT] = []
    loads: list[LoadT] = []
    stores: list[StoreT] = []
    released: list[int] = []


class LookupReport(msgspec.Struct, Generic[FoundT], frozen=True):
    """Metadata of a report of one rank. stored: hold ids of stores that have ended, successfully or
    not: a block counts as stored when a lookup finds it on all ranks."""

    found: list[FoundT] = []
    stored: list[int] = []


@dataclass(slots=True)
class OpenLookup:
    """A lookup that has not been released.

    first_token: the local tokens that its request had.
    is_wanted: False: its request has ended or needs other blocks.
    """

    lookup_id: int
    first_token: int
    ranks_done: set[int] = field(default_factory=set, kw_only=True)
    is_wanted: bool = field(default=True, kw_only=True)


OpenT = TypeVar("OpenT", bound=OpenLookup)


class LookupConnector(SchedulerConnector, ABC, Generic[OpenT]):
    """report_type: what ranks send, a LookupReport."""

    report_type: ClassVar[Any]

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self._holds: BlockHolds
        self._lookup_ids = count(1)
        self._begin()

    def _begin(self) -> None:
        self._lookups: dict[int, OpenT] = {}  # not released yet
        self._of_request: dict[str, OpenT] = {}
        self._num_local: dict[str, int] = {}  # tokens at the last match, by request
        self._loading: set[str] = set()
        self._commands: LookupCommands[Any, Any, Any] = LookupCommands()

    def bind_blocks(self, holds: BlockHolds) -> None:
        self._holds = holds

    # What differs between connectors

    @abstractmethod
    def _look_up(
        self, lookup_id: int, request: RequestView, num_computed_tokens: int
    ) -> OpenT | None:
        """Begin a lookup. None: the request has nothing to look up."""

    @abstractmethod
    def _add_answer(self, lookup: OpenT, answer: Any) -> None:
        """A rank has found this."""

    @abstractmethod
    def _end_of_hit(self, lookup: OpenT, request: RequestView, num_computed_tokens: int) -> int:
        """How many leading tokens the request can have, according to an answered lookup."""

    @abstractmethod
    def _load(
        self,
        lookup_id: int,
        request: RequestView,
        block_ids: tuple[Int32Array, ...],
        first_token: int,
        end: int,
    ) -> None:
        """Load the blocks of these tokens, and release the lookup."""

    @abstractmethod
    def _store(self, storable: Sequence[StorableBlocks]) -> None:
        """Hold these blocks and store them."""

    @abstractmethod
    def _change_keys(self) -> None:
        """Make everything stored so far unreachable."""

    # Lookups

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        if any(num_computed_tokens % spec.block_size for spec in self.config.specs):
            return Matched(0)  # its last block is partly computed, and a load would overwrite it
        request_id = request.request_id
        lookup = self._of_request.get(request_id)
        if lookup is None or num_computed_tokens < lookup.first_token:
            self._drop_lookup(request_id)
            lookup = self._look_up(next(self._lookup_ids), request, num_computed_tokens)
            if lookup is None:
                return Matched(0)
            self._lookups[lookup.lookup_id] = self._of_request[request_id] = lookup
        if len(lookup.ranks_done) < self.config.num_ranks:
            return AskLater()
        self._num_local[request_id] = num_computed_tokens
        end = self._end_of_hit(lookup, request, num_computed_tokens)
        return Matched(max(end - num_computed_tokens, 0), is_async=True)

    def _drop_lookup(self, request_id: str) -> None:
        """Nothing will be loaded from the request's lookup, if it has one."""
        lookup = self._of_request.pop(request_id, None)
        self._num_local.pop(request_id, None)
        if lookup is not None:
            lookup.is_wanted = False
            self._release_if_answered(lookup)

    def _release_if_answered(self, lookup: OpenT) -> None:
        if not lookup.is_wanted and len(lookup.ranks_done) == self.config.num_ranks:
            del self._lookups[lookup.lookup_id]
            self._commands.released.append(lookup.lookup_id)

    def _answered(self, answer: Any, rank: int) -> None:
        lookup = self._lookups.get(answer.lookup_id)
        if lookup is None or rank in lookup.ranks_done:
            return  # a repeated report
        lookup.ranks_done.add(rank)
        self._add_answer(lookup, answer)
        self._release_if_answered(lookup)

    # Loads and stores

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        lookup = self._of_request.pop(request.request_id)
        del self._lookups[lookup.lookup_id]
        first_token = self._num_local.pop(request.request_id)
        self._loading.add(request.request_id)
        end = first_token + num_external_tokens
        self._load(lookup.lookup_id, request, block_ids, first_token, end)

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        self._drop_lookup(request.request_id)
        return FinishAction()

    def build_connector_meta(self, step: StepView) -> bytes:
        for admitted in step.admitted:  # those that had nothing to load
            self._drop_lookup(admitted.request_id)
        if step.storable:
            self._store(step.storable)
        if not self.has_pending_work:
            return b""
        commands, self._commands = self._commands, LookupCommands()
        return msgspec.msgpack.encode(commands)

    @property
    def has_pending_work(self) -> bool:
        return self._commands != LookupCommands()

    # Reports

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for metadata in output.metadata:
            report = msgspec.msgpack.decode(metadata, type=self.report_type)
            for answer in report.found:
                self._answered(answer, output.rank)
            for hold_id in report.stored:
                self._holds.release_rank(hold_id, output.rank)
        self._loading.difference_update(output.finished_receiving)

    def reset_cache(self) -> bool:
        if self._loading:
            return False
        self._change_keys()
        for request_id in list(self._of_request):
            self._drop_lookup(request_id)
        return True

    def on_new_epoch(self, epoch: int) -> None:
        self._begin()  # the locks belonged to the workers
