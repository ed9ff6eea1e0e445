"""Which blocks hold the KV of a named prefix, in one KV cache group.

Several blocks may hold the same content, because requests that came together each computed it; they
are not merged, for ids in block tables never change. The holder named first is in one dict, and in
nearly every case alone; a second, small dict has the others in the order in which they were named.
"""

from collections.abc import Iterable, Sequence


class BlockHashMap:
    """Name of a full block to the blocks that carry it."""

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        self._copies: dict[bytes, dict[int, None]] = {}

    def __len__(self) -> int:
        """Number of different names."""
        return len(self._first)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._first

    def get_one_block(self, block_hash: bytes) -> int | None:
        """The block that got this name first of those that still carry it."""
        return self._first.get(block_hash)

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """One block per name, up to the first name that nobody carries; none is asked for after
        it, so a miss costs what was found before it."""
        found: list[int] = []
        try:
            found.extend(map(self._first.__getitem__, hashes))
        except KeyError:  # it leaves what came before it in the list
            return found
        return found

    def insert_n(self, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Blocks, all different, that carry no name get these; others that carry one keep it."""
        first = list(map(self._first.setdefault, hashes, block_ids))
        if first != block_ids:
            for block_hash, holder, block_id in zip(hashes, first, block_ids, strict=True):
                if holder != block_id:
                    self._copies.setdefault(block_hash, {})[block_id] = None

    def pop(self, block_hash: bytes, block_id: int) -> bool:
        """Forget that this block carries the name; others keep it. False if it did not."""
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
        """`pop` for each pair; each block carries its name."""
        if self._copies and not self._copies.keys().isdisjoint(hashes):
            for block_hash, block_id in zip(hashes, block_ids, strict=True):
                self.pop(block_hash, block_id)
        else:  # each is the only holder
            first = self._first
            for block_hash in hashes:
                del first[block_hash]

    def holders(self, block_hash: bytes) -> list[int]:
        """All blocks that carry the name, in the order in which they got it."""
        first = self._first.get(block_hash)
        return [] if first is None else [first, *self._copies.get(block_hash, ())]

    @property
    def num_holders(self) -> int:
        """Number of blocks that carry a name."""
        return len(self._first) + sum(map(len, self._copies.values()))

    def clear(self) -> None:
        """Forget everything."""
        self._first.clear()
        self._copies.clear()
