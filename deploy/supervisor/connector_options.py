"""Secrets of connectors come from the environment rather than from command lines and files."""

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from longshore.protocol.errors import ConfigError

_VARIABLE: Final = re.compile(r"\$\{(\w+)\}")


def with_variables(
    options: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Replace each text that is `${NAME}`, at any depth, by that environment variable. Raises
    ConfigError if it is not set."""

    def replaced(value: Any) -> Any:
        match value:
            case dict():
                return {key: replaced(each) for key, each in value.items()}
            case list():
                return [replaced(each) for each in value]
            case str() if found := _VARIABLE.fullmatch(value):
                if found[1] not in environment:
                    raise ConfigError(
                        f"--kv-connector-config uses the environment variable {found[1]}, which is "
                        "not set. Set it, or write the value instead of it."
                    )
                return environment[found[1]]
        return value

    return {key: replaced(each) for key, each in options.items()}
