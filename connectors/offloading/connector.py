"""The scheduler half of the offloading connector: when blocks are loaded and stored.

Where they are kept is the spec's matter (`spec.py`). Loads are asynchronous. Those storable blocks
that the manager wants are copied out, and are held until the copy has ended. Cost per step follows
the blocks that can be stored in it. Follows the offloading connector of vLLM.
"""

import logging
import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np

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
from longshore.connectors.base.groups import BlockRows
from longshore.connectors.offloading.jobs import Jobs
from longshore.connectors.offloading.messages import (
    Commands,
    Ended,
    LoadJob,
    Report,
    block_list,
)
from longshore.connectors.offloading.options import check_options, read_options
from longshore.connectors.offloading.spec import HintedKeys, load_spec
from longshore.connectors.offloading.stores import Stores
from longshore.connectors.offloading.swap import SwappedRequest, Swaps
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.events import KVEvent, Medium
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.requests import CacheHint, Tenant

logger = logging.getLogger(__name__)


class _NotKnownYet(Exception):
    """A tier does not know its content yet."""


@dataclass(slots=True)
class _Load:
    keys: list[bytes]
    failed: set[int] = field(default_factory=set)
    is_awaited: bool = True


@dataclass(frozen=True, slots=True)
class _EndedRequest:
    """A request that has ended. keys: of its blocks, by group, without those of states in pages.
    states: the keys of the pages of its states, with the token before which the state ends."""

    keys: list[list[bytes]]
    states: list[tuple[int, bytes]]
    finished_s: float
    hint: CacheHint | None
    tenant: Tenant


class OffloadingConnector(SchedulerConnector):
    """Plans loads and stores for the spec's manager. See `options.OffloadingOptions`."""

    contract_version: ClassVar[int] = 2
    supports_hma = True
    has_verify_kv = True
    uses_shared_memory = True
    opens_nothing: ClassVar[bool] = True
    worker_half: ClassVar[str] = "longshore.connectors.offloading.worker:OffloadingWorker"

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        check_options(options)

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        spec = load_spec(config, read_options(config.options))
        self.can_swap = spec.can_swap
        self._groups = spec.groups
        self._manager = spec.make_manager()
        self.reads_ahead = spec.has_lower_tiers
        self._factor = self.chunk_blocks = spec.groups.factor
        self._jobs: Jobs
        self._stores: Stores
        self._swaps: Swaps
        self._begin()

    def _begin(self) -> None:
        self._touched: set[str] = set()
        self._states: dict[str, list[tuple[int, bytes]]] = {}  # of `_EndedRequest`
        # At the last match, by request: its local tokens, and the swap that it is loaded from.
        self._found: dict[str, tuple[int, SwappedRequest | None]] = {}
        self._loads: dict[str, _Load] = {}
        self._loading: Counter[bytes] = Counter()
        self._ended: list[_EndedRequest] = []  # since the last plan
        # With the last step whose blocks are still to be stored.
        self._unsettled: deque[tuple[int, _EndedRequest]] = deque()
        self._new_loads: list[LoadJob] = []

    def bind_blocks(self, holds: BlockHolds) -> None:
        self._jobs = Jobs(holds, self.config.num_ranks)
        self._stores = Stores(self._groups, self._manager, self._jobs, self.config.num_blocks)
        self._swaps = Swaps(self._groups, self._manager, self._jobs)

    def on_new_request(self, request: RequestView) -> None:
        if not (self.reads_ahead and request.block_hashes):
            return
        self._touch(request)
        for group in self._groups.groups:
            if group.needs_all:
                num_blocks = len(request.block_hashes) // group.hash_step
                keys = group.keys(request.block_hashes, 0, num_blocks)
                self._manager.read_ahead(request.request_id, keys)

    # Loads

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        self._touch(request)
        if any(num_computed_tokens % spec.block_size for spec in self.config.specs):
            return Matched(0)  # its last block is partly computed, and a load would overwrite it
        try:
            end = self._loadable(request, num_computed_tokens)
        except _NotKnownYet:
            return AskLater()
        swapped = self._swaps.get(request.request_id)
        if swapped is not None and end < swapped.num_tokens:
            can_load = self._manager.lookup_swap(swapped.keys_after(num_computed_tokens))
            if can_load is None:
                return AskLater()
            end = swapped.num_tokens if can_load else end
        if end <= num_computed_tokens:
            return Matched(0)
        if self._loading and self._is_loading(request, num_computed_tokens, end):
            return AskLater()  # when that load has ended, the blocks are in the prefix cache
        is_swapped = swapped is not None and end == swapped.num_tokens
        self._found[request.request_id] = num_computed_tokens, swapped if is_swapped else None
        return Matched(end - num_computed_tokens, is_async=True)

    def _loadable(self, request: RequestView, num_computed: int) -> int:
        """The number of leading tokens after a load. A load that the tiers have no room for begins
        with fewer blocks."""
        groups, hashes = self._groups, request.block_hashes
        waiting_s = request.waiting_s if request.max_wait_s else math.inf
        limit = request.num_tokens
        while True:
            end = groups.longest_hit(
                hashes,
                request.num_tokens,
                num_computed,
                partial(self._count_leading, waiting_s),
                limit,
            )
            if end <= num_computed:
                return end
            keys = groups.needed_keys(hashes, num_computed, end)
            num_too_many = self._manager.num_without_room(keys)
            if not num_too_many:
                return end
            limit = end - max(1, num_too_many // groups.keys_per_border) * groups.border

    def _touch(self, request: RequestView) -> None:
        """Count the use of all blocks of the request, once: it may be looked up in every step."""
        if request.request_id in self._touched:
            return
        self._touched.add(request.request_id)
        for group in self._groups.of_tokens:
            num_blocks = len(request.block_hashes) // group.hash_step
            self._manager.touch(group.keys(request.block_hashes, 0, num_blocks))

    def _count_leading(self, waiting_s: float, keys: list[bytes]) -> int:
        num_keys = self._manager.lookup(keys, waiting_s)
        if num_keys is None:
            raise _NotKnownYet
        return num_keys

    def _is_loading(self, request: RequestView, first_token: int, end: int) -> bool:
        return any(
            not self._loading.keys().isdisjoint(
                group.keys(
                    request.block_hashes, first_token // group.block_size, end // group.block_size
                )
            )
            for group in self._groups.of_tokens or self._groups.groups
        )

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        first_token, swapped = self._found.pop(request.request_id)
        self._manager.end_read_ahead(request.request_id, is_over=False)
        end = first_token + num_external_tokens
        if swapped is not None and end != swapped.num_tokens:
            swapped = None
        keys: list[bytes] = []
        rows: list[BlockRows] = []
        groups = bytearray()
        for group, table in zip(self._groups.groups, block_ids, strict=True):
            first, last = group.block_range(first_token, end)
            ids = group.rows(table, first, last, end)
            if not group.num_pages:
                local = first_token // group.spec.block_size - first * self._factor
                ids[:1, :local] = NULL_BLOCK
            needed = (ids != NULL_BLOCK).any(axis=1)
            rows.append(ids[needed])
            if swapped is None:
                all_keys = group.keys(request.block_hashes, first, last)
            else:
                all_keys = swapped.groups[group.number].between(first, last)
            keys += [key for key, is_needed in zip(all_keys, needed, strict=True) if is_needed]
            groups += bytes((group.number,)) * int(needed.sum())
        ids = np.concatenate(rows)
        prepared = self._manager.prepare_load(keys)
        num_keys = prepared.num_keys
        missing = ids[num_keys:]
        self._loads[request.request_id] = _Load(keys[:num_keys])
        self._loading.update(keys[:num_keys])
        self._new_loads.append(
            LoadJob(
                request.request_id,
                block_list(keys[:num_keys], bytes(groups[:num_keys]), ids[:num_keys]),
                prepared.tier_data,
                missing[missing != NULL_BLOCK].tolist(),
                request.max_wait_s,
            )
        )

    def load_abandoned(self, request_id: str) -> None:
        self._stop_waiting(self._loads[request_id])
        self._manager.load_abandoned(self._loads[request_id].keys)

    def load_expired(self, request_id: str) -> None:
        self._stop_waiting(self._loads[request_id])
        self._manager.load_expired(self._loads[request_id].keys)

    def _stop_waiting(self, load: _Load) -> None:
        """No request waits any more until this load has put its blocks into the prefix cache."""
        if load.is_awaited:
            load.is_awaited = False
            self._loading.subtract(load.keys)
            self._loading = +self._loading

    # Stores

    def build_connector_meta(self, step: StepView) -> bytes:
        self._stores.follow_requests(step)
        for request in step.admitted:
            self._manager.end_read_ahead(request.request_id, is_over=False)
        self._stores.begin(step)
        if step.storable:
            self._note_states(step)
        if self._ended:
            self._unsettled += ((step.unanswered_step, ended) for ended in self._ended)
            self._ended.clear()
        while self._unsettled and self._unsettled[0][0] <= step.answered_step:
            self._settle(self._unsettled.popleft()[1])
        tier_jobs = self._manager.take_jobs(self._jobs.begin_tier_job)
        self._manager.end_step()
        if not (self._new_loads or self._jobs.has_new_stores or tier_jobs):
            return b""
        commands = Commands(self._new_loads, self._jobs.take_stores(), tier_jobs)
        self._new_loads = []
        return msgspec.msgpack.encode(commands)

    def _note_states(self, step: StepView) -> None:
        for blocks in step.storable:
            group = self._groups.groups[blocks.group]
            if group.num_pages and blocks.request_id in self._touched:
                states = self._states.setdefault(blocks.request_id, [])
                suffix, start = bytes((group.number,)), blocks.positions[0] * group.block_size
                states += [(start, page_hash + suffix) for page_hash in blocks.block_hashes]

    def _settle(self, ended: _EndedRequest) -> None:
        """The blocks of an ended request are in their tiers, or on their way there."""
        for keys in (*ended.keys, [key for _, key in ended.states]):
            self._manager.refresh(keys)
        self._manager.expire(ended.finished_s)
        if ended.hint is not None:
            of_tokens = zip(self._groups.of_tokens, ended.keys, strict=True)
            placed = ended.states + [
                (index * group.block_size, key)
                for group, keys in of_tokens
                for index, key in enumerate(keys)
            ]
            placed.sort()
            starts = [start for start, _ in placed]
            prefixes = [bisect_left(starts, part.num_tokens) for part in ended.hint.prefixes]
            keys = [key for _, key in placed]
            self._manager.retain(
                HintedKeys(keys, prefixes, ended.hint, ended.tenant, ended.finished_s)
            )

    # Swapped requests

    def swap_size(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_computed_tokens: int
    ) -> SwapSize:
        try:
            found = self._groups.longest_hit(
                request.block_hashes,
                num_computed_tokens,
                0,
                partial(self._count_leading, math.inf),  # what can be loaded without waiting
            )
        except _NotKnownYet:
            found = 0
        num_loading = sum(len(load.keys) for load in self._loads.values())
        rank_bytes = max(self.config.rank_block_bytes)
        return self._swaps.size(request, num_computed_tokens, found, num_loading, rank_bytes)

    def swap_out(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_computed_tokens: int
    ) -> bool:
        is_out = self._swaps.out(request, block_ids, num_computed_tokens)
        if is_out:  # with this, all of its blocks are stored
            self._stores.gaps.close(request.request_id)
        return is_out

    def release_swap(self, request_id: str) -> None:
        self._swaps.release(request_id)

    @property
    def has_pending_work(self) -> bool:
        has_new = self._new_loads or self._jobs.has_new_stores
        return bool(has_new or self._stores.has_work or self._manager.has_jobs)

    # Reports

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for metadata in output.metadata:
            report = msgspec.msgpack.decode(metadata, type=Report)
            for message in report.tier_data:
                self._manager.receive(output.rank, message)
            for ended in report.jobs:
                self._job_ended(ended, output.rank)
            for request_id, failed in report.failed_loads:
                if request_id in self._loads:
                    self._loads[request_id].failed.update(failed)
        for request_id in output.finished_receiving:
            load = self._loads.pop(request_id, None)
            if load is not None:
                self._stop_waiting(load)
                failed_keys = [load.keys[index] for index in sorted(load.failed)]
                self._manager.complete_load(load.keys, failed_keys)
                self._stores.room_was_freed()

    def _job_ended(self, ended: Ended, rank: int) -> None:
        job = self._jobs.ended(ended, rank)
        if job is None:
            return
        self._stores.room_was_freed()
        if job.hold_id:
            self._manager.complete_store(job.keys, job.failed_keys)
        else:
            self._manager.job_ended(ended.job_id, sorted(job.failed))

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        keys = [
            group.keys(request.block_hashes, 0, len(request.block_hashes) // group.hash_step)
            for group in self._groups.of_tokens
        ]
        states = self._states.pop(request.request_id, [])
        hint, tenant = request.cache_hint, request.tenant
        self._ended.append(_EndedRequest(keys, states, request.finished_s, hint, tenant))
        self._stores.gaps.request_finished(request.request_id)
        self._manager.end_read_ahead(request.request_id, is_over=True)
        self._touched.discard(request.request_id)
        self._found.pop(request.request_id, None)
        return FinishAction()

    def get_kv_connector_stats(self) -> ConnectorStats:
        stats = self._manager.stats()
        first, *others = stats.tiers
        num_dropped = first.num_dropped_blocks + self._stores.num_dropped
        first = msgspec.structs.replace(first, num_dropped_blocks=num_dropped)
        num_loading = sum(len(load.keys) for load in self._loads.values())
        queued: dict[tuple[Medium, Medium], int] = {
            ("GPU", first.medium): self._jobs.num_stored_keys,
            (first.medium, "GPU"): num_loading,
        }
        return ConnectorStats([first, *others], queued | dict(stats.queued_blocks))

    def take_events(self) -> list[KVEvent]:
        return self._manager.take_events()

    def reset_cache(self) -> bool:
        if self._loads or self._jobs or not self._manager.reset():
            logger.warning(
                "the offload tiers were not emptied, because %d loads and %d stores and copies "
                "between tiers are in progress; try again when they have ended",
                len(self._loads),
                len(self._jobs),
            )
            return False
        return True

    def on_new_epoch(self, epoch: int) -> None:
        self._begin()
        for part in (self._jobs, self._stores, self._swaps, self._manager):
            part.begin_epoch()

    def check(self) -> None:
        """Raise LongshoreError if an invariant is violated. For tests of idle engines."""
        self._manager.check()
        if self._loads or self._loading or self._jobs or self._jobs.num_storing:
            raise LongshoreError("the offloading connector has transfers in an idle engine")
        if self._swaps:
            raise LongshoreError("the offloading connector has swapped requests in an idle engine")
