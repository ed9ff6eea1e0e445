"""The connector, and the blocks that its transfers own: loads in the background, sends of ended
requests, and blocks that the connector holds.

A transfer owns a reference to each of its blocks from its plan until its end is confirmed. A
request that ends, is preempted or stops waiting releases only its own. A deadline ends the waiting,
not the ownership: the blocks stay in quarantine until every rank has reported the end.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from longshore.connectors.base import (
    AskLater,
    ConnectorOutput,
    FinishAction,
    Matched,
    RequestView,
    SchedulerConnector,
)
from longshore.protocol.arrays import EMPTY_INT32, Int32Array
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import TransferReport
from longshore.protocol.statistics import BlockState
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.request import Request

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Transfer:
    """A load or a send, until all ranks have reported its end.

    request: waits for it; None for a send, or a load in quarantine.
    num_tokens, deadline, order: of a load, see `begin_load`.
    failed:  blocks that the load failed to fill.
    invalid: blocks before the loaded ones whose KV turned out to be wrong.
    """

    blocks: HeldBlocks
    request: Request | None = None
    num_tokens: int = 0
    deadline: float = 0.0
    order: int = 0
    ranks_done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load that all ranks have reported, and whose request waits for it. The request owns
    `blocks` now.

    num_good_tokens: leading tokens whose KV is valid; `is_whole` if nothing failed.
    unwritten_block_ids: blocks that the load did not write.
    """

    request: Request
    blocks: HeldBlocks
    num_good_tokens: int
    unwritten_block_ids: Sequence[int]
    is_whole: bool
    order: int


class Transfers:
    """Loads and sends by request id, held blocks by number.

    num_ranks: each rank reports every transfer once.
    num_bad_reports: reports of unknown or already reported transfers, which are ignored.
    num_loading_blocks: blocks of loads that a request waits for.
    num_queried_tokens, num_hit_tokens: tokens looked up in the connector, and hits.
    """

    def __init__(
        self, connector: SchedulerConnector, kv_cache: KVCacheManager, *, num_ranks: int
    ) -> None:
        self.connector = connector
        self._kv_cache = kv_cache
        self._num_ranks = num_ranks
        self._loads: dict[str, _Transfer] = {}
        self._sends: dict[str, _Transfer] = {}
        self._holds: dict[int, HeldBlocks] = {}
        self._last_hold_id = 0
        self.num_bad_reports = 0
        self.num_loading_blocks = 0
        self.num_queried_tokens = self.num_hit_tokens = 0
        connector.bind_blocks(self)

    # Hooks about one request

    def added(self, request: Request) -> None:
        """A request was queued."""
        self.connector.on_new_request(view_of(request))

    def match(self, request: Request, num_local: int) -> Matched | AskLater:
        """What the connector can load after the first `num_local` tokens."""
        match = self.connector.get_num_new_matched_tokens(view_of(request), num_local)
        if isinstance(match, Matched) and match.num_tokens < 0:
            raise ValueError(f"the connector matched {match.num_tokens} tokens")
        return match

    def allocated(
        self, request: Request, block_ids: tuple[Int32Array, ...], num_external: int
    ) -> None:
        """The request got blocks for tokens that the connector loads."""
        self.connector.update_state_after_alloc(view_of(request), block_ids, num_external)

    def count_lookup(self, request: Request, num_local: int, num_external: int) -> None:
        """The request is admitted or begins to load, with these numbers of hit tokens."""
        self.num_queried_tokens += len(request.token_ids) - num_local
        self.num_hit_tokens += num_external
        request.num_external_tokens = num_external

    def finish(self, request: Request, blocks: HeldBlocks | None) -> FinishAction:
        """The request ends with these blocks. A send may take them over."""
        block_ids = (EMPTY_INT32,) * self._kv_cache.num_groups
        if blocks is not None:
            block_ids = blocks.block_ids
        action = self.connector.request_finished(view_of(request), block_ids)
        if action.delay_free and blocks is not None:
            self._sends[request.request_id] = _Transfer(blocks)
        return action

    # Loads

    def begin_load(
        self,
        request: Request,
        blocks: HeldBlocks,
        *,
        num_tokens: int,
        deadline: float,
        order: int,
    ) -> None:
        """A load fills `blocks` up to `num_tokens` tokens while the request waits."""
        load = _Transfer(blocks, request, num_tokens, deadline, order)
        self._loads[request.request_id] = load
        self.num_loading_blocks += blocks.num_blocks

    def abandon_load(self, request: Request) -> None:
        """The request no longer waits; the blocks of its load are put into quarantine."""
        load = self._loads[request.request_id]
        load.request = None
        self.num_loading_blocks -= load.blocks.num_blocks
        self.connector.load_abandoned(request.request_id)

    def expired(self, now: float) -> list[Request]:
        """Requests whose load has passed its deadline."""
        return [
            load.request
            for load in self._loads.values()
            if load.request is not None and load.deadline <= now
        ]

    def deadline(self, request: Request) -> float:
        """When the request stops waiting for its load."""
        return self._loads[request.request_id].deadline

    # What ranks report

    def apply(self, report: TransferReport) -> tuple[ConnectorOutput, list[EndedLoad]]:
        """Apply a report. Returns the transfers that have ended on all ranks, for the connector,
        and the ended loads that requests wait for."""
        sent, received, ended = [], [], []
        if len(report.failed_block_ids):
            failed = set(report.failed_block_ids.tolist())
            for load in self._loads.values():
                load.failed |= failed & load.blocks.ids()
        for request_id in report.finished_receiving:
            load_over = self._done(self._loads, request_id, report.rank)
            if load_over is None:
                continue
            received.append(request_id)
            if load_over.request is None:
                self._kv_cache.release(load_over.blocks)
            else:
                ended.append(self._ended(load_over.request, load_over))
        for request_id in report.finished_sending:
            send = self._done(self._sends, request_id, report.rank)
            if send is not None:
                sent.append(request_id)
                self._kv_cache.release(send.blocks)
        output = ConnectorOutput(
            finished_sending=sent,
            finished_receiving=received,
            failed_block_ids=report.failed_block_ids,
            metadata=(report.connector_metadata,) if report.connector_metadata else (),
        )
        return output, ended

    def note_invalid(self, block_ids: Int32Array) -> None:
        """These blocks hold wrong KV; they may precede blocks that are being loaded."""
        invalid = set(block_ids.tolist())
        for load in self._loads.values():
            load.invalid |= invalid & load.blocks.ids()

    def _done(
        self, transfers: dict[str, _Transfer], request_id: str, rank: int
    ) -> _Transfer | None:
        """The transfer, if this report is the last of all ranks."""
        transfer = transfers.get(request_id)
        if transfer is None or not 0 <= rank < self._num_ranks or rank in transfer.ranks_done:
            self.num_bad_reports += 1
            about = fields(request_id=request_id, rank=rank)
            logger.warning("rank %d reported an unknown or duplicate transfer", rank, extra=about)
            return None
        transfer.ranks_done.add(rank)
        if len(transfer.ranks_done) < self._num_ranks:
            return None
        return transfers.pop(request_id)

    def _ended(self, request: Request, load: _Transfer) -> EndedLoad:
        self.num_loading_blocks -= load.blocks.num_blocks
        num_good = load.num_tokens
        block_sizes = self._kv_cache.block_sizes
        for block_ids, block_size in zip(load.blocks.block_ids, block_sizes, strict=True):
            for index, block_id in enumerate(block_ids.tolist()):
                if block_id in load.failed or block_id in load.invalid:
                    num_good = min(num_good, index * block_size)
                    break
        blocks, unwritten = load.blocks, load.failed
        if self._kv_cache.frees_skipped and num_good < load.num_tokens:
            # Not every number of loaded tokens is one to resume after, and there are no blocks to
            # compute tokens in where nothing was loaded.
            num_good = self._kv_cache.resume_point(blocks.block_ids, num_good)
            blocks, rest = self._kv_cache.cut(blocks, num_good)
            self._kv_cache.release(rest)
            unwritten = unwritten & blocks.ids()
        return EndedLoad(request, blocks, num_good, sorted(unwritten), not load.failed, load.order)

    # `BlockHolds` of the connector contract

    def hold(self, block_ids: Sequence[int]) -> int:
        """See `BlockHolds.hold`."""
        self._last_hold_id += 1
        self._holds[self._last_hold_id] = self._kv_cache.hold(block_ids)
        return self._last_hold_id

    def release(self, hold_id: int) -> None:
        """See `BlockHolds.release`."""
        self._kv_cache.release(self._holds.pop(hold_id))

    # All of them

    def has(self, request_id: str) -> bool:
        """Whether a transfer of this request id is under way."""
        return request_id in self._loads or request_id in self._sends

    def __len__(self) -> int:
        return len(self._loads) + len(self._sends) + len(self._holds)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of abandoned loads that have not ended."""
        return sum(load.blocks.num_blocks for load in self._loads.values() if load.request is None)

    def owners(self) -> Iterator[tuple[BlockState, str, HeldBlocks]]:
        """The blocks of each transfer, with their state and the id of the request that began it
        ("" for blocks that the connector holds)."""
        for request_id, load in self._loads.items():
            is_awaited = load.request is not None
            state = BlockState.TRANSFER if is_awaited else BlockState.QUARANTINED
            yield state, request_id, load.blocks
        for request_id, send in self._sends.items():
            yield BlockState.TRANSFER, request_id, send.blocks
        for blocks in self._holds.values():
            yield BlockState.TRANSFER, "", blocks

    def begin_epoch(self, epoch: int) -> None:
        """A new epoch has no transfers."""
        self._loads, self._sends, self._holds = {}, {}, {}
        self.num_loading_blocks = 0
        self.connector.on_new_epoch(epoch)


def view_of(request: Request) -> RequestView:
    """A connector's view of a request that does not run."""
    token_ids = request.token_ids.view()
    token_ids.setflags(write=False)
    return RequestView(
        request_id=request.request_id,
        token_ids=token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        block_hashes=request.block_hashes,
        kv_transfer_params=request.kv_transfer_params,
        cache_salt=request.cache_salt,
        lora_name=request.lora_name,
        job_id=request.job_id,
    )
