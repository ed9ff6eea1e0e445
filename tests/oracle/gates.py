"""What keeps a waiting request out although it fits: pressure, its whole input, the watermark."""

from longshore.scheduler.config import CacheConfig


class Gates:
    """WMK-01..03. num_blocks: with the null block. num_reserved: for tenants that are owed."""

    def __init__(self, cache: CacheConfig, num_blocks: int, num_reserved: int = 0) -> None:
        self._num_reserved = num_reserved
        self._cache = cache
        self._num_blocks = num_blocks
        self._is_closed = False

    def feel_pressure(self, num_free: int) -> None:
        """A request is about to be tried: pressure, measured before it has anything, closes the
        gate until it has fallen far enough."""
        usage = 1 - num_free / (self._num_blocks - 1)
        if usage > self._cache.preempt_threshold:
            self._is_closed = True
        elif usage < self._cache.admit_threshold:
            self._is_closed = False

    def admit(self, num_free: int, num_needed: int, *, is_owed: bool) -> bool:
        """Whether a request that needs so many of the free blocks may have them."""
        watermark = int(self._num_blocks * self._cache.watermark)
        if is_owed:
            return num_free - num_needed >= watermark
        if self._is_closed:
            return False
        return num_free - num_needed >= max(watermark, self._num_reserved)
