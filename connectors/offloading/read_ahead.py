"""Which blocks are read into host memory before a load asks for them.

While a request waits in the queue, its blocks in lower tiers are read ahead. All blocks read ahead
for requests that have not begun are at most a share of host memory, so that a long queue does not
evict what the next requests need.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Where(Enum):
    """Where a block is, if no lower tier can be named. HERE: in host memory, or soon."""

    HERE = "here"
    NOWHERE = "nowhere"
    UNKNOWN = "unknown"


@dataclass
class _Waiting:
    """A request. runs: its keys left to read, by group. num_read: those whose reads have begun."""

    runs: list[deque[bytes]] = field(default_factory=list)
    num_read: int = 0


class ReadAhead:
    """max_blocks: of all requests together."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._waiting: dict[str, _Waiting] = {}
        self._num_read = 0
        self._is_changed = False

    def add(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Read these blocks of one group of a queued request, up to the first that no tier has."""
        self._waiting.setdefault(request_id, _Waiting()).runs.append(deque(keys))
        self._is_changed = True

    def end(self, request_id: str) -> None:
        """The request has begun or ended."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._num_read -= waiting.num_read
            self._is_changed = True

    def clear(self) -> None:
        self._waiting.clear()
        self._num_read = 0

    def changed(self) -> None:
        """More may be known, or there may be more room."""
        self._is_changed = True

    @property
    def num_left(self) -> int:
        """Number of blocks that may be read now, if there are some to read."""
        return self._max_blocks - self._num_read if self._is_changed and self._waiting else 0

    def take(self, find: Callable[[bytes], int | Where]) -> list[tuple[bytes, int]]:
        """Blocks to read now, with their tiers.

        find: the tier that has a block.
        """
        taken: dict[bytes, int] = {}
        for waiting in self._waiting.values():
            before = len(taken)
            for run in waiting.runs:
                self._take_of(run, find, taken)
            waiting.num_read += len(taken) - before
        self._num_read += len(taken)
        self._is_changed = False
        return list(taken.items())

    def _take_of(
        self, run: deque[bytes], find: Callable[[bytes], int | Where], taken: dict[bytes, int]
    ) -> None:
        unknown: list[bytes] = []
        while run and self._num_read + len(taken) < self._max_blocks:
            key = run.popleft()
            match find(key):
                case Where.HERE:
                    continue
                case Where.NOWHERE:
                    run.clear()
                case Where.UNKNOWN:
                    unknown.append(key)
                case int() as tier:
                    taken[key] = tier
        run.extendleft(reversed(unknown))
