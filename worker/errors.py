"""Why a worker cannot start or must stop. Errors at startup are raised before the first request and
say what to change."""

from longshore.protocol.errors import ConfigError, EngineDead


class UnsupportedModel(ConfigError):
    """The checkpoint needs a feature that this worker does not implement."""


class BrokenCheckpoint(ConfigError):
    """Files of the checkpoint are missing, truncated or contradict each other."""


class OutOfMemory(EngineDead):
    """This rank has no memory for a step, and the step cannot be computed again in this epoch."""


class RankLost(EngineDead):
    """Another rank of this engine has died or hangs. The cause is in that rank, not in this
    process."""
