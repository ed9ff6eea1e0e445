"""Cached prefixes that clients have asked to keep: their blocks are evicted after all others.

A hint never pins a block. It ends with its time to live, when the next request of its session ends,
or when its tenant retains too many blocks; and if no other block is free, retained ones are
allocated like all others. The rules are the same for the blocks of the KV cache, of which the
scheduler keeps account, and for the slots of an offload tier, of which its ledger does.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, UInt8Array, int32_array
from longshore.protocol.requests import MAX_CACHE_PRIORITY, CacheHint, Tenant


class Prefix(msgspec.Struct):
    """A prefix with a hint.

    tenant:     its name.
    block_ids:  the blocks that it retains, first blocks first, and others that it no longer does.
    num_blocks: that it retains.
    """

    tenant: str
    session: str | None
    priority: int
    expires_at_s: float
    block_ids: Int32Array
    num_blocks: int


class _Tenant(msgspec.Struct):
    """prefixes: the numbers of its prefixes by priority, oldest first, empty for priority 0;
    num_blocks: that these retain."""

    prefixes: tuple[OrderedDict[int, None], ...]
    num_blocks: int = 0


class RetainedPrefixes:
    """The prefixes with a hint, and which of `num_blocks` blocks are retained.

    A block of several prefixes is retained by the one of the highest priority, of these by the one
    that expires last, and of equals by the newest; and no longer than by that one. All methods but
    `clear` take time for the blocks of the prefixes that begin or end, whatever the number of the
    others.

    prefixes:      by number.
    next_expiry_s: `expire` has nothing to do before.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._retained_by = np.zeros(num_blocks, np.int64)  # number of the prefix; 0: none
        self._retained_by_item = memoryview(self._retained_by)
        self._priority: UInt8Array = np.zeros(num_blocks, np.uint8)  # of that prefix; 0: none
        self._last_number = 0
        self.prefixes: dict[int, Prefix] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._sessions: dict[tuple[str, str], list[int]] = {}  # by tenant and session
        self._expiries: list[tuple[float, int]] = []  # a heap; some prefixes have ended
        self.next_expiry_s = math.inf

    @property
    def all_priorities(self) -> UInt8Array:
        """(num_blocks,) `priorities` of all blocks, always up to date. Not to be changed."""
        return self._priority

    def num_retained(self, priority: int) -> int:
        """Number of blocks that are retained with at least this priority."""
        return int(np.count_nonzero(self._priority >= priority))

    def priorities(self, block_ids: Int32Array) -> UInt8Array:
        """With which priority each block is retained; 0: not."""
        priorities: UInt8Array = self._priority[block_ids]
        return priorities

    def add(
        self,
        block_ids: Int32Array,
        hint: CacheHint,
        prefixes: Sequence[Int32Array] = (),
        *,
        tenant: Tenant,
        now: float,
    ) -> Int32Array:
        """Retain cached blocks of a request, all different, first blocks first, instead of those of
        the former request of its session. If the tenant retains too many then, its hints end, the
        lowest priority and the oldest first. Returns blocks that are no longer retained.

        prefixes: the blocks of each of the hint's prefixes.
        """
        ended: list[Int32Array] = []
        if hint.session is not None:
            former = self._sessions.get((tenant.name, hint.session), [])
            ended += [self._remove(number) for number in former[:]]
        limit = self._max_blocks(tenant)
        for prefix in _nested(block_ids, hint, prefixes, tenant.name, now):
            prefix.block_ids = self._take_over(prefix.block_ids[:limit], prefix)
            prefix.num_blocks = len(prefix.block_ids)
            if prefix.num_blocks:
                self._insert(prefix)
        of_tenant = self._tenants.get(tenant.name)
        while of_tenant is not None and of_tenant.num_blocks > limit:
            lowest = next(filter(None, of_tenant.prefixes))
            ended.append(self._remove(next(iter(lowest))))
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
                self._priority[block_id] = 0
                self._lose(number, 1)

    def clear(self) -> Int32Array:
        """End all hints; returns the retained blocks."""
        ended = int32_array(np.flatnonzero(self._retained_by))
        self._retained_by[:] = 0
        self._priority[:] = 0
        self.prefixes.clear()
        self._tenants.clear()
        self._sessions.clear()
        self._expiries.clear()
        self._set_next_expiry()
        return ended

    def _max_blocks(self, tenant: Tenant) -> int:
        return int(self._num_blocks * tenant.cache_share)

    def _take_over(self, block_ids: Int32Array, new: Prefix) -> Int32Array:
        """Those of these blocks that no prefix retains more firmly; others lose them to the new
        one."""
        retained_by = self._retained_by[block_ids]
        numbers, counts = np.unique(retained_by[retained_by != 0], return_counts=True)
        lasting = {n for n in numbers.tolist() if _rank(self.prefixes[n]) > _rank(new)}
        if lasting:
            block_ids = block_ids[np.isin(retained_by, list(lasting), invert=True)]
        self._retained_by[block_ids] = self._last_number + 1
        self._priority[block_ids] = new.priority
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number not in lasting:
                self._lose(number, count)
        return block_ids

    def _insert(self, prefix: Prefix) -> None:
        self._last_number += 1
        number = self._last_number
        self.prefixes[number] = prefix
        if prefix.tenant not in self._tenants:
            by_priority = tuple(OrderedDict[int, None]() for _ in range(MAX_CACHE_PRIORITY + 1))
            self._tenants[prefix.tenant] = _Tenant(by_priority)
        tenant = self._tenants[prefix.tenant]
        tenant.prefixes[prefix.priority][number] = None
        tenant.num_blocks += prefix.num_blocks
        if prefix.session is not None:
            self._sessions.setdefault((prefix.tenant, prefix.session), []).append(number)
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
        self._priority[block_ids] = 0
        tenant = self._tenants[prefix.tenant]
        tenant.num_blocks -= prefix.num_blocks
        del tenant.prefixes[prefix.priority][number]
        if not any(tenant.prefixes):
            del self._tenants[prefix.tenant]
        if prefix.session is not None:
            numbers = self._sessions[prefix.tenant, prefix.session]
            numbers.remove(number)
            if not numbers:
                del self._sessions[prefix.tenant, prefix.session]
        return block_ids

    def _blocks_of(self, number: int, prefix: Prefix) -> Int32Array:
        block_ids: Int32Array = prefix.block_ids[self._retained_by[prefix.block_ids] == number]
        return block_ids

    def _set_next_expiry(self) -> None:
        self.next_expiry_s = self._expiries[0][0] if self._expiries else math.inf


def _rank(prefix: Prefix) -> tuple[int, float]:
    """Of the prefixes of a block, the one of the highest rank retains it."""
    return prefix.priority, prefix.expires_at_s


def _nested(
    block_ids: Int32Array,
    hint: CacheHint,
    prefixes: Sequence[Int32Array],
    tenant: str,
    now: float,
) -> Iterator[Prefix]:
    """What a hint asks for, the longest prefix first, so that each one's rank is at least that of
    the ones before."""
    ttl_s, priority = hint.ttl_s, hint.priority if hint.ttl_s else 1
    if ttl_s:
        yield Prefix(tenant, hint.session, priority, now + ttl_s, block_ids, 0)
    parts = sorted(zip(hint.prefixes, prefixes, strict=True), key=lambda part: -part[0].num_tokens)
    for part, leading in parts:
        ttl_s, priority = max(ttl_s, part.ttl_s), max(priority, part.priority)
        yield Prefix(tenant, hint.session, priority, now + ttl_s, leading, 0)
