"""What users can set of the supervisor: when a process counts as hung, and what replaces it."""

from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta

from longshore.protocol.errors import ConfigError
from longshore.protocol.settings import MAX_TIMEOUT_S, Setting, Settings

MIN_HANG_TIMEOUT_S: Final = 3.0


@dataclass(frozen=True, kw_only=True)
class RestartSettings(Settings):
    """When processes are restarted, and with what."""

    max_restarts: Annotated[
        int,
        Meta(ge=0, le=1000),
        Setting(
            "Operation",
            "How often an engine or gateway that dies again and again is restarted, until the "
            "server stops; a minute without a death ends the row. 0: the first death stops it.",
        ),
    ] = 5
    standby_workers: Annotated[
        int,
        Meta(ge=0, le=8),
        Setting(
            "Operation",
            "Sets of workers per engine that have loaded the model and wait, so that an engine "
            "goes on within about a second after the death of a worker. Each needs the memory of "
            "the weights once more, on the same device.",
        ),
    ] = 0
    hang_timeout_s: Annotated[
        float,
        Setting(
            "Operation",
            "Seconds without a sign of life after which a scheduler, worker or gateway counts as "
            "hung, is killed and restarted; while it starts, seconds for which it is stopped "
            "(SIGSTOP). 0: never.",
        ),
    ] = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.standby_workers and not self.max_restarts:
            raise ConfigError(
                f"standby_workers={self.standby_workers} has no use with max_restarts=0: the first "
                "death of a worker stops the server. Set max_restarts to 1 or more."
            )
        if self.hang_timeout_s and not MIN_HANG_TIMEOUT_S <= self.hang_timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"hang_timeout_s={self.hang_timeout_s} must be between {MIN_HANG_TIMEOUT_S:g} and "
                f"{MAX_TIMEOUT_S:g}, or 0: processes report once a second that they are alive"
            )
