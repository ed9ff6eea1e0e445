"""Connectors by name. A connector's module is imported when it is chosen and not before, so what
is installed beside it costs nothing and may lack its dependencies.
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
    """Build the scheduler's half of a connector.

    name: `package.module:Class`, or what an installed package calls it in the entry point group
          `longshore.connectors`. The class is a `SchedulerConnector`, or a `OneClassConnector`.

    Raises ConfigError that names what is missing: the name, the module, the class, a dependency,
    or the support for several KV cache groups. What the class itself raises is let through.
    """
    entry_point = _entry_point(name)
    try:
        connector = _build(_load(name, entry_point), config)
    except ModuleNotFoundError as error:
        raise _missing_module(name, entry_point.module, error) from error
    if config.num_groups > 1 and not connector.supports_hma:
        raise ConfigError(
            f"--kv-connector {name} reads one KV cache group, but the model has "
            f"{config.num_groups}. Use a connector that declares `supports_hma` (of one class: "
            "inherits SupportsHMA)."
        )
    return connector


def check_connector(name: str) -> None:
    """Raise ConfigError for a name that leads to no connector: see load_scheduler_connector. Its
    module is imported, nothing is built."""
    entry_point = _entry_point(name)
    try:
        _load(name, entry_point)
    except ModuleNotFoundError as error:
        raise _missing_module(name, entry_point.module, error) from error


def parse_options(text: str) -> dict[str, Any]:
    """The options of `--kv-connector-config`. Raises ConfigError if they are no JSON object."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"--kv-connector-config is not a JSON object: {error}") from None


def no_worker_half(name: str) -> ConfigError:
    """What a connector is refused with while no worker can move blocks for it."""
    return ConfigError(
        f"--kv-connector {name}: the workers have no connector half to move their blocks; this "
        "version's workers have none. Start without --kv-connector."
    )


def installed_connectors() -> list[str]:
    """Names that installed packages offer, sorted; none of them is imported."""
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
            f"--kv-connector {name} is offered by several packages: {', '.join(sorted(found))}. "
            "Choose one by that name."
        )
    offered = ", ".join(installed_connectors()) or "none"
    raise ConfigError(
        f"--kv-connector {name} is unknown. Installed packages offer: {offered}. "
        "A connector of your own is given as package.module:Class; no worker of this version can "
        "move blocks for one yet."
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
        f"--kv-connector {name} is neither a SchedulerConnector nor a OneClassConnector; inherit "
        "from one of them (docs/connectors.md)"
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
            f"--kv-connector {name}: there is no module {missing}. Install the package that has "
            "it, or correct the name."
        )
    return ConfigError(f"--kv-connector {name} needs the package {missing}; install it")
