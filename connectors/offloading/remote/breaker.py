"""A circuit breaker: a server that keeps failing is not asked for a while."""

import threading
import time
from collections.abc import Callable
from enum import Enum


class BreakerState(Enum):
    """CLOSED: operations are allowed. OPEN: none is. PROBING: none is, and one operation that
    nothing waits for finds out whether the server works again."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class CircuitBreaker:
    """Opens after `threshold` failures without a success in between. Then a probe every `retry_s`
    seconds closes it or leaves it open. With `max_retry_s`, this time doubles with each probe that
    fails, up to that. Thread-safe.

    num_opened: how often it has opened while it was closed.
    """

    def __init__(
        self,
        threshold: int,
        retry_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_retry_s: float | None = None,
    ) -> None:
        self.num_opened = 0
        self._threshold = threshold
        self._first_retry_s = self._retry_s = retry_s
        self._max_retry_s = retry_s if max_retry_s is None else max_retry_s
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._state = BreakerState.CLOSED
        self._probes_at_s = 0.0

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def is_closed(self) -> bool:
        """Whether operations may begin."""
        return self._state is BreakerState.CLOSED

    def begins_probe(self) -> bool:
        """Whether a probe is due. The caller must begin it, and end it with `succeeded` or
        `failed`; one that takes longer than `retry_s` is given up."""
        with self._lock:
            now_s = self._clock()
            if self._state is BreakerState.CLOSED or now_s < self._probes_at_s:
                return False
            self._state = BreakerState.PROBING
            self._probes_at_s = now_s + self._retry_s
            return True

    def succeeded(self) -> bool:
        """The server has answered. Returns whether this has closed the breaker."""
        with self._lock:
            if self._state is BreakerState.OPEN:
                return False  # the end of an operation that began before the breaker opened
            is_new = self._state is BreakerState.PROBING
            self._state = BreakerState.CLOSED
            self._num_failures = 0
            self._retry_s = self._first_retry_s
            return is_new

    def failed(self) -> bool:
        """An operation has failed. Returns whether this has opened the closed breaker."""
        with self._lock:
            self._num_failures += 1
            is_new = self._state is BreakerState.CLOSED
            if is_new and self._num_failures < self._threshold:
                return False
            if self._state is BreakerState.PROBING:
                self._retry_s = min(2 * self._retry_s, self._max_retry_s)
            self._state = BreakerState.OPEN
            self._probes_at_s = self._clock() + self._retry_s
            self.num_opened += is_new
            return is_new
