"""Events of the prefix cache for subscribers such as routers, tiers and dashboards.

Events are about block hashes, not blocks: `BlockStored` is published with the first block that has
a hash, `BlockRemoved` with the last. A hash is provisional until the step that computes the block
has been answered; until then no event is published, and none at all if it is removed before.
"""

from typing import TypeAlias

import msgspec

from longshore.protocol.arrays import Int32Array

MEDIUM_GPU = "gpu"


class BlockStored(msgspec.Struct, frozen=True, tag="stored"):
    """A full block was cached. `parent_hash` is the hash of the block before it, None for the
    first block. token_ids: (block_size,) int32."""

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: Int32Array
    group: int
    lora_name: str | None = None
    medium: str = MEDIUM_GPU


class BlockRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """The last block with this hash was evicted or uncached."""

    block_hash: bytes
    group: int
    medium: str = MEDIUM_GPU


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Nothing is cached any more; all earlier events are void."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventLog:
    """Events in one sequence, each withheld until it is proven."""

    def __init__(self) -> None:
        self._proven: list[KVEvent] = []
        # (group, hash) -> the step that computes the block, and its event
        self._provisional: dict[tuple[int, bytes], tuple[int, BlockStored]] = {}

    def stored(self, event: BlockStored, step: int) -> None:
        """A hash got its first block, which plan `step` computes; 0: it is computed already."""
        self._provisional.setdefault((event.group, event.block_hash), (step, event))

    def removed(self, block_hash: bytes, group: int) -> None:
        """A hash lost its last block."""
        if self._provisional.pop((group, block_hash), None) is None:
            self._proven.append(BlockRemoved(block_hash, group))

    def cleared(self) -> None:
        """All hashes were removed; `AllBlocksCleared` is the first event taken next."""
        self._provisional.clear()
        self._proven = [AllBlocksCleared()]

    def take(self, answered_step: int) -> list[KVEvent]:
        """All events proven by the output of plan `answered_step`, in order, each only once."""
        provisional, self._provisional = self._provisional, {}
        for key, (step, event) in provisional.items():
            if step <= answered_step:
                self._proven.append(event)
            else:
                self._provisional[key] = step, event
        taken, self._proven = self._proven, []
        return taken
