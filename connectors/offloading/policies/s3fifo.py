"""S3-FIFO (Yang et al., SOSP 2023): three FIFO queues.

New keys enter a small queue with a tenth of the capacity. Those that are used more than once there
move to the main queue; the others are evicted soon, and remembered. A remembered key enters the
main queue, which evicts an entry only after it has passed through once for each recent use.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from longshore.connectors.offloading.policies.policy import EvictionPolicy, Protected
from longshore.protocol.errors import LongshoreError

MAX_USES = 3
SMALL_SHARE = 0.1  # of the capacity, for the small queue


class S3FIFO(EvictionPolicy):
    """With one key per call and nothing protected, every decision is that of the published
    algorithm. With many keys per call, new keys are processed in reverse order, and none of them is
    evicted by the same call."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[bytes, int] = OrderedDict()  # recent uses; oldest first
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._remembered: OrderedDict[bytes, None] = OrderedDict()

    def num_remembered(self) -> int:
        """Number of remembered keys of evicted blocks; at most the capacity."""
        return len(self._remembered)

    def __contains__(self, key: object) -> bool:
        return key in self._small or key in self._main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[bytes]:
        return chain(self._small, self._main)

    def touch(self, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        for queue in (self._small, self._main):
            used = [key for key in keys if key in queue]
            queue.update({key: min(queue[key] + 1, MAX_USES) for key in used})

    def insert(self, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        self.admit(keys, positions, 0, Protected())

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            del (self._small if key in self._small else self._main)[key]

    def evict(self, num_blocks: int, protected: Protected) -> list[bytes] | None:
        if not self.can_evict(num_blocks, protected):
            return None
        return list(islice(self._victims(num_blocks, protected), num_blocks))

    def admit(
        self, keys: Sequence[bytes], positions: Sequence[int], num_evict: int, protected: Protected
    ) -> list[bytes] | None:
        if num_evict and not self.can_evict(num_evict, protected):
            return None
        admitted: set[bytes] = set()
        protected = Protected.union(protected, admitted)
        num_free = len(keys) - num_evict
        victims = self._victims(num_evict, protected)
        evicted = []
        for number, key in enumerate(reversed(keys)):
            if number >= num_free:
                evicted.append(next(victims))
            if key in self._remembered:
                del self._remembered[key]
                self._main[key] = 0
            else:
                self._small[key] = 0
            admitted.add(key)
        return evicted

    def check(self) -> None:
        keys = [*self._small, *self._main, *self._remembered]
        if len(set(keys)) != len(keys):
            raise LongshoreError("a key is in two of S3-FIFO's queues")
        if len(self._remembered) > self.capacity:
            raise LongshoreError(f"S3-FIFO remembers {len(self._remembered)} keys")

    def _victims(self, num_blocks: int, protected: Protected) -> Iterator[bytes]:
        """Evict one entry per step; the caller has checked that there are `num_blocks`."""
        of_small = _oldest(self._small, num_blocks, protected)
        of_main = _oldest(self._main, num_blocks, protected)
        while True:
            evicted = None
            if len(self._small) >= SMALL_SHARE * self.capacity:
                evicted = self._evict_from_small(of_small)
            if evicted is None:
                evicted = self._evict_from_main(of_main)
            if evicted is None:  # of the main queue, all are protected
                evicted = self._evict_from_small(of_small)
            if evicted is None:  # all of the small queue have just moved to the main queue
                evicted = self._evict_from_main(of_main)
            assert evicted is not None
            yield evicted

    def _evict_from_small(self, oldest: Iterator[bytes | None]) -> bytes | None:
        while (key := next(oldest)) is not None:
            if self._small.pop(key) > 1:
                self._main[key] = 0
            else:
                self._remembered[key] = None
                if len(self._remembered) > self.capacity:
                    self._remembered.popitem(last=False)
                return key
        return None

    def _evict_from_main(self, oldest: Iterator[bytes | None]) -> bytes | None:
        while (key := next(oldest)) is not None:
            uses = self._main.pop(key)
            if not uses:
                return key
            self._main[key] = uses - 1
        return None


def _oldest(
    queue: OrderedDict[bytes, int], num_blocks: int, protected: Protected
) -> Iterator[bytes | None]:
    """Unprotected keys, oldest first, and None each time that there are no more. Each key must be
    removed or become the newest before the next step."""
    while True:
        batch = list(islice(protected.evictable(queue), num_blocks))
        yield from batch or (None,)
