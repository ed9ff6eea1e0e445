"""The scheduler half: which ended requests are offered under a lease, and which requests are loaded
from another engine's memory. A request can be both."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
)
from longshore.connectors.pull.layout import first_needed_token
from longshore.connectors.pull.messages import (
    Commands,
    Offer,
    Pull,
    PullOutcome,
    RankInfo,
    Report,
    Source,
    describe,
    digest_input,
    tables_of,
)
from longshore.connectors.pull.options import read_options
from longshore.connectors.pull.params import (
    BadTransferParams,
    RemotePrefill,
    answer_params,
    read_params,
)
from longshore.protocol.arrays import Int32Array
from longshore.protocol.kv_cache_spec import NULL_BLOCK, StateSpec
from longshore.protocol.logs.limits import LogLimit
from longshore.protocol.outputs import FinishReason
from longshore.protocol.statistics import PullStats

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Remote:
    """A request whose prompt another engine has computed.

    num_local: tokens that it had when the pull was matched.
    is_used:   its pull has begun; there is one at most.
    """

    source: Source
    num_tokens: int
    num_local: int = 0
    is_used: bool = False


@dataclass(frozen=True, slots=True)
class _Lease:
    """Blocks that are kept for a reader, all different."""

    transfer_id: str
    block_ids: Int32Array


class PullConnector(SchedulerConnector):
    """One class for all transports. transport: name of the connector.

    num_refused_leases, num_expired_leases, pulls_by_outcome: see `PullStats`.
    """

    contract_version: ClassVar[int] = 2
    supports_hma = True
    chunk_blocks = 0
    min_wait_s = 5.0  # the first pull connects two engines, and a reader computes to others' cost
    opens_nothing: ClassVar[bool] = True
    transport: ClassVar[str]

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        read_options(cls.transport, options)

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        self._options = read_options(self.transport, config.options)
        describe(config, self.transport)
        self._engine_id = config.engine_id
        self.num_leasable_blocks = int(self._options.max_leased_share * config.num_blocks)
        self._has_states = any(isinstance(spec, StateSpec) for spec in config.specs)
        # Whether the token after n others reads less than n tokens, in some group.
        self._frees_skipped = any(first_needed_token(spec, 1 << 40) for spec in config.specs)
        self._warnings = LogLimit(logger, max_per_second=1)
        self._holds: BlockHolds
        self._remote: dict[str, _Remote] = {}
        self._in_use: set[str] = set()  # transfer ids of `_remote`
        self.num_refused_leases = self.num_expired_leases = 0
        self.pulls_by_outcome = dict.fromkeys(PullOutcome, 0)
        self._begin()

    def _begin(self) -> None:
        self._ranks: dict[int, RankInfo] = {}
        self._leased: dict[int, _Lease] = {}  # by hold id
        self._offered: set[str] = set()  # transfer ids
        self._outcomes: dict[str, PullOutcome] = {}  # of the ranks so far, by request id
        self._num_leases = np.zeros(self.config.num_blocks, np.int32)  # by block
        self._num_leased_blocks = 0
        self._commands = Commands()

    def bind_blocks(self, holds: BlockHolds) -> None:
        self._holds = holds

    # Reader

    def on_new_request(self, request: RequestView) -> None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        try:
            found = self._read(request, params)
        except BadTransferParams as error:
            self._warnings.warning(
                "%s; the prompt is computed", error, request_id=request.request_id
            )
            return
        source = found.source(request)
        self._remote[request.request_id] = _Remote(source, found.remote_num_tokens)
        self._in_use.add(source.transfer_id)
        self._commands.keeps.append(source)

    def _read(self, request: RequestView, params: Mapping[str, Any]) -> RemotePrefill:
        """Raises BadTransferParams."""
        if request.prompt_embeds is not None:
            raise BadTransferParams("kv_transfer_params: a prompt of embeddings is not pulled")
        found = read_params(params, request.num_tokens, self._options)
        if found.transfer_id in self._in_use:
            raise BadTransferParams("kv_transfer_params: transfer_id is in use by another request")
        return found

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        remote = self._remote.get(request.request_id)
        if remote is None or remote.is_used:
            return Matched(0)
        if len(self._ranks) < self.config.num_ranks:
            return AskLater()
        if any(num_computed_tokens % spec.block_size for spec in self.config.specs):
            return Matched(0)  # its last block is partly computed, and a pull would overwrite it
        remote.num_local = num_computed_tokens
        num_tokens = self._resumable(remote, request.num_tokens)
        return Matched(max(num_tokens - num_computed_tokens, 0), is_async=True)

    def _resumable(self, remote: _Remote, num_tokens: int) -> int:
        """How many of the owner's tokens the request can continue after. At least its last token is
        computed, and reads a state, or the tokens of a window, before it."""
        if num_tokens > remote.num_tokens or not self._frees_skipped:
            return remote.num_tokens
        return 0 if self._has_states else num_tokens - 1

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        remote = self._remote[request.request_id]
        remote.is_used = True
        self._commands.pulls.append(
            Pull(
                request.request_id,
                remote.source,
                remote.num_local,
                remote.num_local + num_external_tokens,
                tables_of(block_ids),
            )
        )

    def release_transfers(self, transfer_ids: Sequence[str]) -> None:
        self._commands.releases.extend(self._offered.intersection(transfer_ids))

    def load_abandoned(self, request_id: str) -> None:
        self._commands.cancels.append(request_id)

    def _drop(self, request_id: str) -> None:
        """The request needs its owner's blocks no longer."""
        remote = self._remote.pop(request_id, None)
        if remote is not None:
            self._in_use.discard(remote.source.transfer_id)
            self._commands.drops.append(remote.source)

    # Owner

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        self._drop(request.request_id)
        params = request.kv_transfer_params or {}
        # With another reason there is nothing left to decode, or no client to decode for.
        is_continued = request.finish_reason is FinishReason.LENGTH_CAPPED
        if not (params.get("do_remote_decode") and is_continued and any(map(len, block_ids))):
            return FinishAction()
        held = np.unique(np.concatenate(block_ids))
        held = held[held != NULL_BLOCK]
        reason = self._lease_objection(request, held)
        if reason is not None:
            self.num_refused_leases += 1
            self._warnings.warning(
                "the KV is not offered: %s", reason, request_id=request.request_id
            )
            return FinishAction()
        offer = self._offer(request, block_ids, held)
        port, num_ranks = self._ranks[0].port, self.config.num_ranks
        return FinishAction(
            params=answer_params(offer, self._engine_id, self._options, port, num_ranks)
        )

    def _lease_objection(self, request: RequestView, held: Int32Array) -> str | None:
        if request.prompt_embeds is not None:
            return "a prompt of embeddings is not pulled"
        if len(self._ranks) < self.config.num_ranks:
            return "not all ranks have reported yet"
        num_leased = self._num_leased_blocks + self._num_unleased(held)
        if num_leased > self.num_leasable_blocks:
            return (
                f"{num_leased} blocks would be leased, and max_leased_share="
                f"{self._options.max_leased_share:g} allows {self.num_leasable_blocks}"
            )
        return None

    def _offer(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], held: Int32Array
    ) -> Offer:
        """Hold the blocks until the lease ends. Their KV is that of all tokens but the last, which
        was sampled from it."""
        num_tokens = request.num_tokens - 1
        hold_id = self._holds.hold(held.tolist())
        transfer_id = secrets.token_urlsafe(24)
        self._leased[hold_id] = _Lease(transfer_id, held)
        self._offered.add(transfer_id)
        self._num_leased_blocks += self._num_unleased(held)
        self._num_leases[held] += 1
        offer = Offer(
            transfer_id,
            request.request_id,
            hold_id,
            num_tokens,
            digest_input(request, num_tokens),
            tables_of(block_ids),
        )
        self._commands.offers.append(offer)
        return offer

    def _lease_ended(self, hold_id: int) -> None:
        lease = self._leased.pop(hold_id, None)
        if lease is None:
            return  # a repeated report
        self._offered.discard(lease.transfer_id)
        self._num_leases[lease.block_ids] -= 1
        self._num_leased_blocks -= self._num_unleased(lease.block_ids)
        self._holds.release(hold_id)

    def _num_unleased(self, block_ids: Int32Array) -> int:
        """How many of these different blocks no lease keeps."""
        return len(block_ids) - int(np.count_nonzero(self._num_leases[block_ids]))

    # Both

    def build_connector_meta(self, step: StepView) -> bytes:
        for admitted in step.admitted:
            if admitted.request_id in self._remote:  # all was local, or cannot be pulled
                self._drop(admitted.request_id)
        if self._commands == Commands():
            return b""
        commands, self._commands = self._commands, Commands()
        return msgspec.msgpack.encode(commands)

    @property
    def has_pending_work(self) -> bool:
        return self._commands != Commands()

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for metadata in output.metadata:
            report = msgspec.msgpack.decode(metadata, type=Report)
            self._add_outcomes(report.pulls)
            if report.info is not None:
                self._reported(output.rank, report.info)
            self.num_expired_leases += len(report.expired)
            for hold_id in (*report.ended, *report.expired):
                self._lease_ended(hold_id)
        for request_id in output.finished_receiving:
            self._drop(request_id)
            if (outcome := self._outcomes.pop(request_id, None)) is not None:
                self.pulls_by_outcome[outcome] += 1

    def _add_outcomes(self, of_rank: Mapping[str, PullOutcome]) -> None:
        order = list(PullOutcome)
        for request_id, outcome in of_rank.items():
            known = self._outcomes.get(request_id, outcome)
            self._outcomes[request_id] = max(known, outcome, key=order.index)

    def get_kv_connector_stats(self) -> ConnectorStats:
        pulls = PullStats(
            num_leases=len(self._leased),
            num_leased_blocks=self._num_leased_blocks,
            num_refused_leases=self.num_refused_leases,
            num_expired_leases=self.num_expired_leases,
            pulls_by_outcome={each.value: num for each, num in self.pulls_by_outcome.items()},
        )
        return ConnectorStats(pulls=pulls)

    def _reported(self, rank: int, info: RankInfo) -> None:
        self._ranks[rank] = info
        if len(self._ranks) == self.config.num_ranks:
            ranks = tuple(self._ranks[rank] for rank in range(self.config.num_ranks))
            self._commands = msgspec.structs.replace(self._commands, ranks=ranks)

    def on_new_epoch(self, epoch: int) -> None:
        self._begin()
        self._engine_id = f"{self._engine_id.rpartition('.')[0]}.{epoch}"
        for request_id, remote in list(self._remote.items()):
            if remote.is_used:
                self._drop(request_id)  # its prompt is computed
            else:
                self._commands.keeps.append(remote.source)


class MooncakeConnector(PullConnector):
    transport = "mooncake"
    worker_half: ClassVar[str] = "longshore.connectors.pull.worker:MooncakeWorker"


class MoRIIOConnector(PullConnector):
    transport = "moriio"
    worker_half: ClassVar[str] = "longshore.connectors.pull.worker:MoRIIOWorker"


class NixlConnector(PullConnector):
    transport = "nixl"
    worker_half: ClassVar[str] = "longshore.connectors.pull.worker:NixlWorker"


class P2PNcclConnector(PullConnector):
    transport = "p2p_nccl"
    worker_half: ClassVar[str] = "longshore.connectors.pull.worker:P2PNcclWorker"
