"""A heap from which any item can be removed."""

import heapq
from collections.abc import Iterator
from typing import Final, Generic, TypeAlias, TypeVar

OrderT = TypeVar("OrderT")
ItemT = TypeVar("ItemT")

MIN_REBUILD: Final = 64
"""Removed entries that a heap may keep, however small it is."""

_Entry: TypeAlias = tuple[OrderT, str, int, ItemT]


class KeyedHeap(Generic[OrderT, ItemT]):
    """Items by key, the one with the smallest order first; those of equal order are sorted by their
    keys, so that the order is total.

    Operations take O(log n), amortised: a removed entry stays in the heap until it is the first, or
    until more than half of the entries are removed ones.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry[OrderT, ItemT]] = {}
        self._heap: list[_Entry[OrderT, ItemT]] = []
        self._num_added = 0

    def add(self, key: str, order: OrderT, item: ItemT) -> None:
        """Add an item; one that has this key already is replaced."""
        self._num_added += 1  # so that items are never compared
        entry = self._entries[key] = (order, key, self._num_added, item)
        heapq.heappush(self._heap, entry)
        self._drop_removed()

    def first(self) -> tuple[OrderT, ItemT] | None:
        """The first item with its order, which stays in the heap; None if the heap is empty."""
        return (self._heap[0][0], self._heap[0][3]) if self._heap else None

    def pop(self) -> ItemT:
        """Remove and return the first item. Raises LookupError if the heap is empty."""
        if not self._heap:
            raise LookupError("the heap is empty")
        return self.remove(self._heap[0][1])

    def remove(self, key: str) -> ItemT:
        """Remove and return the item with this key. Raises LookupError if there is none."""
        item = self._entries.pop(key)[3]
        self._drop_removed()
        return item

    def discard(self, key: str) -> None:
        """Remove the item with this key, if there is one."""
        if key in self._entries:
            self.remove(key)

    def clear(self) -> None:
        """Remove all items."""
        self._entries.clear()
        self._heap.clear()

    def _drop_removed(self) -> None:
        heap, entries = self._heap, self._entries
        while heap and entries.get(heap[0][1]) is not heap[0]:
            heapq.heappop(heap)
        if len(heap) > 2 * len(entries) + MIN_REBUILD:
            self._heap = list(entries.values())
            heapq.heapify(self._heap)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ItemT]:
        """In order; the first k items take O(k log k). The heap must not change meanwhile."""
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, index = heapq.heappop(frontier)
            if self._entries.get(entry[1]) is entry:
                yield entry[3]
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(frontier, (heap[child], child))
