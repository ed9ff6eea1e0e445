"""Keeps blocks out of a tier until requests have asked for them often enough (selective writes)."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import compress, repeat
from typing import Final

from longshore.connectors.offloading.policies.policy import consume
from longshore.protocol.errors import ConfigError

MAX_TRACKER_SIZE: Final = 64_000


class ReuseFilter:
    """Counts how many requests have looked up each key, for the keys looked up last.

    store_threshold:  only keys that were looked up this often are stored; at least 2.
    max_tracker_size: number of keys that are counted; the counts of others are lost.
    """

    def __init__(self, store_threshold: int, max_tracker_size: int = MAX_TRACKER_SIZE) -> None:
        if store_threshold < 2:
            raise ConfigError(f"store_threshold={store_threshold} of a filter must be at least 2")
        if max_tracker_size < 1:
            raise ConfigError(f"max_tracker_size={max_tracker_size} must be at least 1")
        self.store_threshold = store_threshold
        self.max_tracker_size = max_tracker_size
        self._counts: OrderedDict[bytes, int] = OrderedDict()  # least recently counted first

    def __len__(self) -> int:
        """Number of keys that are counted."""
        return len(self._counts)

    def count(self, keys: Sequence[bytes]) -> None:
        """A request looks these keys up; to be called once per request. A key given twice counts
        once. Of its keys, the last ones are forgotten first."""
        counts = self._counts
        before = list(map(counts.get, keys, repeat(0)))
        counts.update(zip(keys, map((1).__add__, before), strict=True))
        consume(map(counts.move_to_end, reversed(keys)))
        for _ in range(len(counts) - self.max_tracker_size):
            counts.popitem(last=False)

    def worth_storing(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of `keys` that were looked up often enough."""
        counts = map(self._counts.get, keys, repeat(0))
        return list(compress(keys, map(self.store_threshold.__le__, counts)))


def make_reuse_filter(
    store_threshold: int = 0, max_tracker_size: int = MAX_TRACKER_SIZE
) -> ReuseFilter | None:
    """None, and so no filtering, if the threshold is 0 or 1: every block that is stored has been
    looked up once."""
    if store_threshold < 0:
        raise ConfigError(f"store_threshold={store_threshold} must not be negative")
    return ReuseFilter(store_threshold, max_tracker_size) if store_threshold >= 2 else None
