"""How bytes move between memory and segment files: the interface, the thread pool, and the choice.

A transfer is one contiguous range of a file and the pieces of memory that fill it. With direct I/O,
pieces and ranges are aligned to pages.
"""

import enum
import errno
import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from longshore.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

BACKENDS: Final = ("auto", "nixl", "threads")
NUM_THREADS: Final = 4

Bytes: TypeAlias = NDArray[np.uint8]


class Direction(enum.Enum):
    READ = "READ"
    WRITE = "WRITE"


class Transfer(NamedTuple):
    """`addresses[i]` is where `pieces[i]` begins in memory."""

    fd: int
    offset: int
    pieces: list[Bytes]
    addresses: list[int]


def address_of(data: Bytes) -> int:
    """Where an array begins in memory."""
    address: int = data.__array_interface__["data"][0]
    return address


class Pending(Protocol):
    """Transfers that were submitted together."""

    def wait(self) -> list[OSError | None]:
        """Wait until all have ended. Returns an error or None per transfer. Call it once; the
        memory must stay valid until it returns."""


class IoBackend(Protocol):
    """Thread-safe. `name` is for the log."""

    name: str

    def submit(self, direction: Direction, transfers: Sequence[Transfer]) -> Pending:
        """Begin the transfers. Does not wait for them."""

    def close(self) -> None:
        """No transfer is pending."""


def make_backend(kind: str) -> IoBackend:
    """Raises ConfigError for an unknown backend, and for `nixl` if it cannot be used."""
    if kind not in BACKENDS:
        raise ConfigError(f"io={kind!r} is unknown; use one of {', '.join(BACKENDS)}")
    if kind == "threads":
        return ThreadIo()
    from longshore.connectors.offloading.disk.nixl_io import NixlIo, NixlUnusable

    try:
        return NixlIo()
    except NixlUnusable as error:
        if kind == "nixl":
            raise ConfigError(
                f"io='nixl' cannot be used: {error}. Install it with: "
                "pip install --no-deps nixl nixl-cu13, or use io='threads'"
            ) from error
        logger.info("disk store: NIXL cannot be used (%s); using a thread pool", error)
        return ThreadIo()


class ThreadIo:
    """A pool of threads with preadv and pwritev. Each takes an equal share of a submission, since a
    task per transfer costs more than a small transfer."""

    name = f"{NUM_THREADS} threads"

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="disk-store")

    def submit(self, direction: Direction, transfers: Sequence[Transfer]) -> "_Shares":
        shares = [transfers[start::NUM_THREADS] for start in range(NUM_THREADS)]
        return _Shares(
            len(transfers),
            [self._pool.submit(run_all, direction, share) for share in shares if share],
        )

    def close(self) -> None:
        self._pool.shutdown()


class _Shares:
    def __init__(self, num_transfers: int, futures: list[Future[list[OSError | None]]]) -> None:
        self._num_transfers = num_transfers
        self._futures = futures

    def wait(self) -> list[OSError | None]:
        errors: list[OSError | None] = [None] * self._num_transfers
        for start, future in enumerate(self._futures):
            errors[start::NUM_THREADS] = future.result()
        return errors


def run_all(direction: Direction, transfers: Sequence[Transfer]) -> list[OSError | None]:
    """Run the transfers one after the other in this thread."""
    errors: list[OSError | None] = []
    for transfer in transfers:
        try:
            _run(direction, transfer)
        except OSError as error:
            errors.append(error)
        else:
            errors.append(None)
    return errors


def _run(direction: Direction, transfer: Transfer) -> None:
    move = os.preadv if direction is Direction.READ else os.pwritev
    fd, offset, pieces, _ = transfer
    while pieces:
        count = move(fd, pieces, offset)
        if count == 0:
            raise OSError(errno.EIO, "the segment file is cut off")
        offset += count
        pieces = _after(pieces, count)


def _after(pieces: list[Bytes], count: int) -> list[Bytes]:
    """What is left after the first `count` bytes."""
    for position, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[position + 1 :]]
        count -= len(piece)
    return []
