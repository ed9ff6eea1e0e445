"""Why a worker refuses to start or must stop. A refusal happens before the first request and says
what to change."""

from longshore.protocol.errors import ConfigError, EngineDead


class UnsupportedModel(ConfigError):
    """The checkpoint needs a feature that this worker does not implement."""


class BrokenCheckpoint(ConfigError):
    """Files of the checkpoint are missing, truncated or contradict each other."""


class RankLost(EngineDead):
    """Another rank of this engine has died or hangs. The cause is there, not in this process."""
