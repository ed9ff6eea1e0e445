"""The signals that stop a deployment, as an object that a selector can wait for."""

import signal
import socket
import types
from typing import Final

STOPPING: Final = (signal.SIGTERM, signal.SIGINT)
WITHOUT_MEANING: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Their default would end the supervisor at once. Its children are told to stop by one of them."""


class StopSignals:
    """Context manager that handles SIGTERM, SIGINT and SIGHUP. Use it on the main thread.

    SIGHUP is only ever a first signal: when a terminal is closed, the shell and the kernel may send
    one each, and a service manager may send it right after SIGTERM. Under `nohup`, which lets
    programs ignore it, it stays ignored.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._cause: str | None = None
        self._reader, self._writer = socket.socketpair()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        handlers = dict.fromkeys(STOPPING, self._note) | dict.fromkeys(WITHOUT_MEANING, self._skip)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers[signal.SIGHUP] = self._note_hang_up
        for number, handler in handlers.items():
            self._previous[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal gave it
        self._reader.close()
        self._writer.close()

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._set(signal.Signals(number).name)

    def _note_hang_up(self, number: int, frame: types.FrameType | None) -> None:
        if self._cause is None:
            self._note(number, frame)

    def _skip(self, number: int, frame: types.FrameType | None) -> None:
        """A handler instead of SIG_IGN, which children would inherit."""

    def _set(self, cause: str) -> None:
        self._cause = self._cause or cause
        if not self._is_set:
            self._is_set = True
            self._writer.send(b"!")

    def request(self) -> None:
        """As the first signal. Nothing happens after a signal or another call: that is not a second
        signal, which would abort what the first one began. May be called on any thread."""
        if self._cause is None:
            self._set("an operator's request")

    @property
    def cause(self) -> str:
        """The first signal, such as `SIGTERM`, or what else stops the deployment."""
        return self._cause or "no signal"

    def fileno(self) -> int:
        return self._reader.fileno()

    def is_set(self) -> bool:
        return self._is_set

    def clear(self) -> None:
        """Reset, to wait for the next signal."""
        self._reader.recv(1)
        self._is_set = False
