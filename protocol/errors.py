"""Errors every package raises by name. A message says what happened, why it matters, what to do."""


class LongshoreError(Exception):
    """Root of everything Longshore raises on purpose."""


class ConfigError(LongshoreError):
    """A setting is wrong or two settings contradict each other; found before anything is served."""


class KVCacheTooSmall(ConfigError):
    """The KV cache cannot hold one request of the longest length that will be admitted."""


class HandshakeRejected(LongshoreError):
    """Two processes do not fit together; the message names the field and both values."""


class PlanMismatch(LongshoreError):
    """A plan does not continue what the worker holds. Only a new epoch helps, never a guess."""


class EngineDead(LongshoreError):
    """A process that a request depended on is gone; the request cannot be answered."""


class ProtocolError(LongshoreError):
    """What arrived is not a message of this protocol. It is counted and dropped."""


class UnknownMessage(ProtocolError):
    """The tag names no message that this direction knows."""


class MalformedMessage(ProtocolError):
    """Truncated or wrong in type: not what the tag promises."""


class MessageTooLarge(ProtocolError):
    """More bytes or more frames than the channel accepts."""
