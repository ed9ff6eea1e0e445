"""Loads connectors by name. Only the module of the chosen connector is imported, so that other
installed connectors cost nothing and may lack their dependencies.
"""

import importlib
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import msgspec

from longshore.connectors.adapter import ConnectorRole, OneClassAdapter, OneClassConnector
from longshore.connectors.base import ConnectorConfig, SchedulerConnector
from longshore.protocol.errors import ConfigError

ENTRY_POINT_GROUP: Final = "longshore.connectors"


def load_scheduler_connector(name: str, config: ConnectorConfig) -> SchedulerConnector:
    """Build the scheduler half of a connector.

    name: `package.module:Class`, or the name of an entry point in the group `longshore.connectors`.
          The class is a subclass of `SchedulerConnector` or `OneClassConnector`.

    Raises ConfigError if the name, the module, the class or a dependency does not exist, or if the
    connector does not support several KV cache groups. Other errors of the class are not caught.
    """
    entry_point = _entry_point(name)
    try:
        connector = _build(_load(name, entry_point), config)
    except ModuleNotFoundError as error:
        raise _missing_module(name, entry_point.module, error) from error
    if config.num_groups > 1 and not connector.supports_hma:
        raise ConfigError(
            f"--kv-connector {name} supports only one KV cache group, but the model has "
            f"{config.num_groups}. Use one with `supports_hma = True` (a OneClassConnector "
            "inherits it from SupportsHMA)."
        )
    return connector


def check_connector(name: str) -> None:
    """Raise ConfigError if `load_scheduler_connector` could not load this name. Imports the module,
    but constructs nothing."""
    entry_point = _entry_point(name)
    try:
        _load(name, entry_point)
    except ModuleNotFoundError as error:
        raise _missing_module(name, entry_point.module, error) from error


def parse_options(text: str) -> dict[str, Any]:
    """Parse the value of `--kv-connector-config`. Raises ConfigError unless it is a JSON object."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"--kv-connector-config is not a JSON object: {error}") from None


def no_worker_half(name: str) -> ConfigError:
    """The error for any connector, as long as workers have no connector half."""
    return ConfigError(
        f"--kv-connector {name}: the workers have no connector half that could move blocks; this "
        "version does not support connectors yet. Start without --kv-connector."
    )


def installed_connectors() -> list[str]:
    """Names of all installed connectors, sorted; none of them is imported."""
    return sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)})


def _entry_point(name: str) -> EntryPoint:
    module, colon, attribute = name.partition(":")
    if colon and module and attribute:
        return EntryPoint(name, name, ENTRY_POINT_GROUP)
    found = {entry.value: entry for entry in entry_points(group=ENTRY_POINT_GROUP, name=name)}
    if len(found) == 1:
        return found.popitem()[1]
    if found:
        raise ConfigError(
            f"--kv-connector {name} is provided by several packages: {', '.join(sorted(found))}. "
            "Use one of these package.module:Class names."
        )
    installed = ", ".join(installed_connectors()) or "none"
    raise ConfigError(
        f"--kv-connector {name} is unknown. Installed connectors: {installed}. "
        "For a class of your own use package.module:Class. Note that the workers of this version "
        "cannot move blocks for a connector yet."
    )


def _load(name: str, entry_point: EntryPoint) -> type[SchedulerConnector | OneClassConnector]:
    found: Any = importlib.import_module(entry_point.module)
    for attribute in entry_point.attr.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError:
            raise ConfigError(
                f"--kv-connector {name}: module {entry_point.module} has no {entry_point.attr}"
            ) from None
    if isinstance(found, type) and issubclass(found, SchedulerConnector | OneClassConnector):
        return found
    raise ConfigError(
        f"--kv-connector {name} is neither a SchedulerConnector nor a OneClassConnector. Inherit "
        "from one of them; see docs/connectors.md."
    )


def _build(
    chosen: type[SchedulerConnector | OneClassConnector], config: ConnectorConfig
) -> SchedulerConnector:
    if issubclass(chosen, OneClassConnector):
        return OneClassAdapter(chosen(config, ConnectorRole.SCHEDULER), config)
    return chosen(config)


def _missing_module(name: str, module: str, error: ModuleNotFoundError) -> ConfigError:
    missing = error.name or str(error)
    if module == missing or module.startswith(f"{missing}."):
        return ConfigError(
            f"--kv-connector {name}: there is no module {missing}. Install its package, or correct "
            "the name."
        )
    return ConfigError(f"--kv-connector {name} needs the package {missing}. Install it.")
