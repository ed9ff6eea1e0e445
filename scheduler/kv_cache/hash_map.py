"""Maps the hash of a full block to the blocks that hold its KV, in one KV cache group.

Several blocks may have the same content, because requests that arrived together each computed it.
They are not merged, because ids in block tables never change. One dict has the block that was
cached first, which is nearly always the only one; a second, small dict has the others in order.
"""

from collections.abc import Callable, Sequence


class BlockHashMap:
    """The blocks with each hash."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._copies: dict[bytes, dict[int, None]] = {}

    def __len__(self) -> int:
        """Number of different hashes."""
        return len(self._first)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._first

    @property
    def contains(self) -> Callable[[bytes], bool]:
        """`in`, for many hashes; valid until the next call."""
        return self._first.__contains__

    def get_one_block(self, block_hash: bytes) -> int | None:
        """The block with this hash that was cached first."""
        return self._first.get(block_hash)

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """One block per hash, up to the first hash without a block. Later hashes are not looked
        up, so the cost depends on the hits alone."""
        found: list[int] = []
        if not hashes or hashes[0] not in self._first:  # common; an exception costs 1 µs
            return found
        try:
            found.extend(map(self._first.__getitem__, hashes))
        except KeyError:  # the hits before it are in the list
            return found
        return found

    def insert_n(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Give each block, all different and without a hash, its hash; others may have it too."""
        first = list(map(self._first.setdefault, hashes, block_ids))
        if first != block_ids:
            for block_hash, holder, block_id in zip(hashes, first, block_ids, strict=True):
                if holder != block_id:
                    self._copies.setdefault(block_hash, {})[block_id] = None

    def pop(self, block_hash: bytes, block_id: int) -> bool:
        """Remove the hash from this block only. False if the block did not have it."""
        copies = self._copies.get(block_hash)
        if self._first.get(block_hash) != block_id:
            if copies is None or block_id not in copies:
                return False
            del copies[block_id]
        elif copies is None:
            del self._first[block_hash]
            return True
        else:
            self._first[block_hash] = next(iter(copies))
            del copies[self._first[block_hash]]
        if not copies:
            del self._copies[block_hash]
        return True

    def pop_n(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """`pop` for each pair; each block must have its hash."""
        if self._copies and not self._copies.keys().isdisjoint(hashes):
            for block_hash, block_id in zip(hashes, block_ids, strict=True):
                self.pop(block_hash, block_id)
        else:  # each is the only block with its hash
            first = self._first
            for block_hash in hashes:
                del first[block_hash]

    def holders(self, block_hash: bytes) -> list[int]:
        """All blocks with this hash, in the order in which they were cached."""
        first = self._first.get(block_hash)
        return [] if first is None else [first, *self._copies.get(block_hash, ())]

    @property
    def num_holders(self) -> int:
        """Number of blocks with a hash."""
        return len(self._first) + sum(map(len, self._copies.values()))

    def clear(self) -> None:
        """Remove all hashes."""
        self._first.clear()
        self._copies.clear()
