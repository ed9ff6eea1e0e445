"""The order in which free blocks are allocated: first those without a hash, which nobody can find,
the last freed first; then the cached ones, least recently freed first; then retained ones of each
priority from the lowest, in the same order. Those of priority 0 are the blocks of chains, which go
when their owner says so (`make_room`).

Blocks without a hash form a stack at the head. A request frees its tail first, so its blocks come
from the stack in ascending order of position, and the next request gets the same contiguous run.

A log of block ids with lazy deletion, instead of a linked list: `ring[position] = block` and
`position[block] = position`, and an entry is live only while the two agree. Adding or removing n
blocks takes a few vector operations instead of n changes of links, and removing one from the middle
takes one store. When an end of the log is reached, its live entries move to the middle; it is three
times as long as the number of blocks, so this costs O(1) per block. There are no links to repair
and no sentinel nodes, hence no edge cases for them. Retained blocks of each priority have a part of
their own behind it, which only grows at its end.
"""

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, Int64Array, UInt8Array
from longshore.protocol.errors import LongshoreError
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.protocol.requests import MAX_CACHE_PRIORITY

TAKEN: Final = -1
PINNED: Final = -2

_CHUNK: Final = 1024


class OutOfBlocks(LongshoreError):
    """More blocks are needed than are free; nothing has changed."""


class NotInFreeQueue(LongshoreError):
    """A block to be removed is not in the free queue; nothing has changed."""


class NotTaken(LongshoreError):
    """A block to be freed has no reference; nothing has changed."""


class _Retained:
    """The part of the log for one priority: positions [head, tail) of [first, end)."""

    __slots__ = ("end", "first", "head", "tail")

    def __init__(self, first: int, end: int) -> None:
        self.first = self.head = self.tail = first
        self.end = end


class FreeQueue:
    """Blocks 1..num_blocks-1, all free at first. The first `num_set_aside` of them, like the null
    block, are never in the queue.

    is_cached: a byte per block, kept by the owner: whether it has a hash.
    block_ids: all blocks of the queue in its order; None: ascending.
    position: (num_blocks,) int32, the position of a free block, 0 or more; of a held one, minus its
              number of references, so no block can be both free and held. The null block is PINNED.
              Blocks set aside always have one reference.
    position_item: the same memory for scalar access, which costs half as much as numpy's.
    make_room: called before blocks of priority 0 are allocated in the order of the queue, with the
              number of those that are missing: may move some of them before all retained ones.

    Block ids are int32 arrays or, if they are few, lists. `num_free` is always exact.
    """

    def __init__(
        self, is_cached: bytearray, num_set_aside: int = 0, block_ids: Int32Array | None = None
    ) -> None:
        num_blocks, first = len(is_cached), NULL_BLOCK + 1 + num_set_aside
        self._is_cached_item = is_cached
        self._is_cached: UInt8Array = np.frombuffer(is_cached, np.uint8)
        self.num_free = num_blocks - first
        self.position: Int32Array = np.full(num_blocks, TAKEN, np.int32)
        self.position[NULL_BLOCK] = PINNED
        self.position_item = memoryview(self.position)
        self._middle, self._capacity = num_blocks, 3 * num_blocks
        self._head = self._tail = num_blocks
        end = self._capacity + 2 * num_blocks * (MAX_CACHE_PRIORITY + 1)
        firsts = range(self._capacity, end, 2 * num_blocks)
        self._retained = [_Retained(first, first + 2 * num_blocks) for first in firsts]
        self._has_retained = False  # whether some part of them has an entry, live or not
        self.make_room: Callable[[int], None] | None = None
        self._ring: Int32Array = np.zeros(end, np.int32)
        self._ring_item = memoryview(self._ring)
        ascending = np.arange(first, num_blocks, dtype=np.int32)
        self._fill(ascending if block_ids is None else block_ids)

    def __len__(self) -> int:
        return self.num_free

    def __iter__(self) -> Iterator[int]:
        for block_ids in self.chunks():
            yield from block_ids.tolist()

    def chunks(self) -> Iterator[Int32Array]:
        """The queue from its head, in pieces; it must not change during the iteration."""
        parts = [(self._head, self._tail), *((each.head, each.tail) for each in self._retained)]
        for head, tail in parts:
            for start in range(head, tail, _CHUNK):
                entries, live = self._live(start, min(start + _CHUNK, tail))
                yield entries[live]

    def popleft_n(self, count: int) -> Int32Array:
        """Remove the first `count` blocks; each gets one reference. Raises OutOfBlocks."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks are needed, {self.num_free} are free")
        self.num_free -= count
        self._head, pieces = self._first_n(self._head, self._tail, count)
        if self._has_retained:
            missing = count - sum(map(len, pieces))
            if missing and self.make_room is not None:
                self.make_room(missing)
                self._head, more = self._first_n(self._head, self._tail, missing)
                pieces += more
            for part in self._retained:
                missing = count - sum(map(len, pieces))
                part.head, more = self._first_n(part.head, part.tail, missing)
                pieces += more
            self._look_for_retained()
        popped = np.concatenate(pieces) if pieces else EMPTY_INT32
        self.position[popped.astype(np.int64)] = TAKEN
        return popped

    def popleft_few(self, count: int) -> list[int]:
        """`popleft_n`, one by one: 50 times faster for one block, twice for 16."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks are needed, {self.num_free} are free")
        if self._has_retained:
            return self.popleft_n(count).tolist()
        self.num_free -= count
        ring, position, head = self._ring_item, self.position_item, self._head
        popped: list[int] = []
        while count:
            block_id = ring[head]
            if position[block_id] == head:
                position[block_id] = TAKEN
                popped.append(block_id)
                count -= 1
            head += 1
        self._head = head
        return popped

    def release_few(self, block_ids: list[int]) -> None:
        """Release one reference each, in this order; a block without another one goes to the tail
        if it is cached, else to the head. Raises NotTaken, and nothing has changed, if a block has
        none."""
        if len(block_ids) > self._head or self._tail + len(block_ids) > self._capacity:
            self._move_to_middle()
        head, tail = first_head, first_tail = self._head, self._tail
        ring, position, is_cached = self._ring_item, self.position_item, self._is_cached_item
        remaining = iter(block_ids)
        for block_id in remaining:
            before = position[block_id]
            if before == TAKEN:
                if is_cached[block_id]:
                    ring[tail] = block_id
                    position[block_id] = tail
                    tail += 1
                else:
                    head -= 1
                    ring[head] = block_id
                    position[block_id] = head
            elif before >= 0:
                num_done = len(block_ids) - 1 - len(list(remaining))
                for freed in reversed(block_ids[:num_done]):
                    position[freed] = TAKEN if position[freed] >= 0 else position[freed] - 1
                position[NULL_BLOCK] = PINNED
                raise NotTaken(f"block {block_id} cannot be freed: it has no reference")
            elif block_id != NULL_BLOCK:
                position[block_id] = before + 1
        self._head, self._tail = head, tail
        self.num_free += tail - first_tail + first_head - head

    def release_n(self, block_ids: Int32Array) -> bool:
        """`release_few` for many blocks. False, and nothing has changed, if a block is repeated,
        because vector operations need different blocks."""
        position, index = self.position, block_ids.astype(np.int64)
        before = position[index]
        has_others = np.count_nonzero(before == TAKEN) < len(index)  # shared or null blocks
        if has_others:
            index = index[index != NULL_BLOCK]
            before = position[index]
            if np.count_nonzero(before >= 0):
                block_id = index[(before >= 0).argmax()]
                raise NotTaken(f"block {block_id} cannot be freed: it has no reference")
            order = np.arange(len(index), dtype=np.int32)
            position[index] = order  # of a repeated block, the last one remains
            if np.count_nonzero(position[index] != order):
                position[index] = before
                return False
            position[index] = before + 1
            index = index[before == TAKEN]
        count = len(index)
        if count > self._head or self._tail + count > self._capacity:
            self._move_to_middle()
        is_cached = self._is_cached[index]
        num_new = count - int(np.count_nonzero(is_cached))  # at the head
        head, tail = self._head, self._tail
        if num_new == count:
            order = np.arange(head - 1, head - 1 - num_new, -1, dtype=np.int32)
        else:
            order = np.arange(tail - num_new, tail - num_new + count, dtype=np.int32)
            if num_new:
                order[:num_new] = np.arange(head - 1, head - 1 - num_new, -1)
                if np.count_nonzero(is_cached[:num_new]):  # several requests, not one's tail
                    index = np.concatenate((index[is_cached == 0], index[is_cached != 0]))
        position[index] = order
        if not has_others and np.count_nonzero(position[index] != order):
            position[index] = TAKEN
            return False
        if num_new < count:
            self._ring[tail : tail + count - num_new] = index[num_new:]
        if num_new:
            self._ring[head - num_new : head] = index[:num_new][::-1]
        self._head, self._tail = head - num_new, tail + count - num_new
        self.num_free += count
        return True

    def move_to_head(self, block_ids: list[int]) -> None:
        """Of these blocks, which have lost their hashes, those that are free go to the head."""
        free = [block_id for block_id in block_ids if self.position_item[block_id] >= 0]
        for block_id in free:
            self.remove(block_id)
        self.release_few(free)

    def move_to_retained(self, block_ids: Int32Array, priority: int) -> None:
        """Of these cached blocks, those that are free become the last of the retained ones of this
        priority."""
        part = self._retained[priority]
        free = block_ids[self.position[block_ids] >= 0]
        if part.tail + len(free) > part.end:
            entries, live = self._live(part.head, part.tail)
            part.head = part.tail = part.first
            self._append_retained(part, entries[live])
        self._append_retained(part, free)

    def move_to_tail(self, block_ids: Int32Array) -> None:
        """Of these blocks, all different and cached, those that are free become the last ones
        before all retained blocks, in the order that they have in the queue."""
        positions = self.position[block_ids]
        order = np.argsort(positions)
        free = block_ids[order[np.count_nonzero(positions < 0) :]]
        self.remove_n(free)
        self.release_n(free)
        ring, position = self._ring_item, self.position_item
        for part in self._retained:
            while part.head < part.tail and position[ring[part.head]] != part.head:
                part.head += 1
        self._look_for_retained()

    def acquire_few(self, block_ids: list[int]) -> None:
        """Add one reference each; a block that had none is removed."""
        position, num_free = self.position_item, self.num_free
        for block_id in block_ids:
            at = position[block_id]
            if at >= 0:
                position[block_id] = TAKEN
                num_free -= 1
            elif block_id != NULL_BLOCK:
                position[block_id] = at - 1
        self.num_free = num_free

    def acquire_n(self, block_ids: Int32Array) -> bool:
        """`acquire_few` for many blocks. False, and nothing has changed, if a block is repeated."""
        position, index = self.position, block_ids.astype(np.int64)
        if not index.all():
            index = index[index != NULL_BLOCK]
        before = position[index]
        order = np.arange(len(index), dtype=np.int32)
        position[index] = order  # of a repeated block, the last one remains
        is_repeated = np.count_nonzero(position[index] != order) > 0
        position[index] = before if is_repeated else np.minimum(before, 0) - 1
        if is_repeated:
            return False
        self.num_free -= int(np.count_nonzero(before >= 0))
        return True

    def num_before_retained(self) -> int:
        """How many blocks are allocated before all retained ones. O(n), in one vector operation."""
        return len(self._live(self._head, self._tail)[1])

    def remove(self, block_id: int) -> None:
        """Remove one block at any position. Raises NotInFreeQueue."""
        if self.position_item[block_id] < 0:
            raise NotInFreeQueue(f"block {block_id} is not free")
        self.position_item[block_id] = TAKEN
        self.num_free -= 1

    def remove_n(self, block_ids: Int32Array | Int64Array) -> None:
        """`remove` for several blocks, all different."""
        index = block_ids.astype(np.int64)
        is_taken = self.position[index] < 0
        if is_taken.any():
            raise NotInFreeQueue(f"block {index[is_taken.argmax()]} is not free")
        self.position[index] = TAKEN
        self.num_free -= len(index)

    def _first_n(self, head: int, tail: int, count: int) -> tuple[int, list[Int32Array]]:
        """The first live entries of [head, tail), at most `count`, in pieces, and the position
        after the last of them."""
        pieces: list[Int32Array] = []
        while count and head < tail:
            end = min(head + max(count, _CHUNK), tail)
            entries, live = self._live(head, end)
            if len(live) >= count:
                live = live[:count]
                end = head + int(live[-1]) + 1
            pieces.append(entries[live])
            count -= len(live)
            head = end
        return head, pieces

    def _look_for_retained(self) -> None:
        self._has_retained = any([part.head < part.tail for part in self._retained])

    def _live(self, start: int, end: int) -> tuple[Int32Array, Int64Array]:
        """The entries at positions [start, end), and which of them are live."""
        entries = self._ring[start:end]
        positions = self.position[entries.astype(np.int64)]
        return entries, np.flatnonzero(positions == np.arange(start, end, dtype=np.int32))

    def _move_to_middle(self) -> None:
        entries, live = self._live(self._head, self._tail)
        self._fill(entries[live])

    def _fill(self, block_ids: Int32Array) -> None:
        """Make these the entries of the log, in its middle."""
        self._head, self._tail = self._middle, self._middle + len(block_ids)
        self._ring[self._head : self._tail] = block_ids
        self.position[block_ids] = np.arange(self._head, self._tail, dtype=np.int32)

    def _append_retained(self, part: _Retained, block_ids: Int32Array) -> None:
        tail = part.tail
        part.tail = end = tail + len(block_ids)
        self._has_retained |= tail < end
        self._ring[tail:end] = block_ids
        # Of a repeated block, the last one remains.
        self.position[block_ids] = np.arange(tail, end, dtype=np.int32)
