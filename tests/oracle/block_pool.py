"""One object per block, a list as free queue, and names that are equal exactly when content is.

The rules are the checklist's POO, FRQ and HSH; cost is of no concern here.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longshore.protocol.kv_cache_spec import NULL_BLOCK

if TYPE_CHECKING:
    from tests.oracle.retention import Retention


class OutOfBlocks(Exception):
    """More blocks were asked for than are free."""


@dataclass(eq=False)
class Block:
    """`name` is set while the block can be found as a prefix, held or not.

    fence:     the newest plan that may still write to it, or read from it.
    num_taken: how often it was taken from the free queue, which tells one content from the next.
    retention: the hint that retains it.
    """

    block_id: int
    ref_count: int = 0
    name: int | None = None
    fence: int = 0
    num_taken: int = 0
    retention: "Retention | None" = None


class BlockNames:
    """Numbers every (parent, tokens, extra key) ever seen, so two blocks share a name only if they
    hold the same tokens behind the same prefix. A name of bytes is the root of all chains."""

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._numbers: dict[Hashable, int] = {}

    def extend(
        self,
        names: list[int],
        token_ids: Sequence[int],
        block_size: int,
        extra_key: Callable[[int, int], Hashable],
    ) -> None:
        """Append to `names` until every full block of `token_ids` has one.

        extra_key: of the block that holds positions [first, last): what else its KV depends on.
        """
        for first in range(len(names) * block_size, len(token_ids) - block_size + 1, block_size):
            last = first + block_size
            parent: int | bytes = names[-1] if names else self._root
            content = (parent, tuple(token_ids[first:last]), extra_key(first, last))
            names.append(self._numbers.setdefault(content, len(self._numbers)))


class TextbookBlockPool:
    """Hands out blocks: the last freed of those without a name, then the least recently freed of
    the others, and retained ones last of all; a block keeps its name until it is reused.

    `free_queue` and `retained_queue` hold the blocks without a holder, the next to be taken first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_queue = [block for block in self.blocks if block.block_id != NULL_BLOCK]
        self.retained_queue: list[Block] = []
        self._by_name: dict[int, list[Block]] = {}

    @property
    def num_free(self) -> int:
        return len(self.free_queue) + len(self.retained_queue)

    def take(self, num_blocks: int, *, answered_step: int | None = None) -> list[Block]:
        """Blocks from the head of the free queue; they lose their names. With `answered_step`,
        blocks whose fence is newer keep their place. Raises OutOfBlocks."""
        taken = self.available(answered_step)[:num_blocks]
        if num_blocks > len(taken):
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {len(taken)} are free")
        for block in taken:
            self.remove_name(block)
            self._dequeue(block)
            block.ref_count = 1
            block.num_taken += 1
        return taken

    def available(self, answered_step: int | None = None) -> list[Block]:
        """The free blocks, the next to be taken first; with `answered_step`, those behind their
        fences only."""
        free = self.free_queue + self.retained_queue
        if answered_step is None:
            return free
        return [block for block in free if block.fence <= answered_step]

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more holder for each block; those without one leave the free queue."""
        for block in blocks:
            if block.ref_count == 0:
                self._dequeue(block)
            block.ref_count += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """One holder less, in the order given; those without one go to the tail of the queue, where
        they are found by their names, or to its head, if they have none."""
        for block in blocks:
            if block.ref_count == 0:
                raise ValueError(f"block {block.block_id} is freed, but nobody holds it")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._enqueue(block)

    def _enqueue(self, block: Block) -> None:
        if block.name is None:
            self.free_queue.insert(0, block)
        elif block.retention is None:
            self.free_queue.append(block)
        else:
            queue = self.retained_queue  # the lowest priority first
            queue.append(block)
            queue.sort(key=lambda each: each.retention.priority if each.retention else 0)

    def _dequeue(self, block: Block) -> None:
        (self.free_queue if block in self.free_queue else self.retained_queue).remove(block)

    def requeue(self) -> None:
        """Hints have ended: what they retained is as if it were freed only now."""
        for block in [block for block in self.retained_queue if block.retention is None]:
            self._dequeue(block)
            self._enqueue(block)

    def set_name(self, block: Block, name: int) -> None:
        """Make a full block findable. Several blocks may carry one name."""
        if block.name is not None:
            raise ValueError(f"block {block.block_id} already has a name")
        block.name = name
        self._by_name.setdefault(name, []).append(block)

    def remove_name(self, block: Block) -> None:
        """Make a block unfindable, and the next to be taken if it is free; nothing happens to one
        without a name."""
        if block.name is not None:
            self._by_name[block.name].remove(block)
            block.name = block.retention = None
            if block.ref_count == 0:
                self._dequeue(block)
                self._enqueue(block)

    def find(self, name: int) -> Block | None:
        """Of the blocks that carry the name, the one that has carried it longest."""
        blocks = self._by_name.get(name)
        return blocks[0] if blocks else None

    def check_invariants(self, holders: Iterable[Block]) -> None:
        """holders: every held block, once per holder. Raises AssertionError."""
        num_holders = dict.fromkeys(self.blocks, 0)
        for block in holders:
            num_holders[block] += 1
        for block, count in num_holders.items():
            assert block.ref_count == count, f"{block} has {count} holders"
        null_block = self.blocks[NULL_BLOCK]
        assert null_block.ref_count == 0, "somebody holds the null block"
        assert null_block.name is None, "the null block has a name"
        free = self.available()
        assert len(free) == len(set(free)), "a block is free twice"
        is_named = [block.name is not None for block in free]
        assert is_named == sorted(is_named), "a block with a name is taken before one without"
        ranks = [block.retention.priority if block.retention else 0 for block in free]
        assert ranks == sorted(ranks), "a retained block is taken before one of a lower priority"
        assert all(block.name is not None for block in self.blocks if block.retention is not None)
        not_held = {block for block, count in num_holders.items() if count == 0}
        assert set(free) == not_held - {null_block}, "a block is lost"
        cached = [block for blocks in self._by_name.values() for block in blocks]
        assert len(cached) == len(set(cached)), "a block has two names"
        assert set(cached) == {block for block in self.blocks if block.name is not None}
