"""What a remote store remembers and allows, within limits."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

MAX_ABSENT: Final = 100_000


class AbsentKeys:
    """Keys that the store did not have, each for `ttl_s` seconds: negative caching. Keeps the last
    MAX_ABSENT. Thread-safe."""

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # in the order of these times

    def __len__(self) -> int:
        return len(self._until_s)

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return self._until_s.get(key, 0.0) > self._clock()

    def add(self, key: bytes) -> None:
        with self._lock:
            now_s = self._clock()
            while self._until_s:
                oldest = next(iter(self._until_s))
                if self._until_s[oldest] > now_s and len(self._until_s) < MAX_ABSENT:
                    break
                del self._until_s[oldest]
            self._until_s[key] = now_s + self._ttl_s
            self._until_s.move_to_end(key)

    def discard(self, key: bytes) -> None:
        with self._lock:
            self._until_s.pop(key, None)


class ByteBudget:
    """Bytes of the operations in progress. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self.used_bytes = 0

    def acquire(self, num_bytes: int, timeout_s: float) -> bool:
        """Wait until so many bytes may be in progress; an operation larger than the limit, until
        there is no other. False if that takes longer than `timeout_s`."""
        with self._changed:
            is_free = self._changed.wait_for(
                lambda: not self.used_bytes or self.used_bytes + num_bytes <= self._limit_bytes,
                timeout_s,
            )
            self.used_bytes += num_bytes if is_free else 0
            return is_free

    def release(self, num_bytes: int) -> None:
        with self._changed:
            self.used_bytes -= num_bytes
            self._changed.notify_all()
