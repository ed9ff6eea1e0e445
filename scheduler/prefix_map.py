"""Which blocks hold the KV of a named prefix.

Several blocks may hold the same content, because requests that came together each computed it; they
are not merged, for ids in block tables never change. One holder is stored as its id, several as a
dict in the order in which they were named.
"""

from longshore.protocol.errors import LongshoreError


class PrefixMap:
    """Block key (name and group) to the blocks that carry it."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int | dict[int, None]] = {}

    def __len__(self) -> int:
        """Number of different keys."""
        return len(self._holders)

    def get_one_block(self, key: bytes) -> int | None:
        """The block that got this key first of those that still carry it."""
        holders = self._holders.get(key)
        return next(iter(holders)) if isinstance(holders, dict) else holders

    def insert(self, key: bytes, block_id: int) -> None:
        """Raises LongshoreError if the block carries the key already."""
        holders = self._holders.get(key)
        if holders is None:
            self._holders[key] = block_id
        elif isinstance(holders, int) and holders != block_id:
            self._holders[key] = {holders: None, block_id: None}
        elif isinstance(holders, dict) and block_id not in holders:
            holders[block_id] = None
        else:
            raise LongshoreError(f"block {block_id} already carries this key")

    def pop(self, key: bytes, block_id: int) -> bool:
        """Forget that this block carries the key; others keep it. False if it did not."""
        holders = self._holders.get(key)
        if isinstance(holders, dict):
            if block_id not in holders:
                return False
            del holders[block_id]
            if len(holders) == 1:
                self._holders[key] = next(iter(holders))
            return True
        if holders != block_id:
            return False
        del self._holders[key]
        return True

    def pop_all(self, key: bytes) -> list[int]:
        """Forget the key; the blocks that carried it."""
        holders = self._holders.pop(key, None)
        if holders is None:
            return []
        return list(holders) if isinstance(holders, dict) else [holders]

    def clear(self) -> None:
        """Forget everything."""
        self._holders.clear()
