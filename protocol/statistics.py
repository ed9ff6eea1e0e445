"""What a rank has computed so far: counts that only grow, so that a lost report loses nothing but
its longest step."""

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

import msgspec

STEP_SECONDS_BOUNDS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the buckets that steps are counted in by their time; one more is for the rest."""
STEP_TOKENS_BOUNDS: Final = (
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384,
)  # fmt: skip
"""Likewise by their tokens."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
StepsBySeconds: TypeAlias = Annotated[
    tuple[Count, ...],
    msgspec.Meta(min_length=len(STEP_SECONDS_BOUNDS) + 1, max_length=len(STEP_SECONDS_BOUNDS) + 1),
]
StepsByTokens: TypeAlias = Annotated[
    tuple[Count, ...],
    msgspec.Meta(min_length=len(STEP_TOKENS_BOUNDS) + 1, max_length=len(STEP_TOKENS_BOUNDS) + 1),
]


class WorkerStats(msgspec.Struct, tag="stats", frozen=True, forbid_unknown_fields=True):
    """One rank since the start of its epoch; sent about once a second while it steps, and once
    after that.

    steps_by_seconds, steps_by_tokens: steps by what they took and by the tokens they computed: of
                    at most as much as the bound of their bucket, and more than the one before.
    compute_s:      seconds on the device, all steps together; waiting for other ranks is part of
                    it where a step waits.
    longest_step_s: of the steps since the last report, so that who sees one report of several sees
                    one second of several; the longest of all shows in `steps_by_seconds`.
    resident_bytes: of the process, in the host's memory.
    device_bytes:   that it holds of a GPU; 0 on a CPU.
    """

    epoch: int
    rank: int
    steps_by_seconds: StepsBySeconds
    steps_by_tokens: StepsByTokens
    compute_s: Seconds
    num_tokens: Count
    longest_step_s: Seconds
    resident_bytes: Count
    device_bytes: Count = 0

    @property
    def num_steps(self) -> int:
        return sum(self.steps_by_seconds)


def cumulative(counts: Sequence[int]) -> list[int]:
    """Of each bucket: what is in it and in those below, as Prometheus counts."""
    total = 0
    return [total := total + count for count in counts]
