"""Least recently used: the default."""

from collections.abc import Iterable, Iterator, Sequence

from longshore.connectors.offloading.policies.policy import EvictionPolicy, Protected, consume
from longshore.connectors.offloading.policies.runs import Index, RunQueue, parts_of, remove


class LRU(EvictionPolicy):
    """Evicts the entry whose last use is longest ago. Keys are used in reverse order, so that the
    first block of a prefix is evicted after those that depend on it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._index: Index = {}
        self._queue = RunQueue(self._index)

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._queue)

    def touch(self, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        self.refresh(keys)

    def refresh(self, keys: Sequence[bytes]) -> None:
        parts = parts_of(keys, self._index)
        self._queue.move([part for part in parts if part[0] is not None])

    def insert(self, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        self._queue.append(keys)

    def remove(self, keys: Iterable[bytes]) -> None:
        remove(keys, self._index)

    def evict(self, num_blocks: int, protected: Protected) -> list[bytes] | None:
        if not self.can_evict(num_blocks, protected):
            return None
        evicted = self._queue.pop(num_blocks, protected)
        consume(map(self._index.pop, evicted))
        return evicted

    def admit_each(
        self,
        runs: Sequence[tuple[Sequence[bytes], Sequence[int]]],
        num_evict: int,
        protected: Protected,
    ) -> list[bytes] | None:
        evicted = self.evict(num_evict, protected) if num_evict else []
        if evicted is not None:  # as one run, in which the first prefix is the oldest
            self._queue.append([key for keys, _ in reversed(runs) for key in keys])
        return evicted

    def check(self) -> None:
        self._queue.check()
