"""Rate limit for warnings that clients can cause, so that a flood of them cannot fill the disk."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from longshore.protocol.logs.records import Field, fields

MAX_PER_SECOND: Final = 10


class LogLimit:
    """Logs the first `max_per_second` warnings of a second and counts the others. The count is
    logged when the second is over, by the event loop if one runs, else before the next warning."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        max_per_second: int = MAX_PER_SECOND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._max_per_second = max_per_second
        self._clock = clock
        self._second_ends_s = -1.0
        self._num_logged = 0
        self._num_suppressed = 0

    def warning(
        self,
        message: str,
        *values: object,
        exc_info: BaseException | None = None,
        **about: Field,
    ) -> None:
        """Log like `logger.warning(message, *values, exc_info=exc_info, extra=fields(**about))`."""
        now_s = self._clock()
        if now_s >= self._second_ends_s:
            self.log_suppressed()
            self._second_ends_s, self._num_logged = now_s + 1.0, 0
        if self._num_logged < self._max_per_second:
            self._num_logged += 1
            self._logger.warning(message, *values, exc_info=exc_info, extra=fields(**about))
            return
        self._num_suppressed += 1
        if self._num_suppressed == 1:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return
            loop.call_later(self._second_ends_s - now_s, self.log_suppressed)

    def log_suppressed(self) -> None:
        """Log the number of suppressed warnings now, if there are any."""
        if self._num_suppressed:
            number, self._num_suppressed = self._num_suppressed, 0
            self._logger.warning(
                "suppressed %d similar warnings; the limit is %d per second",
                number,
                self._max_per_second,
            )
