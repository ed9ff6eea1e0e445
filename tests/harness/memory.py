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
"""What failed background loads and killed workers leave in some blocks: no request may read it."""


class RankMemory:
    """By block id and offset. Blocks need not be of one size.

    step: the plan that is executed now; 0: none, what is written now is complete.
    """

    def __init__(self) -> None:
        self._blocks: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._written_in: dict[tuple[int, int], int] = {}
        self.step = 0

    def write(self, block_id: int, offset: int, content: int) -> None:
        self._blocks[block_id][offset] = content
        self._written_in[block_id, offset] = self.step

    def tear(self, answered_step: int) -> None:
        """The process is killed: what plans after `answered_step` have written may be anything.
        Plans are numbered from 1 again."""
        for (block_id, offset), step in self._written_in.items():
            if step > answered_step:
                self._blocks[block_id][offset] = JUNK
        self._written_in.clear()

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
        for target, content in contents:
            self._written_in.update(dict.fromkeys(((target, each) for each in content), self.step))

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
