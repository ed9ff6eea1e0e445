"""Reads and writes of the disk tier's store, compared with its I/O backend alone.

    python benchmarks/disk_store.py [--path DIR] [--json F]

Both sides move the same blocks, between the same page-aligned memory and the same number of
slots, in batches of 64 MB. `raw` submits them to the backend as one transfer per block and waits;
the store also keeps its index, and verifies every block that it reads. `ratio` is the store's rate
divided by the raw rate, the median over pairs that are measured in turns, because the rate of a
disk changes. `scattered` gives the blocks slots in a random order, so that few are neighbours.

`checksum` is the rate of `block_checksum` on one core, for blocks that are not in its caches.
"""

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import report

from longshore.connectors.offloading.disk.io import (
    Direction,
    IoBackend,
    Transfer,
    address_of,
    make_backend,
)
from longshore.connectors.offloading.disk.results import Outcome
from longshore.connectors.offloading.disk.segments import supports_direct_io
from longshore.connectors.offloading.disk.store import DiskStore
from longshore.deploy.machine.bandwidth import IDENTITY, StoredBlocks
from longshore.protocol.errors import ConfigError
from longshore.protocol.private_files import Folder

SIZES: Final = (64 << 10, 2 << 20)
BATCH_BYTES: Final = 64 << 20

Move = Callable[[], None]


def blocks_of(num: int, size: int, *, scattered: bool) -> StoredBlocks:
    return StoredBlocks(num, size, random.Random(1).sample(range(num), num) if scattered else None)


def batches(blocks: StoredBlocks) -> Iterator[slice]:
    per_batch = BATCH_BYTES // blocks.slot_bytes
    for start in range(0, len(blocks.data), per_batch):
        yield slice(start, start + per_batch)


def raw_moves(backend: IoBackend, fd: int, blocks: StoredBlocks) -> dict[Direction, Move]:
    """The backend alone, with a file of its own."""
    slots, data = list(blocks.slots), blocks.data

    def move(direction: Direction) -> None:
        for batch in batches(blocks):
            transfers = [
                Transfer(fd, slot * blocks.slot_bytes, [each], [address_of(each)])
                for slot, each in zip(slots[batch], data[batch], strict=True)
            ]
            assert not any(backend.submit(direction, transfers).wait())

    return {direction: lambda direction=direction: move(direction) for direction in Direction}


def store_moves(store: DiskStore, blocks: StoredBlocks) -> dict[Direction, Move]:
    writes, reads = blocks.writes(store.identity_digest), blocks.reads()

    def write() -> None:
        for batch in batches(blocks):
            expect_ok(store.write(writes[batch]))

    def read() -> None:
        for batch in batches(blocks):
            expect_ok(store.read(reads[batch]))

    return {Direction.WRITE: write, Direction.READ: read}


def expect_ok(outcomes: Sequence[Outcome]) -> None:
    assert all(outcome is Outcome.OK for outcome in outcomes)


def hash_rate(blocks: StoredBlocks) -> float:
    """GB/s of processor time, the best of some turns."""
    times = []
    for _ in range(7):
        start = time.thread_time()
        blocks.checksums(bytes(16))
        times.append(time.thread_time() - start)
    return len(blocks.memory) / 1e9 / min(times)


def seconds(move: Move) -> float:
    start = time.perf_counter()
    move()
    return time.perf_counter() - start


def compare(path: Path, kind: str, blocks: StoredBlocks, pairs: int) -> list[dict[str, Any]]:
    """A row per direction. Both files have been written once before."""
    size, num_bytes = blocks.slot_bytes, len(blocks.memory)
    with Folder.open(path) as folder:
        direct = os.O_DIRECT if supports_direct_io(folder) else 0
    fd = os.open(path / "raw", os.O_RDWR | os.O_CREAT | direct, 0o600)
    os.posix_fallocate(fd, 0, num_bytes)
    backend = make_backend(kind)
    store = DiskStore.open(
        path, IDENTITY, slot_bytes=size, capacity_bytes=blocks.capacity_bytes, io=kind
    )
    try:
        sides = {"raw": raw_moves(backend, fd, blocks), "store": store_moves(store, blocks)}
        for moves in sides.values():
            moves[Direction.WRITE]()
        rows = []
        for direction in (Direction.WRITE, Direction.READ):
            times: dict[str, list[float]] = {"raw": [], "store": []}
            for turn in range(pairs):
                for side in ("raw", "store") if turn % 2 else ("store", "raw"):
                    times[side].append(seconds(sides[side][direction]))
            ratios = [raw / ours for raw, ours in zip(times["raw"], times["store"], strict=True)]
            gigabytes = num_bytes / 1e9
            rows.append(
                {
                    "backend": backend.name,
                    "direct": bool(direct),
                    "operation": direction.value.lower(),
                    "raw_gb_s": gigabytes / statistics.median(times["raw"]),
                    "store_gb_s": gigabytes / statistics.median(times["store"]),
                    "ratio": statistics.median(ratios),
                    "ratios": ratios,
                }
            )
        return rows
    finally:
        store.close()
        backend.close()
        os.close(fd)


def main() -> None:
    arguments = report.parser(__doc__)
    arguments.add_argument(
        "--path", type=Path, help="folder on the disk to measure; default: a temporary one"
    )
    arguments.add_argument("--megabytes", type=int, default=256, help="size of the data")
    arguments.add_argument("--pairs", type=int, default=7, help="turns of each side")
    options = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        for scattered in (False, True):
            blocks = blocks_of((options.megabytes << 20) // size, size, scattered=scattered)
            about = {"block_kb": size >> 10, "scattered": scattered}
            if not scattered:
                rows.append({**about, "operation": "checksum", "store_gb_s": hash_rate(blocks)})
            for kind in ("nixl", "threads"):
                with tempfile.TemporaryDirectory(dir=options.path) as folder:
                    try:
                        found = compare(Path(folder), kind, blocks, options.pairs)
                    except ConfigError as error:
                        print(f"*** {error}")
                        continue
                rows += [{**about, **row} for row in found]
    report.write(options.json, rows)


if __name__ == "__main__":
    main()
