"""Whether a lower tier is fast enough to be waited for.

A request waits for its blocks as long as computing them would take (`LoadWaits` in the scheduler).
A tier that has not read them by then was of no use, and one that is always too slow would cost each
request this time. So a tier that was late is not read for a while; then one read finds out whether
it has become faster.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

from longshore.connectors.offloading.remote.breaker import CircuitBreaker

logger = logging.getLogger(__name__)

LATE_IN_A_ROW: Final = 2
"""One late read can be a hiccup."""

RETRY_S: Final = 10.0
MAX_RETRY_S: Final = 320.0
"""How long a tier is not read: at first, and after several reads in a row that were late again."""


class Pace:
    """what: what can be late, for messages. Thread-safe."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._breaker = CircuitBreaker(LATE_IN_A_ROW, RETRY_S, clock, max_retry_s=MAX_RETRY_S)

    def may_begin(self) -> bool:
        """Whether to read. If so, the caller must call `ended`."""
        return self._breaker.is_closed or self._breaker.begins_probe()

    def ended(self, *, is_late: bool) -> None:
        """A read was in time, or was not."""
        if not is_late:
            if self._breaker.succeeded():
                logger.info("%s are fast enough again", self._what)
        elif self._breaker.failed():
            logger.warning(
                "%s take longer than computing the tokens would. They are not tried for %g s, or "
                "longer if they are still too slow then",
                self._what,
                RETRY_S,
            )
