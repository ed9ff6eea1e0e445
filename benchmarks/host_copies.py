"""Copies of blocks between the KV cache of a CPU and host memory, compared with plain memcpy.

    python benchmarks/host_copies.py [--seconds S] [--json F]

Both sides copy the same number of bytes, in turns: `memcpy` as one copy of contiguous memory in
one thread, `copies` as scattered blocks, of which no two are neighbours, with the copier that a
worker of this machine uses. `with checksums` stores them as the offloading connector does: copied,
then a checksum of each block. Rates are in 10^9 bytes per second. `ratio` is the median over pairs
of measurements; the aim is 0.8 for `copies`.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import report

from longshore.connectors.base.checksum import IDENTITY_DIGEST_BYTES, block_checksum
from longshore.connectors.offloading.copies import HostCopier
from longshore.connectors.offloading.copy_method import choose_host_copies

SIZES: Final = (4 << 10, 64 << 10, 2 << 20)
BYTES: Final = 64 << 20
"""Per measurement, of twice as much memory on each side: more than the caches of a processor."""


class Side:
    """Two pieces of memory, and the blocks that are copied between them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.source = np.full(2 * BYTES, 1, np.uint8)
        self.target = np.zeros(2 * BYTES, np.uint8)
        # Every second block, so that none are neighbours. Slots of a job are in order.
        starts = np.arange(BYTES // size, dtype=np.int64) * 2 * size
        self.sources = self.source.ctypes.data + np.random.default_rng(0).permutation(starts)
        self.slots = starts
        self.targets = self.target.ctypes.data + self.slots
        self.sizes = np.full(len(starts), size, np.int64)
        self.copier = HostCopier(choose_host_copies(size, None).num_threads)
        self.one_copy = HostCopier()

    def memcpy(self) -> None:
        first = np.array([self.target.ctypes.data]), np.array([self.source.ctypes.data])
        self.one_copy.copy(*first, np.array([BYTES]))

    def copies(self) -> None:
        self.copier.copy(self.targets, self.sources, self.sizes)

    def with_checksums(self) -> None:
        self.copies()
        identity = bytes(IDENTITY_DIGEST_BYTES)
        for slot in self.slots.tolist():
            block_checksum(self.target[slot : slot + self.size], identity, b"key")


def seconds(move: Callable[[], None]) -> float:
    started = time.perf_counter()
    move()
    return time.perf_counter() - started


def measure(size: int, max_s: float) -> dict[str, Any]:
    side = Side(size)
    sides = {"memcpy": side.memcpy, "copies": side.copies, "with checksums": side.with_checksums}
    for move in sides.values():
        move()  # touches the memory
    times: dict[str, list[float]] = {name: [] for name in sides}
    deadline = time.perf_counter() + max_s
    while time.perf_counter() < deadline or len(times["memcpy"]) < 5:
        for name, move in sides.items():
            times[name].append(seconds(move))
    pairs = list(zip(*times.values(), strict=True))
    return {
        "block_bytes": size,
        "method": side.copier.name,
        "num_pairs": len(pairs),
        "gb_s": {name: BYTES / statistics.median(each) / 1e9 for name, each in times.items()},
        "ratio": statistics.median(plain / copied for plain, copied, _ in pairs),
        "ratio_with_checksums": statistics.median(plain / stored for plain, _, stored in pairs),
    }


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=5, help="per block size")
    options = parser.parse_args()
    report.write(options.json, [measure(size, options.seconds) for size in SIZES])


if __name__ == "__main__":
    main()
