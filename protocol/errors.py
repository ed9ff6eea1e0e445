"""Errors of all packages. A message says what happened, why it matters, and what to do."""

from typing import Final

MAX_ECHOED_CHARACTERS: Final = 200
"""Limit of a name or value from outside in a message."""


def shortened(text: str, max_characters: int = MAX_ECHOED_CHARACTERS) -> str:
    """`text`, or as much of it as a message may repeat."""
    return text if len(text) <= max_characters else f"{text[:max_characters]}..."


class LongshoreError(Exception):
    """Base of all errors that Longshore raises deliberately."""


class ConfigError(LongshoreError):
    """A setting is invalid, or two settings contradict each other; found at startup."""


class KVCacheTooSmall(ConfigError):
    """The KV cache cannot hold one request of the maximum length."""


class HandshakeRejected(LongshoreError):
    """Two processes are incompatible; the message has the field and both values."""


class PlanMismatch(LongshoreError):
    """A plan does not continue the worker's state. Only a new epoch recovers from it."""


class EngineDead(LongshoreError):
    """A process that a request depended on is gone; the request cannot be answered."""


class MessagesLost(EngineDead):
    """Messages of a connection were lost; only a new connection recovers from it."""


class ProtocolError(LongshoreError):
    """Received data is not a message of this protocol. It is counted and dropped."""


class UnknownMessage(ProtocolError):
    """The message's tag is unknown in this direction."""


class MalformedMessage(ProtocolError):
    """The message is truncated, or a field has the wrong type."""


class RepeatedMessage(ProtocolError):
    """The message has arrived before."""


class MessageTooLarge(ProtocolError):
    """The message has more bytes or more frames than the channel accepts."""
