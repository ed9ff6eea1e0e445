"""Log lines about rejected requests: the first of each reason at once, the others as a count."""

import asyncio
import logging
from typing import Final

from longshore.deploy.gateway.api.errors import reason_of, status_of
from longshore.deploy.requests.errors import RequestError
from longshore.protocol.logs.records import Field, fields

REJECTED: Final = frozenset({401, 408, 413, 414, 429, 431, 503})
"""Statuses of requests that the server rejects because of a key or a limit, or because it cannot
serve now. Other statuses from 400 to 499 are mistakes in a request, and are not logged."""
INTERVAL_S: Final = 10.0


class RejectionLog:
    """Logs rejected requests through `logger`. Used inside a running event loop."""

    def __init__(self, logger: logging.Logger, interval_s: float = INTERVAL_S) -> None:
        self._logger = logger
        self._interval_s = interval_s
        # Rejections that are not logged yet, by status and code of the error.
        self._num_more: dict[tuple[int, str], int] = {}

    def rejected(self, error: RequestError, **about: Field) -> None:
        """Log one rejection, or count it if the same reason was logged a moment ago."""
        reason = (status_of(error), reason_of(error))
        if reason in self._num_more:
            self._num_more[reason] += 1
            return
        status, code = reason
        about = {**about, "status": status, "code": code}
        self._logger.warning("request rejected: %s", error, extra=fields(**about))
        self._count(reason)

    def _count(self, reason: tuple[int, str]) -> None:
        self._num_more[reason] = 0
        asyncio.get_running_loop().call_later(self._interval_s, self._interval_ends, reason)

    def _interval_ends(self, reason: tuple[int, str]) -> None:
        if self._log(reason):
            self._count(reason)  # they may go on: one line per interval

    def _log(self, reason: tuple[int, str]) -> int:
        number = self._num_more.pop(reason, 0)
        if number:
            self._logger.warning(
                "rejected %d more requests for this reason within %g s",
                number,
                self._interval_s,
                extra=fields(status=reason[0], code=reason[1]),
            )
        return number

    def close(self) -> None:
        """Log what has been counted: no interval ends any more."""
        for reason in list(self._num_more):
            self._log(reason)
