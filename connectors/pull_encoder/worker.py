"""The worker half: slots of host memory. Other engines read those of rank 0; each rank pulls into
its own."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec
import torch
from torch import Tensor

from longshore.connectors.base import EncoderWorker, EncoderWorkerConfig
from longshore.connectors.pull.layout import RankLayout
from longshore.connectors.pull.messages import (
    KVDescription,
    Offer,
    Pull,
    RankInfo,
    Source,
)
from longshore.connectors.pull.owner import Owner, Release
from longshore.connectors.pull.reader import ANY_ENGINE, Drop, EndedPull, Reader
from longshore.connectors.pull.transport import CONFIRM_TIMEOUT_S, Memory, PullStuck
from longshore.connectors.pull.transports import TRANSPORTS
from longshore.connectors.pull_encoder.messages import Commands, Report, SlotPull
from longshore.connectors.pull_encoder.options import read_encoder_options
from longshore.connectors.pull_encoder.shelf import Shelf
from longshore.protocol.kv_cache_spec import KVCacheGroup, MLAAttentionSpec

ANSWER_TIMEOUT_S: Final = 1.0
"""How long a peer may take to answer: a request waits for it, and can be encoded instead."""

SILENCE_S: Final = 10.0
"""How long a peer that has not answered in time is not asked again."""

LAYER: Final = "encoder output"
DIGEST: Final = b""
"""The key identifies the content, so there are no tokens and block ids to compare."""


@dataclass(slots=True)
class _Asked:
    """A pull in progress. peer: index of the one that is asked, since `began_at`."""

    command: SlotPull
    peer: int = -1
    began_at: float = 0.0


class PullEncoderWorker(EncoderWorker[Commands]):
    """One class for all transports. transport: name of the connector."""

    contract_version: ClassVar[int] = 2
    poll_interval_s = 1.0  # a thread may have failed
    transport: ClassVar[str]

    def __init__(self, config: EncoderWorkerConfig) -> None:
        super().__init__(config)
        self._options = read_encoder_options(self.transport, config.options, config.role)
        self._owner: Owner | None = None
        self._reader: Reader | None = None
        self._lock = threading.Lock()  # of what the threads write
        self._report = Report()
        self._asked: dict[str, _Asked] = {}
        self._silent_until = [0.0] * len(self._options.peers)

    @property
    def port(self) -> int | None:
        """Where other engines reach this one, if they do."""
        return None if self._owner is None else self._owner.port

    def register_caches(self, wake: Callable[[], None]) -> None:
        config, options = self.config, self._options
        self._wake = wake
        shape = options.max_outputs + 1, config.max_tokens, config.hidden_size
        is_pinned = config.device.type == "cuda"
        self._slots = torch.zeros(shape, dtype=config.dtype, pin_memory=is_pinned)
        slot_bytes = self._slots[0].nbytes
        transport = TRANSPORTS[self.transport](options.pull)
        agent = transport.register(Memory(self._slots.data_ptr(), self._slots.nbytes, slot_bytes))
        spec = MLAAttentionSpec(config.max_tokens, config.hidden_size, config.dtype.itemsize)
        layout = RankLayout((KVCacheGroup((LAYER,), spec),), slot_bytes, shape[0])
        description = KVDescription(
            transport=self.transport,
            model_fingerprint=config.identity.model_fingerprint,
            dtype=config.identity.dtype,
            kv_cache_dtype=LAYER,
            kv_layout=LAYER,
            kv_rotation="",
            ranks=(),
        )
        if config.is_producer and config.rank == 0:
            self._owner = Owner(
                options.pull,
                config.engine_id,
                description,
                self._leases_ended,
                leases=Shelf(options.pull.lease_s),
                early_claim_s=0.0,
            )
            self._owner.start()
            self._owner.put((RankInfo(layout, agent, self._owner.port),))
        # Each rank is a reader of its own, and its lease that of no other rank.
        name = f"{config.engine_id.rpartition('.')[0]} rank {config.rank}"
        self._reader = Reader(
            transport, options.pull, name, 0, self._pull_ended, answer_timeout_s=ANSWER_TIMEOUT_S
        )
        self._reader.start()
        self._reader.put(msgspec.structs.replace(description, ranks=(layout,)))

    # On the loop thread

    def bind_connector_metadata(self, data: bytes) -> Commands:
        return msgspec.msgpack.decode(data, type=Commands)

    def start_load_caches(self, metadata: Commands) -> None:
        for pull in metadata.pulls:
            asked = self._asked[pull.key] = _Asked(pull)
            self._ask_next(asked)
        if self._owner is not None and metadata.withdrawn:
            self._owner.put(Release(metadata.withdrawn))

    def build_connector_worker_meta(self) -> bytes:
        self._check_threads()
        with self._lock:
            report, self._report = self._report, Report()
        return b"" if report == Report() else msgspec.msgpack.encode(report)

    def _check_threads(self) -> None:
        """Raises PullStuck."""
        reader, owner = self._reader, self._owner
        if reader is None:
            return
        since = reader.resetting_since
        if since is not None and time.monotonic() - since > CONFIRM_TIMEOUT_S:
            raise PullStuck(
                f"{self.transport} did not close its connections within {CONFIRM_TIMEOUT_S:g} s, "
                "so a late read may still write to encoder outputs of this rank"
            )
        failure = reader.failure or (owner.failure if owner is not None else None)
        if failure is not None:
            raise PullStuck(f"a thread of the connector has failed: {failure}") from failure

    def shutdown(self) -> None:
        if self._owner is not None:
            self._owner.close()
        if self._reader is not None:
            self._reader.close()

    # On the compute queue

    def load_cache(self, metadata: Commands, row: int) -> Tensor | None:
        for each in metadata.loads:
            if each.row == row:
                return self._slots[each.slot, : each.num_tokens]
        return None

    def save_caches(self, metadata: Commands, row: int, encoded: Tensor) -> None:
        for each in metadata.saves:
            if each.row == row:
                self._slots[each.slot, : each.num_tokens].copy_(encoded, non_blocking=True)

    def step_ended(self, metadata: Commands) -> None:
        if self._owner is None:
            return
        for each in metadata.saves:
            tables = (each.slot.to_bytes(4, "little"),)
            self._owner.put(Offer(each.key, "", each.slot, each.num_tokens, DIGEST, tables))

    # Pulls: on the loop thread until the first peer is asked, then on the reader's

    def _ask_next(self, asked: _Asked) -> None:
        """Ask the next peer; after the last one, the output is missing."""
        assert self._reader is not None
        asked.began_at = time.monotonic()
        pull = asked.command
        for index in range(asked.peer + 1, len(self._options.peers)):
            if self._silent_until[index] <= asked.began_at:
                asked.peer = index
                tables = (pull.slot.to_bytes(4, "little"),)
                source = self._source(asked)
                self._reader.put(Pull(pull.key, source, 0, pull.num_tokens, tables))
                return
        self._ended(asked, is_pulled=False)

    def _source(self, asked: _Asked) -> Source:
        key, lease_s = asked.command.key, self._options.pull.lease_s
        host, port = self._options.peers[asked.peer]
        return Source(host, port, ANY_ENGINE, key, key, lease_s, DIGEST, DIGEST)

    def _pull_ended(self, ended: EndedPull) -> None:
        assert self._reader is not None
        asked = self._asked[ended.request_id]
        if not ended.failed:
            self._reader.put(Drop(self._source(asked)))
            self._ended(asked, is_pulled=True)
            return
        now = time.monotonic()
        if now - asked.began_at >= ANSWER_TIMEOUT_S:
            self._silent_until[asked.peer] = now + SILENCE_S
        self._ask_next(asked)

    def _ended(self, asked: _Asked, *, is_pulled: bool) -> None:
        key = asked.command.key
        del self._asked[key]
        with self._lock:
            (self._report.pulled if is_pulled else self._report.failed).append(key)
        self._wake()

    def _leases_ended(self, ended: list[Offer], expired: list[Offer]) -> None:
        with self._lock:
            self._report.free_slots.extend(offer.hold_id for offer in (*ended, *expired))
        self._wake()


class MooncakeEncoderWorker(PullEncoderWorker):
    transport = "mooncake"


class NixlEncoderWorker(PullEncoderWorker):
    transport = "nixl"
