"""Evicts the blocks whose expected rate of reuse, times the cost to recompute them, is lowest.

The probability that a block is used again depends mostly on how often it has been used so far, and
on whether it ended the prompt that used it last: the last block holds what only that prompt has. So
blocks are in classes by number of uses and by that place, and the probability of each class is
learned. The time to the next use has a long tail; it is taken as Lomax distributed, whose rate at
age `a` is proportional to 1 / (scale + a), where the scale is the median age at reuse, learned too.

    value = probability of the class × cost to recompute / (scale + age)

If the tier is much larger than the scale, ages differ by more than the scale, and this is close to
LRU with credit for blocks used often. If it is much smaller, all ages are below the scale, so the
class decides and blocks used once do not displace the others. Nothing has to be tuned between.

Within a class the oldest block has the lowest value. Blocks that one request used together form a
run; a run is evicted from its last block on, because a block is worth nothing without those before.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from math import inf
from typing import Final

from longshore.connectors.offloading.policies.policy import EvictionPolicy, Protected, consume
from longshore.connectors.offloading.policies.reuse_statistics import (
    FIRST_USE,
    FIRST_USE_AT_END,
    MAX_USES,
    NUM_USE_CLASSES,
    ReuseStatistics,
)
from longshore.connectors.offloading.policies.runs import Index, Run, RunQueue, parts_of, remove
from longshore.protocol.errors import ConfigError, LongshoreError

# Keys of evicted blocks are remembered, with their class, for this many times the capacity, because
# reuse is often several times further away than a small tier reaches. A key takes 200 bytes, and
# MAX_REMEMBERED 26 MB; a larger tier remembers as many keys as it has blocks, as ARC does.
REMEMBERED_PER_BLOCK: Final = 4
MAX_REMEMBERED: Final = 1 << 17
UPDATES_PER_CAPACITY: Final = 4  # new values while as many blocks are used as the tier has
NUM_DEPTHS: Final = 8  # of positions, for their cost: each depth is a factor of 4, up to 16,384

NOTHING: Final = Protected()
Placed = tuple[RunQueue, int, Run | None, Sequence[bytes]]  # to which queue and class, from where


class ReuseRate(EvictionPolicy):
    """
    cost_doubles_at: the position in a prompt, in blocks, at which a block costs twice as much to
        recompute as the first one, because attention over the prefix then costs as much as the rest
        of the model. None: all blocks cost the same.

    Time is counted in blocks that requests have used.
    """

    def __init__(self, capacity: int, *, cost_doubles_at: float | None = None) -> None:
        super().__init__(capacity)
        if cost_doubles_at is not None and not cost_doubles_at > 0:
            raise ConfigError(f"cost_doubles_at={cost_doubles_at} must be more than 0")
        self._costs = _costs_by_depth(cost_doubles_at)
        self._index: Index = {}
        self._queues = [RunQueue(self._index) for _ in range(NUM_USE_CLASSES * len(self._costs))]
        self._remembered = RunQueue(self._index)  # runs have the class in which they were evicted
        self._max_remembered = max(capacity, min(capacity * REMEMBERED_PER_BLOCK, MAX_REMEMBERED))
        self._now = 0
        self._next_update = 0
        self._statistics = ReuseStatistics(capacity)
        self._values: list[float] = []  # by class: probability of reuse × cost
        self._update_values()

    def num_remembered(self) -> int:
        """Number of remembered keys of blocks that are no entries."""
        return len(self._remembered)

    def __contains__(self, key: object) -> bool:
        run = self._index.get(key)  # type: ignore[call-overload]  # any object is a valid question
        return run is not None and run.queue is not self._remembered

    def __len__(self) -> int:
        return len(self._index) - len(self._remembered)

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self._queues)

    def touch(self, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        if not keys:
            return
        self._now += len(keys)
        if self._now >= self._next_update:
            self._update_values()
        first_class = NUM_USE_CLASSES * self._depth(positions[-1])
        parts = parts_of(keys, self._index)
        run, last = parts.pop()
        parts += [(run, last[:-1]), (run, last[-1:])]
        placed: list[Placed] = []
        for number, (run, part) in enumerate(parts, 1):
            place = FIRST_USE_AT_END if number == len(parts) else FIRST_USE
            if run is not None and part:
                cls = first_class + place + min(run.cls % MAX_USES + 1, MAX_USES - 1)
                self._statistics.reuse(run.cls, len(part), self._now - run.used_at)
                is_entry = run.queue is not self._remembered
                placed.append((self._queues[cls] if is_entry else self._remembered, cls, run, part))
            elif place == FIRST_USE_AT_END:
                # New keys get their class when they are inserted, except the last one, because only
                # this call shows which key that is.
                placed.append((self._remembered, first_class + place, None, part))
        for _, cls, _, part in placed:
            self._statistics.use(cls, len(part))
        self._place(placed)
        self._trim()

    def refresh(self, keys: Sequence[bytes]) -> None:
        self._place(
            [
                (run.queue, run.cls, run, part)
                for run, part in parts_of(keys, self._index)
                if run is not None and run.queue is not self._remembered
            ]
        )

    def insert(self, keys: Sequence[bytes], positions: Sequence[int]) -> None:
        if not keys:
            return
        new = NUM_USE_CLASSES * self._depth(positions[-1]) + FIRST_USE
        placed: list[Placed] = []
        for run, part in parts_of(keys, self._index):
            if run is None:
                self._statistics.use(new, len(part))
            cls = new if run is None else run.cls
            placed.append((self._queues[cls], cls, run, part))
        self._place(placed)

    def remove(self, keys: Iterable[bytes]) -> None:
        remove(keys, self._index)

    def evict(self, num_blocks: int, protected: Protected) -> list[bytes] | None:
        if not self.can_evict(num_blocks, protected):
            return None
        evicted: list[bytes] = []
        candidates = [queue for queue in self._queues if queue.runs]
        while len(evicted) < num_blocks:
            queue, run = self._least_valuable(candidates)
            cls, used_at = run.cls, run.used_at
            popped = queue.pop(min(num_blocks - len(evicted), run.num_keys), protected)
            if not popped or not queue.runs:  # the rest of the queue is protected, or there is none
                candidates.remove(queue)
            self._remembered.append(popped[::-1], cls, used_at)
            evicted += popped
        self._trim()
        return evicted

    def check(self) -> None:
        for cls, queue in enumerate(self._queues):
            queue.check()
            if any(run.cls != cls for run in queue.runs):
                raise LongshoreError("a run is in the queue of another class")
        self._remembered.check()
        if len(self._index) != sum(map(len, self._queues)) + len(self._remembered):
            raise LongshoreError("the index has keys that are in no queue")
        if len(self._remembered) > self._max_remembered:
            raise LongshoreError(f"{len(self._remembered)} keys are remembered")

    def _place(self, placed: list[Placed]) -> None:
        """Move parts of a prefix to their queues; neighbours with the same place become one run,
        and the first part of the prefix becomes the newest run."""
        runs = [(place, list(same)) for place, same in groupby(placed, lambda each: each[:2])]
        for (queue, cls), same in reversed(runs):
            queue.move([(run, part) for _, _, run, part in same], cls, self._now)

    def _least_valuable(self, candidates: list[RunQueue]) -> tuple[RunQueue, Run]:
        """The queue whose oldest run has the lowest value, and the run. Of equal values the first
        queue: the end of a prompt before the rest, and fewer uses before more."""
        now, scale, values = self._now, self._statistics.scale, self._values
        lowest = inf
        for queue in candidates:
            run = next(iter(queue.runs))
            value = values[run.cls] / (scale + now - run.used_at)
            if value < lowest:
                lowest, chosen = value, (queue, run)
        return chosen

    def _trim(self) -> None:
        excess = max(0, len(self._remembered) - self._max_remembered)
        consume(map(self._index.__delitem__, self._remembered.pop(excess, NOTHING)))

    def _depth(self, position: int) -> int:
        return min(position.bit_length() // 2, len(self._costs) - 1)

    def _update_values(self) -> None:
        self._statistics.update(self._now)
        self._values = [
            probability * cost
            for cost in self._costs
            for probability in self._statistics.probabilities
        ]
        self._next_update = self._now + max(1, self.capacity // UPDATES_PER_CAPACITY)


def _costs_by_depth(cost_doubles_at: float | None) -> list[float]:
    """Depth d has the positions around 4^d. A single depth if all positions cost the same."""
    if cost_doubles_at is None:
        return [1.0]
    return [1.0 + (4**depth if depth else 0) / cost_doubles_at for depth in range(NUM_DEPTHS)]
