"""Checks of single settings: each raises ConfigError naming the setting."""

import re

from longshore.protocol.errors import ConfigError
from longshore.protocol.settings import MAX_TIMEOUT_S


def check_device(device: str) -> None:
    """Raise ConfigError unless `device` is auto, cpu, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device={device!r} is unknown; use auto, cpu, cuda or cuda:N")


def check_range(name: str, value: int | None, minimum: int, maximum: int) -> None:
    """Raise ConfigError naming the setting if it is set and outside minimum..maximum."""
    if value is not None and not minimum <= value <= maximum:
        raise ConfigError(f"{name}={value} must be between {minimum} and {maximum}")


def check_duration(name: str, seconds: float) -> None:
    """Raise ConfigError naming the setting unless it is above 0 and at most MAX_TIMEOUT_S."""
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ConfigError(f"{name}={seconds} must be above 0 and at most {MAX_TIMEOUT_S}")


def check_at_least(name: str, value: int | None, minimum: int) -> None:
    """Raise ConfigError naming the setting if it is set and below `minimum`."""
    if value is not None and value < minimum:
        raise ConfigError(f"{name}={value} must be at least {minimum}")
