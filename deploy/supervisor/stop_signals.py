"""SIGTERM and SIGINT as an object that a selector can wait for."""

import signal
import socket
import types


class StopSignals:
    """Context manager that handles both signals. Use it on the main thread."""

    def __init__(self) -> None:
        self._is_set = False
        self._has_begun = False
        self._reader, self._writer = socket.socketpair()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal gave it
        self._reader.close()
        self._writer.close()

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._has_begun = True
        if not self._is_set:
            self._is_set = True
            self._writer.send(b"!")

    def request(self) -> None:
        """As the first signal. Nothing happens after a signal or another call: that is not a second
        signal, which would abort what the first one began. May be called on any thread."""
        if not self._has_begun:
            self._note(signal.SIGTERM, None)

    def fileno(self) -> int:
        return self._reader.fileno()

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        """Reset, to wait for the next signal."""
        self._reader.recv(1)
        self._is_set = False
