"""A connector that makes another one misbehave, at random but reproducibly.

`FaultyConnector` wraps the scheduler half, `FaultyWorker` the worker half of the connector that its
options name. Everything it does is allowed by the contract in `connectors/base.py`, or is a failure
that the engine must survive. It is an ordinary connector, so it works in every process.
"""

import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

import msgspec

from longshore.connectors.base import (
    AskLater,
    ConnectorConfig,
    FinishAction,
    FinishedTransfers,
    KVCaches,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
    TransferQueue,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.registry import load_scheduler_connector, load_worker_connector
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import NULL_BLOCK

FAULTY_CONNECTOR: Final = "longshore.testing.faults:FaultyConnector"
"""Value of `--kv-connector`."""

POLL_INTERVAL_S: Final = 0.005
MAX_POLLS: Final = 8
"""A late report waits for at most so many calls of `get_finished`."""

DELAY_S: Final = 1.0
"""How long a hook takes that `Faults.switch` delays."""

NEVER_S: Final = 1e6

JUNK: Final = (0x3F, 0xFF)
"""Bytes of overwritten blocks: in float32 a plausible number, and one that is not finite."""


class InjectedFault(Exception):
    """Raised by a hook on purpose."""


class Faults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong; chances are between 0 and 1.

    ask_later:     chance that a lookup answers AskLater.
    partial:       chance that a match is cut to fewer blocks.
    failed_lookup: chance that a lookup raises.
    failed_load:   chance that blocks of a load are overwritten with junk and reported as failed.
    late:          chance that a report of the workers waits.
    duplicate:     chance that a report is repeated, together with one of an unknown request.
    unreported:    chance that the end of a background load is never reported, until the loads that
                   were not reported have `max_unreported_blocks` blocks.
    raise_in:      `FaultyConnector.HOOK` or `FaultyWorker.HOOK`, which raises from its call number
                   `raise_at` on.
    switch:        path of a file. Once it exists, the hook that it names is faulty once: its
                   content is `raise`, `hang` or `delay`, and FaultyConnector.HOOK or
                   FaultyWorker.HOOK. A hook that hangs never ends; a delay lasts `DELAY_S`. The
                   file is removed first.
    """

    ask_later: float = 0.0
    partial: float = 0.0
    failed_lookup: float = 0.0
    failed_load: float = 0.0
    late: float = 0.0
    duplicate: float = 0.0
    unreported: float = 0.0
    max_unreported_blocks: int = 0
    raise_in: str = ""
    raise_at: int = 1
    switch: str = ""


class FaultyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a FaultyConnector. connector, options: the wrapped connector, as in
    `--kv-connector` and `--kv-connector-config`."""

    connector: str
    options: dict[str, Any] = {}
    seed: int = 0
    faults: Faults = Faults()


class BegunLoad(msgspec.Struct, frozen=True, array_like=True):
    """A load. block_ids: the blocks that it fills; owned: these and all others that it holds."""

    request_id: str
    is_async: bool
    block_ids: list[int]
    owned: list[int]


class FaultyMetadata(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of a plan. wrapped: that of the wrapped connector."""

    wrapped: bytes
    loads: list[BegunLoad]


def faulty_options(config: ConnectorConfig) -> FaultyOptions:
    """Raises ConfigError."""
    try:
        return msgspec.convert(dict(config.options), FaultyOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--kv-connector-config of {FAULTY_CONNECTOR}: {error}") from None


class _Chance:
    """Draws the faults of one half, and counts the calls of its hooks."""

    def __init__(self, options: FaultyOptions, half: str, rank: int = 0) -> None:
        self.faults = options.faults
        self.random = Random(f"{options.seed} {half} {rank}")
        self.num_calls: Counter[str] = Counter()
        self._half = half

    def has(self, chance: float) -> bool:
        return self.random.random() < chance

    def called(self, hook: str) -> None:
        """A hook is called. Raises InjectedFault if it is the chosen one."""
        self.num_calls[hook] += 1
        faults = self.faults
        is_chosen = faults.raise_in == f"{self._half}.{hook}"
        if is_chosen and self.num_calls[hook] >= faults.raise_at:
            raise InjectedFault(f"call {self.num_calls[hook]} of {hook}")
        if faults.switch and os.path.exists(faults.switch):
            self._obey(Path(faults.switch), hook)

    def _obey(self, switch: Path, hook: str) -> None:
        try:
            what, _, name = switch.read_text().partition(" ")
            if name != f"{self._half}.{hook}":
                return
            switch.unlink()
        except FileNotFoundError:  # another rank was first
            return
        if what == "raise":
            raise InjectedFault(f"{hook}, which {switch} names")
        time.sleep(DELAY_S if what == "delay" else NEVER_S)

    def some(self, block_ids: Sequence[int]) -> list[int]:
        """Choose at least one of these blocks."""
        return self.random.sample(block_ids, self.random.randint(1, len(block_ids)))


def _counted(hook: str) -> Any:
    """A method that counts the call and calls the hook of the wrapped half."""

    def call(self: "FaultyConnector | FaultyWorker", *arguments: Any) -> Any:
        self._chance.called(hook)
        return getattr(self.wrapped, hook)(*arguments)

    call.__name__ = hook
    return call


def _counted_for_plan(hook: str) -> Any:
    """The same for a hook about a plan, if the plan is for the wrapped half, too."""

    def call(self: "FaultyWorker", metadata: "BoundPlan", *arguments: Any) -> None:
        self._chance.called(hook)
        if metadata.has_wrapped:
            getattr(self.wrapped, hook)(metadata.wrapped, *arguments)

    call.__name__ = hook
    return call


class FaultyConnector(SchedulerConnector):
    """The scheduler half. `num_calls` counts the calls of its hooks."""

    contract_version: ClassVar[int] = 2
    uses_shared_memory: ClassVar[bool] = True  # in case the wrapped connector does
    worker_half: ClassVar[str] = "longshore.testing.faults:FaultyWorker"

    bind_blocks = _counted("bind_blocks")
    on_new_request = _counted("on_new_request")
    skips_prefix_cache = _counted("skips_prefix_cache")
    update_connector_output = _counted("update_connector_output")
    load_abandoned = _counted("load_abandoned")
    load_expired = _counted("load_expired")
    release_transfers = _counted("release_transfers")
    swap_size = _counted("swap_size")
    swap_out = _counted("swap_out")
    release_swap = _counted("release_swap")
    take_events = _counted("take_events")
    get_kv_connector_stats = _counted("get_kv_connector_stats")
    reset_cache = _counted("reset_cache")

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        options = faulty_options(config)
        self._chance = _Chance(options, "FaultyConnector")
        self.wrapped = load_scheduler_connector(
            options.connector, replace(config, options=options.options)
        )
        self.supports_hma = self.wrapped.supports_hma
        self.can_swap = self.wrapped.can_swap
        self.needs_every_step = self.wrapped.needs_every_step
        self.reads_ahead = self.wrapped.reads_ahead
        self.chunk_blocks = self.wrapped.chunk_blocks
        self.min_wait_s = self.wrapped.min_wait_s
        self.names_answers = self.wrapped.names_answers
        self.num_leasable_blocks = self.wrapped.num_leasable_blocks
        self._matched: dict[str, tuple[int, bool]] = {}  # computed tokens, is_async
        self._put_off: list[str] = []  # requests that were told to ask later by this class alone
        self._loads: list[BegunLoad] = []

    @property
    def num_calls(self) -> Counter[str]:
        return self._chance.num_calls

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        chance, faults = self._chance, self._chance.faults
        chance.called("get_num_new_matched_tokens")
        if chance.has(faults.ask_later / 2):
            return self._ask_later(request)
        match = self.wrapped.get_num_new_matched_tokens(request, num_computed_tokens)
        if chance.has(faults.ask_later / 2):
            return self._ask_later(request)
        if chance.has(faults.failed_lookup):
            raise InjectedFault("a lookup")
        if not isinstance(match, Matched):
            return match
        # Where groups free skipped blocks, a load cannot end after any block.
        if self.config.num_groups == 1 and chance.has(faults.partial):
            num_blocks = chance.random.randint(0, match.num_tokens // self.config.block_size)
            match = replace(match, num_tokens=num_blocks * self.config.block_size)
        self._matched[request.request_id] = (num_computed_tokens, match.is_async)
        return match

    def _ask_later(self, request: RequestView) -> AskLater:
        if self.names_answers:
            self._put_off.append(request.request_id)
        return AskLater()

    def take_answered(self, now: float) -> list[str]:
        self._chance.called("take_answered")
        put_off, self._put_off = self._put_off, []
        return [*put_off, *self.wrapped.take_answered(now)]

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        self._chance.called("update_state_after_alloc")
        self.wrapped.update_state_after_alloc(request, block_ids, num_external_tokens)
        num_computed, is_async = self._matched.pop(request.request_id)
        targets: list[int] = []
        if len(block_ids) == 1:
            block_size = self.config.block_size
            last = math.ceil((num_computed + num_external_tokens) / block_size)
            targets = block_ids[0][num_computed // block_size : last].tolist()
        owned = [block_id for ids in block_ids for block_id in ids.tolist()]
        self._loads.append(BegunLoad(request.request_id, is_async, targets, owned))

    def build_connector_meta(self, step: StepView) -> bytes:
        self._chance.called("build_connector_meta")
        wrapped = self.wrapped.build_connector_meta(step)
        loads, self._loads = self._loads, []
        if not (wrapped or loads):
            return b""
        return msgspec.msgpack.encode(FaultyMetadata(wrapped, loads))

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        self._chance.called("request_finished")
        self._matched.pop(request.request_id, None)
        return self.wrapped.request_finished(request, block_ids)

    @property
    def has_pending_work(self) -> bool:
        self._chance.called("has_pending_work")
        return self.wrapped.has_pending_work

    def on_new_epoch(self, epoch: int) -> None:
        self._chance.called("on_new_epoch")
        self._matched.clear()
        self._loads.clear()
        self.wrapped.on_new_epoch(epoch)

    def shutdown(self) -> None:
        self.wrapped.shutdown()
        self._chance.called("shutdown")


@dataclass
class BoundPlan:
    """The decoded metadata of one plan.

    wrapped: that of the wrapped connector; it is not called for this plan if `has_wrapped` is
             False.
    failed:  blocks of synchronous loads that were overwritten.
    """

    loads: Sequence[BegunLoad]
    wrapped: Any = None
    has_wrapped: bool = False
    failed: list[int] = field(default_factory=list)


@dataclass
class _Report:
    """A report that waits for `num_polls` more calls of `get_finished`."""

    num_polls: int
    finished: FinishedTransfers
    metadata: bytes


class FaultyWorker(WorkerConnector[BoundPlan]):
    """The worker half.

    num_calls: counts the calls of its hooks.
    unreported_blocks, unreported_ids: blocks and request ids of loads whose end it has not
        reported, and never will.
    """

    contract_version: ClassVar[int] = 2

    handle_preemptions = _counted_for_plan("handle_preemptions")
    get_kv_connector_stats = _counted("get_kv_connector_stats")
    wait_for_layer_load = _counted_for_plan("wait_for_layer_load")
    save_kv_layer = _counted_for_plan("save_kv_layer")
    save_hidden_states = _counted_for_plan("save_hidden_states")
    wait_for_save = _counted_for_plan("wait_for_save")

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        options = faulty_options(config)
        self._chance = _Chance(options, "FaultyWorker", config.rank)
        self.wrapped = load_worker_connector(
            options.connector, replace(config, options=options.options)
        )
        self.has_layer_hooks = self.wrapped.has_layer_hooks
        self.has_hidden_states_hook = self.wrapped.has_hidden_states_hook
        self.stores_within_step = self.wrapped.stores_within_step
        self.poll_interval_s = self.wrapped.poll_interval_s
        if options.faults.late:
            self.poll_interval_s = POLL_INTERVAL_S
        self._loads: dict[str, BegunLoad] = {}  # in the background, by request id
        self._reports: deque[_Report] = deque()
        self._metadata = b""
        self.unreported_blocks: set[int] = set()
        self.unreported_ids: set[str] = set()
        self._kv_caches: KVCaches
        self._queue: TransferQueue

    @property
    def num_calls(self) -> Counter[str]:
        return self._chance.num_calls

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        self._chance.called("register_kv_caches")
        self._kv_caches = kv_caches
        self._queue = queues.open("faults")
        self.wrapped.register_kv_caches(kv_caches, queues)

    # On the loop thread

    def bind_connector_metadata(self, data: bytes) -> BoundPlan:
        self._chance.called("bind_connector_metadata")
        metadata = msgspec.msgpack.decode(data, type=FaultyMetadata)
        if not metadata.wrapped:
            return BoundPlan(metadata.loads)
        wrapped = self.wrapped.bind_connector_metadata(metadata.wrapped)
        return BoundPlan(metadata.loads, wrapped, has_wrapped=True)

    def start_load_kv(self, metadata: BoundPlan) -> None:
        self._chance.called("start_load_kv")
        self._loads |= {load.request_id: load for load in metadata.loads if load.is_async}
        if metadata.has_wrapped:
            self.wrapped.start_load_kv(metadata.wrapped)

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        self._chance.called("get_finished")
        finished = self._tampered(self.wrapped.get_finished(finished_request_ids))
        metadata = self.wrapped.build_connector_worker_meta()
        if finished.sent or finished.received or metadata:
            num_polls = 0
            if self._chance.has(self._chance.faults.late):
                num_polls = self._chance.random.randint(1, MAX_POLLS)
            self._reports.append(_Report(num_polls, finished, metadata))
        return self._next_report()

    def _next_report(self) -> FinishedTransfers:
        """The oldest report, if it has waited long enough. Their order does not change, because
        a connector may depend on it."""
        if self._reports and self._reports[0].num_polls == 0:
            report = self._reports.popleft()
            self._metadata = report.metadata
            return report.finished
        if self._reports:
            self._reports[0].num_polls -= 1
        return FinishedTransfers()

    def _tampered(self, finished: FinishedTransfers) -> FinishedTransfers:
        chance, faults = self._chance, self._chance.faults
        received, failed = [], list(finished.failed_block_ids)
        for request_id in finished.received:
            load = self._loads.pop(request_id)
            unreported = self.unreported_blocks.union(load.owned) - {NULL_BLOCK}
            if len(unreported) <= faults.max_unreported_blocks and chance.has(faults.unreported):
                self.unreported_blocks = unreported
                self.unreported_ids.add(request_id)
                continue
            if load.block_ids and chance.has(faults.failed_load):
                failed += (overwritten := chance.some(load.block_ids))
                self._queue.submit(partial(self._overwrite, overwritten)).wait()
            received.append(request_id)
        sent = list(finished.sent)
        if (received or sent) and chance.has(faults.duplicate):
            sent, received = [*sent, *sent, "unknown"], [*received, *received, "unknown"]
        return FinishedTransfers(sent, received, failed)

    def _overwrite(self, block_ids: Iterable[int]) -> None:
        (group,) = self._kv_caches.groups
        for block_id in block_ids:
            group.blocks[block_id].fill_(self._chance.random.choice(JUNK))

    def build_connector_worker_meta(self) -> bytes:
        self._chance.called("build_connector_worker_meta")
        metadata, self._metadata = self._metadata, b""
        return metadata

    # On the compute queue

    def wait_for_load(self, metadata: BoundPlan) -> None:
        self._chance.called("wait_for_load")
        if metadata.has_wrapped:
            self.wrapped.wait_for_load(metadata.wrapped)
        chance = self._chance
        for load in metadata.loads:
            if load.block_ids and not load.is_async and chance.has(chance.faults.failed_load):
                overwritten = chance.some(load.block_ids)
                self._overwrite(overwritten)
                metadata.failed += overwritten

    def get_block_ids_with_load_errors(self, metadata: BoundPlan) -> Sequence[int]:
        self._chance.called("get_block_ids_with_load_errors")
        failed = list(metadata.failed)
        if metadata.has_wrapped:
            failed += self.wrapped.get_block_ids_with_load_errors(metadata.wrapped)
        return failed

    def shutdown(self) -> None:
        self.wrapped.shutdown()
        self._chance.called("shutdown")
