"""What the two halves of the lmcache connector send to each other."""

from typing import TypeAlias

import msgspec

from longshore.connectors.base.lookups import LookupCommands, LookupReport

Blocks: TypeAlias = list[tuple[int, int, bytes]]
"""(KV cache group, block id, key hash) of each block of a transfer."""


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """Lock the blocks that are stored, and report them. groups: key hashes of each KV cache group,
    in the order of the prefix."""

    lookup_id: int
    groups: list[list[bytes]]


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Fill blocks from what a lookup has locked, and release the lookup."""

    request_id: str
    lookup_id: int
    blocks: Blocks


class Store(msgspec.Struct, frozen=True, array_like=True):
    """Store blocks, and report `hold_id`."""

    hold_id: int
    blocks: Blocks


Commands: TypeAlias = LookupCommands[Lookup, Load, Store]


class Found(msgspec.Struct, frozen=True, array_like=True):
    """The end of a lookup on one rank. groups: indices of the blocks that it has locked."""

    lookup_id: int
    groups: list[list[int]]


Report: TypeAlias = LookupReport[Found]
