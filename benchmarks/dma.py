"""Copies of scattered pages between a CUDA device and registered host memory, in each way of
submitting them.

    python benchmarks/dma.py [--dry-run] [--mib M] [--repeats N] [--json F]

One way and both ways at once, with pages of 16 KiB to 2 MiB, none of which are joined. `share` is
the rate as a share of the peak: one copy of all bytes, in the same directions, measured right
before. The first copy of each way is compared with what it should be. `is_chosen` marks the way
that a worker with this page size would use. Rates are in 10^9 bytes per second, for both ways the
sum. A way that is not possible has an `error`.

--dry-run uses host memory on both sides and copies of the CPU, to test the program.
"""

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import report
import torch
from torch import Tensor

from longshore.connectors.offloading.copies import Copier, HostCopier
from longshore.connectors.offloading.cuda_copies import (
    Direction,
    RunSubmission,
    copied_per_s,
    cuda_copiers,
    fastest,
    load_runtime,
    scattered,
)
from longshore.connectors.offloading.registration import RegisteredMemory

PAGES: Final = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20)
NUM_TRIES: Final = 3
DIRECTIONS: Final[tuple[Direction, ...]] = ("to host", "to device")

Makers = Mapping[str, Callable[[], Copier]]


class Side(NamedTuple):
    """One direction: its memory, and copiers on a stream of its own.

    peak: makes the copier of the peak.
    """

    direction: Direction
    source: Tensor
    target: Tensor
    copiers: Makers
    peak: Callable[[], Copier]


class Move(NamedTuple):
    """Copies of one direction."""

    copier: Copier
    side: Side
    page_bytes: int

    def run(self, repeats: int) -> None:
        to, starts, sizes = scattered(len(self.side.source), self.page_bytes)
        copies = to + self.side.target.data_ptr(), starts + self.side.source.data_ptr(), sizes
        for _ in range(repeats):
            self.copier.copy(*copies)


def bytes_per_s(moves: Sequence[Move], repeats: int) -> float:
    """Rate of all moves together, the best of NUM_TRIES. The first copies are verified."""
    for move in moves:
        copied_per_s(move.copier, move.side.source, move.side.target, move.page_bytes)
    num_bytes = sum(
        int(scattered(len(move.side.source), move.page_bytes)[2].sum()) for move in moves
    )
    return repeats * num_bytes / min(seconds(moves, repeats) for _ in range(NUM_TRIES))


def seconds(moves: Sequence[Move], repeats: int) -> float:
    """Until all moves, each on a thread of its own, have run. Raises the error of a move."""
    begin = threading.Barrier(len(moves) + 1)
    failures: list[Exception] = []

    def run(move: Move) -> None:
        begin.wait()
        try:
            move.run(repeats)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(move,)) for move in moves]
    for thread in threads:
        thread.start()
    begin.wait()
    started_s = time.perf_counter()
    for thread in threads:
        thread.join()
    elapsed_s = time.perf_counter() - started_s
    if failures:
        raise failures[0]
    return elapsed_s


def measure(sides: Sequence[Side], page_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """One row per direction, or both, and way."""
    chosen = {
        side.direction: fastest(
            side.copiers, side.source, side.target, page_bytes, side.direction
        ).name
        for side in sides
    }
    rows = []
    for moved in ([sides[0]], [sides[1]], list(sides)):
        for name in moved[0].copiers:
            row: dict[str, Any] = {
                "page_bytes": page_bytes,
                "direction": moved[0].direction if len(moved) == 1 else "both",
                "way": name,
                "is_chosen": all(chosen[side.direction] == name for side in moved),
            }
            try:
                peak = bytes_per_s(
                    [Move(side.peak(), side, len(side.source)) for side in moved], repeats
                )
                rate = bytes_per_s(
                    [Move(side.copiers[name](), side, page_bytes) for side in moved], repeats
                )
                row |= {"gb_s": rate / 1e9, "peak_gb_s": peak / 1e9, "share": rate / peak}
            except Exception as error:
                row["error"] = str(error)
            rows.append(row)
    return rows


@contextmanager
def sides_of(device: torch.device, num_bytes: int) -> Iterator[list[Side]]:
    """Both directions, with this much memory on each side of each. On a CPU, without CUDA."""
    registered: list[RegisteredMemory] = []
    sides = []
    for direction in DIRECTIONS:
        host = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
        host.zero_()
        on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        copiers: Makers = {HostCopier().name: HostCopier}
        peak: Callable[[], Copier] = HostCopier
        if device.type == "cuda":
            registered.append(RegisteredMemory(load_runtime(), host.data_ptr(), num_bytes))
            copiers = cuda_copiers(device)
            peak = copiers[RunSubmission.name]
        source, target = (on_device, host) if direction == "to host" else (host, on_device)
        sides.append(Side(direction, source, target, copiers, peak))
    try:
        yield sides
    finally:
        for memory in registered:
            memory.close()


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, without CUDA")
    parser.add_argument("--mib", type=int, default=256, help="copied at a time (%(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="copies per rate (%(default)s)")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --dry-run needs none")
    if not 2 <= options.mib <= 1024:
        parser.error("--mib must be 2 to 1024, the size of a registered chunk")
    device = torch.device("cpu" if options.dry_run else "cuda")
    about = "dry run" if options.dry_run else torch.cuda.get_device_name(device)
    rows = []
    with sides_of(device, options.mib << 20) as sides:
        for page_bytes in PAGES:
            rows += measure(sides, page_bytes, options.repeats)
    report.write(options.json, rows, device=about)


if __name__ == "__main__":
    main()
