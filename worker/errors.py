"""Why a worker refuses to start. Each is found before the first request and says what to change."""

from longshore.protocol.errors import ConfigError


class UnsupportedModel(ConfigError):
    """The checkpoint asks for something that this worker does not compute."""


class BrokenCheckpoint(ConfigError):
    """Files of the checkpoint are missing, truncated or contradict each other."""


class KVCacheTooSmall(ConfigError):
    """The KV cache cannot hold one request of the longest length that will be admitted."""
