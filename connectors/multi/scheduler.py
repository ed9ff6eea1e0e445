"""The scheduler half: which child loads a request, and which children keep blocks of its end."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec

from longshore.connectors.base import (
    AskLater,
    BlockHolds,
    ConnectorConfig,
    ConnectorOutput,
    ConnectorStats,
    FinishAction,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
    SwapSize,
)
from longshore.connectors.options import Options
from longshore.connectors.registry import check_connector, load_scheduler_connector
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import KVEvent, Medium


@dataclass(frozen=True, slots=True)
class Child:
    """One of the connectors: its name and options, as for `--kv-connector`."""

    name: str
    options: dict[str, Any]


def children_of(config: ConnectorConfig) -> list[Child]:
    """The option `connectors`. Raises ConfigError."""
    options = Options("multi", config.options, ("connectors",))
    found = config.options.get("connectors")
    if not isinstance(found, list) or len(found) < 2:
        raise options.error(
            '\'connectors\', a list of two or more, as in [{"connector": "example", "options": '
            '{"path": "/var/tmp/kv"}}, {"connector": "package.module:Class"}]'
        )
    return [_child(options, index, entry) for index, entry in enumerate(found)]


def _child(options: Options, index: int, entry: object) -> Child:
    where = f"connectors[{index}]"
    if not isinstance(entry, dict) or set(entry) - {"connector", "options"}:
        raise options.error(f"{where} to have 'connector' and 'options' only; it is {entry!r}")
    name, of_child = entry.get("connector"), entry.get("options", {})
    if not isinstance(name, str) or not name:
        raise options.error(f"{where} to name its 'connector'; it is {entry!r}")
    if not isinstance(of_child, dict):
        raise options.error(f"the 'options' of {where} to be an object; they are {of_child!r}")
    return Child(name, of_child)


class Commands(msgspec.Struct, frozen=True):
    """Metadata of a plan.

    children: metadata of each child; empty: none.
    loads:    which child loads a request in the background from now on.
    sends:    which children keep the blocks of an ended request until they have sent them.
    """

    children: list[bytes]
    loads: dict[str, int] = {}
    sends: dict[str, list[int]] = {}


class MultiConnector(SchedulerConnector):
    """Children are numbered in the order of the option `connectors`.

    One child loads a request: the one with the longest hit, the first on a tie. While one of them
    answers AskLater, the request waits as long as requests do, because that child may have the
    longest hit. A request that
    skips the prefix cache because of some children is loaded by one of those or not at all.
    """

    contract_version: ClassVar[int] = 2
    uses_shared_memory: ClassVar[bool] = True  # for the child that uses it, if there is one
    opens_nothing: ClassVar[bool] = True
    worker_half: ClassVar[str] = "longshore.connectors.multi.worker:MultiWorker"

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        for child in children_of(ConnectorConfig(options)):
            check_connector(child.name, child.options)

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        children = children_of(config)
        self.children = [
            load_scheduler_connector(child.name, replace(config, options=child.options))
            for child in children
        ]
        for child, connector in zip(children, self.children, strict=True):
            if not connector.is_combinable:
                raise ConfigError(
                    f"--kv-connector multi cannot contain {child.name}, which must be the only "
                    f"connector. Use --kv-connector {child.name}."
                )
        sharing = [
            child.name
            for child, connector in zip(children, self.children, strict=True)
            if connector.uses_shared_memory
        ]
        if len(sharing) > 1:
            raise ConfigError(
                f"--kv-connector multi cannot contain both {' and '.join(sharing)}: the memory "
                "that workers share is for one connector. Remove one of them."
            )
        self.supports_hma = all(child.supports_hma for child in self.children)
        self._swapping = next((child for child in self.children if child.can_swap), None)
        self.can_swap = self._swapping is not None
        self.needs_every_step = any(child.needs_every_step for child in self.children)
        chunks = [child.chunk_blocks for child in self.children if child.chunk_blocks]
        self.chunk_blocks = math.lcm(*chunks) if chunks else 0
        self.min_wait_s = max(child.min_wait_s for child in self.children)
        self.num_leasable_blocks = max(child.num_leasable_blocks for child in self.children)
        self._skipping: dict[str, set[int]] = {}  # children because of which a request skips hits
        # Which child has the hit of the last lookup, and whether it loads in the background.
        self._matched: dict[str, tuple[int, bool]] = {}
        self._loading: dict[str, int] = {}  # in the background
        self._new_loads: dict[str, int] = {}
        self._sending: dict[str, list[int]] = {}
        self._new_sends: dict[str, list[int]] = {}

    def bind_blocks(self, holds: BlockHolds) -> None:
        for child in self.children:
            child.bind_blocks(holds)

    @property
    def reads_ahead(self) -> bool:  # type: ignore[override]  # of the children
        return any(child.reads_ahead for child in self.children)

    @property
    def names_answers(self) -> bool:  # type: ignore[override]  # of the children
        return all(child.names_answers for child in self.children)

    def take_answered(self, now: float) -> list[str]:
        return [each for child in self.children for each in child.take_answered(now)]

    def on_new_request(self, request: RequestView) -> None:
        for child in self.children:
            child.on_new_request(request)

    def skips_prefix_cache(self, request: RequestView) -> bool:
        skipping = {
            index for index, child in enumerate(self.children) if child.skips_prefix_cache(request)
        }
        if skipping:
            self._skipping[request.request_id] = skipping
        return bool(skipping)

    # Loads

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        best = Matched(0)
        asks_later = False
        self._matched.pop(request.request_id, None)
        asked: Collection[int] = self._skipping.get(request.request_id, range(len(self.children)))
        for index in sorted(asked):
            match = self.children[index].get_num_new_matched_tokens(request, num_computed_tokens)
            if isinstance(match, AskLater):
                asks_later = True
            elif match.num_tokens > best.num_tokens:
                best = match
                self._matched[request.request_id] = index, match.is_async
        return AskLater() if asks_later and request.max_wait_s else best

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        index, is_async = self._matched.pop(request.request_id)
        if is_async:
            self._loading[request.request_id] = self._new_loads[request.request_id] = index
        self.children[index].update_state_after_alloc(request, block_ids, num_external_tokens)

    def release_transfers(self, transfer_ids: Sequence[str]) -> None:
        for child in self.children:
            child.release_transfers(transfer_ids)

    def load_abandoned(self, request_id: str) -> None:
        self.children[self._loading[request_id]].load_abandoned(request_id)

    def load_expired(self, request_id: str) -> None:
        self.children[self._loading[request_id]].load_expired(request_id)

    # Plans and reports

    def build_connector_meta(self, step: StepView) -> bytes:
        parts = [child.build_connector_meta(step) for child in self.children]
        if not (any(parts) or self._new_loads or self._new_sends):
            return b""
        commands = Commands(parts, self._new_loads, self._new_sends)
        self._new_loads, self._new_sends = {}, {}
        return msgspec.msgpack.encode(commands)

    @property
    def has_pending_work(self) -> bool:
        return bool(self._new_sends) or any(child.has_pending_work for child in self.children)

    def update_connector_output(self, output: ConnectorOutput) -> None:
        parts: list[list[bytes]] = [[] for _ in self.children]
        for metadata in output.metadata:
            of_children = msgspec.msgpack.decode(metadata, type=list[bytes])
            for part, of_child in zip(parts, of_children, strict=True):
                if of_child:
                    part.append(of_child)
        for index, (child, part) in enumerate(zip(self.children, parts, strict=True)):
            sent = [key for key in output.finished_sending if index in self._sending[key]]
            received = [key for key in output.finished_receiving if self._loading[key] == index]
            child.update_connector_output(
                replace(output, finished_sending=sent, finished_receiving=received, metadata=part)
            )
        for request_id in output.finished_sending:
            del self._sending[request_id]
        for request_id in output.finished_receiving:
            del self._loading[request_id]

    # Swaps: the first child that can

    def swap_size(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_computed_tokens: int
    ) -> SwapSize:
        assert self._swapping is not None
        return self._swapping.swap_size(request, block_ids, num_computed_tokens)

    def swap_out(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_computed_tokens: int
    ) -> bool:
        assert self._swapping is not None
        return self._swapping.swap_out(request, block_ids, num_computed_tokens)

    def release_swap(self, request_id: str) -> None:
        assert self._swapping is not None
        self._swapping.release_swap(request_id)

    # The end of requests

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        request_id = request.request_id
        self._matched.pop(request_id, None)
        self._skipping.pop(request_id, None)
        actions = [child.request_finished(request, block_ids) for child in self.children]
        sending = [index for index, action in enumerate(actions) if action.delay_free]
        delay_free = bool(sending) and any(map(len, block_ids))
        if delay_free:
            self._sending[request_id] = self._new_sends[request_id] = sending
        params: dict[str, Any] = {}
        for action in reversed(actions):  # of equal keys, the first child's
            params |= action.params or {}
        return FinishAction(delay_free, params or None)

    # The whole engine

    def take_events(self) -> list[KVEvent]:
        return [event for child in self.children for event in child.take_events()]

    def get_kv_connector_stats(self) -> ConnectorStats:
        stats = [child.get_kv_connector_stats() for child in self.children]
        queued: Counter[tuple[Medium, Medium]] = Counter()
        for each in stats:
            queued.update(each.queued_blocks)
        pulls = next((each.pulls for each in stats if each.pulls is not None), None)
        return ConnectorStats([tier for each in stats for tier in each.tiers], queued, pulls)

    def reset_cache(self) -> bool:
        return all([child.reset_cache() for child in self.children])

    def on_new_epoch(self, epoch: int) -> None:
        self._matched, self._loading, self._new_loads = {}, {}, {}
        self._sending, self._new_sends = {}, {}
        for child in self.children:
            child.on_new_epoch(epoch)

    def shutdown(self) -> None:
        with ExitStack() as stack:  # all of them, also if one raises
            for child in self.children:
                stack.callback(child.shutdown)
