"""The scheduler half: which blocks are stored, and which to load or store next."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import msgspec

from longshore.connectors.base import (
    AskLater,
    BlockHolds,
    ConnectorConfig,
    ConnectorOutput,
    FinishAction,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
)
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import NULL_BLOCK


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Fill `block_ids[i]` with the stored block `block_hashes[i]`."""

    request_id: str
    block_ids: list[int]
    block_hashes: list[bytes]


class Store(msgspec.Struct, frozen=True, array_like=True):
    """Store `block_ids[i]` as `block_hashes[i]`, and report `hold_id`."""

    hold_id: int
    block_ids: list[int]
    block_hashes: list[bytes]


class Commands(msgspec.Struct, frozen=True):
    """Metadata of a plan, from the scheduler half to all ranks."""

    loads: list[Load] = []
    stores: list[Store] = []


class Report(msgspec.Struct, frozen=True):
    """Metadata of a report, from one rank to the scheduler half.

    found:  stored blocks that the rank found when it started; None in later reports.
    stored: hold ids of stores that have ended on this rank.
    lost:   blocks of stores and loads that are not stored on this rank.
    """

    found: list[bytes] | None = None
    stored: list[int] = []
    lost: list[bytes] = []


class ExampleConnector(SchedulerConnector):
    """Plans. A block counts as stored when all ranks have stored their share of it."""

    contract_version: ClassVar[int] = 2
    opens_nothing: ClassVar[bool] = True
    worker_half: ClassVar[str] = "longshore.connectors.example.worker:ExampleWorker"

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        folder_of(ConnectorConfig(options))

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        folder_of(config)
        self._holds: BlockHolds
        self._begin()

    def _begin(self) -> None:
        self._num_started = 0  # ranks that have said what they found
        self._ranks_of: dict[bytes, set[int]] = {}  # which ranks have stored a block
        self._storing: dict[int, list[bytes]] = {}  # by hold id
        self._first_block: dict[str, int] = {}
        self._loads: list[Load] = []

    def bind_blocks(self, holds: BlockHolds) -> None:
        self._holds = holds

    # Loads

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        if self._num_started < self.config.num_ranks:
            return AskLater()
        first = num_computed_tokens // self.config.block_size
        num_blocks = 0
        for block_hash in self._hashes_of(request)[first:]:
            if not self._is_stored(block_hash):
                break
            num_blocks += 1
        self._first_block[request.request_id] = first
        return Matched(num_blocks * self.config.block_size, is_async=True)

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        first = self._first_block.pop(request.request_id)
        last = first + num_external_tokens // self.config.block_size
        (table,) = block_ids
        ids, hashes = table[first:last].tolist(), self._hashes_of(request)[first:last]
        # Positions that no later token reads (windows, states) have the null block.
        needed = [index for index, block_id in enumerate(ids) if block_id != NULL_BLOCK]
        self._loads.append(
            Load(
                request.request_id,
                [ids[index] for index in needed],
                [hashes[index] for index in needed],
            )
        )

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        self._first_block.pop(request.request_id, None)
        return FinishAction()

    def _hashes_of(self, request: RequestView) -> list[bytes]:
        """The hash of each full block; `hash_block_size` may be smaller than a block."""
        step = self.config.block_size // (self.config.hash_block_size or self.config.block_size)
        return list(request.block_hashes[step - 1 :: step])

    def _is_stored(self, block_hash: bytes) -> bool:
        return len(self._ranks_of.get(block_hash, ())) == self.config.num_ranks

    # Stores

    def build_connector_meta(self, step: StepView) -> bytes:
        new = {
            block_hash: block_id
            for blocks in step.storable
            for block_hash, block_id in zip(blocks.block_hashes, blocks.block_ids, strict=True)
            if not self._is_stored(block_hash)
        }
        stores: list[Store] = []
        if new:
            hold_id = self._holds.hold(list(new.values()))
            self._storing[hold_id] = list(new)
            stores.append(Store(hold_id, list(new.values()), list(new)))
        loads, self._loads = self._loads, []
        return msgspec.msgpack.encode(Commands(loads, stores)) if loads or stores else b""

    @property
    def has_pending_work(self) -> bool:
        return bool(self._loads)

    # Reports

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for metadata in output.metadata:
            report = msgspec.msgpack.decode(metadata, type=Report)
            if report.found is not None:
                self._num_started += 1
                self._add(report.found, output.rank)
            for hold_id in report.stored:
                self._store_ended(hold_id, output.rank)
            for block_hash in report.lost:  # from now on a miss, and stored again
                self._ranks_of.get(block_hash, set()).discard(output.rank)

    def _add(self, block_hashes: Iterable[bytes], rank: int) -> None:
        for block_hash in block_hashes:
            self._ranks_of.setdefault(block_hash, set()).add(rank)

    def _store_ended(self, hold_id: int, rank: int) -> None:
        """A rank has stored its share."""
        self._add(self._storing[hold_id], rank)
        if self._holds.release_rank(hold_id, rank):
            del self._storing[hold_id]

    def on_new_epoch(self, epoch: int) -> None:
        self._begin()  # the new workers report what they find


def folder_of(config: ConnectorConfig) -> str:
    """The option `path`. Raises ConfigError."""
    unknown = set(config.options) - {"path"}
    if unknown:
        raise ConfigError(
            f"--kv-connector-config: the example connector has no option {sorted(unknown)[0]!r}; "
            "it has only 'path'"
        )
    path = config.options.get("path")
    if not isinstance(path, str) or not path:
        raise ConfigError(
            "--kv-connector-config: the example connector needs the option 'path', the folder for "
            'its files, as in \'{"path": "/var/tmp/kv"}\''
        )
    return path
