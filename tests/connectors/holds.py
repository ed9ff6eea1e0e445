"""The scheduler as a connector sees it: what the connector holds."""

from collections.abc import Sequence

from longshore.connectors.base import BlockHolds


class Holds(BlockHolds):
    """held: blocks, by id of the hold."""

    def __init__(self, num_ranks: int = 1) -> None:
        self.held: dict[int, list[int]] = {}
        self._num_ranks = num_ranks
        self._ranks_done: dict[int, set[int]] = {}
        self._last = 0

    def hold(self, block_ids: Sequence[int]) -> int:
        self._last += 1
        self.held[self._last] = list(block_ids)
        self._ranks_done[self._last] = set()
        return self._last

    def release(self, hold_id: int) -> None:
        del self.held[hold_id]

    def release_rank(self, hold_id: int, rank: int) -> bool:
        self._ranks_done[hold_id].add(rank)
        if hold_id not in self.held or len(self._ranks_done[hold_id]) < self._num_ranks:
            return False
        self.release(hold_id)
        return True
