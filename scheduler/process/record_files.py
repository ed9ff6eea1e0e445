"""Writes the files of a record: chunks on a thread, snapshots in a child process, so that the
scheduler waits for no disk."""

import contextlib
import gc
import logging
import os
import queue
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from longshore.protocol.errors import ConfigError
from longshore.scheduler.recorder.entries import (
    MAGIC,
    Header,
    frame,
    number_of,
    segment_files,
)
from longshore.scheduler.recorder.graph import GraphError

logger = logging.getLogger(__name__)

FILE_MODE: Final = 0o600
NUM_SEGMENTS: Final = 4
"""Of a full ring. The oldest one is removed as a whole, so at least 3/4 of the bytes are kept."""

MAX_WAITING: Final = 256
"""Chunks that wait to be written. If there are more, the disk is too slow."""

CHILD_TIMEOUT_S: Final = 120.0
CHILD_POLL_S: Final = 0.01
CLOSE_TIMEOUT_S: Final = 30.0


class _NewSegment(NamedTuple):
    """A file with its snapshot.

    child: the process that writes it; None: it is written.
    has_gap: chunks before it were lost.
    """

    path: Path
    descriptor: int
    child: int | None
    has_gap: bool = False


_Work: TypeAlias = bytearray | _NewSegment | threading.Event
"""A chunk, a file that begins, or an event to be set when all before it is written."""


class SegmentWriter:
    """A ring of files, of `limit_bytes` at most beside the newest snapshot. All methods are called
    on one thread; the files are written on another one.

    path:  name of the files without their number. Files of former processes belong to the ring.
    forks: snapshots are written by a child process, while the caller goes on.
    """

    def __init__(self, path: Path, limit_bytes: int, *, forks: bool) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._forks = forks
        old = segment_files(path)
        self._next_number = 1 + max((number_of(each) or 0 for each in old), default=-1)
        self._ring = deque((each, each.stat().st_size) for each in old)
        self._num_segment_bytes = 0
        self._has_gap = False
        self._descriptor = -1
        self._is_broken = False
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)

    @property
    def fullness(self) -> float:
        """From 1 on, the next segment should begin."""
        if self._has_gap:
            return float(self._work.empty())
        return self._num_segment_bytes * NUM_SEGMENTS / self._limit_bytes

    def begin(self, header: Header, snapshot: Callable[[], bytes]) -> None:
        """Begin the first segment. Raises ConfigError if the file cannot be written, GraphError if
        there is no snapshot of this scheduler."""
        try:
            path, descriptor = self._create()
            # To look at the attributes of all objects in this process would make each of them
            # slower for ever: CPython gives an object a dict then.
            child = self._fork(descriptor, header, snapshot) if self._forks else None
            if child is None or not _wait_for(child):
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                _write(descriptor, _beginning(header, snapshot()))
        except OSError as error:
            raise ConfigError(f"--record {self._path}: {error}") from error
        except GraphError:
            _discard(path, descriptor)
            raise
        self._thread.start()
        self._work.put(_NewSegment(path, descriptor, None))

    def begin_next(self, header: Header, snapshot: Callable[[], bytes]) -> None:
        """Begin a segment with a snapshot of now; chunks from now on follow it. If it
        cannot be written, the former segment continues."""
        self._num_segment_bytes = 0
        try:
            path, descriptor = self._create()
        except OSError as error:
            logger.warning("no further file of the record can be created: %s", error)
            return
        child = None
        try:
            if self._forks:
                child = self._fork(descriptor, header, snapshot)
            else:
                _write(descriptor, _beginning(header, snapshot()))
        except OSError as error:
            logger.warning(
                "the snapshot %s was not written; the former file continues: %s", path, error
            )
            _discard(path, descriptor)
            return
        self._work.put(_NewSegment(path, descriptor, child, self._has_gap))
        self._has_gap = False

    def _fork(self, descriptor: int, header: Header, snapshot: Callable[[], bytes]) -> int:
        """The child process that writes a snapshot."""
        with warnings.catch_warnings():
            # The child runs only what is below: no lock of another thread, no socket, no logger.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _write_and_exit(descriptor, header, snapshot)
        return child

    def _create(self) -> tuple[Path, int]:
        path = Path(f"{self._path}.{self._next_number:06d}")
        self._next_number += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return path, os.open(path, flags, FILE_MODE)

    def write(self, chunk: bytearray) -> None:
        """Write a chunk of entries soon. The caller does not change it any more."""
        if self._work.qsize() >= MAX_WAITING and not self._has_gap:
            self._has_gap = True
            logger.warning(
                "the disk is too slow for the record, which has a gap here and goes on with its "
                "next file"
            )
        if not self._has_gap:
            self._num_segment_bytes += len(chunk)
            self._work.put(chunk)

    def wait(self) -> None:
        """Return when all chunks are written."""
        if self._thread.is_alive():
            done = threading.Event()
            self._work.put(done)
            done.wait(CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Write all chunks and end the thread."""
        if self._thread.is_alive():
            self._work.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)

    # On the thread

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            match work:
                case bytearray():
                    self._write_chunk(work)
                case _NewSegment():
                    self._switch(work)
                case threading.Event():
                    work.set()
        self._close_file()

    def _write_chunk(self, chunk: bytearray) -> None:
        if self._is_broken:
            return
        path, size = self._ring[-1]
        try:
            _write(self._descriptor, frame(chunk))
            _write(self._descriptor, chunk)
        except OSError as error:
            self._is_broken = True  # what follows would have a gap before it
            logger.warning("the record ends here, because it cannot be written: %s", error)
        self._ring[-1] = path, size + len(chunk)
        self._drop_oldest()

    def _switch(self, new: _NewSegment) -> None:
        if new.child is not None and not _wait_for(new.child):
            logger.warning("the snapshot %s was not written; the former file continues", new.path)
            _discard(new.path, new.descriptor)
            self._is_broken |= new.has_gap
            return
        self._close_file()
        self._descriptor, self._is_broken = new.descriptor, False
        self._ring.append((new.path, os.fstat(new.descriptor).st_size))
        self._drop_oldest()

    def _close_file(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _drop_oldest(self) -> None:
        while len(self._ring) > 1 and sum(size for _, size in self._ring) > self._limit_bytes:
            path, _ = self._ring.popleft()
            with contextlib.suppress(OSError):
                path.unlink()


def _discard(path: Path, descriptor: int) -> None:
    """Remove a file that has no snapshot."""
    with contextlib.suppress(OSError):
        os.close(descriptor)
    with contextlib.suppress(OSError):
        path.unlink()


def _beginning(header: Header, snapshot: bytes) -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return b"".join((MAGIC, frame(encoded), encoded, frame(snapshot), snapshot))


def _write(descriptor: int, data: bytes | bytearray) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _write_and_exit(descriptor: int, header: Header, snapshot: Callable[[], bytes]) -> None:
    """The child process: no other thread of the parent exists here, and nothing is cleaned up."""
    status = 1
    try:
        gc.disable()
        signal.set_wakeup_fd(-1)  # the parent's loop reads from it
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        _write(descriptor, _beginning(header, snapshot()))
        status = 0
    finally:
        os._exit(status)


def _wait_for(child: int) -> bool:
    """Whether the child has written its snapshot. One that hangs is killed."""
    deadline_s = time.monotonic() + CHILD_TIMEOUT_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(CHILD_POLL_S)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
