"""What the two halves of a connector to a prefix store send to each other. Blocks are counted from
the beginning of the request, and hashes are those of all blocks from there on."""

from typing import TypeAlias

import msgspec

from longshore.connectors.base.lookups import LookupCommands, LookupReport


class Prefix(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of a request. salt: another one after each reset of the cache."""

    hashes: list[bytes]
    salt: str = ""


class Lookup(msgspec.Struct, frozen=True, array_like=True):
    """Count the leading blocks that are stored, and keep them for a load."""

    lookup_id: int
    prefix: Prefix


class Load(msgspec.Struct, frozen=True, array_like=True):
    """Fill blocks from `first_block` on with what a lookup has found, and release the lookup."""

    request_id: str
    lookup_id: int
    first_block: int
    block_ids: list[int]


class Store(msgspec.Struct, frozen=True, array_like=True):
    """Store the last blocks of a prefix, and report `hold_id`."""

    hold_id: int
    prefix: Prefix
    block_ids: list[int]

    @property
    def first_block(self) -> int:
        return len(self.prefix.hashes) - len(self.block_ids)


Commands: TypeAlias = LookupCommands[Lookup, Load, Store]


class Found(msgspec.Struct, frozen=True, array_like=True):
    """The end of a lookup on one rank. num_blocks: leading blocks that a load can fill."""

    lookup_id: int
    num_blocks: int


Report: TypeAlias = LookupReport[Found]
