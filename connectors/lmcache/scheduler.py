"""The scheduler half: asks the workers what is stored, and plans loads and stores.

LMCache is asked in the workers, because a lookup may read files or a server. A request waits
(`AskLater`) until all ranks have answered. An answered lookup has its blocks locked in the host
memory of every rank, until a load has read them or the lookup is released: each lookup ends with
exactly one of the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar
from uuid import uuid4

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
from longshore.connectors.lmcache.messages import (
    Blocks,
    Commands,
    Found,
    Load,
    Lookup,
    Report,
    Store,
)
from longshore.connectors.lmcache.options import check_library, read_options
from longshore.connectors.offloading.groups import StoredGroups
from longshore.protocol.arrays import Int32Array
from longshore.protocol.kv_cache_spec import NULL_BLOCK


@dataclass(slots=True)
class _Lookup:
    """What one request has asked for.

    keys:    by KV cache group, from the block after `first_token` on.
    found:   keys that all ranks which have answered have locked.
    is_wanted: False: its request has ended or needs other blocks.
    """

    lookup_id: int
    first_token: int
    keys: list[list[bytes]]
    found: set[bytes]
    ranks_done: set[int] = field(default_factory=set)
    is_wanted: bool = True

    def count_leading(self, keys: list[bytes]) -> int:
        num_found = 0
        while num_found < len(keys) and keys[num_found] in self.found:
            num_found += 1
        return num_found


@dataclass(slots=True)
class _NewBlocks:
    """Blocks that are held until the plan that computes them is answered."""

    step: int
    hold_id: int
    blocks: Blocks


class LMCacheConnector(SchedulerConnector):
    """See `options.LMCacheOptions`."""

    contract_version: ClassVar[int] = 1
    supports_hma = True
    worker_half: ClassVar[str] = "longshore.connectors.lmcache.worker:LMCacheWorker"

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        read_options(ConnectorConfig(options))

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        check_library()
        read_options(config)
        self._groups = StoredGroups(config, None, connector="lmcache")
        self._salt = b""  # of the keys; a new one makes everything stored so far unreachable
        self._holds: BlockHolds | None = None
        self._lookup_ids = count(1)
        self._begin()

    def _begin(self) -> None:
        self._lookups: dict[int, _Lookup] = {}  # not released yet
        self._of_request: dict[str, _Lookup] = {}
        self._num_local: dict[str, int] = {}  # tokens at the last match, by request
        self._loading: set[str] = set()
        self._unproven: list[_NewBlocks] = []
        self._ranks_stored: dict[int, set[int]] = {}  # by hold id
        self._commands = Commands()

    def bind_blocks(self, holds: BlockHolds) -> None:
        self._holds = holds

    # Lookups

    def get_num_new_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        if any(num_computed_tokens % spec.block_size for spec in self.config.specs):
            return Matched(0)  # its last block is partly computed, and a load would overwrite it
        lookup = self._of_request.get(request.request_id)
        if lookup is None or num_computed_tokens < lookup.first_token:
            self._drop_lookup(request.request_id)
            lookup = self._look_up(request, num_computed_tokens)
        if lookup is None:
            return Matched(0)
        if len(lookup.ranks_done) < self.config.num_ranks:
            return AskLater()
        end = self._groups.longest_hit(
            request.block_hashes, request.num_tokens, num_computed_tokens, lookup.count_leading
        )
        self._num_local[request.request_id] = num_computed_tokens
        return Matched(max(end - num_computed_tokens, 0), is_async=True)

    def _look_up(self, request: RequestView, first_token: int) -> _Lookup | None:
        """Ask for all blocks after `first_token`. None: there is no full one."""
        keys = [
            group.keys(
                request.block_hashes,
                first_token // group.block_size,
                len(request.block_hashes) // group.hash_step,
            )
            for group in self._groups.groups
        ]
        if not any(keys):
            return None
        lookup = _Lookup(next(self._lookup_ids), first_token, keys, set().union(*keys))
        self._lookups[lookup.lookup_id] = self._of_request[request.request_id] = lookup
        hashes = [[self._key_hash(key) for key in of_group] for of_group in keys]
        self._commands.lookups.append(Lookup(lookup.lookup_id, hashes))
        return lookup

    def _key_hash(self, key: bytes) -> bytes:
        """The key of LMCache has a field of its own for the group."""
        return self._salt + key[:-1]

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
        lookup.found &= {
            keys[index]
            for keys, indices in zip(lookup.keys, answer.groups, strict=True)
            for index in indices
        }
        self._release_if_answered(lookup)

    # Loads

    def update_state_after_alloc(
        self, request: RequestView, block_ids: tuple[Int32Array, ...], num_external_tokens: int
    ) -> None:
        lookup = self._of_request.pop(request.request_id)
        del self._lookups[lookup.lookup_id]
        first_token = self._num_local.pop(request.request_id)
        end = first_token + num_external_tokens
        blocks: Blocks = []
        for group, table in zip(self._groups.groups, block_ids, strict=True):
            first, last = first_token // group.block_size, end // group.block_size
            keys = group.keys(request.block_hashes, first, last)
            blocks += [
                (group.number, block_id, self._key_hash(key))
                for block_id, key in zip(table[first:last].tolist(), keys, strict=True)
                if block_id != NULL_BLOCK
            ]
        self._loading.add(request.request_id)
        self._commands.loads.append(Load(request.request_id, lookup.lookup_id, blocks))

    def request_finished(
        self, request: RequestView, block_ids: tuple[Int32Array, ...]
    ) -> FinishAction:
        self._drop_lookup(request.request_id)
        return FinishAction()

    # Stores

    def build_connector_meta(self, step: StepView) -> bytes:
        for request in step.admitted:  # those that had nothing to load
            self._drop_lookup(request.request_id)
        if step.uncached:
            uncached = set(step.uncached)
            for new in self._unproven:
                new.blocks = [block for block in new.blocks if block[1] not in uncached]
        while self._unproven and self._unproven[0].step <= step.answered_step:
            self._store(self._unproven.pop(0))
        if step.cached:
            self._hold(step)
        if self._commands == Commands():
            return b""
        commands, self._commands = self._commands, Commands()
        return msgspec.msgpack.encode(commands)

    def _hold(self, step: StepView) -> None:
        """Keep the blocks that this plan caches until it is answered."""
        assert self._holds is not None
        blocks: Blocks = [
            (cached.group, block_id, self._salt + block_hash)
            for cached in step.cached
            for block_id, block_hash in zip(cached.block_ids, cached.block_hashes, strict=True)
        ]
        hold_id = self._holds.hold([block_id for _, block_id, _ in blocks])
        self._unproven.append(_NewBlocks(step.step, hold_id, blocks))

    def _store(self, new: _NewBlocks) -> None:
        assert self._holds is not None
        if not new.blocks:
            self._holds.release(new.hold_id)
            return
        self._ranks_stored[new.hold_id] = set()
        self._commands.stores.append(Store(new.hold_id, new.blocks))

    def _stored(self, hold_id: int, rank: int) -> None:
        """A rank has ended its share of a store, successfully or not: a block counts as stored
        when a lookup finds it on all ranks."""
        assert self._holds is not None
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
        """LMCache cannot empty its files and servers: from now on, other keys are used."""
        if self._loading:
            return False
        self._salt = uuid4().bytes
        for request_id in list(self._of_request):
            self._drop_lookup(request_id)
        return True

    def on_new_epoch(self, epoch: int) -> None:
        self._begin()  # the locks belonged to the workers
