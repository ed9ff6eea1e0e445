"""What happened to the prefix cache, for those outside who follow it: routers, tiers, dashboards.

Events speak of names, not of blocks: `BlockStored` comes with the first block that carries a name,
`BlockRemoved` with the last. A name is provisional until the step that computes the block has been
answered, and nobody hears of it before; if it is taken back meanwhile nobody hears of it at all.
"""

from typing import TypeAlias

import msgspec

from longshore.protocol.arrays import Int32Array

MEDIUM_GPU = "gpu"


class BlockStored(msgspec.Struct, frozen=True, tag="stored"):
    """A full block can be found. `parent_hash` is the hash of the block before it; None: it is the
    first. token_ids: (block_size,) int32."""

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: Int32Array
    group: int
    lora_name: str | None = None
    medium: str = MEDIUM_GPU


class BlockRemoved(msgspec.Struct, frozen=True, tag="removed"):
    """No block carries the name any more."""

    block_hash: bytes
    group: int
    medium: str = MEDIUM_GPU


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Nothing is cached; whatever was said before is void."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventLog:
    """Events in one sequence, each held back until it is proven."""

    def __init__(self) -> None:
        self._proven: list[KVEvent] = []
        # (group, name) -> the step that computes the block, and what to say then
        self._provisional: dict[tuple[int, bytes], tuple[int, BlockStored]] = {}

    def stored(self, event: BlockStored, step: int) -> None:
        """A name got its first block, which plan `step` computes; 0: its content is there."""
        self._provisional.setdefault((event.group, event.block_hash), (step, event))

    def removed(self, block_hash: bytes, group: int) -> None:
        """A name lost its last block."""
        if self._provisional.pop((group, block_hash), None) is None:
            self._proven.append(BlockRemoved(block_hash, group))

    def cleared(self) -> None:
        """Every name is gone; this comes first in what is taken next."""
        self._provisional.clear()
        self._proven = [AllBlocksCleared()]

    def take(self, answered_step: int) -> list[KVEvent]:
        """Everything proven once plan `answered_step` is answered, in order, and only once."""
        provisional, self._provisional = self._provisional, {}
        for key, (step, event) in provisional.items():
            if step <= answered_step:
                self._proven.append(event)
            else:
                self._provisional[key] = step, event
        taken, self._proven = self._proven, []
        return taken
