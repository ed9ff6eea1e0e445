"""Rejected requests in the log: each reason, and how many."""

import asyncio
import logging
from typing import Any

import pytest

from longshore.deploy.gateway.api.errors import ApiError, queue_full
from longshore.deploy.gateway.rejection_log import RejectionLog
from longshore.deploy.requests.errors import Unavailable

logger = logging.getLogger(__name__)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    return [
        (record.getMessage(), vars(record)["fields"])
        for record in caplog.records
        if record.name == __name__
    ]


async def test_of_150_requests_the_88_that_were_rejected_are_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = RejectionLog(logger)
    for number in range(88):
        log.rejected(queue_full(62, 62), request_id=f"r-{number}", key="alice")
    log.close()
    first, others = said(caplog)
    assert first[0].startswith("request rejected: 62 requests are running or waiting, and the")
    assert first[1] == {"request_id": "r-0", "key": "alice", "status": 429, "code": "queue_full"}
    assert others[0] == "rejected 87 more requests for this reason within 10 s"
    assert others[1] == {"status": 429, "code": "queue_full"}


async def test_each_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    log = RejectionLog(logger)
    for error in (queue_full(1, 1), ApiError(413, "too large"), Unavailable("it starts")) * 2:
        log.rejected(error)
    assert [about["status"] for _, about in said(caplog)] == [429, 413, 503]
    log.close()
    assert [about["code"] for _, about in said(caplog)[3:]] == [
        "queue_full",
        "invalid_request_error",
        "engine_unavailable",
    ]


async def test_a_flood_is_one_line_per_interval_and_later_ones_are_logged_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def until(num_lines: int) -> None:
        async with asyncio.timeout(60):
            while len(said(caplog)) < num_lines:
                await asyncio.sleep(0)

    log = RejectionLog(logger, interval_s=0.01)
    for _ in range(3):
        log.rejected(queue_full(1, 1))
    await until(2)
    log.rejected(queue_full(1, 1))  # in the interval that follows a count
    await until(3)
    async with asyncio.timeout(60):
        while log._num_more:
            await asyncio.sleep(0)
    log.rejected(queue_full(2, 2))
    messages = [message for message, _ in said(caplog)]
    assert [message.split(":")[0] for message in messages] == [
        "request rejected",
        "rejected 2 more requests for this reason within 0.01 s",
        "rejected 1 more requests for this reason within 0.01 s",
        "request rejected",
    ]
    log.close()
