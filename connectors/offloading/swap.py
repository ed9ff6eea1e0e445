"""Requests that are swapped out: the keys that keep their KV, and the device's blocks that have it.

A full block with a hash is kept under the key that any request finds, and so is stored once. The
others are kept under private keys: the partial last blocks, the states of partial blocks, and
everything if prefixes are not cached.
"""

from itertools import chain, count
from typing import NamedTuple

import numpy as np

from longshore.connectors.base import RequestView, SwapSize
from longshore.connectors.base.groups import BlockRows, StoredGroup, StoredGroups, private_key
from longshore.connectors.offloading.jobs import Jobs
from longshore.connectors.offloading.spec import OffloadingManager
from longshore.protocol.arrays import Int32Array
from longshore.protocol.kv_cache_spec import NULL_BLOCK


class GroupKeys(NamedTuple):
    """Keys of the offloaded blocks of one group, from block `first` on: those that the next token
    needs."""

    group: StoredGroup
    first: int
    keys: list[bytes]

    def between(self, first: int, last: int) -> list[bytes]:
        """One key per offloaded block [first, last), or page of the state after them; empty for
        blocks that are not needed."""
        if self.group.num_pages:
            return self.keys
        start = max(first, self.first)
        return [b""] * (start - first) + self.keys[start - self.first : last - self.first]


class SwappedRequest(NamedTuple):
    """A request whose first `num_tokens` tokens have their KV in a tier."""

    num_tokens: int
    groups: tuple[GroupKeys, ...]

    @property
    def keys(self) -> list[bytes]:
        return list(chain.from_iterable(each.keys for each in self.groups))

    def keys_after(self, num_tokens: int) -> list[bytes]:
        """The keys of blocks that do not end within the first `num_tokens` tokens."""
        return [
            key
            for each in self.groups
            for key in (
                each.keys
                if each.group.num_pages
                else each.keys[max(num_tokens // each.group.block_size - each.first, 0) :]
            )
        ]

    def rows(self, block_ids: tuple[Int32Array, ...]) -> BlockRows | None:
        """(len(keys), factor) blocks of the device, from the request's block tables; the null block
        where an offloaded block has no tokens yet. None if a block is missing."""
        parts = []
        for (group, first, keys), table in zip(self.groups, block_ids, strict=True):
            rows = group.rows(table, first, first + len(keys), self.num_tokens)
            size = group.spec.block_size
            num_blocks = -(-self.num_tokens // size) - first * group.factor if keys else 0
            num_blocks = group.num_pages or num_blocks
            if np.count_nonzero(rows != NULL_BLOCK) != num_blocks:
                return None
            parts.append(rows)
        return np.concatenate(parts)


class Swaps:
    """The requests that are swapped out."""

    def __init__(self, groups: StoredGroups, manager: OffloadingManager, jobs: Jobs) -> None:
        self._groups = groups
        self._manager = manager
        self._jobs = jobs
        self._ids = count(1)
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self._swapped: dict[str, SwappedRequest] = {}

    def __len__(self) -> int:
        return len(self._swapped)

    def get(self, request_id: str) -> SwappedRequest | None:
        return self._swapped.get(request_id)

    def size(
        self,
        request: RequestView,
        num_tokens: int,
        num_found: int,
        num_loading: int,
        rank_bytes: int,
    ) -> SwapSize:
        """What `out` would move. num_found: tokens that can be loaded already. num_loading:
        offloaded blocks of other loads. rank_bytes: of one block of the device on one rank."""
        swapped = swapped_request(self._groups, 0, request, num_tokens)
        block_bytes = self._groups.factor * rank_bytes
        num_found_blocks = sum(
            (num_found // group.block_size - group.first_needed(num_found)) * (group.num_pages or 1)
            for group in self._groups.groups
        )
        return SwapSize(
            store_bytes=len(swapped.keys_after(num_found)) * block_bytes,
            load_bytes=len(swapped.keys) * block_bytes,
            queued_store_bytes=self._jobs.num_storing * rank_bytes,
            queued_load_bytes=num_loading * block_bytes,
            num_found_tokens=num_found,
            found_bytes=num_found_blocks * block_bytes,
        )

    def out(self, request: RequestView, block_ids: tuple[Int32Array, ...], num_tokens: int) -> bool:
        """See `SchedulerConnector.swap_out`."""
        swapped = swapped_request(self._groups, next(self._ids), request, num_tokens)
        keys, rows = swapped.keys, swapped.rows(block_ids)
        prepared = None if rows is None else self._manager.prepare_swap(keys)
        if prepared is None or rows is None:
            return False
        self._swapped[request.request_id] = swapped
        if prepared.indices:
            stored = [keys[index] for index in prepared.indices]
            groups = bytes(key[-1] for key in stored)
            ids = rows[list(prepared.indices)]
            self._jobs.begin_store(stored, groups, ids, prepared.tier_data)
        return True

    def release(self, request_id: str) -> None:
        self._manager.release_swap(self._swapped.pop(request_id).keys)


def swapped_request(
    groups: StoredGroups, swap_id: int, request: RequestView, num_tokens: int
) -> SwappedRequest:
    """The keys for the first `num_tokens` tokens. swap_id: of no other request, and no earlier swap
    of this one."""
    return SwappedRequest(
        num_tokens,
        tuple(_group_keys(group, swap_id, request, num_tokens) for group in groups.groups),
    )


def _group_keys(
    group: StoredGroup, swap_id: int, request: RequestView, num_tokens: int
) -> GroupKeys:
    hashes = request.block_hashes
    first = group.first_needed(num_tokens)
    last = -(-num_tokens // group.block_size)
    num_full = min(num_tokens // group.block_size, len(hashes) // group.hash_step)
    num_full = max(num_full, first)
    if group.num_pages:  # the state after the last token, which may be within a block
        is_hashed = num_full * group.block_size == num_tokens
        pages = range(group.num_pages)
        private = [private_key(swap_id, page, group.number) for page in pages]
        return GroupKeys(group, first, group.keys(hashes, first, last) if is_hashed else private)
    private = [private_key(swap_id, index, group.number) for index in range(num_full, last)]
    return GroupKeys(group, first, group.keys(hashes, first, num_full) + private)
