"""The worker half of a pull connector in virtual time: decode engines copy KV from the memory of
prefill engines, as fast as the links between them are."""

from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from longshore.connectors.base import ConnectorConfig, SchedulerConnector
from longshore.connectors.pull.layout import RankLayout
from longshore.connectors.pull.messages import (
    Commands,
    Offer,
    Pull,
    PullOutcome,
    RankInfo,
    Report,
    block_ids_of,
)
from longshore.connectors.registry import load_scheduler_connector
from longshore.deploy.simulator.clock import Clock
from longshore.deploy.simulator.cost_model import TransferRates
from longshore.protocol.kv_cache_spec import KVCacheConfig
from longshore.protocol.outputs import TransferReport
from longshore.protocol.statistics import TransferOperation

CONNECTOR: Final = "nixl"
"""Which one does not matter: their scheduler halves are the same."""
PORT: Final = 1  # nothing listens there


class PullNetwork:
    """The links between all engines, and what is offered on them.

    A pull takes `pull_latency_s`, and then it has the owner's link out and the reader's link in for
    its bytes / `pull_bytes_per_s`, once both are free.
    """

    def __init__(self, rates: TransferRates, clock: Clock) -> None:
        self._rates, self._clock = rates, clock
        # By transfer. An offer is there before its reader knows of it: it travels with the plan
        # that follows the output which tells the gateway.
        self._offers: dict[str, tuple[SimulatedPulls, Offer]] = {}

    def offer(self, owner: "SimulatedPulls", offer: Offer) -> None:
        self._offers[offer.transfer_id] = owner, offer

    def pull(self, reader: "SimulatedPulls", pull: Pull) -> None:
        owner, _ = self._offers[pull.source.transfer_id]
        num_blocks = reader.num_blocks_of(pull)
        num_bytes = num_blocks * reader.block_bytes
        seconds = num_bytes / self._rates.pull_bytes_per_s
        begin_s = self._clock.now_s + self._rates.pull_latency_s
        end_s = max(begin_s, owner.out_free_at_s, reader.in_free_at_s) + seconds
        owner.out_free_at_s = reader.in_free_at_s = end_s
        operation = TransferOperation("REMOTE", "GPU", num_blocks, num_bytes, seconds)
        self._clock.at(end_s, reader.pulled, pull, operation)

    def end(self, transfer_id: str) -> None:
        """The reader does not need it any more."""
        owner, offer = self._offers.pop(transfer_id)
        owner.lease_ended(offer)


class SimulatedPulls:
    """report: receives the reports of the worker, at their times.

    connector: the scheduler half, whose commands `begin` carries out.
    out_free_at_s, in_free_at_s: when the last pull from this engine, and the last one to it, ends.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        kv_cache: KVCacheConfig,
        network: PullNetwork,
        clock: Clock,
        report: Callable[[TransferReport], None],
    ) -> None:
        self.connector: SchedulerConnector = load_scheduler_connector(CONNECTOR, config)
        self.block_bytes = kv_cache.largest_block_bytes
        self.out_free_at_s = self.in_free_at_s = 0.0
        self._block_size = config.block_size
        self._network, self._clock, self._report = network, clock, report
        layout = RankLayout(kv_cache.groups, self.block_bytes, kv_cache.num_blocks)
        clock.at(0.0, self._send, Report(info=RankInfo(layout, b"", PORT)))

    def begin(self, metadata: bytes, received_s: float, _: float) -> None:
        """See `SimulatedTransfers`. A pull waits for no step."""
        self._clock.at(received_s, self._begin, msgspec.msgpack.decode(metadata, type=Commands))

    def _begin(self, commands: Commands) -> None:
        for offer in commands.offers:
            self._network.offer(self, offer)
        for pull in commands.pulls:
            self._network.pull(self, pull)
        for source in commands.drops:
            self._network.end(source.transfer_id)

    def num_blocks_of(self, pull: Pull) -> int:
        """Blocks of this engine that the pull fills."""
        (table,) = block_ids_of(pull.tables)
        first, last = pull.first_token // self._block_size, -(-pull.num_tokens // self._block_size)
        return len(np.unique(table[first:last]))

    def pulled(self, pull: Pull, operation: TransferOperation) -> None:
        self._send(
            Report(pulls={pull.request_id: PullOutcome.COMPLETE}),
            finished_receiving=(pull.request_id,),
            operations=(operation,),
        )

    def lease_ended(self, offer: Offer) -> None:
        self._send(Report(ended=[offer.hold_id]))

    def _send(self, report: Report, **fields: Any) -> None:
        metadata = msgspec.msgpack.encode(report)
        self._report(TransferReport(epoch=1, rank=0, connector_metadata=metadata, **fields))
