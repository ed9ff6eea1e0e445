"""Cached prefixes that clients have asked to keep: their free blocks are evicted after all others.

A hint never pins a block. It ends with its time to live, when the next request of its session ends,
or when its tenant retains too many blocks; and if no other block is free, retained ones are
allocated like all others.
"""

import heapq
from typing import Final

import msgspec
import numpy as np

from longshore.protocol.arrays import BoolArray, Int32Array
from longshore.protocol.requests import CacheHint

MAX_SHARE_OF_TENANT: Final = 0.25
"""Share of all blocks that one tenant may retain."""
MAX_PREFIXES: Final = 4096


class _Prefix(msgspec.Struct):
    """A prefix whose blocks are retained. block_ids: those that no later prefix has, too; first
    blocks first."""

    tenant: str
    session: str | None
    block_ids: Int32Array


class RetainedPrefixes:
    """The prefixes with a hint, and which of `num_blocks` blocks are retained."""

    def __init__(self, num_blocks: int) -> None:
        self._max_of_tenant = int(num_blocks * MAX_SHARE_OF_TENANT)
        self._prefixes: dict[int, _Prefix] = {}  # by number, which grows
        self._numbers: dict[tuple[str, str], int] = {}  # by tenant and session
        self._expiries: list[tuple[float, int]] = []  # a heap
        self._last_number = 0
        # The number of the newest prefix that retains the block; 0: none does.
        self._owner: Int32Array = np.zeros(num_blocks, np.int32)
        self._owner_item = memoryview(self._owner)

    def __len__(self) -> int:
        return len(self._prefixes)

    def is_retained(self, block_ids: Int32Array) -> BoolArray:
        retained: BoolArray = self._owner[block_ids] != 0
        return retained

    def add(self, block_ids: Int32Array, hint: CacheHint, *, tenant: str, now: float) -> None:
        """Retain cached blocks, all different, of one prefix, first blocks first. The former prefix
        of its session is not retained any more, except for blocks that both have."""
        block_ids = block_ids[: self._max_of_tenant]
        self._last_number += 1
        number, former = self._last_number, np.unique(self._owner[block_ids])
        self._owner[block_ids] = number
        for other in former[former != 0].tolist():
            self._keep_owned(other)
        if hint.session is not None:
            self._remove(self._numbers.get((tenant, hint.session)))
        if not len(block_ids):
            return
        if hint.session is not None:
            self._numbers[tenant, hint.session] = number
        self._prefixes[number] = _Prefix(tenant, hint.session, block_ids)
        heapq.heappush(self._expiries, (now + hint.ttl_s, number))
        self._limit(tenant)

    def expire(self, now: float) -> None:
        """End the hints whose time to live has passed."""
        while self._expiries and self._expiries[0][0] <= now:
            self._remove(heapq.heappop(self._expiries)[1])

    def evicted(self, block_ids: list[int]) -> None:
        """These blocks are not cached any more."""
        owner = self._owner_item
        for block_id in block_ids:
            owner[block_id] = 0

    def clear(self) -> None:
        self._prefixes.clear()
        self._numbers.clear()
        self._expiries.clear()
        self._owner[:] = 0

    def _limit(self, tenant: str) -> None:
        """Remove the oldest prefixes beyond the limits."""
        while len(self._prefixes) > MAX_PREFIXES:
            self._remove(next(iter(self._prefixes)))
        of_tenant = [n for n, prefix in self._prefixes.items() if prefix.tenant == tenant]
        num_blocks = sum(len(self._prefixes[number].block_ids) for number in of_tenant)
        for number in of_tenant:
            if num_blocks <= self._max_of_tenant:
                break
            num_blocks -= len(self._prefixes[number].block_ids)
            self._remove(number)

    def _keep_owned(self, number: int) -> None:
        """A prefix keeps only the blocks that it still owns."""
        prefix = self._prefixes[number]
        prefix.block_ids = prefix.block_ids[self._owner[prefix.block_ids] == number]
        if not len(prefix.block_ids):
            self._remove(number)

    def _remove(self, number: int | None) -> None:
        prefix = None if number is None else self._prefixes.pop(number, None)
        if number is None or prefix is None:
            return
        self._owner[prefix.block_ids[self._owner[prefix.block_ids] == number]] = 0
        if prefix.session is not None and self._numbers[prefix.tenant, prefix.session] == number:
            del self._numbers[prefix.tenant, prefix.session]
        if len(self._expiries) > 2 * MAX_PREFIXES:
            self._expiries = [e for e in self._expiries if e[1] in self._prefixes]
            heapq.heapify(self._expiries)
