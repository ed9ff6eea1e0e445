"""The memory of the host tier: one region, shared by the ranks of a node.

A slot holds one offloaded block with the shares of all ranks, in order of rank; after the slots
follow their checksums, and a mark per rank, which says that the memory has been in use. The region
is a memfd whose descriptor the supervisor keeps, so that it outlives a worker, and that no name in
the file system leaks.
"""

import logging
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from longshore.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE of Linux 5.14, which the mmap module does not name
MARK: Final = 0x6C6F6E6773686F72
TOUCH_CHUNK_BYTES: Final = 256 << 20
LONG_TOUCH_S: Final = 2.0


class HostRegion:
    """The slots of one engine, as seen by one rank.

    memory:    all slots, uint8.
    checksums: (num_slots, num_ranks) uint64; a rank writes its own column.
    is_kept:   whether the memory is that of an earlier process of this rank, with its content.
    """

    def __init__(
        self, fd: int | None, *, num_slots: int, share_bytes: tuple[int, ...], rank: int
    ) -> None:
        """fd: descriptor of the shared memory; None: memory of this process alone.

        share_bytes: bytes per slot of each rank. Raises ConfigError if there is too little memory.
        """
        self.num_slots = num_slots
        self.slot_bytes = sum(share_bytes)
        self.share_bytes = share_bytes[rank]
        self._offset = sum(share_bytes[:rank])
        slots_bytes = num_slots * self.slot_bytes
        padding = -slots_bytes % 8
        num_ranks = len(share_bytes)
        self.size_bytes = slots_bytes + padding + 8 * (num_slots + 1) * num_ranks
        own_fd = os.memfd_create("longshore-host-tier") if fd is None else os.dup(fd)
        try:
            _check_available(self.size_bytes, own_fd)
            os.ftruncate(own_fd, self.size_bytes)  # every rank sets the same size
            self._map = mmap.mmap(own_fd, self.size_bytes)
        except OSError as error:
            raise ConfigError(
                f"the host tier cannot have {self.size_bytes} bytes: {error.strerror}. Lower "
                "cpu_bytes_to_use."
            ) from error
        finally:
            os.close(own_fd)
        whole = np.frombuffer(self._map, np.uint8)
        self.memory: npt.NDArray[np.uint8] = whole[:slots_bytes]
        numbers = whole[slots_bytes + padding :].view(np.uint64).reshape(num_slots + 1, num_ranks)
        self.checksums: npt.NDArray[np.uint64] = numbers[:-1]
        self._touch(rank, num_ranks)
        # New memory is zero.
        self.is_kept = bool(numbers[-1, rank] == MARK)
        numbers[-1, rank] = MARK

    @property
    def address(self) -> int:
        """The address of the first slot."""
        return self.memory.ctypes.data

    def offset(self, slot: int) -> int:
        """Where this rank's share of a slot begins in `memory`."""
        return slot * self.slot_bytes + self._offset

    def share(self, slot: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The first bytes of this rank's share of a slot."""
        start = self.offset(slot)
        return self.memory[start : start + num_bytes]

    def _touch(self, rank: int, num_ranks: int) -> None:
        """Have the kernel provide this rank's part of the pages now, rather than during the first
        stores. Raises ConfigError if there is too little memory."""
        page = mmap.PAGESIZE
        first = self.size_bytes * rank // num_ranks // page * page
        last = self.size_bytes * (rank + 1) // num_ranks // page * page
        if rank == num_ranks - 1:
            last = self.size_bytes
        chunks = range(first, last, TOUCH_CHUNK_BYTES)
        started_s = shown_s = time.monotonic()

        def touch(start: int) -> None:
            self._map.madvise(POPULATE_WRITE, start, min(TOUCH_CHUNK_BYTES, last - start))

        with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
            try:
                for number, _ in enumerate(pool.map(touch, chunks), 1):
                    now_s = time.monotonic()
                    if now_s - shown_s > LONG_TOUCH_S:
                        shown_s = now_s
                        share = 100 * number // len(chunks)
                        logger.info("host tier: %d %% of its memory is allocated", share)
            except OSError as error:
                if error.errno not in (22, 38):  # an older kernel allocates at the first access
                    raise ConfigError(
                        f"the host tier cannot have {self.size_bytes} bytes: {error.strerror}. "
                        "Lower cpu_bytes_to_use."
                    ) from error
        logger.info(
            "host tier: %d blocks of %d bytes, %.2f GiB, allocated in %.1f s",
            self.num_slots,
            self.slot_bytes,
            self.size_bytes / 2**30,
            time.monotonic() - started_s,
        )

    def close(self) -> None:
        """Unmap the memory. No view of it may be in use."""
        self.memory = np.empty(0, np.uint8)
        self.checksums = np.empty((0, 0), np.uint64)
        try:
            self._map.close()
        except BufferError:
            logger.debug("the host tier is still in use; it is unmapped when the process ends")


def _check_available(size_bytes: int, fd: int) -> None:
    """Raise ConfigError if the host has too little memory: the kernel would not refuse it, but kill
    processes when it is touched. What the descriptor has already counts as available."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    known = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in lines)}
    if "MemAvailable" not in known:
        return
    available = int(known["MemAvailable"]) * 1024 + os.fstat(fd).st_blocks * 512
    if size_bytes > available:
        raise ConfigError(
            f"the host tier cannot have {size_bytes} bytes: {available} bytes of memory are "
            "available. Lower cpu_bytes_to_use."
        )
