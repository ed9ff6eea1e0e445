"""What the policy `reuse_rate` learns: how probable another use of a block is, and how far away.

A class of blocks is the number of their uses so far, in two places: at the end of the prompt that
used them last, and elsewhere.
"""

from bisect import bisect_left
from itertools import accumulate
from math import log2
from typing import Final

# More uses than this do not make another use more probable: after 8 uses, 8/9 by the rule below.
MAX_USES: Final = 8
NUM_USE_CLASSES: Final = 2 * MAX_USES
FIRST_USE_AT_END: Final = 0  # + uses - 1
FIRST_USE: Final = MAX_USES
# Weight of the prior, in blocks. Blocks of a prompt are used together, and a prompt has some 25 to
# 100 blocks, so that 1,000 blocks are 10 to 40 independent samples. With fewer, the standard error
# of a learned probability (0.5 / sqrt(25) = 0.1) is as large as the difference between classes.
PRIOR_BLOCKS: Final = 1000.0
# What was learned loses half of its weight while this many times the capacity is used: longer than
# a small tier remembers a key, so that all that can be observed counts.
HALF_LIFE_PER_BLOCK: Final = 8
AGES_PER_OCTAVE: Final = 4  # the median age is exact to 2^(1/4), or 19 %
NUM_AGES: Final = 48 * AGES_PER_OCTAVE


class ReuseStatistics:
    """
    probabilities: by class, that a block of the class is used again. Not lower for more uses.
    scale:         median age at which blocks are used again.

    Both are computed by `update`. Ages are in the unit of `now`.
    """

    def __init__(self, capacity: int) -> None:
        self.probabilities: list[float] = []
        self.scale = float(capacity)  # until blocks have been used again
        self._half_life = HALF_LIFE_PER_BLOCK * capacity
        self._next_decay = self._half_life
        self._num_uses = [0.0] * NUM_USE_CLASSES
        self._num_reuses = [0.0] * NUM_USE_CLASSES
        self._ages = [0.0] * NUM_AGES  # number of reuses by logarithm of their age

    def use(self, cls: int, num_blocks: int) -> None:
        """Blocks have been used, and are in this class now; `cls` modulo the number of classes."""
        self._num_uses[cls % NUM_USE_CLASSES] += num_blocks

    def reuse(self, cls: int, num_blocks: int, age: int) -> None:
        """Blocks that were in this class have been used again."""
        self._num_reuses[cls % NUM_USE_CLASSES] += num_blocks
        self._ages[min(int(log2(age) * AGES_PER_OCTAVE), NUM_AGES - 1) if age > 1 else 0] += (
            num_blocks
        )

    def update(self, now: int) -> None:
        if now >= self._next_decay:
            self._next_decay = now + self._half_life
            self._num_uses = [number / 2 for number in self._num_uses]
            self._num_reuses = [number / 2 for number in self._num_reuses]
            self._ages = [number / 2 for number in self._ages]
        # Laplace's rule of succession for a block seen n times: the next request has it with
        # probability n / (n + 1). The end of a prompt is like the rest of it until it is known.
        rule = [(uses + 1) / (uses + 2) for uses in range(MAX_USES)]
        elsewhere = self._learn(FIRST_USE, rule)
        self.probabilities = [*self._learn(FIRST_USE_AT_END, elsewhere), *elsewhere]
        self.scale = self._median_age() or self.scale

    def _learn(self, first: int, prior: list[float]) -> list[float]:
        weights = [uses + PRIOR_BLOCKS for uses in self._num_uses[first : first + MAX_USES]]
        reuses = self._num_reuses[first : first + MAX_USES]
        return non_decreasing(
            [
                (reuse + PRIOR_BLOCKS * expected) / weight
                for reuse, expected, weight in zip(reuses, prior, weights, strict=True)
            ],
            weights,
        )

    def _median_age(self) -> float | None:
        half = sum(self._ages) / 2
        if not half:
            return None
        number = bisect_left(list(accumulate(self._ages)), half)
        return float(2 ** ((number + 0.5) / AGES_PER_OCTAVE))


def non_decreasing(values: list[float], weights: list[float]) -> list[float]:
    """The closest sequence (least weighted squares) in which no value is below the one before it,
    by pooling adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for value, weight in zip(values, weights, strict=True):
        pool = (value, weight, 1)
        while pools and pools[-1][0] > pool[0]:
            mean, other, number = pools.pop()
            total = other + pool[1]
            pool = ((mean * other + pool[0] * pool[1]) / total, total, number + pool[2])
        pools.append(pool)
    return [mean for mean, _, number in pools for _ in range(number)]
