"""Numbers the messages of one connection, so that none is lost, repeated or reordered unnoticed.

Each message begins with its number, by direction, and its number of frames. A message without
contents is a ping, which the server answers with a ping: it reveals that the last messages before
it were lost. When one end has noticed a loss, the connection is over, and a new one starts at 0.
"""

import struct
from collections.abc import Sequence
from typing import Final

from longshore.protocol.errors import MalformedMessage, MessagesLost, RepeatedMessage
from longshore.protocol.transport.codec import Frame

_PREFIX: Final = struct.Struct("<QI")
PREFIX_BYTES: Final = _PREFIX.size
_LAST_NUMBER: Final = 2**64 - 1

PING: Final[Sequence[Frame]] = (b"",)

OVER: Final = _PREFIX.pack(_LAST_NUMBER, 1)
"""The last message to a peer of which messages were lost."""


class Numbering:
    """The next numbers of both directions of a connection, at one of its ends."""

    def __init__(self) -> None:
        self._next_sent = 0
        self._next_received = 0

    def add(self, frames: Sequence[Frame]) -> list[Frame]:
        """The frames of the next message to send, with its number."""
        prefix = _PREFIX.pack(self._next_sent, len(frames))
        self._next_sent += 1
        return [prefix + frames[0], *frames[1:]]

    def check(self, frames: Sequence[Frame]) -> list[Frame] | None:
        """The frames of a received message without its number; None if it is a ping.

        Raises MessagesLost if a message before it, or a frame of it, is missing, RepeatedMessage if
        it has arrived before, MalformedMessage if it has no number.
        """
        header = memoryview(frames[0])
        if len(header) < PREFIX_BYTES:
            raise MalformedMessage(f"a message of {len(header)} bytes has no number")
        number, num_frames = _PREFIX.unpack_from(header)
        expected = self._next_received
        if number == _LAST_NUMBER:
            raise MessagesLost("the other process did not get all messages of this one")
        if number < expected:
            raise RepeatedMessage(f"message {number} arrived twice")
        if number > expected:
            raise MessagesLost(f"message {number} arrived instead of {expected}")
        if num_frames != len(frames):
            raise MessagesLost(f"message {number} has {len(frames)} of its {num_frames} frames")
        self._next_received += 1
        if num_frames == 1 and len(header) == PREFIX_BYTES:
            return None
        return [header[PREFIX_BYTES:], *frames[1:]]
