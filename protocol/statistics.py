"""What operators see: counters of ranks and engines, why requests wait, and the use of each block.

Counters only grow, so that a lost report costs nothing but its `longest_step_s`. `EngineReport` and
`BlockSnapshot` are built only when a client asks for them.
"""

import enum
from typing import Annotated, Final, TypeAlias

import msgspec

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, UInt8Array
from longshore.protocol.events import Medium

STEP_SECONDS_BOUNDS: Final = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the histogram of steps by duration. One more bucket counts the longer ones."""

STEP_TOKENS_BOUNDS: Final = (
    1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384,
)  # fmt: skip
"""The same for the histogram of steps by number of tokens."""

STEP_GAP_BOUNDS: Final = (
    0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1,
)  # fmt: skip
"""The same for the histogram of steps by the idle time before them."""

OPERATION_BYTES_BOUNDS: Final = (
    1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30,
)  # fmt: skip
"""The same for the histogram of transfer operations by bytes."""

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
StepsByGap: TypeAlias = Annotated[
    tuple[Count, ...],
    msgspec.Meta(min_length=len(STEP_GAP_BOUNDS) + 1, max_length=len(STEP_GAP_BOUNDS) + 1),
]
OperationsByBytes: TypeAlias = Annotated[
    tuple[Count, ...],
    msgspec.Meta(
        min_length=len(OPERATION_BYTES_BOUNDS) + 1, max_length=len(OPERATION_BYTES_BOUNDS) + 1
    ),
]


class TransferOperation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank has moved blocks from one medium to another, in one operation that has ended.

    num_blocks, num_bytes: moved by this rank.
    seconds:     that the operation took, without waiting for its turn.
    num_failed_blocks:  not moved, because reading or writing them failed.
    num_corrupt_blocks: not moved, because they did not match their checksums.
    """

    source: Medium
    destination: Medium
    num_blocks: Count
    num_bytes: Count
    seconds: Seconds
    num_failed_blocks: Count = 0
    num_corrupt_blocks: Count = 0


class TransferStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All transfers of an engine from one medium to another, summed over ranks. See
    TransferOperation.

    operations_by_bytes: histogram of operations by bytes.
    num_queued_blocks: offloaded blocks whose transfer is planned and has not ended.
    """

    source: Medium
    destination: Medium
    operations_by_bytes: OperationsByBytes
    num_blocks: Count = 0
    num_bytes: Count = 0
    seconds: Seconds = 0.0
    num_failed_blocks: Count = 0
    num_corrupt_blocks: Count = 0
    num_queued_blocks: Count = 0

    @property
    def num_operations(self) -> int:
        return sum(self.operations_by_bytes)


class TenantStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The live requests of one tenant that has some."""

    name: str
    num_running: Count
    num_waiting: Count


class TierStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tier of a connector.

    num_blocks, capacity_blocks: offloaded blocks that it has, and for which it has room; a capacity
                        of 0 is not known.
    num_hit_tokens:     tokens whose KV requests have loaded from this tier.
    num_dropped_blocks: blocks that were to be stored and were not, because there was no room or
                        the tier was too slow.
    num_failed_operations: reads, writes and lookups that failed or took too long, of all ranks.
    num_rejected_operations: those that did not begin, because a circuit breaker was open.
    num_breaker_openings, num_open_breakers: how often circuit breakers have opened, and how many
                        are open now: one for reads and one for writes, on each rank.
    """

    medium: Medium
    num_blocks: Count
    capacity_blocks: Count
    num_hit_tokens: Count = 0
    num_dropped_blocks: Count = 0
    num_failed_operations: Count = 0
    num_rejected_operations: Count = 0
    num_breaker_openings: Count = 0
    num_open_breakers: Count = 0


class PullStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a connector keeps for other engines, and pulls from them.

    num_leases, num_leased_blocks: kept now.
    num_refused_leases: requests whose KV could not be kept, because too much was kept.
    num_expired_leases: leases that no reader renewed in time.
    pulls_by_outcome: pulls of this engine that have ended, see `PullOutcome` of the connector.
    """

    num_leases: Count = 0
    num_leased_blocks: Count = 0
    num_refused_leases: Count = 0
    num_expired_leases: Count = 0
    pulls_by_outcome: dict[str, Count] = {}


class WorkerStats(msgspec.Struct, tag="stats", frozen=True, forbid_unknown_fields=True):
    """One rank since the start of its epoch; sent about once a second while it steps, and once
    after its last step.

    steps_by_seconds, steps_by_tokens: histograms of steps by duration and by tokens computed. A
                    bucket counts steps above the previous bound and up to its own.
    compute_s:      seconds on the device, over all steps. Includes waiting for other ranks within
                    a step.
    steps_by_gap:   histogram of the steps whose plan was there before the step before them had
                    ended, by the time for which the device was idle in between.
    gap_s:          sum of these times.
    longest_step_s: longest step since the last report. The longest ever shows in
                    `steps_by_seconds`.
    resident_bytes: host memory of the process.
    device_bytes:   GPU memory of the process; 0 on a CPU.
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
    steps_by_gap: StepsByGap = (0,) * (len(STEP_GAP_BOUNDS) + 1)
    gap_s: Seconds = 0.0

    @property
    def num_steps(self) -> int:
        return sum(self.steps_by_seconds)


class SchedulerStats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of one engine. The `num_*` fields that count events only grow from the start of
    the engine; `num_steps` from the start of its epoch.

    steps_in_flight: unanswered plans, averaged over the steps planned since the last report (each
                     counts itself): 2.0 in a steady asynchronous decode.
    kv_usage:        1 - free / usable blocks; cached blocks without a holder count as free.
    num_prompt_tokens: of requests, counted together with their hits when they are admitted.
    num_stale_tokens: tokens sampled for an earlier occupant of a row, and dropped.
    num_external_*:  tokens looked up in the connector, and tokens it had.
    num_drafted_rows: rows with drafts, added up over the steps that have verified them.
    num_draft_tokens, num_accepted_tokens, num_invalid_draft_tokens: drafts verified, drafts
                     accepted, and drafts rejected by a grammar.
    accepted_by_position: of the drafts of a row in a step, how many of the first ones were
                     accepted, of the second ones, and so on; as many as a row may have.
    encoder_cache_usage: used share of the encoder cache.
    num_encoded_items, num_loaded_encoder_outputs, num_missed_encoder_outputs: items that the
                     workers encoded; items whose output the encoder connector had instead, and
                     those that no other engine gave.
    num_quarantined_blocks: targets of abandoned loads that may still write to them.
    num_rewinds:     requests rewound because KV that they depended on was wrong.
    num_swapped_*:   requests swapped out, and those whose KV was loaded again; the blocks that the
                     former freed, and that the latter were to fill.
    num_swaps_refused: swaps for which there was no room in host memory.
    num_swaps_too_slow: swaps not begun because recomputing takes less time.
    num_pins, num_pinned_blocks: turns of jobs whose KV is kept for the next turn, and its blocks.
    num_pin_hits:    turns that were admitted while the KV of their job was kept.
    num_pins_expired, num_pins_yielded: pins that have ended with their time to live, and because
                     other requests needed the blocks.
    num_kept_states, num_kept_state_blocks: recurrent states in the prefix cache, and their blocks.
    num_states_kept, num_states_evicted: states cached, and those evicted because blocks were
                     needed.
    num_states_found: requests that began with one, counted each time they are admitted.
    num_failed_lookups: lookups in which the connector raised.
    num_failed_loads: loads that did not fill all of their blocks.
    num_late_loads: lookups and loads of the connector that requests did not wait for any longer,
                     because computing takes less time.
    tenants:         requests by tenant; those of no tenant are not among them.
    tiers, transfers, pulls: of the connector, if it reports them.
    workers:         the latest report of each rank that has sent one, by rising rank.
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
    num_prompt_tokens: int = 0
    num_external_queried_tokens: int = 0
    num_external_hit_tokens: int = 0
    num_drafted_rows: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    num_invalid_draft_tokens: int = 0
    encoder_cache_usage: float = 0.0
    num_encoded_items: int = 0
    num_loaded_encoder_outputs: int = 0
    num_missed_encoder_outputs: int = 0
    num_quarantined_blocks: int = 0
    num_rewinds: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_swaps_refused: int = 0
    num_swaps_too_slow: int = 0
    num_pins: int = 0
    num_pinned_blocks: int = 0
    num_pin_hits: int = 0
    num_pins_expired: int = 0
    num_pins_yielded: int = 0
    num_kept_states: int = 0
    num_kept_state_blocks: int = 0
    num_states_kept: int = 0
    num_states_found: int = 0
    num_states_evicted: int = 0
    num_failed_lookups: int = 0
    num_failed_loads: int = 0
    num_late_loads: int = 0
    tenants: tuple[TenantStats, ...] = ()
    tiers: tuple[TierStats, ...] = ()
    transfers: tuple[TransferStats, ...] = ()
    pulls: PullStats | None = None
    workers: tuple[WorkerStats, ...] = ()


class DescribeEngine(msgspec.Struct, tag="describe", frozen=True, forbid_unknown_fields=True):
    """Ask what each waiting request waits for; answered with an `EngineReport`."""


MAX_REPORTED: Final = 200
"""Maximum number of waiting requests in an `EngineReport`."""


class WaitingReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request that is not running. `waits_for` is a sentence for an operator."""

    request_id: str
    status: str
    waits_for: str
    waited_s: float
    num_tokens: int
    num_preemptions: int = 0


class EngineReport(
    msgspec.Struct, tag="report", frozen=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The state of an engine, for an operator.

    waiting: at most MAX_REPORTED waiting requests, the head of the queue first.
    idle_s:  seconds for which no request has made progress although some wait for the engine.
    pause:   value of the `PauseState`.
    num_pins, num_pinned_blocks: see SchedulerStats.
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
    num_pins: int = 0
    num_pinned_blocks: int = 0


MIN_INTERVAL_S: Final = 0.25
"""Minimum time between two new `BlockSnapshot`s."""

MAX_LISTED_HOLDERS: Final = 256
"""Maximum number of holders in a `BlockSnapshot`."""

MAX_LISTED_BLOCKS: Final = 65_536
"""Maximum number of block ids in a `BlockSnapshot`, over all holders."""


class DescribeBlocks(
    msgspec.Struct, tag="describe_blocks", frozen=True, forbid_unknown_fields=True
):
    """Ask what each block is used for; answered with a `BlockSnapshot`. Queries within
    MIN_INTERVAL_S of each other may get the same snapshot."""


class BlockState(enum.IntEnum):
    """What a block is used for. If several states apply, the one with the highest value counts.

    RESERVED:    the null block, or a block set aside permanently.
    FREE:        not held and not cached.
    CACHED:      not held, but in the prefix cache until it is allocated again.
    HELD:        held by one running request only.
    SHARED:      held by a running request and by at least one other holder.
    KEPT:        held by requests that are not running: sessions between inputs, forks, loaded
                 requests; or kept for the next turn of a job.
    TRANSFER:    target of a load, source of a send, or held by a connector.
    QUARANTINED: target of an abandoned load that may still write to it.
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
    """A request or transfer that holds blocks.

    state:      HELD, KEPT, TRANSFER or QUARANTINED.
    num_blocks: blocks held, per KV cache group, without null blocks.
    num_listed: per group, how many of them `BlockSnapshot.block_ids` lists: the last ones.
    row:        -1 without a row. For a transfer this and all later fields have their defaults.
    age_s:      seconds since the request first arrived anywhere.
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
    """One KV cache group.

    num_layers, block_bytes: those of one worker.
    num_blocks: entries in the block tables of running requests; a shared block counts in each.
    """

    kind: str
    block_size: int
    num_layers: int
    block_bytes: int
    num_blocks: int


class BlockSnapshot(msgspec.Struct, tag="block_snapshot", frozen=True, forbid_unknown_fields=True):
    """The answer to `DescribeBlocks`.

    states:    a `BlockState` for each block.
    holders:   at most MAX_LISTED_HOLDERS: running requests first, in admission order.
    block_ids: those of each holder in turn, group by group.
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
