"""The scheduler half: which prefixes are looked up, and which of their chunks are loaded and
stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from uuid import uuid4

from longshore.connectors.base import ConnectorConfig, RequestView, StorableBlocks
from longshore.connectors.base.groups import StoredGroups
from longshore.connectors.base.lookups import LookupConnector, OpenLookup
from longshore.connectors.base.prefix_store.messages import (
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
class _Lookup(OpenLookup):
    """num_found: leading blocks that all ranks which have answered can load."""

    num_found: int


class PrefixStoreConnector(LookupConnector[_Lookup]):
    """name: of the connector."""

    contract_version: ClassVar[int] = 2
    report_type = Report
    name: ClassVar[str]

    def __init__(self, config: ConnectorConfig, chunk_blocks: int = 1) -> None:
        super().__init__(config)
        (self._group,) = StoredGroups(config, None, connector=self.name).groups[:1]
        if not self._group.needs_all:
            raise ConfigError(
                f"--kv-connector {self.name} is for models that attend to all tokens; this one has "
                f"a {type(self._group.spec).__name__}. Use offloading or simple_cpu."
            )
        self.chunk_blocks = chunk_blocks
        self._salt = ""

    def _prefix(self, block_hashes: Sequence[bytes], num_blocks: int) -> Prefix:
        keys = self._group.keys(block_hashes, 0, num_blocks)
        return Prefix([key[:-1] for key in keys], self._salt)  # without the number of the group

    def _look_up(
        self, lookup_id: int, request: RequestView, num_computed_tokens: int
    ) -> _Lookup | None:
        num_blocks = len(request.block_hashes) // self._group.hash_step
        if num_blocks * self._group.block_size <= num_computed_tokens:
            return None
        prefix = self._prefix(request.block_hashes, num_blocks)
        self._commands.lookups.append(Lookup(lookup_id, prefix))
        return _Lookup(lookup_id, 0, num_blocks)  # from the first token on

    def _add_answer(self, lookup: _Lookup, answer: Found) -> None:
        lookup.num_found = min(lookup.num_found, answer.num_blocks)

    def _end_of_hit(self, lookup: _Lookup, request: RequestView, num_computed_tokens: int) -> int:
        return lookup.num_found * self._group.block_size

    def _load(
        self,
        lookup_id: int,
        request: RequestView,
        block_ids: tuple[Int32Array, ...],
        first_token: int,
        end: int,
    ) -> None:
        first, last = first_token // self._group.block_size, end // self._group.block_size
        targets = block_ids[0][first:last].tolist()
        self._commands.loads.append(Load(request.request_id, lookup_id, first, targets))

    def _store(self, storable: Sequence[StorableBlocks]) -> None:
        for new in storable:
            block_ids: list[int] = []
            end = 0
            for chunk in new.chunks(self.chunk_blocks):
                if block_ids and chunk.position != end:
                    break  # a block between them is not cached any more
                block_ids += chunk.block_ids
                end = chunk.position + self.chunk_blocks
            if block_ids:
                prefix = self._prefix(new.request_hashes, end)
                hold_id = self._holds.hold(block_ids)
                self._commands.stores.append(Store(hold_id, prefix, block_ids))

    def _change_keys(self) -> None:
        """Other engines may use the store."""
        self._salt = uuid4().hex
