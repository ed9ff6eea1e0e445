"""The scheduler half: what is looked up, loaded and stored of each KV cache group.

Blocks that a lookup has found are locked in the host memory of every rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

from longshore.connectors.base import ConnectorConfig, RequestView, StorableBlocks
from longshore.connectors.base.groups import StoredGroups
from longshore.connectors.base.lookups import LookupConnector, OpenLookup
from longshore.connectors.lmcache.messages import Blocks, Found, Load, Lookup, Report, Store
from longshore.connectors.lmcache.options import check_library, read_options
from longshore.protocol.arrays import Int32Array
from longshore.protocol.kv_cache_spec import NULL_BLOCK


@dataclass(slots=True)
class _Lookup(OpenLookup):
    """
    keys:  by KV cache group, from the block after `first_token` on.
    found: keys that all ranks which have answered have locked.
    """

    keys: list[list[bytes]]
    found: set[bytes]

    def count_leading(self, keys: list[bytes]) -> int:
        num_found = 0
        while num_found < len(keys) and keys[num_found] in self.found:
            num_found += 1
        return num_found


class LMCacheConnector(LookupConnector[_Lookup]):
    """See `options.LMCacheOptions`."""

    contract_version: ClassVar[int] = 2
    supports_hma = True
    worker_half: ClassVar[str] = "longshore.connectors.lmcache.worker:LMCacheWorker"
    report_type = Report

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        read_options(ConnectorConfig(options))

    def __init__(self, config: ConnectorConfig) -> None:
        super().__init__(config)
        check_library()
        read_options(config)
        self._groups = StoredGroups(config, None, connector="lmcache")
        self._salt = b""  # of the keys

    def _key_hash(self, key: bytes) -> bytes:
        """The key of LMCache has a field of its own for the group."""
        return self._salt + key[:-1]

    def _look_up(
        self, lookup_id: int, request: RequestView, num_computed_tokens: int
    ) -> _Lookup | None:
        """Ask for all blocks after `num_computed_tokens`; of states, for the first page of each."""
        keys = [
            group.first_keys(
                request.block_hashes,
                num_computed_tokens // group.block_size,
                len(request.block_hashes) // group.hash_step,
            )
            for group in self._groups.groups
        ]
        if not any(keys):
            return None
        hashes = [[self._key_hash(key) for key in of_group] for of_group in keys]
        self._commands.lookups.append(Lookup(lookup_id, hashes))
        return _Lookup(lookup_id, num_computed_tokens, keys, set().union(*keys))

    def _add_answer(self, lookup: _Lookup, answer: Found) -> None:
        lookup.found &= {
            keys[index]
            for keys, indices in zip(lookup.keys, answer.groups, strict=True)
            for index in indices
        }

    def _end_of_hit(self, lookup: _Lookup, request: RequestView, num_computed_tokens: int) -> int:
        def count_leading(keys: list[bytes]) -> int:
            """The other pages of a state are stored with the first; one that is gone is a load that
            fails."""
            is_state = keys and self._groups.groups[keys[0][-1]].num_pages
            return len(keys) * (keys[0] in lookup.found) if is_state else lookup.count_leading(keys)

        return self._groups.longest_hit(
            request.block_hashes, request.num_tokens, num_computed_tokens, count_leading
        )

    def _load(
        self,
        lookup_id: int,
        request: RequestView,
        block_ids: tuple[Int32Array, ...],
        first_token: int,
        end: int,
    ) -> None:
        blocks: Blocks = []
        for group, table in zip(self._groups.groups, block_ids, strict=True):
            first, last = group.block_range(first_token, end)
            keys = group.keys(request.block_hashes, first, last)
            block_ids_of = group.rows(table, first, last, end).ravel().tolist()
            blocks += [
                (group.number, block_id, self._key_hash(key))
                for block_id, key in zip(block_ids_of, keys, strict=True)
                if block_id != NULL_BLOCK
            ]
        self._commands.loads.append(Load(request.request_id, lookup_id, blocks))

    def _store(self, storable: Sequence[StorableBlocks]) -> None:
        blocks = {
            (new.group, self._salt + block_hash): block_id
            for new in storable
            for block_id, block_hash in zip(new.block_ids, new.block_hashes, strict=True)
        }
        stored = [(group, block_id, key) for (group, key), block_id in blocks.items()]
        self._commands.stores.append(Store(self._holds.hold(list(blocks.values())), stored))

    def _change_keys(self) -> None:
        """LMCache cannot empty its files and servers."""
        self._salt = uuid4().bytes
