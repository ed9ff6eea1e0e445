"""Moves blocks between buffers and segment files.

Blocks in neighbouring slots are one transfer. With direct I/O, a buffer that is not aligned to
pages, or not a number of whole pages, is copied through aligned memory.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from longshore.connectors.offloading.disk.io import (
    Bytes,
    Direction,
    IoBackend,
    Pending,
    Transfer,
    address_of,
)
from longshore.connectors.offloading.disk.segments import (
    PAGE_BYTES,
    SegmentFiles,
    aligned_memory,
    whole_pages,
)

CHUNK_BYTES: Final = 16 << 20
"""Blocks that are submitted together."""

CHUNK_SEGMENTS: Final = 64
"""Files that one chunk uses: the number of a process's open files is limited."""

RUN_BYTES: Final = 1 << 20
"""Blocks in neighbouring slots are one transfer up to this size."""

_MAX_PIECES: Final = 1024  # IOV_MAX
_MAX_KEPT_ARENAS: Final = 4


@dataclass(slots=True)
class Block:
    """One block of a read or write. position: in the caller's batch. sequence: of the entry that is
    read."""

    position: int
    key: bytes
    slot: int
    data: Bytes
    checksum: int
    sequence: int = 0


@dataclass(slots=True)
class Chunk:
    """Blocks that were submitted together. The transfers have one piece per block.
    staged: aligned memory that stands for the buffer of a block, by its index."""

    blocks: Sequence[Block]
    transfers: list[Transfer]
    pending: Pending
    staged: dict[int, Bytes]
    arena: Bytes | None


class BlockMover:
    """Thread-safe."""

    def __init__(self, backend: IoBackend, segments: SegmentFiles, slot_bytes: int) -> None:
        self._backend = backend
        self._segments = segments
        self._slot_bytes = slot_bytes
        self._arena_bytes = max(CHUNK_BYTES, slot_bytes)
        self._arenas: deque[Bytes] = deque()

    def chunks(self, blocks: Sequence[Block]) -> Iterator[list[Block]]:
        """The blocks in the order of their slots, in chunks of at most CHUNK_BYTES and
        CHUNK_SEGMENTS segments."""
        per_chunk = max(1, CHUNK_BYTES // self._slot_bytes)
        chunk: list[Block] = []
        segments: set[int] = set()
        for block in sorted(blocks, key=lambda block: block.slot):
            segment = self._segments.segment_of(block.slot)
            is_full = len(segments) == CHUNK_SEGMENTS and segment not in segments
            if is_full or len(chunk) == per_chunk:
                yield chunk
                chunk, segments = [], set()
            chunk.append(block)
            segments.add(segment)
        if chunk:
            yield chunk

    def submit(
        self, direction: Direction, blocks: Sequence[Block], fds: Mapping[int, int]
    ) -> Chunk:
        """Begin to move a chunk. fds: the open file of each segment."""
        staged: dict[int, Bytes] = {}
        arena: Bytes | None = None
        transfers: list[Transfer] = []
        next_slot, run_bytes = None, 0  # of the last transfer
        for index, block in enumerate(blocks):
            memory, address = block.data, address_of(block.data)
            if self._segments.direct and (address | len(memory)) % PAGE_BYTES:
                if arena is None:
                    arena = self._take_arena()
                memory = staged[index] = self._stage(direction, block, arena, index)
                address = address_of(memory)
            offset = self._segments.offset_of(block.slot)
            joins = block.slot == next_slot and offset and run_bytes + len(memory) <= RUN_BYTES
            if joins and len(transfers[-1].pieces) < _MAX_PIECES:
                transfers[-1].pieces.append(memory)
                transfers[-1].addresses.append(address)
            else:
                fd = fds[self._segments.segment_of(block.slot)]
                transfers.append(Transfer(fd, offset, [memory], [address]))
                run_bytes = 0
            run_bytes += len(memory)
            # A block that does not fill its slot ends the run.
            next_slot = block.slot + 1 if len(memory) == self._slot_bytes else None
        pending = self._backend.submit(direction, transfers)
        return Chunk(blocks, transfers, pending, staged, arena)

    def wait(self, direction: Direction, chunk: Chunk) -> list[OSError | None]:
        """Wait until the chunk has been moved; returns an error or None per block."""
        errors: list[OSError | None] = []
        for transfer, error in zip(chunk.transfers, chunk.pending.wait(), strict=True):
            if error is None or len(transfer.pieces) == 1:
                errors.extend([error] * len(transfer.pieces))
            else:  # find the blocks that fail
                errors.extend(self._backend.submit(direction, _one_by_one(transfer)).wait())
        if direction is Direction.READ:
            for index, memory in chunk.staged.items():
                data = chunk.blocks[index].data
                np.copyto(data, memory[: len(data)])
        if chunk.arena is not None and len(self._arenas) < _MAX_KEPT_ARENAS:
            self._arenas.append(chunk.arena)
        return errors

    def _take_arena(self) -> Bytes:
        try:
            return self._arenas.pop()
        except IndexError:
            return aligned_memory(self._arena_bytes)

    def _stage(self, direction: Direction, block: Block, arena: Bytes, index: int) -> Bytes:
        size = len(block.data)
        start = index * self._slot_bytes
        memory = arena[start : start + whole_pages(size)]
        if direction is Direction.WRITE:
            np.copyto(memory[:size], block.data)
            memory[size:] = 0
        return memory


def _one_by_one(transfer: Transfer) -> list[Transfer]:
    single = []
    offset = transfer.offset
    for piece, address in zip(transfer.pieces, transfer.addresses, strict=True):
        single.append(Transfer(transfer.fd, offset, [piece], [address]))
        offset += len(piece)
    return single
