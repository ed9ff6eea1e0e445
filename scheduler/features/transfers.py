"""Blocks that transfers own: loads in the background, sends of ended requests, connectors' holds.

A transfer holds a reference to each of its blocks from plan to confirmed end. A request that ends,
is preempted or stops waiting drops only its own; a deadline ends the waiting, never the ownership:
the blocks stay in quarantine until every rank has reported the end.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from longshore.protocol.arrays import Int32Array, int32_array
from longshore.protocol.logs.records import fields
from longshore.protocol.outputs import TransferReport
from longshore.protocol.statistics import BlockState
from longshore.scheduler.kv_cache.manager import HeldBlocks, KVCacheManager
from longshore.scheduler.request import Request
from longshore.scheduler.step.in_flight import StepsInFlight

logger = logging.getLogger(__name__)

_NO_DEADLINE: Final = float("inf")


@dataclass(slots=True)
class _Transfer:
    """`request` is None once nobody waits for it (a load in quarantine) or ever did (a send)."""

    held: HeldBlocks
    request: Request | None = None
    num_tokens: int = 0
    deadline: float = _NO_DEADLINE
    ranks_done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load that all ranks have reported, for a request that waits. `held` is the request's now.

    num_good_tokens: leading tokens whose KV is in place; `is_whole` if that is all it was to bring.
    """

    request: Request
    held: HeldBlocks
    num_good_tokens: int
    unwritten: Int32Array
    is_whole: bool


class Transfers:
    """Loads and sends by request id, holds by number.

    num_ranks: all of them report every transfer once.
    num_bad_reports: of unknown transfers, or said twice by one rank; ignored.
    """

    def __init__(
        self, kv_cache: KVCacheManager, in_flight: StepsInFlight, *, num_ranks: int
    ) -> None:
        self._kv_cache = kv_cache
        self._in_flight = in_flight
        self._num_ranks = num_ranks
        self._loads: dict[str, _Transfer] = {}
        self._sends: dict[str, _Transfer] = {}
        self._holds: dict[int, HeldBlocks] = {}
        self._last_hold_id = 0
        self.num_bad_reports = 0
        self.num_loading_blocks = 0

    # Loads

    def begin_load(
        self, request: Request, held: HeldBlocks, *, num_tokens: int, deadline: float
    ) -> None:
        """`held` are being filled up to `num_tokens` tokens while the request waits."""
        self._loads[request.request_id] = _Transfer(held, request, num_tokens, deadline)
        self.num_loading_blocks += num_blocks_of(held)

    def abandon_load(self, request: Request) -> None:
        """Nobody waits for it any more; its blocks go into quarantine."""
        load = self._loads[request.request_id]
        load.request = None
        load.deadline = _NO_DEADLINE
        self.num_loading_blocks -= num_blocks_of(load.held)

    def expired(self, now: float) -> list[Request]:
        """Requests whose load has passed its deadline."""
        if not self._loads:
            return []
        return [
            load.request
            for load in self._loads.values()
            if load.request is not None and load.deadline <= now
        ]

    def deadline(self, request: Request) -> float:
        """When the request stops waiting for its load."""
        return self._loads[request.request_id].deadline

    # Sends

    def begin_send(self, request_id: str, held: HeldBlocks) -> None:
        """An ended request's blocks stay until they have been read."""
        self._sends[request_id] = _Transfer(held)

    # What ranks report

    def apply(self, report: TransferReport) -> tuple[list[str], list[str], list[EndedLoad]]:
        """(sends over, loads over, loads over that somebody waits for): what ended on all ranks."""
        sent, received, ended = [], [], []
        self._note_failed(report.failed_block_ids)
        for request_id in report.finished_receiving:
            load_over = self._done(self._loads, request_id, report.rank)
            if load_over is None:
                continue
            received.append(request_id)
            if load_over.request is None:
                self._kv_cache.release(load_over.held)
            else:
                ended.append(self._ended(load_over.request, load_over))
        for request_id in report.finished_sending:
            send = self._done(self._sends, request_id, report.rank)
            if send is not None:
                sent.append(request_id)
                self._kv_cache.release(send.held)
        return sent, received, ended

    def note_invalid(self, block_ids: Int32Array) -> None:
        """These blocks hold wrong KV; a load may have begun behind some of them."""
        invalid = set(block_ids.tolist())
        for load in self._loads.values():
            load.invalid |= invalid & _ids(load.held)

    def _note_failed(self, block_ids: Int32Array) -> None:
        if len(block_ids):
            failed = set(block_ids.tolist())
            for load in self._loads.values():
                load.failed |= failed & _ids(load.held)

    def _done(
        self, transfers: dict[str, _Transfer], request_id: str, rank: int
    ) -> _Transfer | None:
        transfer = transfers.get(request_id)
        if transfer is None or not 0 <= rank < self._num_ranks or rank in transfer.ranks_done:
            self.num_bad_reports += 1
            about = fields(request_id=request_id, rank=rank)
            logger.warning("a rank reports a transfer that it has not", extra=about)
            return None
        transfer.ranks_done.add(rank)
        if len(transfer.ranks_done) < self._num_ranks:
            return None
        return transfers.pop(request_id)

    def _ended(self, request: Request, load: _Transfer) -> EndedLoad:
        block_sizes = self._kv_cache.block_sizes
        num_good = load.num_tokens
        for block_ids, block_size in zip(load.held.block_ids, block_sizes, strict=True):
            for index, block_id in enumerate(block_ids.tolist()):
                if block_id in load.failed or block_id in load.invalid:
                    num_good = min(num_good, index * block_size)
                    break
        held, unwritten = load.held, load.failed
        if self._kv_cache.frees_skipped and num_good < load.num_tokens:
            # Not every length that was loaded is one to go on from, nor are there blocks to
            # compute the rest into where none was loaded.
            num_good = self._kv_cache.resume_point(held.block_ids, num_good)
            held, rest = self._kv_cache.cut(held, num_good)
            self.num_loading_blocks -= num_blocks_of(rest)
            self._kv_cache.release(rest)
            unwritten = unwritten & _ids(held)
        return EndedLoad(request, held, num_good, int32_array(sorted(unwritten)), not load.failed)

    # Holds: `BlockHolder` of the connector contract

    def hold(self, block_ids: Sequence[int]) -> int:
        """See `BlockHolder.hold`."""
        self._last_hold_id += 1
        self._holds[self._last_hold_id] = self._kv_cache.hold(block_ids)
        return self._last_hold_id

    def release(self, hold_id: int) -> None:
        """See `BlockHolder.release`."""
        self._kv_cache.release(self._holds.pop(hold_id))

    # All of them

    def has(self, request_id: str) -> bool:
        """Whether a transfer of this request id is under way."""
        return request_id in self._loads or request_id in self._sends

    def __len__(self) -> int:
        return len(self._loads) + len(self._sends) + len(self._holds)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of loads that nobody waits for."""
        return sum(
            num_blocks_of(load.held) for load in self._loads.values() if load.request is None
        )

    def held(self) -> Iterator[HeldBlocks]:
        """What transfers hold."""
        for transfers in (self._loads, self._sends):
            for transfer in transfers.values():
                yield transfer.held
        yield from self._holds.values()

    def holdings(self) -> Iterator[tuple[BlockState, str, HeldBlocks]]:
        """The same, with what it is held for and the id of the request that began it; a hold has
        none."""
        for request_id, load in self._loads.items():
            is_awaited = load.request is not None
            state = BlockState.TRANSFER if is_awaited else BlockState.QUARANTINED
            yield state, request_id, load.held
        for request_id, send in self._sends.items():
            yield BlockState.TRANSFER, request_id, send.held
        for held in self._holds.values():
            yield BlockState.TRANSFER, "", held

    def reset(self) -> None:
        """A new epoch has no transfers."""
        self._loads, self._sends, self._holds = {}, {}, {}
        self.num_loading_blocks = 0


def num_blocks_of(held: HeldBlocks) -> int:
    """Blocks of all groups."""
    return sum(map(len, held.block_ids))


def _ids(held: HeldBlocks) -> set[int]:
    return set(np.concatenate(held.block_ids).tolist())
