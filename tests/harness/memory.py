"""The KV cache memory of a rank: what each slot holds, as one number per slot.

A number that is not negative is the prefix (`tokens.Prefixes`) whose last token's KV is there. A
negative one is invalid KV, with the step that made it so: logits that were not finite, a load
within the step that failed, or KV computed from such.
"""

from collections import defaultdict
from collections.abc import Iterable
from itertools import takewhile
from typing import Final

from tests.harness.transfers import Load

JUNK: Final = 1 << 40
"""What a failed background load leaves in some of its blocks: no request may read it."""


class RankMemory:
    """By block id and offset. Blocks need not be of one size."""

    def __init__(self) -> None:
        self._blocks: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def write(self, block_id: int, offset: int, content: int) -> None:
        self._blocks[block_id][offset] = content

    def read(self, block_id: int, offset: int) -> int | None:
        """None if nothing was written since the block was cleared."""
        return self._blocks[block_id].get(offset)

    def clear(self, block_id: int) -> None:
        self._blocks[block_id] = {}

    def copy(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """(source, target, number of offsets); all are read before any is written."""
        contents = [
            (target, {offset: self._blocks[source][offset] for offset in range(count)})
            for source, target, count in copies
        ]
        self._blocks.update(contents)

    def write_load(
        self, load: Load, block_sizes: Iterable[int], failing: set[int], junk: int | None
    ) -> None:
        """Write what the load brings; `junk` (None: nothing) into the blocks where it fails."""
        for block_id, offset, prefix in load.slots(tuple(block_sizes)):
            if block_id not in failing:
                self.write(block_id, offset, prefix)
            elif junk is not None:
                self.write(block_id, offset, junk)

    def partial(self, block_id: int, block_size: int) -> tuple[int, ...]:
        """The leading part of a block that was ever written, whatever it is."""
        content = (self.read(block_id, offset) for offset in range(block_size))
        written = list(takewhile(lambda each: each is not None, content))
        return tuple(each for each in written if each is not None)

    def block(self, block_id: int, block_size: int) -> tuple[int, ...]:
        """The whole content of a block that a store reads, which must be valid."""
        content = tuple(self.read(block_id, offset) for offset in range(block_size))
        assert all(each is not None and 0 <= each < JUNK for each in content), (
            f"a store reads {content} from block {block_id}"
        )
        return tuple(each for each in content if each is not None)
