"""When KV events are published: an event is withheld until the step that it is about is answered.

Events are about block hashes, not blocks: `BlockStored` is published with the first block that has
a hash, `BlockRemoved` with the last. A hash is provisional until the step that computes the block
has been answered; until then no event is published, and none at all if it is removed before.
"""

from longshore.protocol.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent


class KVEventLog:
    """Events in one sequence, each withheld until it is proven."""

    def __init__(self) -> None:
        self._proven: list[KVEvent] = []
        # (group, hash) -> the step that computes the block, and its event
        self._provisional: dict[tuple[int, bytes], tuple[int, BlockStored]] = {}

    def stored(self, event: BlockStored, step: int) -> None:
        """A hash got its first block, which plan `step` computes; 0: it is computed already."""
        self._provisional.setdefault((event.group, event.block_hash), (step, event))

    def copied(self, block_hash: bytes, group: int, step: int) -> None:
        """A hash got another block, which plan `step` computes. A provisional hash waits for it,
        because the block before may turn out to be invalid."""
        known = self._provisional.get((group, block_hash))
        if known is not None:
            self._provisional[group, block_hash] = max(known[0], step), known[1]

    def removed(self, block_hash: bytes, group: int) -> None:
        """A hash lost its last block."""
        if self._provisional.pop((group, block_hash), None) is None:
            self._proven.append(BlockRemoved(block_hash, group))

    def proven(self) -> None:
        """All hashes that are left are of blocks that have been computed."""
        self._proven += [event for _, event in self._provisional.values()]
        self._provisional.clear()

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
