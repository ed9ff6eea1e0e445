"""Loads encoder connectors by name; only the module of the chosen one is imported."""

import importlib
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from longshore.connectors.base import (
    CONTRACT_VERSION,
    SUPPORTED_VERSIONS,
    ECRole,
    EncoderConnector,
    EncoderConnectorConfig,
    EncoderWorker,
    EncoderWorkerConfig,
)
from longshore.protocol.errors import ConfigError

BUILT_IN: Final = {
    "mooncake": "longshore.connectors.pull_encoder.scheduler:MooncakeEncoderConnector",
    "nixl": "longshore.connectors.pull_encoder.scheduler:NixlEncoderConnector",
}

T = TypeVar("T")


def load_encoder_connector(name: str, config: EncoderConnectorConfig) -> EncoderConnector:
    """Build the scheduler half. name: a built-in one, or `package.module:Class` of an
    EncoderConnector. Raises ConfigError."""
    return _scheduler_class(name)(config)


def load_encoder_worker(name: str, config: EncoderWorkerConfig) -> EncoderWorker[Any]:
    """Build the worker half of the connector of this name. Raises ConfigError."""
    path = _scheduler_class(name).worker_half
    found: type[EncoderWorker[Any]] = _load(name, path, EncoderWorker)
    return found(config)


def check_encoder_connector(name: str, options: Mapping[str, Any], role: ECRole) -> None:
    """Raise ConfigError if the connector could not be loaded, or rejects the options."""
    _scheduler_class(name).check_options(options, role)


def _scheduler_class(name: str) -> type[EncoderConnector]:
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        raise ConfigError(
            f"--ec-connector {name} is unknown. Built-in ones: {', '.join(BUILT_IN)}. For a class "
            "of your own use package.module:Class."
        )
    return _load(name, path, EncoderConnector)


def _load(name: str, path: str, base: type[T]) -> type[T]:
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--ec-connector {name}: {path} cannot be loaded: {error}") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"--ec-connector {name}: {path} is no {base.__name__}")
    version = getattr(found, "contract_version", None)
    if version not in SUPPORTED_VERSIONS:
        raise ConfigError(
            f"--ec-connector {name}: {found.__name__} was written for version {version} of the "
            f"connector contract, and this is version {CONTRACT_VERSION}"
        )
    return found
