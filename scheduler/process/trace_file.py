"""The file of a scheduler trace. A thread writes it, so a slow disk does not delay the engine."""

import errno
import logging
import os
import threading
import time
from collections import deque
from itertools import count
from pathlib import Path
from typing import Final

import msgspec

from longshore.scheduler.inspect.trace import SchedulerTrace
from longshore.scheduler.inspect.trace_records import RecordsDropped
from longshore.scheduler.process.settings import InspectionSettings

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 0.05
MAX_QUEUED_BYTES: Final = 64 << 20
CLOSE_TIMEOUT_S: Final = 2.0
MAX_BYTES: Final = InspectionSettings.sched_trace_mib << 20


class TraceFile:
    """Appends lines to a file, on a thread of its own, at most every `INTERVAL_S`.

    At most `max_queued_bytes` wait to be written. What comes after that is dropped, and the file
    says how many records are missing. `write` raises the error with which the thread has ended: an
    error of the disk, or that the file has `max_bytes`.
    """

    def __init__(
        self, file: int, max_bytes: int = MAX_BYTES, *, max_queued_bytes: int = MAX_QUEUED_BYTES
    ) -> None:
        """file: a descriptor, which this closes."""
        self._file = file
        self._max_bytes = max_bytes
        self._max_queued_bytes = max_queued_bytes
        self._num_bytes = 0
        self._queued: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._num_queued_bytes = self._num_dropped = 0
        self._error: OSError | None = None
        self._has_lines, self._closing = threading.Event(), threading.Event()
        # A daemon: a disk that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="scheduler trace", daemon=True)
        self._thread.start()

    def write(self, lines: bytes) -> None:
        """Queue whole lines. Never waits for the disk."""
        if self._error is not None:
            raise self._error
        with self._lock:
            if self._num_queued_bytes + len(lines) > self._max_queued_bytes:
                self._num_dropped += lines.count(b"\n")
                return
            if self._num_dropped:
                lines = self._dropped_record() + lines
            self._queued.append(lines)
            self._num_queued_bytes += len(lines)
        self._has_lines.set()

    def _dropped_record(self) -> bytes:
        record = RecordsDropped(self._num_dropped)
        self._num_dropped = 0
        return msgspec.json.encode(record) + b"\n"

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._has_lines.wait()
                self._closing.wait(INTERVAL_S)  # more lines come, and are written together
                self._has_lines.clear()
                self._write_queued()
            self._write_queued()  # what came during the last one
        except OSError as error:
            self._error = error
        finally:
            os.close(self._file)

    def _write_queued(self) -> None:
        with self._lock:
            lines = b"".join(self._queued)
            self._queued.clear()
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        with self._lock:
            self._num_queued_bytes -= len(lines)
        self._num_bytes += len(lines)
        if self._num_bytes >= self._max_bytes:
            limit_mib = self._max_bytes / (1 << 20)
            raise OSError(errno.EFBIG, f"it has {limit_mib:g} MiB (sched_trace_mib)")

    def close(self) -> None:
        """Write what is queued, if the disk takes it soon."""
        with self._lock:
            if self._num_dropped:
                self._queued.append(self._dropped_record())
        self._closing.set()
        self._has_lines.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._error is not None or self._thread.is_alive():
            why = self._error or f"the disk has not taken the rest within {CLOSE_TIMEOUT_S:g} s"
            logger.warning("the end of the scheduler trace was not written: %s", why)


def open_trace(
    path: Path, engine: str, max_bytes: int = MAX_BYTES
) -> tuple[SchedulerTrace, TraceFile] | None:
    """A trace of the engine in a new file, by the monotonic clock. If the file exists, the next
    free name is taken (trace.jsonl, trace.1.jsonl), also after a restart of the process. None, with
    a warning, if no file can be created."""
    for number in count():
        free = path if not number else path.with_name(f"{path.stem}.{number}{path.suffix}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            file = TraceFile(os.open(free, flags, 0o600), max_bytes)
        except FileExistsError:
            continue
        except OSError as error:
            logger.warning("there is no scheduler trace: %s", error)
            return None
        logger.info("the scheduler trace is written to %s", free)
        offset_s = time.time() - time.monotonic()
        return SchedulerTrace(file.write, engine=engine, unix_time_offset_s=offset_s), file
    raise AssertionError("count() does not end")
