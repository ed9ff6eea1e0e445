"""Options of connectors that are not on the command line: secrets, and those of split requests."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from longshore.connectors.offloading.options import read_options as read_offloading_options
from longshore.connectors.options import parse_size
from longshore.connectors.pull.options import PullOptions, read_options
from longshore.connectors.registry import parse_options
from longshore.deploy.settings.options import EngineOptions, ServeOptions
from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.errors import ConfigError

_VARIABLE: Final = re.compile(r"\$\{(\w+)\}")

PULL_CONNECTORS: Final = ("nixl", "mooncake", "p2p_nccl", "moriio")
"""Connectors by which one engine pulls the KV of another."""

_OptionsT = TypeVar("_OptionsT", bound=EngineOptions)


def with_pull_connector(options: _OptionsT, defaults: Mapping[str, Any] | None = None) -> _OptionsT:
    """The settings of an engine that pulls KV from others: the first pull connector if none is
    chosen. Raises ConfigError for a connector that cannot pull.

    defaults: of its options; None: a secret for engines on one host.
    """
    name = options.kv_connector or PULL_CONNECTORS[0]
    values = parse_options(options.kv_connector_config)
    if not can_pull(name, values):
        advice = f"or multi to combine one of them with {name}"
        if name == "multi":
            advice = "and add it to its option 'connectors'"
        raise ConfigError(
            f"kv_connector={name!r} does not pull KV from another engine, as decode engines do. "
            f"Use one of {', '.join(PULL_CONNECTORS)}, {advice}"
        )

    def complete(given: dict[str, Any]) -> dict[str, Any]:
        if defaults is not None:
            return {**defaults, **given}
        if "secret_file" in given:
            return given
        return {**given, "secret_file": str(StateDir(options.state_dir).transfer_secret_file())}

    config = msgspec.json.encode(map_pull_options(name, values, complete)).decode()
    return replace(options, kv_connector=name, kv_connector_config=config)


def can_pull(name: str, values: Mapping[str, Any]) -> bool:
    """Whether a connector with these options may pull KV from other engines."""
    return any(each in PULL_CONNECTORS or ":" in each for each in connector_names(name, values))


def pull_connectors(name: str, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of PULL_CONNECTORS it is, or `multi` has."""
    return tuple(each for each in connector_names(name, values) if each in PULL_CONNECTORS)


def connector_names(name: str, values: Mapping[str, Any]) -> list[str]:
    """The connector, and those that `multi` has."""
    return [name, *(child["connector"] for child in _children(name, values))]


def map_pull_options(
    name: str, values: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """The options of a connector, with those of each of PULL_CONNECTORS changed."""
    if name in PULL_CONNECTORS:
        return change(values)
    for child in _children(name, values):
        if child["connector"] in PULL_CONNECTORS:
            child["options"] = change(child.get("options", {}))
    return values


def check_router_key(options: ServeOptions, pull: PullOptions | None) -> None:
    """Raises ConfigError for a key of routers whose requests would all be rejected.

    pull: the options of the connector that pulls KV.
    """
    if options.router_key_file is not None and pull is None:
        raise ConfigError(
            f"router_key_file={options.router_key_file} is set, but kv_connector="
            f"{options.kv_connector!r} does not pull KV from another engine, so it has no effect. "
            f"Set kv_connector to one of {', '.join(PULL_CONNECTORS)}, or remove router_key_file."
        )


def pull_options(name: str | None, config: str) -> PullOptions | None:
    """The options of the connector that pulls KV, also if it is one of several in `multi`; None if
    there is none. Raises ConfigError."""
    values = with_variables(parse_options(config))
    if name in PULL_CONNECTORS:
        return read_options(name, values)
    for child in _children(name, values):
        if child["connector"] in PULL_CONNECTORS:
            return read_options(child["connector"], child.get("options", {}))
    return None


def p2p_host(options: EngineOptions) -> str | None:
    """The address at which other engines reach this one by NCCL; None: they do not."""
    name, config = options.kv_connector, options.kv_connector_config
    if name is None or "p2p_nccl" not in pull_connectors(name, parse_options(config)):
        return None
    found = pull_options(name, config)
    return None if found is None else found.host


def disk_tiers(name: str | None, values: Mapping[str, Any]) -> list[tuple[Path, int]]:
    """The folder and the size of each disk tier. The options are valid."""
    children = [{"connector": name, "options": values}, *_children(name, values)]
    found = []
    for child in children:
        if child["connector"] == "offloading":
            read = read_offloading_options(child.get("options", {}))
            if read.disk_path is not None:
                assert read.disk_bytes is not None
                size = parse_size("disk_bytes", read.disk_bytes)
                found.append((Path(read.disk_path).expanduser(), size))
    return found


def _children(name: str | None, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The connectors in `multi`, which are parts of `values`, without those that it will reject."""
    children = values.get("connectors") if name == "multi" else None
    return [
        child
        for child in (children if isinstance(children, list) else ())
        if isinstance(child, dict)
        and isinstance(child.get("connector"), str)
        and isinstance(child.get("options", {}), dict)
    ]


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
