"""What operators look at: counters, why requests wait, and what blocks are used for.

Counters only grow, so a report that is lost loses nothing but its longest step. Reports and
snapshots are made only when a client asks for them.
"""

import enum
from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias

import msgspec

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, UInt8Array

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


class SchedulerStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of one engine; the `num_*` that count what happened only grow, from
    the engine's start; `num_steps` from that of its epoch.

    steps_in_flight: plans not yet answered, averaged over the steps planned since the last report
                     (the one just planned included): 2.0 in a steady asynchronous decode.
    kv_usage:        1 - free / usable blocks; cached blocks that nobody holds count as free.
    num_stale_tokens: sampled for an occupant that had left its row, and dropped.
    num_external_*:  tokens the connector was asked for, and said it has.
    num_draft_tokens, num_accepted_tokens, num_invalid_draft_tokens: speculated, right, refused by
                     a grammar.
    encoder_cache_usage: share of the encoder cache that holds outputs.
    num_quarantined_blocks: targets of loads that nobody waits for any more, not confirmed ended.
    num_rewinds:     requests sent back because KV they had computed on proved wrong.
    workers:         the latest report of every rank that has sent one, by rising rank.
    """

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    kv_usage: float
    steps_in_flight: float
    num_steps: int
    num_preemptions: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_preempted_queried_tokens: int
    num_preempted_hit_tokens: int
    num_stale_tokens: int
    num_bad_messages: int
    num_external_queried_tokens: int = 0
    num_external_hit_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_invalid_draft_tokens: int = 0
    encoder_cache_usage: float = 0.0
    num_quarantined_blocks: int = 0
    num_rewinds: int = 0
    workers: tuple[WorkerStats, ...] = ()


class DescribeEngine(msgspec.Struct, tag="describe", frozen=True, forbid_unknown_fields=True):
    """Ask what every waiting request waits for; answered with an `EngineReport`."""


class WaitingReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request that does not run. `waits_for` is a sentence for an operator."""

    request_id: str
    status: str
    waits_for: str
    waited_s: float
    num_tokens: int
    num_preemptions: int = 0


class EngineReport(
    msgspec.Struct, tag="report", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The state of an engine as an operator wants to read it.

    waiting:        at most MAX_REPORTED of them, the head of the queue first.
    idle_s:         seconds since some request last advanced.
    pause:          value of the `PauseState`.
    """

    engine_id: str
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    kv_usage: float
    steps_in_flight: int
    idle_s: float
    pause: str
    waiting: tuple[WaitingReport, ...] = ()


MAX_REPORTED: Final = 200
"""Waiting requests that an `EngineReport` lists."""


MAX_LISTED_HOLDERS: Final = 256
"""Holders that a `BlockSnapshot` lists."""


MAX_LISTED_BLOCKS: Final = 65_536
"""Block ids that it lists, of all holders together."""


class BlockState(enum.IntEnum):
    """What a block is used for; of those that fit it, the last.

    RESERVED:    the null block, and blocks set aside for good.
    FREE:        nobody holds it, nobody can find it.
    CACHED:      nobody holds it, but a prefix is found in it until it is handed out again.
    HELD:        one running request holds it, and nobody else.
    SHARED:      a running request holds it, and somebody else too.
    KEPT:        requests that do not run hold it: sessions between inputs, forks, loaded requests.
    TRANSFER:    it is loaded into or sent from, or a connector holds it.
    QUARANTINED: a load that nobody waits for any more may still write to it.
    """

    RESERVED = 0
    FREE = 1
    CACHED = 2
    HELD = 3
    SHARED = 4
    KEPT = 5
    TRANSFER = 6
    QUARANTINED = 7


class BlockHolder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who holds blocks. state: HELD, KEPT, TRANSFER or QUARANTINED, by what it does.

    row, num_computed_tokens: -1 without a row, and 0 for a transfer.
    num_blocks: by KV cache group; forgotten ones do not count.
    num_listed: by group, how many of them `BlockSnapshot.block_ids` names: those at the end.
    age_s:      seconds since the request arrived anywhere.
    """

    request_id: str
    state: BlockState
    num_blocks: tuple[int, ...]
    num_listed: tuple[int, ...]
    row: int = -1
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    age_s: float = 0.0


class GroupUse(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One KV cache group. num_blocks: in the tables of running requests, those shared counted
    in each; num_layers, block_bytes: of one worker."""

    kind: str
    block_size: int
    num_layers: int
    block_bytes: int
    num_blocks: int


class BlockSnapshot(msgspec.Struct, tag="block_snapshot", frozen=True, forbid_unknown_fields=True):
    """The answer to `DescribeBlocks`.

    states:    a `BlockState` for each block.
    holders:   at most MAX_LISTED_HOLDERS, those that run first, in admission order.
    block_ids: of the holders in turn, of each group by group.
    num_*:     as in `SchedulerStats`.
    """

    report: EngineReport
    states: UInt8Array
    groups: tuple[GroupUse, ...]
    num_steps: int
    num_preemptions: int
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    holders: tuple[BlockHolder, ...] = ()
    block_ids: Int32Array = EMPTY_INT32


class DescribeBlocks(
    msgspec.Struct, tag="describe_blocks", frozen=True, forbid_unknown_fields=True
):
    """Ask what every block is used for. Who asks again within MIN_INTERVAL_S may get the same
    answer again."""


MIN_INTERVAL_S: Final = 0.25
"""No new `BlockSnapshot` is made sooner."""
