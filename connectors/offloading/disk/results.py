"""What a store takes and returns."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from longshore.connectors.base.checksum import BlockBuffer


class Outcome(Enum):
    """What became of one block.

    MISSING: no entry with this key in this slot.
    CORRUPT: the bytes do not match the checksum; the entry is deleted.
    FAILED:  the disk reported an error, which is logged; the entry is deleted.
    LATE:    it was not read in time. The entry is kept.

    Unless a read is OK, its buffer may contain anything.
    """

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"
    LATE = "late"


class BlockWrite(NamedTuple):
    """`checksum` is `block_checksum` of the buffer, the store's `identity_digest` and the key. The
    buffer may be shorter than a slot."""

    key: bytes
    slot: int
    buffer: BlockBuffer
    checksum: int


class BlockRead(NamedTuple):
    """`buffer` is writable and has the size of the stored block."""

    key: bytes
    slot: int
    buffer: BlockBuffer


class OtherStore(NamedTuple):
    """A store of another identity on the same path, which is not touched."""

    name: str
    size_bytes: int


@dataclass
class DiskStoreStats:
    """Counters since the store was opened. used_bytes: slots that have an entry. queued_blocks:
    blocks of the reads and writes in progress. num_failed: reads and writes."""

    num_entries: int = 0
    capacity_slots: int = 0
    used_bytes: int = 0
    queued_blocks: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    num_missing: int = 0
    num_corrupt: int = 0
    num_failed: int = 0
