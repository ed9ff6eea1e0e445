"""Operations of one kind on a remote store: on threads, within limits, behind a circuit breaker."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from longshore.connectors.offloading.remote.breaker import CircuitBreaker
from longshore.connectors.offloading.remote.limits import ByteBudget

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Operation: TypeAlias = Callable[[], Result]

WARN_EVERY_S: Final = 30.0

PATIENCE: Final = 2
"""An operation that takes this many timeouts is abandoned: a client's own timeout can count from
the last byte that arrived."""


class RareWarnings:
    """Logs a kind of warning at most every WARN_EVERY_S seconds. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s: dict[str, float] = {}
        self._num_left_out: dict[str, int] = {}

    def warn(self, kind: str, text: str) -> None:
        with self._lock:
            now_s = self._clock()
            if now_s < self._next_s.get(kind, 0.0):
                self._num_left_out[kind] = self._num_left_out.get(kind, 0) + 1
                return
            self._next_s[kind] = now_s + WARN_EVERY_S
            count = self._num_left_out.pop(kind, 0)
        logger.warning("%s%s", text, f" ({count} more of this kind before)" if count else "")


@dataclass
class LaneCounts:
    """num_failed: operations that failed, of which num_timed_out were abandoned.
    num_rejected: operations that did not begin, because the circuit breaker was open."""

    num_failed: int = 0
    num_timed_out: int = 0
    num_rejected: int = 0


class Lane:
    """name: of the store and the kind of operation, for messages. Thread-safe."""

    def __init__(
        self,
        name: str,
        *,
        num_threads: int,
        concurrency: int,
        timeout_s: float,
        breaker: CircuitBreaker,
        budget: ByteBudget,
        probe: Callable[[], object],
        interrupt: Callable[[], None],
        describe: Callable[[BaseException], str],
    ) -> None:
        """num_threads: `concurrency`, times the number of threads that use this lane.

        probe:     an operation that shows whether the server works again.
        interrupt: makes operations in progress fail.
        describe:  an error in words, without secrets.
        """
        self.counts = LaneCounts()
        self.breaker = breaker
        self._name = name
        self._concurrency = concurrency
        self._patience_s = PATIENCE * timeout_s
        self._budget = budget
        self._probe = probe
        self._interrupt = interrupt
        self._describe = describe
        self._warnings = RareWarnings()
        self._lock = threading.Lock()  # of the counts
        self._stopped: Future[None] = Future()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="remote-store")

    def run(
        self,
        sizes: Sequence[int],
        begin: Callable[[int], Operation[Result]],
        end: Callable[[int, Result], None],
        ends_s: float = math.inf,
    ) -> None:
        """Execute operations, some at a time; return when none is of interest any more.

        sizes: bytes of each operation.
        ends_s: by time.monotonic(): nothing is of interest after that. This is no failure, because
               the server may be as fast as its timeout allows.
        begin: makes the operation with this index; called when it may begin.
        end:   takes the result of one that has succeeded. Both are called in this thread.
        """
        left = deque(range(len(sizes)))
        pending: dict[Future[Result], tuple[int, float]] = {}
        while (left or pending) and not self._stopped.done() and time.monotonic() < ends_s:
            while left and len(pending) < self._concurrency:
                index = left.popleft()
                future = self._submit(sizes[index], index, begin)
                if future is not None:
                    pending[future] = index, time.monotonic() + self._patience_s
            if not pending:
                continue
            next_s = min(ends_s, *(deadline_s for _, deadline_s in pending.values()))
            awaited: list[Future[Any]] = [*pending, self._stopped]
            wait(awaited, max(0.0, next_s - time.monotonic()), FIRST_COMPLETED)
            for future in [future for future in pending if future.done()]:
                self._end(future, pending.pop(future)[0], end)
            now_s = time.monotonic()
            late = [future for future, (_, late_s) in pending.items() if late_s <= now_s]
            for future in late:
                del pending[future]
            if late:
                self._abandon(len(late))
        for future in pending:
            future.cancel()  # those that no thread has begun

    def stop(self) -> None:
        """Abandon all operations; later ones do not begin. May be called on any thread."""
        with self._lock:
            if not self._stopped.done():
                self._stopped.set_result(None)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(
        self, size: int, index: int, begin: Callable[[int], Operation[Result]]
    ) -> Future[Result] | None:
        if not self.breaker.is_closed:
            with self._lock:
                self.counts.num_rejected += 1
            if self.breaker.begins_probe():
                self._pool.submit(self._probe).add_done_callback(self._end_probe)
            return None
        if not self._budget.acquire(size, self._patience_s):
            self._failed("there are too many bytes in flight")
            return None
        operation = begin(index)
        future = self._pool.submit(operation)
        future.add_done_callback(lambda _: self._budget.release(size))
        return future

    def _end(self, future: Future[Result], index: int, end: Callable[[int, Result], None]) -> None:
        error = future.exception()
        if error is not None:
            self._failed(self._describe(error))
            return
        self.breaker.succeeded()
        end(index, future.result())

    def _end_probe(self, future: Future[object]) -> None:
        if future.cancelled():
            return  # the lane is closed
        if future.exception() is not None:
            self.breaker.failed()
        elif self.breaker.succeeded():
            logger.info("%s work again", self._name)

    def _abandon(self, count: int) -> None:
        """Operations take too long: nothing waits for them any more."""
        with self._lock:
            self.counts.num_timed_out += count
        for _ in range(count):
            self._failed(f"no answer in {self._patience_s:g} s")
        self._interrupt()

    def _failed(self, reason: str) -> None:
        with self._lock:
            self.counts.num_failed += 1
        if self.breaker.failed():
            logger.warning(
                "%s fail: %s. The store is not asked for a while; its blocks are misses until an "
                "attempt after remote_retry_s succeeds",
                self._name,
                reason.rstrip("."),
            )
        elif self.breaker.is_closed:
            self._warnings.warn("failed", f"{self._name} fail: {reason}")
