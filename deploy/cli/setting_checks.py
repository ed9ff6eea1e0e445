"""Checks of single settings: each raises ConfigError naming the setting."""

import re
from typing import Final

from longshore.protocol.errors import ConfigError

MAX_TIMEOUT_S: Final = 7 * 24 * 3600


def check_device(device: str) -> None:
    """Raise ConfigError unless `device` is auto, cpu, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device={device!r} is unknown; use auto, cpu, cuda or cuda:N")


def check_context_parallel_size(size: int, tensor_parallel_size: int) -> None:
    """Raise ConfigError unless the shards can be divided into groups of `size`."""
    if tensor_parallel_size % size:
        raise ConfigError(
            f"decode_context_parallel_size={size} does not divide tensor_parallel_size="
            f"{tensor_parallel_size}, whose workers form the groups that share tokens. Use a "
            "divisor of tensor_parallel_size."
        )


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
