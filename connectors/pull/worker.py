"""The worker half: registers the blocks, answers readers on rank 0, and pulls."""

import threading
import time
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from longshore.connectors.base import (
    FinishedTransfers,
    KVCaches,
    TransferQueues,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.connectors.pull.layout import RankLayout
from longshore.connectors.pull.messages import Commands, Offer, RankInfo, Report, describe
from longshore.connectors.pull.options import read_options
from longshore.connectors.pull.owner import Owner, Release
from longshore.connectors.pull.reader import Cancel, Drop, EndedPull, Keep, Reader
from longshore.connectors.pull.transport import CONFIRM_TIMEOUT_S, Memory, PullStuck
from longshore.connectors.pull.transports import TRANSPORTS
from longshore.protocol.kv_cache_spec import KVCacheGroup
from longshore.protocol.statistics import TransferOperation


class PullWorker(WorkerConnector[Commands]):
    """One class for all transports. transport: name of the connector."""

    contract_version: ClassVar[int] = 2
    stores_within_step = False
    poll_interval_s = 1.0  # a thread may have failed
    transport: ClassVar[str]

    def __init__(self, config: WorkerConnectorConfig) -> None:
        super().__init__(config)
        self._rank = config.rank
        self._options = read_options(self.transport, config.options)
        self._owner: Owner | None = None
        self._reader: Reader | None = None
        self._lock = threading.Lock()  # of what the threads write
        self._report = Report()
        self._ended: list[EndedPull] = []
        self._operations: list[TransferOperation] = []

    def register_kv_caches(self, kv_caches: KVCaches, queues: TransferQueues) -> None:
        memory, layout = _memory_of(kv_caches)
        transport = TRANSPORTS[self.transport](self._options)
        agent = transport.register(memory)
        self._wake = queues.wake
        kv = describe(self.config, self.transport)
        port = 0
        if self._rank == 0:
            self._owner = Owner(self._options, self.config.engine_id, kv, self._leases_ended)
            self._owner.start()
            port = self._owner.port
        name = reader_name(self.config.engine_id, self._options.host)
        self._reader = Reader(transport, self._options, name, self._rank, self._pull_ended)
        self._reader.start()
        self._report = Report(info=RankInfo(layout, agent, port))
        self._kv = kv
        queues.wake()

    def bind_connector_metadata(self, data: bytes) -> Commands:
        return msgspec.msgpack.decode(data, type=Commands)

    def start_load_kv(self, metadata: Commands) -> None:
        assert self._reader is not None
        if metadata.ranks:
            layouts = tuple(info.layout for info in metadata.ranks)
            self._reader.put(msgspec.structs.replace(self._kv, ranks=layouts))
        if self._owner is not None:
            if metadata.ranks:
                self._owner.put(metadata.ranks)
            for offer in metadata.offers:
                self._owner.put(offer)
            if metadata.releases:
                self._owner.put(Release(metadata.releases))
            for source in metadata.keeps:
                self._reader.put(Keep(source))
        for pull in metadata.pulls:
            self._reader.put(pull)
        for request_id in metadata.cancels:
            self._reader.put(Cancel(request_id))
        if self._owner is not None:
            for source in metadata.drops:
                self._reader.put(Drop(source))

    # On the threads

    def _leases_ended(self, ended: list[Offer], expired: list[Offer]) -> None:
        with self._lock:
            self._report.ended.extend(offer.hold_id for offer in ended)
            self._report.expired.extend(offer.hold_id for offer in expired)
        self._wake()

    def _pull_ended(self, ended: EndedPull) -> None:
        operation = TransferOperation(
            "REMOTE",
            "GPU",
            ended.num_blocks,
            ended.num_bytes,
            ended.seconds,
            num_failed_blocks=len(ended.failed),
        )
        with self._lock:
            self._ended.append(ended)
            self._operations.append(operation)
        self._wake()

    # On the loop thread

    def get_finished(self, finished_request_ids: Sequence[str]) -> FinishedTransfers:
        self._check_threads()
        with self._lock:
            ended, self._ended = self._ended, []
            self._report.pulls.update({each.request_id: each.outcome for each in ended})
        failed = [block_id for each in ended for block_id in each.failed]
        return FinishedTransfers(
            received=[each.request_id for each in ended], failed_block_ids=failed
        )

    def _check_threads(self) -> None:
        """Raises PullStuck."""
        reader, owner = self._reader, self._owner
        if reader is None:
            return
        since = reader.resetting_since
        if since is not None and time.monotonic() - since > CONFIRM_TIMEOUT_S:
            raise PullStuck(
                f"{self.transport} did not close its connections within {CONFIRM_TIMEOUT_S:g} s, "
                "so a late read may still write to blocks of this rank"
            )
        failure = reader.failure or (owner.failure if owner is not None else None)
        if failure is not None:
            raise PullStuck(f"a thread of the connector has failed: {failure}") from failure

    def build_connector_worker_meta(self) -> bytes:
        with self._lock:
            report, self._report = self._report, Report()
        return b"" if report == Report() else msgspec.msgpack.encode(report)

    def get_kv_connector_stats(self) -> Sequence[TransferOperation]:
        with self._lock:
            operations, self._operations = self._operations, []
        return operations

    def shutdown(self) -> None:
        try:
            if self._owner is not None:
                self._owner.close()
        finally:
            if self._reader is not None:
                self._reader.close()


class MooncakeWorker(PullWorker):
    transport = "mooncake"


class MoRIIOWorker(PullWorker):
    transport = "moriio"


class NixlWorker(PullWorker):
    transport = "nixl"


class P2PNcclWorker(PullWorker):
    transport = "p2p_nccl"


def reader_name(engine_id: str, host: str) -> str:
    """Identifies a reader to owners. Without the epoch, because leases of requests that have not
    been pulled outlive it; with the host, because engines of several hosts have the same ids."""
    return f"{engine_id.rpartition('.')[0]}@{host}"


def _memory_of(kv_caches: KVCaches) -> tuple[Memory, RankLayout]:
    """The blocks of all groups are views of one buffer."""
    blocks = kv_caches.groups[0].blocks
    num_blocks, block_bytes = blocks.shape[0], blocks.stride(0)
    groups = tuple(KVCacheGroup(group.layer_names, group.spec) for group in kv_caches.groups)
    device = kv_caches.device.index or 0 if kv_caches.device.type == "cuda" else None
    memory = Memory(blocks.data_ptr(), num_blocks * block_bytes, block_bytes, device)
    return memory, RankLayout(groups, block_bytes, num_blocks)
