"""Reads text and JSON files of model folders; errors name the file."""

from pathlib import Path
from typing import Any

from longshore.protocol.errors import ConfigError
from longshore.protocol.model_files import read_bytes, read_json


def read_text(path: Path) -> str:
    """Raises ConfigError if the file cannot be read as UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises ConfigError if the file cannot be read or is not a JSON object."""
    try:
        content = read_json(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content
