"""A picture of an engine's KV blocks, for whoever watches: what each is used for, and by whom.

It is made only when asked for, with `DescribeBlocks`, and tells no tokens.
"""

import enum
from typing import Final

import msgspec

from longshore.protocol.arrays import EMPTY_INT32, Int32Array, UInt8Array
from longshore.protocol.client import EngineReport

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
