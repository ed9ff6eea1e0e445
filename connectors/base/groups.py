"""Which blocks of each KV cache group a hit needs, and the keys under which they are stored.

A key is the block hash and the number of the group; blocks of swapped requests that have no hash
get a private key. A state in pages has one key per page, and a hit needs the pages of one state,
that at its end. All arithmetic is in offloaded blocks: with one group, an offloaded block can be
several blocks of the device.
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from longshore.connectors.base import ConnectorConfig
from longshore.protocol.arrays import Int32Array
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    CustomSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    StateSpec,
    page_hashes,
)

BlockRows: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int32]]
"""(n, factor) block ids of the device, a line per offloaded block."""

_PRIVATE: Final = struct.Struct(">QIB")


def private_key(swap_id: int, position: int, group: int) -> bytes:
    """Key of one offloaded block of a swapped request. No block hash has its length."""
    return _PRIVATE.pack(swap_id, position, group)


def is_private(key: bytes) -> bool:
    """Whether `private_key` has made this key."""
    return len(key) == _PRIVATE.size


class StoredGroup(NamedTuple):
    """How one group is stored.

    number:     of the group.
    block_size: tokens per offloaded block.
    factor:     blocks of the device per offloaded block.
    hash_step:  block hashes of a request per offloaded block.
    """

    number: int
    spec: KVCacheSpec
    block_size: int
    factor: int
    hash_step: int

    @property
    def needs_all(self) -> bool:
        """Whether a hit needs every block before its end."""
        partial = (SlidingWindowSpec, ChunkedLocalAttentionSpec, StateSpec)
        return not isinstance(self.spec, partial)

    @property
    def num_pages(self) -> int:
        """Blocks of a state in pages; 0 for other groups."""
        return self.spec.num_pages if isinstance(self.spec, StateSpec) else 0

    def keys(self, block_hashes: Sequence[bytes], first: int, last: int) -> list[bytes]:
        """Keys of the offloaded blocks [first, last) of a request; of states in pages, those of the
        pages of the states after these blocks."""
        keys = self.first_keys(block_hashes, first, last)
        if not self.num_pages:
            return keys
        suffix = bytes((self.number,))
        return [page + suffix for key in keys for page in page_hashes(key[:-1], self.num_pages)]

    def first_keys(self, block_hashes: Sequence[bytes], first: int, last: int) -> list[bytes]:
        """`keys`, but of a state in pages only that of its first page."""
        step, suffix = self.hash_step, bytes((self.number,))
        hashes = block_hashes[(first + 1) * step - 1 : last * step : step]
        return [block_hash + suffix for block_hash in hashes]

    def block_range(self, first_token: int, end: int) -> tuple[int, int]:
        """The offloaded blocks that a load fills of a request whose tokens [first_token, end) are
        loaded; of states in pages, the block that the state at the end follows."""
        last = -(-end // self.block_size)
        return (last - 1 if self.num_pages else first_token // self.block_size), last

    def rows(self, table: Int32Array, first: int, last: int, num_tokens: int) -> BlockRows:
        """(last - first, factor) block ids of the offloaded blocks [first, last), as a copy: those
        that hold the first `num_tokens` tokens, the null block for others. Of states in pages:
        (num_pages, 1)."""
        if self.num_pages:
            return table.reshape(-1, 1).copy()
        rows = np.zeros((last - first) * self.factor, np.int32)
        end = min(last * self.factor, -(-num_tokens // self.spec.block_size))
        ids = table[first * self.factor : end]
        rows[: len(ids)] = ids
        return rows.reshape(-1, self.factor)

    def first_needed(self, num_tokens: int) -> int:
        """The first offloaded block that a request needs to go on after `num_tokens` tokens."""
        spec = self.spec
        match spec:
            case StateSpec():
                skipped = num_tokens - 1
            case SlidingWindowSpec():
                skipped = num_tokens - spec.sliding_window + 1
            case ChunkedLocalAttentionSpec():
                size = spec.attention_chunk_size
                skipped = num_tokens // size * size
            case _:
                skipped = 0
        return max(skipped, 0) // self.block_size


class StoredGroups:
    """All groups of a model. Raises ConfigError if one cannot be stored."""

    def __init__(
        self, config: ConnectorConfig, block_size: int | None, *, connector: str = "offloading"
    ) -> None:
        """block_size: tokens per offloaded block; None: the block of the device.
        connector: for messages."""
        for index, spec in enumerate(config.specs):
            _check_kind(index, spec, connector)
        self.groups = tuple(
            _stored_group(index, spec, config.hash_block_size, block_size, len(config.specs))
            for index, spec in enumerate(config.specs)
        )
        self.border = math.lcm(*(group.block_size for group in self.groups))
        """A hit of several groups ends at a multiple of this."""
        self._hash_block_size = self.groups[0].block_size // self.groups[0].hash_step
        self.are_all_full = all(group.needs_all for group in self.groups)

    @property
    def of_tokens(self) -> tuple[StoredGroup, ...]:
        """Those whose blocks hold tokens, unlike states in pages."""
        return tuple(group for group in self.groups if not group.num_pages)

    @property
    def factor(self) -> int:
        return self.groups[0].factor

    @property
    def most_complete(self) -> StoredGroup:
        """The first group of which a hit needs every block; if there is none, the first one."""
        return next((group for group in self.groups if group.needs_all), self.groups[0])

    def longest_hit(
        self,
        block_hashes: Sequence[bytes],
        num_tokens: int,
        num_computed: int,
        count_leading: Callable[[list[bytes]], int],
        max_tokens: int | None = None,
    ) -> int:
        """The number of leading tokens, at least `num_computed`, that a request of `num_tokens`
        tokens can have: `num_computed` of them are there, the others can be loaded.

        count_leading: how many leading keys can be loaded.
        max_tokens:    find no longer hit.

        Where a group does not need all blocks, at least one token is left to compute, because the
        last one reads a state or a window that ends before it.
        """
        limit = num_tokens if self.are_all_full else num_tokens - 1
        limit = min(limit, len(block_hashes) * self._hash_block_size)
        if max_tokens is not None:
            limit = min(limit, max_tokens)
        end = limit - limit % self.border
        for group in self.groups:
            if group.needs_all and end > num_computed:
                first = num_computed // group.block_size
                keys = group.keys(block_hashes, first, end // group.block_size)
                end = (first + count_leading(keys)) * group.block_size
                end -= end % self.border
        others = [group for group in self.groups if not group.needs_all]
        # One key tells of most positions that no state is there.
        others.sort(key=lambda group: not group.num_pages)
        while end > num_computed and not all(
            self._has_needed(group, block_hashes, num_computed, end, count_leading)
            for group in others
        ):
            end -= self.border
        return max(end, num_computed)

    def needed_keys(
        self, block_hashes: Sequence[bytes], num_computed: int, end: int
    ) -> list[bytes]:
        """All keys of a hit of `end` tokens of which `num_computed` are there."""
        return [
            key
            for group in self.groups
            for key in self._needed_of(group, block_hashes, num_computed, end)
        ]

    @property
    def keys_per_border(self) -> int:
        """Number of keys that a hit which is shorter by `border` needs less, at most."""
        of_tokens = [group for group in self.groups if not group.num_pages]
        return sum(self.border // group.block_size for group in of_tokens) or 1

    def _needed_of(
        self, group: StoredGroup, block_hashes: Sequence[bytes], num_computed: int, end: int
    ) -> list[bytes]:
        first = max(group.first_needed(end), num_computed // group.block_size)
        return group.keys(block_hashes, first, end // group.block_size)

    def _has_needed(
        self,
        group: StoredGroup,
        block_hashes: Sequence[bytes],
        num_computed: int,
        end: int,
        count_leading: Callable[[list[bytes]], int],
    ) -> bool:
        keys = self._needed_of(group, block_hashes, num_computed, end)
        if group.num_pages and not count_leading(keys[:1]):
            return False
        return count_leading(keys) == len(keys)


def _check_kind(index: int, spec: KVCacheSpec, connector: str) -> None:
    if isinstance(spec, (CrossAttentionSpec, CustomSpec)):
        raise ConfigError(
            f"the {connector} connector cannot store KV cache group {index}, which is a "
            f"{type(spec).__name__}: equal tokens need not have equal KV there. Start without it."
        )


def _stored_group(
    index: int, spec: KVCacheSpec, hash_block_size: int, block_size: int | None, num_groups: int
) -> StoredGroup:
    size = spec.block_size if block_size is None else block_size
    if size % spec.block_size or size < 1:
        raise ConfigError(
            f"block_size={size} of the offloading connector must be a multiple of the "
            f"{spec.block_size} tokens of a block of this engine"
        )
    if size != spec.block_size and num_groups > 1:
        raise ConfigError(
            f"block_size={size} of the offloading connector is for models with one KV cache group, "
            f"but this model has {num_groups}. Remove it."
        )
    group = StoredGroup(
        index, spec, size, size // spec.block_size, size // (hash_block_size or size)
    )
    if group.factor > 1 and not group.needs_all:
        raise ConfigError(
            f"block_size={size} of the offloading connector is for models that keep all blocks of "
            f"a request, but the {type(spec).__name__} of this model frees some of them before "
            "the last one of an offloaded block is computed. Remove it."
        )
    return group
