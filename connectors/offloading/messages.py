"""What the two halves of the offloading connector send to each other.

Lists of numbers travel as raw little-endian bytes. A plan's `tier_data` is made by the spec's
manager for the spec's handlers; the connector layer does not look into it.
"""

import math
from typing import Final

import msgspec
import numpy as np

from longshore.connectors.base.groups import BlockRows

BLOCK_IDS: Final = np.dtype("<i4")


class BlockList(msgspec.Struct, frozen=True, array_like=True):
    """Offloaded blocks, and the blocks of the device that they consist of.

    keys:      one per offloaded block.
    groups:    KV cache group of each, one byte each.
    block_ids: (len(keys), factor) int32; 0 for a block that is not copied.
    """

    keys: list[bytes]
    groups: bytes
    block_ids: bytes

    def ids(self, factor: int) -> BlockRows:
        return np.frombuffer(self.block_ids, BLOCK_IDS).reshape(-1, factor)


def block_list(keys: list[bytes], groups: bytes, block_ids: BlockRows) -> BlockList:
    return BlockList(keys, groups, np.ascontiguousarray(block_ids, BLOCK_IDS).tobytes())


class LoadJob(msgspec.Struct, frozen=True, array_like=True):
    """Fill blocks of the device. `missing` are blocks that no tier has; they are reported as
    failed. limit_s: what is not read from a lower tier by then has failed, too."""

    request_id: str
    blocks: BlockList
    tier_data: bytes
    missing: list[int] = []
    limit_s: float = math.inf


class StoreJob(msgspec.Struct, frozen=True, array_like=True):
    """Copy blocks of the device to a tier."""

    job_id: int
    blocks: BlockList
    tier_data: bytes


class TierJob(msgspec.Struct, frozen=True, array_like=True):
    """Copy between tiers."""

    job_id: int
    tier_data: bytes


class Commands(msgspec.Struct, frozen=True):
    """Metadata of a plan."""

    loads: list[LoadJob] = []
    stores: list[StoreJob] = []
    tier_jobs: list[TierJob] = []


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A store or tier job that has ended on one rank. failed: indices of blocks that were not
    copied."""

    job_id: int
    failed: list[int] = []


class Report(msgspec.Struct, frozen=True):
    """Metadata of a report of one rank.

    jobs:         stores and tier jobs that have ended.
    failed_loads: request id and indices of the blocks that its load did not fill.
    tier_data:    messages of the spec's handlers to its manager, in order.
    """

    jobs: list[Ended] = []
    failed_loads: list[tuple[str, list[int]]] = []
    tier_data: list[bytes] = []
