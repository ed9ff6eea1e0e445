"""The segment files of a store: slots of one size, a fixed number per file.

A segment is allocated on disk when it is first written, so that a full disk shows up there and
writes of blocks need no new space; it is removed when it has no entries.
"""

import mmap
import os
from collections.abc import Container
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from longshore.connectors.offloading.disk.index import Geometry, allocate
from longshore.protocol.private_files import Folder

PAGE_BYTES: Final = 4096
"""Slots and direct I/O are aligned to this, which is a multiple of every disk's block size."""

MAX_OPEN: Final = 384
"""Segments that stay open. A store has fewer, unless its capacity was raised much: the size of its
segments stays the same."""


class SegmentFiles:
    """Opens segments when they are needed. The caller serializes the calls.

    direct: bypass the page cache (O_DIRECT).
    """

    def __init__(
        self, directory: Folder, geometry: Geometry, num_slots: int, *, direct: bool
    ) -> None:
        self._directory = directory
        self._geometry = geometry
        self._num_slots = num_slots
        self.direct: Final = direct
        self._fds: dict[int, int] = {}

    def segment_of(self, slot: int) -> int:
        return slot // self._geometry.slots_per_segment

    def offset_of(self, slot: int) -> int:
        """Position of the slot in its segment, in bytes."""
        return slot % self._geometry.slots_per_segment * self._geometry.slot_bytes

    def path(self, segment: int) -> Path:
        return self._directory.path / _name(segment)

    def fd(self, segment: int, *, create: bool) -> int:
        """The open file of a segment. Raises OSError: FileNotFoundError if it does not exist and
        `create` is False, ENOSPC if there is no space for a new one."""
        if (fd := self._fds.get(segment)) is None:
            flags = os.O_RDWR | (os.O_DIRECT * self.direct) | (os.O_CREAT * create)
            fd = self._directory.open_own_file(_name(segment), flags)
            try:
                allocate(fd, self._size(segment))
            except OSError:
                os.close(fd)
                if create and self._directory.file_size(_name(segment)) == 0:
                    self._directory.unlink(_name(segment))
                raise
            self._fds[segment] = fd
        return fd

    def present_bytes(self) -> NDArray[np.int64]:
        """(num_segments,) size of each segment's file, 0 if it does not exist. Raises OSError if
        one is not a regular file."""
        num_segments = -(-self._num_slots // self._geometry.slots_per_segment)
        sizes = np.zeros(num_segments, np.int64)
        for segment in range(num_segments):
            sizes[segment] = self._directory.file_size(_name(segment)) or 0
        return sizes

    def resize(self, num_slots: int) -> None:
        """Delete what lies after `num_slots` slots. Raises OSError."""
        first, last = self.segment_of(num_slots - 1), self.segment_of(self._num_slots - 1)
        self._num_slots = num_slots
        for segment in range(first + 1, last + 1):
            self.remove(segment)
        if (self._directory.file_size(_name(first)) or 0) > self._size(first):
            os.ftruncate(self.fd(first, create=False), self._size(first))

    def close_idle(self, in_use: Container[int]) -> None:
        """Close segments that nothing reads or writes, the first opened ones first, as long as
        more than MAX_OPEN are open."""
        idle = [segment for segment in self._fds if segment not in in_use]
        for segment in idle[: max(0, len(self._fds) - MAX_OPEN)]:
            os.close(self._fds.pop(segment))

    def remove(self, segment: int) -> None:
        """Delete a segment's file, if it exists. Raises OSError."""
        if (fd := self._fds.pop(segment, None)) is not None:
            os.close(fd)
        self._directory.unlink(_name(segment))

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _size(self, segment: int) -> int:
        per_segment = self._geometry.slots_per_segment
        num_slots = min(per_segment, self._num_slots - segment * per_segment)
        return num_slots * self._geometry.slot_bytes


def _name(segment: int) -> str:
    return f"segment-{segment:06d}.kv"


def aligned_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Memory for direct I/O, aligned to a page."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)


def whole_pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def supports_direct_io(directory: Folder) -> bool:
    """Whether files in this directory can be written with O_DIRECT. Raises OSError if they cannot
    be written at all."""
    probe = f"probe.{os.getpid()}"
    os.close(directory.create_file(probe))
    try:
        with open(directory.open_own_file(probe, os.O_RDWR | os.O_DIRECT), "r+b", 0) as file:
            return file.write(aligned_memory(PAGE_BYTES)) == PAGE_BYTES
    except OSError:
        return False
    finally:
        directory.unlink(probe)
