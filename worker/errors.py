"""Why a worker cannot start or must stop. Errors at startup are raised before the first request and
say what to change."""

from typing import Final

from longshore.protocol.errors import ConfigError, EngineDead, shortened

_MAX_NAMED: Final = 4


class UnsupportedModel(ConfigError):
    """The checkpoint needs a feature that this worker does not implement."""


class BrokenCheckpoint(ConfigError):
    """Files of the checkpoint are missing, truncated or contradict each other."""


class OutOfMemory(EngineDead):
    """This rank has no memory for a step, and the step cannot be computed again in this epoch."""


class RankLost(EngineDead):
    """Another rank of this engine has died or hangs. The cause is in that rank, not in this
    process."""


def some_of(names: list[str]) -> str:
    """As many names as a message may repeat."""
    shown = ", ".join(map(shortened, names[:_MAX_NAMED]))
    hidden = len(names) - _MAX_NAMED
    return shown if hidden <= 0 else f"{shown} and {hidden} more"
