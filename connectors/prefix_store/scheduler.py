"""The scheduler half: asks the workers what is stored, and plans loads and stores.

The store is asked in the workers, because a lookup waits for another process. A request waits
(`AskLater`) until all ranks have answered, and other requests are scheduled meanwhile. Each lookup
ends with exactly one load or release.
"""

from dataclasses import dataclass, field
from itertools import count
from typing import ClassVar
from uuid import uuid4

import msgspec

from longshore.connectors.base import (
    AskLater,
    BlockHolds,
    CachedBlocks,
    ConnectorConfig,
    ConnectorOutput,
    FinishAction,
    Match,
    Matched,
    RequestView,
    SchedulerConnector,
    StepView,
)
from longshore.connectors.offloading.groups import StoredGroups
from longshore.connectors.prefix_store.messages import (
    Commands,
    Found,
    Load,
    Lookup,
    Prefix,
    Report,
    Store,
)
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError


@dataclass(slots=True)
class _Lookup:
    """What one request has asked for.

    num_found: leading blocks that all ranks which have answered can load.
    is_wanted: False: its request has ended or needs no load.
    """

    lookup_id: int
    num_found: int
    ranks_done: set[int] = field(default_factory=set)
    is_wanted: bool = True


@dataclass(slots=True)
class _NewChunks:
    """Blocks that are held until the plan that completes them is answered."""

    step: int
    store: Store


class PrefixStoreConnector(SchedulerConnector):
    """name: of the connector. Only whole chunks of `chunk_blocks` blocks are stored."""

    contract_version: ClassVar[int] = 1
    reads_ahead = True
    name: ClassVar[str]

    def __init__(self, config: ConnectorConfig, chunk_blocks: int = 1) -> None:
        super().__init__(config)
        (self._group,) = StoredGroups(config, None, connector=self.name).groups[:1]
        if not self._group.needs_all:
            raise ConfigError(
                f"--kv-connector {self.name} is for models that attend to all tokens; this one has "
                f"a {type(self._group.spec).__name__}. Use offloading or simple_cpu."
            )
        self._chunk_blocks = chunk_blocks
        self._salt = ""  # a new one makes everything stored so far unreachable
        self._hashes: dict[str, list[bytes]] = {}  # of all full blocks, by request
        self._lookup_ids = count(1)
        self._begin()

    def _begin(self) -> None:
        self._holds: BlockHolds
        self._tables: dict[str, list[int]] = {}  # of requests that have a row
        self._lookups: dict[int, _Lookup] = {}  # not released yet
        self._of_request: dict[str, _Lookup] = {}
        self._num_local: dict[str, int] = {}  # tokens at the last match, by request
        self._loading: set[str] = set()
        self._unproven: list[_NewChunks] = []
        self._ranks_stored: dict[int, set[int]] = {}  # by hold id
        self._commands = Commands()

    def bind_blocks(self, holds: BlockHolds) -> None:
        self._holds = holds

    # Lookups

    def on_new_request(self, request: RequestView) -> None:
        self._hashes[request.request_id] = self._hashes_of(request)

    def _hashes_of(self, request: RequestView) -> list[bytes]:
        num_blocks = len(request.block_hashes) // self._group.hash_step
        keys = self._group.keys(request.block_hashes, 0, num_blocks)
        return [key[:-1] for key in keys]  # without the number of the group

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        block_size = self._group.block_size
        if num_computed_tokens % block_size:
            return Matched(0)  # its last block is partly computed, and a load would overwrite it
        lookup = self._of_request.get(request.request_id)
        if lookup is None:
            hashes = self._hashes_of(request)
            if len(hashes) * block_size <= num_computed_tokens:
                return Matched(0)
            lookup = _Lookup(next(self._lookup_ids), len(hashes))
            self._lookups[lookup.lookup_id] = self._of_request[request.request_id] = lookup
            self._commands.lookups.append(Lookup(lookup.lookup_id, Prefix(hashes, self._salt)))
        if len(lookup.ranks_done) < self.config.num_ranks:
            return AskLater()
        self._num_local[request.request_id] = num_computed_tokens
        return Matched(max(lookup.num_found * block_size - num_computed_tokens, 0), is_async=True)

    def _drop_lookup(self, request_id: str) -> None:
        """Nothing will be loaded from the request's lookup, if it has one."""
        lookup = self._of_request.pop(request_id, None)
        self._num_local.pop(request_id, None)
        if lookup is not None:
            lookup.is_wanted = False
            self._release_if_answered(lookup)

    def _release_if_answered(self, lookup: _Lookup) -> None:
        if not lookup.is_wanted and len(lookup.ranks_done) == self.config.num_ranks:
            del self._lookups[lookup.lookup_id]
            self._commands.released.append(lookup.lookup_id)

    def _answered(self, answer: Found, rank: int) -> None:
        lookup = self._lookups.get(answer.lookup_id)
        if lookup is None or rank in lookup.ranks_done:
            return  # a repeated report
        lookup.ranks_done.add(rank)
        lookup.num_found = min(lookup.num_found, answer.num_blocks)
        self._release_if_answered(lookup)

    # Loads

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        lookup = self._of_request.pop(request.request_id)
        del self._lookups[lookup.lookup_id]
        first_token = self._num_local.pop(request.request_id)
        first = first_token // self._group.block_size
        last = (first_token + num_external_tokens) // self._group.block_size
        self._loading.add(request.request_id)
        self._commands.loads.append(
            Load(request.request_id, lookup.lookup_id, first, block_ids[0][first:last].tolist())
        )

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        self._drop_lookup(request.request_id)
        self._hashes.pop(request.request_id, None)
        self._tables.pop(request.request_id, None)
        return FinishAction()

    # Stores

    def build_connector_meta(self, step: StepView) -> bytes:
        for request_id in step.preempted:
            self._tables.pop(request_id, None)  # it owns its blocks no more
        for admitted in step.admitted:
            self._drop_lookup(admitted.request_id)  # of those that had nothing to load
            self._tables[admitted.request_id] = admitted.block_ids[0].tolist()
        uncached = set(step.uncached)
        if uncached:
            for new in [each for each in self._unproven if uncached & set(each.store.block_ids)]:
                self._unproven.remove(new)
                self._holds.release(new.store.hold_id)
        while self._unproven and self._unproven[0].step <= step.answered_step:
            store = self._unproven.pop(0).store
            self._ranks_stored[store.hold_id] = set()
            self._commands.stores.append(store)
        for cached in step.cached:
            self._hold_chunks(step.step, cached)
        if self._commands == Commands():
            return b""
        commands, self._commands = self._commands, Commands()
        return msgspec.msgpack.encode(commands)

    def _hold_chunks(self, step: int, cached: CachedBlocks) -> None:
        """Hold the chunks that these blocks complete, until their plan is answered."""
        hashes, table = self._hashes.get(cached.request_id), self._tables.get(cached.request_id)
        if hashes is None or table is None:
            return  # the request has ended
        end = first = cached.positions[0]
        for position, block_id, block_hash in zip(
            cached.positions, cached.block_ids, cached.block_hashes, strict=True
        ):
            if position != end or position > min(len(hashes), len(table)):
                break  # a block between them is not cached any more
            hashes[position : position + 1] = [block_hash]
            table[position : position + 1] = [block_id]
            end += 1
        chunk = self._chunk_blocks
        first, last = first // chunk * chunk, end // chunk * chunk
        block_ids = table[first:last]
        if not block_ids:
            return
        hold_id = self._holds.hold(block_ids)
        store = Store(hold_id, Prefix(hashes[:last], self._salt), block_ids)
        self._unproven.append(_NewChunks(step, store))

    def _stored(self, hold_id: int, rank: int) -> None:
        """A rank has ended its share of a store, successfully or not: a block counts as stored
        when a lookup finds it on all ranks."""
        ranks = self._ranks_stored.get(hold_id)
        if ranks is None:
            return  # a repeated report
        ranks.add(rank)
        if len(ranks) == self.config.num_ranks:
            del self._ranks_stored[hold_id]
            self._holds.release(hold_id)

    @property
    def has_pending_work(self) -> bool:
        return bool(self._unproven) or self._commands != Commands()

    # Reports

    def update_connector_output(self, output: ConnectorOutput) -> None:
        for metadata in output.metadata:
            report = msgspec.msgpack.decode(metadata, type=Report)
            for answer in report.found:
                self._answered(answer, output.rank)
            for hold_id in report.stored:
                self._stored(hold_id, output.rank)
        self._loading.difference_update(output.finished_receiving)

    def reset_cache(self) -> bool:
        """Other engines may use the store: from now on, other keys are used."""
        if self._loading:
            return False
        self._salt = uuid4().hex
        for request_id in list(self._of_request):
            self._drop_lookup(request_id)
        return True

    def on_new_epoch(self, epoch: int) -> None:
        self._begin()  # the locks belonged to the workers
