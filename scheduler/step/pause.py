"""How much of its work a scheduler does for now."""

import enum


class PauseState(enum.Enum):
    """UNPAUSED: everything. PAUSED_NEW: running requests go on, nothing is admitted (weights are
    about to be swapped, the engine drains). PAUSED_ALL: nothing is scheduled at all."""

    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused_new"
    PAUSED_ALL = "paused_all"
