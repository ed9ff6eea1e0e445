"""Relays the output of all processes to one stream, line by line, with the process name."""

import os
import threading
from collections.abc import Callable
from typing import IO, Final, TextIO

from longshore.deploy.supervisor.log_lines import LineFormat, text_line
from longshore.protocol.logs.records import RECORD_MARK

MAX_LINE_BYTES: Final = 1 << 20
"""A longer line is written as several, so that memory and time per byte are bounded."""

ERASE_TO_END: Final = "\x1b[K"  # erases the rest of a longer progress bar on this line


class LogRelay:
    """Writes the log lines of several processes to one stream. Thread-safe.

    Text that a carriage return overwrites (a progress bar) is updated in place on a terminal.
    Elsewhere only its last state is written."""

    def __init__(self, stream: TextIO, format_line: LineFormat = text_line) -> None:
        self._stream = stream
        self._format_line = format_line
        self._is_terminal = stream.isatty()
        self._unfinished: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def feed(self, name: str, chunk: bytes) -> None:
        """Take a chunk of process `name`'s output; it may end anywhere."""
        with self._lock:
            *lines, rest = (self._unfinished.get(name, b"") + chunk).split(b"\n")
            for line in lines:
                self._write(name, line, "\n")
            while len(rest) > MAX_LINE_BYTES and b"\r" not in rest:
                self._write(name, rest[:MAX_LINE_BYTES], "\n")
                rest = rest[MAX_LINE_BYTES:]
            if self._is_terminal and b"\r" in rest:
                self._write(name, rest, "\r")
            self._unfinished[name] = rest.rpartition(b"\r")[2] if b"\r" in rest else rest

    def end(self, name: str) -> None:
        """The process has closed its output: write its last, incomplete line."""
        with self._lock:
            rest = self._unfinished.pop(name, b"")
            if rest:
                self._write(name, rest, "\n")

    def _write(self, name: str, line: bytes, end: str) -> None:
        states = [state for state in line.split(b"\r") if state]
        text = states[-1].decode(errors="replace") if states else ""
        if not text and end == "\r":
            return
        erase = ERASE_TO_END if self._is_terminal else ""
        before, mark, record = text.partition(RECORD_MARK)  # a record may follow a partial line
        lines = [before, mark + record] if before and mark else [text]
        shown = f"{erase}\n".join(self._format_line(name, each) for each in lines)
        try:
            self._stream.write(f"{shown}{erase}{end}")
            self._stream.flush()
        except (OSError, ValueError):
            return  # a full disk or a closed stream: the next line may succeed


def relay_output(stream: IO[bytes], relay: LogRelay, name: Callable[[], str]) -> None:
    """Feed what a process prints, until it closes its output. name: of the process, now."""
    with stream:
        while chunk := os.read(stream.fileno(), 65536):
            relay.feed(name(), chunk)
    relay.end(name())
