"""The blocks of the KV cache: who holds each, what it is named, which is handed out next.

One pool serves all groups. A block whose last holder let go keeps its name and its content until it
is handed out again, so the free queue is also the prefix cache, evicted in LRU order. Blocks are
integers; the columns here are Python lists indexed by them.
"""

from collections.abc import Iterable, Sequence

from longshore.protocol.errors import LongshoreError
from longshore.protocol.kv_cache_spec import NULL_BLOCK
from longshore.scheduler.block_hash import block_key
from longshore.scheduler.free_queue import FreeQueue
from longshore.scheduler.prefix_map import PrefixMap


class BlockPool:
    """`num_blocks` blocks with the null block, which is a placeholder: never handed out, never
    freed, never named, its references not counted."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_count = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._free = FreeQueue(num_blocks)
        self._prefixes = PrefixMap()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out; named ones that nobody holds are among them."""
        return self._free.num_free

    @property
    def usage(self) -> float:
        """Share of the usable blocks that somebody holds, 0 to 1."""
        usable = self.num_blocks - 1
        return (usable - self.num_free) / usable

    def ref_count(self, block_id: int) -> int:
        """Holders of the block."""
        return self._ref_count[block_id]

    def key(self, block_id: int) -> bytes | None:
        """Name and group of the block, if it is full and cached."""
        return self._key[block_id]

    def free_block_ids(self) -> list[int]:
        """All free blocks, next to be handed out first. O(n): for checks, not for the step."""
        return list(self._free)

    def get_new_blocks(self, count: int) -> list[int]:
        """Hand out the blocks freed longest ago; they lose their names. Raises OutOfBlocks."""
        block_ids = self._free.popleft_n(count)
        ref_count, keys = self._ref_count, self._key
        for block_id in block_ids:
            assert ref_count[block_id] == 0
            ref_count[block_id] = 1
            key = keys[block_id]
            if key is not None:
                self._prefixes.pop(key, block_id)
                keys[block_id] = None
        return block_ids

    def free_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop one reference each; those that nobody holds any more queue up in the order given,
        names kept. Raises LongshoreError, having changed nothing for it, if a block has no holder.
        """
        ref_count = self._ref_count
        freed: list[int] = []
        try:
            for block_id in block_ids:
                count = ref_count[block_id] - 1
                if count > 0:
                    ref_count[block_id] = count
                elif count == 0:
                    ref_count[block_id] = 0
                    freed.append(block_id)
                elif block_id != NULL_BLOCK:
                    raise LongshoreError(f"block {block_id} is freed, but nobody holds it")
        finally:
            self._free.append_n(freed)

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add one holder each; a block that nobody held leaves the free queue."""
        ref_count = self._ref_count
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if ref_count[block_id] == 0:
                self._free.remove(block_id)
            ref_count[block_id] += 1

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """How many of the blocks `touch` would take from the free queue."""
        ref_count = self._ref_count
        return sum(not ref_count[block_id] for block_id in block_ids if block_id != NULL_BLOCK)

    def cache_full_blocks(
        self, block_ids: Sequence[int], names: Sequence[bytes], group: int
    ) -> None:
        """Make full blocks findable: `block_ids[i]` holds the KV of the prefix named `names[i]`.

        Null blocks are skipped. Raises LongshoreError if a block is named already.
        """
        for block_id, name in zip(block_ids, names, strict=True):
            if block_id == NULL_BLOCK:
                continue
            if self._key[block_id] is not None:
                raise LongshoreError(f"block {block_id} is named already")
            key = block_key(name, group)
            self._key[block_id] = key
            self._prefixes.insert(key, block_id)

    def get_cached_block(self, name: bytes, groups: Sequence[int]) -> list[int] | None:
        """One block per group that holds this prefix; None if any group has none."""
        block_ids: list[int] = []
        for group in groups:
            block_id = self._prefixes.get_one_block(block_key(name, group))
            if block_id is None:
                return None
            block_ids.append(block_id)
        return block_ids

    def forget(self, name: bytes, group: int) -> None:
        """Take the name from every block that carries it: its content proved wrong somewhere."""
        for block_id in self._prefixes.pop_all(block_key(name, group)):
            self._key[block_id] = None

    def reset_prefix_cache(self) -> bool:
        """Forget every name. False, and nothing happens, while anybody holds a block."""
        if self.num_free != self.num_blocks - 1:
            return False
        self._prefixes.clear()
        self._key = [None] * self.num_blocks
        return True
