"""Options of connectors that are not on the command line: secrets, and those of split requests."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec

from longshore.connectors.pull.options import PullOptions, read_options
from longshore.connectors.registry import parse_options
from longshore.deploy.cli.options import EngineOptions
from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.errors import ConfigError

_VARIABLE: Final = re.compile(r"\$\{(\w+)\}")

PULL_CONNECTORS: Final = ("nixl", "mooncake")
"""Connectors by which one engine pulls the KV of another."""

_OptionsT = TypeVar("_OptionsT", bound=EngineOptions)


def with_pull_connector(options: _OptionsT) -> _OptionsT:
    """The settings of engines that pull KV from each other on one host: the first pull connector if
    none is chosen, and a secret. Raises ConfigError for a connector that cannot pull."""
    name = options.kv_connector or PULL_CONNECTORS[0]
    if name not in (*PULL_CONNECTORS, "multi") and ":" not in name:
        raise ConfigError(
            f"kv_connector={name!r} does not pull KV from another engine, as decode engines do. "
            f"Use one of {', '.join(PULL_CONNECTORS)}, or multi to combine one of them with {name}"
        )
    values = parse_options(options.kv_connector_config)
    if name in PULL_CONNECTORS and "secret_file" not in values:
        values["secret_file"] = str(StateDir(options.state_dir).transfer_secret_file())
    config = msgspec.json.encode(values).decode()
    return replace(options, kv_connector=name, kv_connector_config=config)


def pull_options(name: str | None, config: str) -> PullOptions | None:
    """The options of the connector that pulls KV, also if it is one of several in `multi`; None if
    there is none. Raises ConfigError."""
    values = with_variables(parse_options(config))
    if name in PULL_CONNECTORS:
        return read_options(name, values)
    for child in values.get("connectors", ()) if name == "multi" else ():
        if child.get("connector") in PULL_CONNECTORS:
            return read_options(child["connector"], child.get("options", {}))
    return None


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
