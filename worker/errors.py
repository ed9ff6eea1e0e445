"""Why a worker refuses to start, or cannot go on. The former are found before the first request and
say what to change."""

from longshore.protocol.errors import ConfigError, EngineDead


class UnsupportedModel(ConfigError):
    """The checkpoint asks for something that this worker does not compute."""


class BrokenCheckpoint(ConfigError):
    """Files of the checkpoint are missing, truncated or contradict each other."""


class RankLost(EngineDead):
    """Another rank of this engine has ended or hangs: the cause is there, not here."""
