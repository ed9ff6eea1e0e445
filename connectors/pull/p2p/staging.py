"""Staging memory of links: chunks are gathered into it before they are sent, and scattered from it
after they were received. Its size does not depend on the number of links."""

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from torch import Tensor

from longshore.connectors.offloading.copies import Copies, divide, joined
from longshore.connectors.pull.p2p.communicator import Library
from longshore.connectors.pull.p2p.messages import MAX_RUNS
from longshore.connectors.pull.transport import BlockReads
from longshore.protocol.arrays import Int64Array

CHUNK_BYTES: Final = 8 << 20
NUM_BUFFERS: Final = 8
"""Chunks that all links of one direction have in staging memory at a time, 64 MiB together. It is
allocated when it is needed first."""


class StagingPool:
    """Buffers for the chunks of one direction. Thread-safe."""

    def __init__(self, library: Library, num_buffers: int = NUM_BUFFERS) -> None:
        self._library = library
        self._num_new = num_buffers  # that are not allocated yet
        self._free: list[Tensor] = []
        self._lost: list[Tensor] = []
        self._changed = threading.Condition()

    def take(self, timeout_s: float) -> Tensor | None:
        """A buffer of CHUNK_BYTES; None if none is free within this time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._num_new, timeout_s):
                return None
            if self._free:
                return self._free.pop()
            buffer = self._library.allocate(CHUNK_BYTES)
            self._num_new -= 1
            return buffer

    def release(self, buffer: Tensor) -> None:
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def replace(self, buffer: Tensor, *, is_unused: bool) -> None:
        """A transfer of this buffer has failed. It is not used again, and kept if the library may
        still use it."""
        with self._changed:
            if is_unused:
                self._num_new += 1
            else:
                self._lost.append(buffer)
            self._changed.notify()


class Chunk(NamedTuple):
    """Runs of bytes with at most CHUNK_BYTES together: (n,) int64 each. Offsets are from the start
    of the memory of each side."""

    owner_offsets: Int64Array
    reader_offsets: Int64Array
    lengths: Int64Array

    @property
    def num_bytes(self) -> int:
        return int(self.lengths.sum())


def chunks_of(
    reads: Sequence[BlockReads],
    owner_block_bytes: int,
    reader_block_bytes: int,
    chunk_bytes: int = CHUNK_BYTES,
    max_runs: int = MAX_RUNS,
) -> Iterator[Chunk]:
    """What `reads` copy, in order."""
    owners, readers, lengths = [], [], []
    for pattern, owner_blocks, reader_blocks in reads:
        starts = owner_blocks[:, None] * owner_block_bytes + pattern.owner_offsets
        owners.append(starts.ravel())
        starts = reader_blocks[:, None] * reader_block_bytes + pattern.reader_offsets
        readers.append(starts.ravel())
        lengths.append(np.tile(pattern.lengths, len(owner_blocks)))
    runs = joined(Copies(np.concatenate(owners), np.concatenate(readers), np.concatenate(lengths)))
    ends = np.cumsum(runs.sizes)
    index, offsets, sizes = divide(ends - runs.sizes, runs.sizes, chunk_bytes)
    owner, reader = runs.device[index] + offsets, runs.host[index] + offsets
    number = (np.cumsum(sizes) - sizes) // chunk_bytes
    borders = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(sizes)]
    for begin, end in itertools.pairwise(borders):
        for first in range(begin, end, max_runs):
            part = slice(first, min(first + max_runs, end))
            yield Chunk(owner[part], reader[part], sizes[part])


def positions_of(lengths: Int64Array) -> Int64Array:
    """Where each run of a chunk is in a buffer."""
    return np.cumsum(lengths) - lengths
