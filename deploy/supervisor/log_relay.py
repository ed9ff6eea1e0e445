"""The output of all processes on one stream: whole lines, each with the name of its process."""

import threading
from typing import Final, TextIO

from longshore.deploy.supervisor.log_lines import LineFormat, text_line
from longshore.protocol.logs.records import RECORD_MARK

ERASE_TO_END: Final = "\x1b[K"  # of a longer progress bar that stood on this line


class LogRelay:
    """Thread-safe.

    What a carriage return would overwrite (a progress bar) is shown in place on a
    terminal and left out elsewhere; only its last state stays."""

    def __init__(self, stream: TextIO, format_line: LineFormat = text_line) -> None:
        self._stream = stream
        self._format_line = format_line
        self._is_terminal = stream.isatty()
        self._unfinished: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def feed(self, name: str, chunk: bytes) -> None:
        """Bytes as process `name` wrote them, cut anywhere."""
        with self._lock:
            *lines, rest = (self._unfinished.get(name, b"") + chunk).split(b"\n")
            for line in lines:
                self._write(name, line, "\n")
            if self._is_terminal and b"\r" in rest:
                self._write(name, rest, "\r")
            self._unfinished[name] = rest.rpartition(b"\r")[2] if b"\r" in rest else rest

    def end(self, name: str) -> None:
        """The process has closed its output; a line without an end is shown as it is."""
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
        before, mark, record = text.partition(RECORD_MARK)  # behind what has not ended its line
        lines = [before, mark + record] if before and mark else [text]
        shown = f"{erase}\n".join(self._format_line(name, each) for each in lines)
        try:
            self._stream.write(f"{shown}{erase}{end}")
            self._stream.flush()
        except (OSError, ValueError):
            return  # a full disk, a closed stream: the next line may be written again
