"""The random number of an output position: a function of (seed, position) alone.

A counter-based generator (SplitMix64, Steele et al., 2014). It has no state to keep or replay, so
preemption, resubmission and the batch do not change what a request draws.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

SEED_MASK: Final = 2**64 - 1
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)


def uniform(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """seeds, positions: (n,) -> (n,) in [0, 1), 53 random bits each."""
    # Mix the seeds first: consecutive seeds must not be consecutive positions of one stream.
    counters = _mix(seeds) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    return (_mix(counters) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
