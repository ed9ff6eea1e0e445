"""Statistics of a rank, as messages."""

from typing import Any

import msgspec
import pytest

from longshore.protocol.errors import MalformedMessage
from longshore.protocol.handshake import FromWorker
from longshore.protocol.statistics import (
    STEP_SECONDS_BOUNDS,
    STEP_TOKENS_BOUNDS,
    WorkerStats,
)
from longshore.protocol.transport.codec import Decoder

FIELDS: dict[str, Any] = {
    "type": "stats",
    "epoch": 1,
    "rank": 0,
    "steps_by_seconds": [1] * (len(STEP_SECONDS_BOUNDS) + 1),
    "steps_by_tokens": [1] * (len(STEP_TOKENS_BOUNDS) + 1),
    "compute_s": 0.5,
    "num_tokens": 9,
    "longest_step_s": 0.1,
    "resident_bytes": 1,
}


def decode(**changes: Any) -> Any:
    return Decoder[Any](FromWorker).decode([msgspec.msgpack.encode(FIELDS | changes)])


def test_a_report_counts_its_steps() -> None:
    stats = decode()
    assert isinstance(stats, WorkerStats)
    assert stats.num_steps == len(STEP_SECONDS_BOUNDS) + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"steps_by_seconds": [1]},
        {"steps_by_tokens": [1] * 99},
        {"steps_by_seconds": [-1] * (len(STEP_SECONDS_BOUNDS) + 1)},
        {"num_tokens": -1},
        {"compute_s": -0.5},
        {"compute_s": None},
        {"load": 1.0},
    ],
    ids=str,
)
def test_an_impossible_report_is_malformed(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        decode(**changes)
