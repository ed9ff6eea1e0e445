"""The worker half of the offloading connector in virtual time: what its ledgers command takes as
long as its bytes need."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from longshore.connectors.base import ConnectorConfig, SchedulerConnector
from longshore.connectors.offloading.disk_tier import DiskContents
from longshore.connectors.offloading.host_spec import CPUOffloadingSpec
from longshore.connectors.offloading.messages import Commands, Ended, LoadJob, Report
from longshore.connectors.offloading.options import DEFAULT_SPEC, read_options
from longshore.connectors.offloading.spec import load_spec
from longshore.connectors.offloading.tiers import (
    LoadSource,
    Spill,
    Stage,
    TierCommand,
    TierMessage,
    TierTask,
)
from longshore.connectors.registry import load_scheduler_connector, parse_options
from longshore.deploy.simulator.clock import Clock
from longshore.deploy.simulator.cost_model import TransferRates
from longshore.protocol.arrays import int32_array
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import Medium
from longshore.protocol.outputs import TransferReport
from longshore.protocol.statistics import TransferOperation

SUPPORTED: Final = "offloading"
_DISK: Final = 0  # the number of the disk among the lower tiers
_NO_FIELDS: Final = b""


class TransferQueue:
    """Transfers of one kind, one after the other."""

    def __init__(
        self, source: Medium, destination: Medium, bytes_per_s: float, latency_s: float
    ) -> None:
        self._media = source, destination
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._free_at_s = 0.0

    def submit(
        self, now_s: float, num_blocks: int, num_bytes: int
    ) -> tuple[float, TransferOperation]:
        """When the transfer ends, and how it is reported."""
        seconds = self._latency_s + num_bytes / self._bytes_per_s
        self._free_at_s = max(now_s, self._free_at_s) + seconds
        return self._free_at_s, TransferOperation(*self._media, num_blocks, num_bytes, seconds)


class SimulatedTransfers:
    """report: receives the reports of the worker, at their times.

    connector: the scheduler half, whose commands `begin` carries out.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        rates: TransferRates,
        clock: Clock,
        report: Callable[[TransferReport], None],
    ) -> None:
        self.connector: SchedulerConnector = load_scheduler_connector(SUPPORTED, config)
        spec = load_spec(config, read_options(config.options))
        assert isinstance(spec, CPUOffloadingSpec)
        self._block_bytes = spec.slot_bytes
        self._clock, self._report = clock, report
        latency_s = rates.latency_s
        self._loads = TransferQueue("CPU", "GPU", rates.load_bytes_per_s, latency_s)
        self._stores = TransferQueue("GPU", "CPU", rates.store_bytes_per_s, latency_s)
        self._reads = TransferQueue("DISK", "CPU", rates.disk_read_bytes_per_s, latency_s)
        self._writes = TransferQueue("CPU", "DISK", rates.disk_write_bytes_per_s, latency_s)
        if spec.has_disk:
            num_slots = spec.disk_bytes // self._block_bytes
            contents = msgspec.msgpack.encode(DiskContents(num_slots, [], b"", True))
            message = msgspec.msgpack.encode(TierMessage(_DISK, contents))
            clock.at(0.0, self._send, Report(tier_data=[message]))

    def begin(self, metadata: bytes, _: float, begin_s: float) -> None:
        """The worker receives these commands with a plan, whose step begins at `begin_s`."""
        self._clock.at(begin_s, self._begin, msgspec.msgpack.decode(metadata, type=Commands))

    def _begin(self, commands: Commands) -> None:
        for load in commands.loads:
            self._begin_load(load)
        for store in commands.stores:
            self._run(self._stores, store.job_id, len(store.blocks.keys))
        for job in commands.tier_jobs:
            match msgspec.msgpack.decode(job.tier_data, type=TierTask):
                case Spill(keys=keys):
                    self._run(self._writes, job.job_id, len(keys))
                case Stage(keys=keys):
                    self._run(self._reads, job.job_id, len(keys))
                case TierCommand():
                    self._send(Report([Ended(job.job_id)]))

    def _begin_load(self, load: LoadJob) -> None:
        num_reads = len(msgspec.msgpack.decode(load.tier_data, type=LoadSource).reads)
        if num_reads:
            self._then(self._reads, num_reads, lambda operation: self._copy_in(load, operation))
        else:
            self._copy_in(load)

    def _copy_in(self, load: LoadJob, *operations: TransferOperation) -> None:
        def end(operation: TransferOperation) -> None:
            self._send(
                Report(),
                finished_receiving=(load.request_id,),
                failed_block_ids=int32_array(load.missing),
                operations=(*operations, operation),
            )

        self._then(self._loads, len(load.blocks.keys), end)

    def _run(self, queue: TransferQueue, job_id: int, num_blocks: int) -> None:
        self._then(
            queue,
            num_blocks,
            lambda operation: self._send(Report([Ended(job_id)]), operations=(operation,)),
        )

    def _then(
        self, queue: TransferQueue, num_blocks: int, end: Callable[[TransferOperation], None]
    ) -> None:
        now_s = self._clock.now_s
        ended_s, operation = queue.submit(now_s, num_blocks, num_blocks * self._block_bytes)
        self._clock.at(ended_s, end, operation)

    def _send(self, report: Report, **fields: Any) -> None:
        metadata = _NO_FIELDS if report == Report() else msgspec.msgpack.encode(report)
        self._report(TransferReport(epoch=1, rank=0, connector_metadata=metadata, **fields))


def read_connector_options(name: str, text: str) -> Mapping[str, Any]:
    """The options of the connector. Raises ConfigError for what cannot be simulated."""
    if name != SUPPORTED:
        raise ConfigError(
            f"connector={name!r} cannot be simulated, because the simulator knows the transfers of "
            f"{SUPPORTED} only. Use {SUPPORTED}."
        )
    options = parse_options(text, "--connector-config")
    read = read_options(options)
    if read.remote_url is not None:
        raise ConfigError(
            "--connector-config: remote_url cannot be simulated; the tiers are host memory and "
            "disk. Remove the options that begin with remote_."
        )
    if read.spec_name != DEFAULT_SPEC or read.spec_module_path is not None:
        raise ConfigError(
            f"--connector-config: spec_name={read.spec_name!r} cannot be simulated, because only "
            f"its own workers know its transfers. Remove it to use {DEFAULT_SPEC}."
        )
    return options
