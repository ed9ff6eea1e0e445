"""A subscriber of KV events: rebuilds the index of stored blocks from encoded batches alone."""

from collections.abc import Iterable

import msgspec

from longshore.protocol.events import (
    ClearedBlocks,
    EventBatch,
    RemovedBlocks,
    StoredBlocks,
    WireEvent,
    WireHash,
)

Place = tuple[str, str | None, int | None]  # medium, locality, group
_decoder = msgspec.msgpack.Decoder(EventBatch)


class EventIndex:
    """What a subscriber knows.

    blocks:  (parent's hash, tokens) by place and hash.
    next_number: of the batch that it needs next.
    batches: the decoded batches.
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[Place, WireHash], tuple[WireHash | None, tuple[int, ...]]] = {}
        self.next_number = 0
        self.batches: list[EventBatch] = []

    def receive(self, number: int, payload: bytes) -> bool:
        """Apply the next batch, ignore an earlier one. False: batches before it are missing."""
        if number > self.next_number:
            return False
        if number == self.next_number:
            batch = _decoder.decode(payload)
            self.batches.append(batch)
            for event in batch.events:
                self._apply(event)
            self.next_number += 1
        return True

    def restore(self, number: int, payloads: Iterable[bytes]) -> None:
        """Start again from a snapshot of the index after this batch."""
        self.blocks.clear()
        for payload in payloads:
            for event in _decoder.decode(payload).events:
                assert isinstance(event, StoredBlocks)
                self._apply(event)
        self.next_number = number + 1

    def hashes(self, group: int = 0, medium: str = "GPU") -> set[WireHash]:
        """The hashes in a place without a locality."""
        return {block for place, block in self.blocks if place == (medium, None, group)}

    def _apply(self, event: WireEvent) -> None:
        match event:
            case ClearedBlocks():
                self.blocks.clear()
            case RemovedBlocks():
                place = (event.medium, event.locality, event.group_idx)
                for block_hash in event.block_hashes:
                    del self.blocks[place, block_hash]  # only what was stored is removed
            case StoredBlocks():
                place = (event.medium, event.locality, event.group_idx)
                parent, size = event.parent_block_hash, event.block_size
                assert len(event.token_ids) in (0, size * len(event.block_hashes))
                for index, block_hash in enumerate(event.block_hashes):
                    assert (place, block_hash) not in self.blocks
                    tokens = tuple(event.token_ids[index * size : (index + 1) * size])
                    self.blocks[place, block_hash] = parent, tokens
                    parent = block_hash
