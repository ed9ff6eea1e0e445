"""Reads text and JSON files of model folders; errors name the file."""

import json
from pathlib import Path
from typing import Any

from longshore.protocol.errors import ConfigError


def read_text(path: Path) -> str:
    """Raises ConfigError if the file cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises ConfigError if the file cannot be read or is not a JSON object."""
    try:
        content = json.loads(read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content
