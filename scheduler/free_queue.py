"""The order in which free blocks are handed out: least recently freed first.

A circular doubly linked list over two Python lists indexed by block id, so no object exists per
block and taking one from the middle is O(1). The null block, which is never free, is its fake head
and tail: no operation has an edge case. (Scalar access to a Python list is several times cheaper
than to a numpy column, which is why these are not arrays.)
"""

from collections.abc import Iterator, Sequence
from typing import Final

from longshore.protocol.errors import LongshoreError
from longshore.protocol.kv_cache_spec import NULL_BLOCK

UNLINKED: Final = -1


class OutOfBlocks(LongshoreError):
    """More blocks were asked for than are free; nothing has changed."""


class NotInFreeQueue(LongshoreError):
    """A block was to be taken out of the free queue that is not in it; nothing has changed."""


class FreeQueue:
    """Blocks 1..num_blocks-1, all free at first, in ascending order."""

    def __init__(self, num_blocks: int) -> None:
        self._next: list[int] = [*range(1, num_blocks), NULL_BLOCK]
        self._previous: list[int] = [num_blocks - 1, *range(num_blocks - 1)]
        self.num_free = num_blocks - 1

    def __len__(self) -> int:
        return self.num_free

    def __iter__(self) -> Iterator[int]:
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            yield block_id
            block_id = self._next[block_id]

    def popleft_n(self, count: int) -> list[int]:
        """The `count` blocks freed longest ago, oldest first. Raises OutOfBlocks."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks are needed, {self.num_free} are free")
        following, previous = self._next, self._previous
        popped: list[int] = []
        block_id = following[NULL_BLOCK]
        for _ in range(count):
            popped.append(block_id)
            after = following[block_id]
            following[block_id] = UNLINKED
            previous[block_id] = UNLINKED
            block_id = after
        following[NULL_BLOCK] = block_id
        previous[block_id] = NULL_BLOCK
        self.num_free -= count
        return popped

    def append_n(self, block_ids: Sequence[int]) -> None:
        """Append in the order given: the first of them is handed out first."""
        following, previous = self._next, self._previous
        last = previous[NULL_BLOCK]
        for block_id in block_ids:
            following[last] = block_id
            previous[block_id] = last
            last = block_id
        following[last] = NULL_BLOCK
        previous[NULL_BLOCK] = last
        self.num_free += len(block_ids)

    def remove(self, block_id: int) -> None:
        """Take one block out, wherever it stands. Raises NotInFreeQueue."""
        following, previous = self._next, self._previous
        after = following[block_id]
        if after == UNLINKED or block_id == NULL_BLOCK:
            raise NotInFreeQueue(f"block {block_id} is not free")
        before = previous[block_id]
        following[before] = after
        previous[after] = before
        following[block_id] = UNLINKED
        previous[block_id] = UNLINKED
        self.num_free -= 1
