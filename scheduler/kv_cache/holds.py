"""Waiting requests that hold blocks: loaded requests, forks, sessions between two inputs, and, only
while they start, those that begin with an earlier answer.

No hold is necessary: when blocks are short, holds are released, the youngest first, and their
requests recompute everything when they are admitted.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

from longshore.protocol.errors import LongshoreError
from longshore.scheduler.heap import KeyedHeap
from longshore.scheduler.kv_cache.blocks import HeldBlocks
from longshore.scheduler.kv_cache.manager import KVCacheManager
from longshore.scheduler.request import Hold, HoldKind, Request


class Holds:
    """The blocks that requests hold without a row. holders: the holding requests, oldest hold
    first; num_loaded_blocks: blocks of loaded requests."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self.holders: dict[Request, None] = {}
        self._youngest: dict[bool, KeyedHeap[int, Request]] = {
            is_loaded: KeyedHeap() for is_loaded in (False, True)
        }
        self._last_order = 0
        self.num_loaded_blocks = 0

    def __iter__(self) -> Iterator[Request]:
        """The holding requests, the oldest hold first."""
        return iter(self.holders)

    def __len__(self) -> int:
        return len(self.holders)

    def next_order(self) -> int:
        """An order for a hold, higher than all before."""
        self._last_order += 1
        return self._last_order

    def add(self, request: Request, hold: Hold) -> None:
        """Give the references of a hold to a request without a row."""
        request.hold = hold
        self.holders[request] = None
        self._peers_of(hold).add(request.request_id, -hold.order, request)
        if hold.kind is HoldKind.LOADED:
            self.num_loaded_blocks += hold.blocks.num_blocks

    def take(self, request: Request) -> HeldBlocks:
        """End the hold; the caller owns its references."""
        hold = request.hold
        assert hold is not None
        del self.holders[request]
        self._peers_of(hold).remove(request.request_id)
        request.hold = None
        if hold.kind is HoldKind.LOADED:
            self.num_loaded_blocks -= hold.blocks.num_blocks
        return hold.blocks

    def release(self, request: Request) -> None:
        """End the hold and release its references. A loaded request may load again."""
        assert request.hold is not None
        if request.hold.kind is HoldKind.LOADED:
            request.asks_connector = True
        self._kv_cache.release(self.take(request))

    def release_youngest(self, *, loaded: bool, besides: Request | None = None) -> bool:
        """Release the youngest hold of loaded requests, or of the others. False if there is none,
        except perhaps that of `besides`."""
        peers = self._youngest[loaded]
        found = next((request for request in islice(peers, 2) if request is not besides), None)
        if found is None:
            return False
        self.release(found)
        return True

    def _peers_of(self, hold: Hold) -> KeyedHeap[int, Request]:
        return self._youngest[hold.kind is HoldKind.LOADED]

    def release_all(self) -> None:
        """Release all holds, the youngest first."""
        for request in sorted(self.holders, key=_order, reverse=True):
            self.release(request)

    def check(self, waiting: Iterable[Request]) -> None:
        """Raise LongshoreError unless the holders are exactly those of the `waiting` requests that
        have a hold, and the blocks of loaded ones are counted."""
        holds = {request: request.hold for request in waiting if request.hold is not None}
        if holds.keys() != self.holders.keys():
            raise LongshoreError(
                f"{len(holds)} waiting requests hold blocks, but {len(self.holders)} are recorded"
            )
        loaded = [hold.blocks.num_blocks for hold in holds.values() if hold.kind is HoldKind.LOADED]
        if sum(map(len, self._youngest.values())) != len(holds):
            raise LongshoreError(f"{len(holds)} holds are not those that can be released")
        if sum(loaded) != self.num_loaded_blocks:
            raise LongshoreError(
                f"loaded requests hold {sum(loaded)} blocks, but num_loaded_blocks is "
                f"{self.num_loaded_blocks}"
            )

    def begin_epoch(self) -> None:
        """All KV is lost. No reference is released, because the pool is reset."""
        for request in self.holders:
            request.hold = None
        self.holders.clear()
        for peers in self._youngest.values():
            peers.clear()
        self.num_loaded_blocks = 0


def _order(holder: Request) -> int:
    assert holder.hold is not None
    return holder.hold.order
