"""SIGTERM and SIGINT as an object that a selector can wait for."""

import signal
import socket
import types


class StopSignals:
    """Context manager that handles both signals. Use it on the main thread."""

    def __init__(self) -> None:
        self._is_set = False
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
        if not self._is_set:
            self._is_set = True
            self._writer.send(b"!")

    def fileno(self) -> int:
        return self._reader.fileno()

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        """Reset, to wait for the next signal."""
        self._reader.recv(1)
        self._is_set = False
