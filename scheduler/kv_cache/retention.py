"""Cached prefixes that clients have asked to keep: their free blocks are evicted after all others.

A hint never pins a block. It ends with its time to live, when the next request of its session ends,
or when its tenant retains too many blocks; and if no other block is free, retained ones are
allocated like all others.
"""

import heapq
import math
from collections import OrderedDict
from typing import Final

import msgspec
import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, BoolArray, Int32Array, int32_array
from longshore.protocol.requests import CacheHint

MAX_SHARE_OF_TENANT: Final = 0.25
"""Share of all blocks that one tenant may retain."""


class Prefix(msgspec.Struct):
    """A prefix with a hint.

    block_ids:  the blocks that it retains, first blocks first, and others that it no longer does.
    num_blocks: that it retains.
    """

    tenant: str
    session: str | None
    expires_at_s: float
    block_ids: Int32Array
    num_blocks: int


class _Tenant(msgspec.Struct):
    """prefixes: the numbers of its prefixes, oldest first; num_blocks: that these retain."""

    prefixes: OrderedDict[int, None]
    num_blocks: int = 0


class RetainedPrefixes:
    """The prefixes with a hint, and which of `num_blocks` blocks are retained.

    A block of several prefixes is retained by the one that expires last, the newest of equals, and
    no longer than by that one. All methods but `clear` take time for the blocks of the prefixes
    that begin or end, whatever the number of the others.

    prefixes:      by number.
    next_expiry_s: `expire` has nothing to do before.
    """

    def __init__(self, num_blocks: int) -> None:
        self._max_of_tenant = int(num_blocks * MAX_SHARE_OF_TENANT)
        self._retained_by = np.zeros(num_blocks, np.int64)  # number of the prefix; 0: none
        self._retained_by_item = memoryview(self._retained_by)
        self._last_number = 0
        self.prefixes: dict[int, Prefix] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._sessions: dict[tuple[str, str], int] = {}  # by tenant and session
        self._expiries: list[tuple[float, int]] = []  # a heap; some prefixes have ended
        self.next_expiry_s = math.inf

    def is_retained(self, block_ids: Int32Array) -> BoolArray:
        retained: BoolArray = self._retained_by[block_ids] != 0
        return retained

    def add(self, block_ids: Int32Array, hint: CacheHint, *, tenant: str, now: float) -> Int32Array:
        """Retain cached blocks, all different, of one prefix, first blocks first, instead of the
        former prefix of its session. Returns blocks that are no longer retained."""
        ended: list[Int32Array] = []
        if hint.session is not None and (tenant, hint.session) in self._sessions:
            ended.append(self._remove(self._sessions[tenant, hint.session]))
        expires_at_s = now + hint.ttl_s
        block_ids = self._take_over(block_ids[: self._max_of_tenant], expires_at_s)
        if len(block_ids):
            self._insert(Prefix(tenant, hint.session, expires_at_s, block_ids, len(block_ids)))
        of_tenant = self._tenants.get(tenant)
        while of_tenant is not None and of_tenant.num_blocks > self._max_of_tenant:
            ended.append(self._remove(next(iter(of_tenant.prefixes))))
        block_ids = np.concatenate(ended) if ended else EMPTY_INT32
        unretained: Int32Array = block_ids[self._retained_by[block_ids] == 0]
        return unretained

    def expire(self, now: float) -> Int32Array:
        """End the hints whose time to live has passed; returns their blocks."""
        ended = [EMPTY_INT32]
        while self._expiries and self._expiries[0][0] <= now:
            _, number = heapq.heappop(self._expiries)
            if number in self.prefixes:
                ended.append(self._remove(number))
        self._set_next_expiry()
        return np.concatenate(ended)

    def evicted(self, block_ids: list[int]) -> None:
        """These blocks are not cached any more."""
        retained_by = self._retained_by_item
        for block_id in block_ids:
            if number := retained_by[block_id]:
                retained_by[block_id] = 0
                self._lose(number, 1)

    def clear(self) -> Int32Array:
        """End all hints; returns the retained blocks."""
        ended = int32_array(np.flatnonzero(self._retained_by))
        self._retained_by[:] = 0
        self.prefixes.clear()
        self._tenants.clear()
        self._sessions.clear()
        self._expiries.clear()
        self._set_next_expiry()
        return ended

    def _take_over(self, block_ids: Int32Array, expires_at_s: float) -> Int32Array:
        """Those of these blocks that no prefix retains for longer; others lose them to the next
        prefix."""
        retained_by = self._retained_by[block_ids]
        numbers, counts = np.unique(retained_by[retained_by != 0], return_counts=True)
        lasting = {n for n in numbers.tolist() if self.prefixes[n].expires_at_s > expires_at_s}
        if lasting:
            block_ids = block_ids[np.isin(retained_by, list(lasting), invert=True)]
        self._retained_by[block_ids] = self._last_number + 1
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number not in lasting:
                self._lose(number, count)
        return block_ids

    def _insert(self, prefix: Prefix) -> None:
        self._last_number += 1
        number = self._last_number
        self.prefixes[number] = prefix
        tenant = self._tenants.setdefault(prefix.tenant, _Tenant(OrderedDict()))
        tenant.prefixes[number] = None
        tenant.num_blocks += prefix.num_blocks
        if prefix.session is not None:
            self._sessions[prefix.tenant, prefix.session] = number
        heapq.heappush(self._expiries, (prefix.expires_at_s, number))
        if len(self._expiries) > 2 * len(self.prefixes):
            self._expiries = [each for each in self._expiries if each[1] in self.prefixes]
            heapq.heapify(self._expiries)
        self._set_next_expiry()

    def _lose(self, number: int, count: int) -> None:
        """`count` blocks are no longer retained by this prefix; it ends with the last one."""
        prefix = self.prefixes[number]
        prefix.num_blocks -= count
        self._tenants[prefix.tenant].num_blocks -= count
        if not prefix.num_blocks:
            self._remove(number)
        elif len(prefix.block_ids) > 2 * prefix.num_blocks:
            prefix.block_ids = self._blocks_of(number, prefix)

    def _remove(self, number: int) -> Int32Array:
        """End a prefix; returns the blocks that it retained."""
        prefix = self.prefixes.pop(number)
        block_ids = self._blocks_of(number, prefix)
        self._retained_by[block_ids] = 0
        tenant = self._tenants[prefix.tenant]
        tenant.num_blocks -= prefix.num_blocks
        del tenant.prefixes[number]
        if not tenant.prefixes:
            del self._tenants[prefix.tenant]
        if prefix.session is not None:
            del self._sessions[prefix.tenant, prefix.session]
        return block_ids

    def _blocks_of(self, number: int, prefix: Prefix) -> Int32Array:
        block_ids: Int32Array = prefix.block_ids[self._retained_by[prefix.block_ids] == number]
        return block_ids

    def _set_next_expiry(self) -> None:
        self.next_expiry_s = self._expiries[0][0] if self._expiries else math.inf
