"""Loads connectors by name. Only the module of the chosen connector is imported, so that other
installed connectors cost nothing and may lack their dependencies.
"""

import hashlib
import importlib
import logging
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from longshore.connectors import version_1
from longshore.connectors.adapter import (
    ConnectorRole,
    OneClassAdapter,
    OneClassConnector,
    OneClassWorkerAdapter,
)
from longshore.connectors.base import (
    CONTRACT_VERSION,
    SUPPORTED_VERSIONS,
    ConnectorConfig,
    SchedulerConnector,
    WorkerConnector,
    WorkerConnectorConfig,
)
from longshore.protocol.errors import ConfigError
from longshore.protocol.handshake import EngineIdentity
from longshore.protocol.install_command import install_command
from longshore.protocol.kv_cache_spec import KVCacheConfig, of_all_ranks
from longshore.protocol.model_files import read_bytes

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP: Final = "longshore.connectors"

BUILT_IN: Final = {
    "decode_bench": "longshore.connectors.decode_bench.scheduler:DecodeBenchConnector",
    "example": "longshore.connectors.example.scheduler:ExampleConnector",
    "flexkv": "longshore.connectors.flexkv.scheduler:FlexKVConnector",
    "hidden_states": "longshore.connectors.hidden_states.scheduler:HiddenStatesConnector",
    "lmcache": "longshore.connectors.lmcache.scheduler:LMCacheConnector",
    "lmcache_mp": "longshore.connectors.lmcache_mp.scheduler:LMCacheMPConnector",
    "mooncake": "longshore.connectors.pull.scheduler:MooncakeConnector",
    "moriio": "longshore.connectors.pull.scheduler:MoRIIOConnector",
    "multi": "longshore.connectors.multi.scheduler:MultiConnector",
    "nixl": "longshore.connectors.pull.scheduler:NixlConnector",
    "offloading": "longshore.connectors.offloading.connector:OffloadingConnector",
    "p2p_nccl": "longshore.connectors.pull.scheduler:P2PNcclConnector",
    "simple_cpu": "longshore.connectors.simple_cpu:SimpleCPUConnector",
}
"""Connectors of this package: name -> package.module:Class of the scheduler half. Other packages
cannot take these names."""

UNVERIFIED: Final = frozenset({"flexkv", "moriio"})
"""Written from the published interface of a library and tested with a fake of it: the library
itself needs hardware that the tests have not had."""

EXTRAS: Final[dict[str, str]] = {}
"""The extra of this package that installs a connector's optional dependency, by module."""

_SchedulerClass: TypeAlias = type[SchedulerConnector] | type[OneClassConnector]
_WorkerClass: TypeAlias = type[WorkerConnector[Any]] | type[OneClassConnector]


def load_scheduler_connector(name: str, config: ConnectorConfig) -> SchedulerConnector:
    """Build the scheduler half of a connector.

    name: of a built-in connector, of an entry point in the group `longshore.connectors`, or
          `package.module:Class` of a `SchedulerConnector` or `OneClassConnector`.

    Raises ConfigError if the name, the module, the class or a dependency does not exist, if the
    class was written for another version of the contract, or if the connector does not support
    several KV cache groups. Other errors of the class are not caught.
    """
    chosen = _scheduler_class(name)
    if name in UNVERIFIED:
        logger.warning(
            "--kv-connector %s is not verified against the library: it was tested only with a fake "
            "of its interface. Compare outputs before you rely on it.",
            name,
        )
    connector: SchedulerConnector
    with _naming_missing_packages(name, chosen.__module__):
        if issubclass(chosen, OneClassConnector):
            connector = OneClassAdapter(chosen(config, ConnectorRole.SCHEDULER), config)
        else:
            connector = chosen(config)
    if chosen.contract_version == 1:
        version_1.adapt(connector)
    if config.num_groups > 1 and not connector.supports_hma:
        raise ConfigError(
            f"--kv-connector {name} supports only one KV cache group, but the model has "
            f"{config.num_groups}. Use one with `supports_hma = True` (a OneClassConnector "
            "inherits it from SupportsHMA)."
        )
    return connector


def load_worker_connector(name: str, config: WorkerConnectorConfig) -> WorkerConnector[Any]:
    """Build the worker half of the connector that `load_scheduler_connector` builds for this name.
    Raises ConfigError as that does."""
    chosen = _worker_class(name)
    with _naming_missing_packages(name, chosen.__module__):
        if issubclass(chosen, OneClassConnector):
            return OneClassWorkerAdapter(chosen(config, ConnectorRole.WORKER), config)
        return chosen(config)


def engine_fields(
    identity: EngineIdentity,
    kv_cache: KVCacheConfig,
    *,
    options: Mapping[str, Any],
    rank_block_bytes: tuple[int, ...],
    engine_id: str,
    epoch: int,
) -> dict[str, Any]:
    """The fields of ConnectorConfig, the same in all processes of one engine."""
    num_sharing = identity.decode_context_parallel_size
    return {
        "options": options,
        "block_size": identity.block_size * num_sharing,
        "num_blocks": kv_cache.num_blocks,
        "num_groups": len(kv_cache.groups),
        "specs": tuple(of_all_ranks(group.spec, num_sharing) for group in kv_cache.groups),
        "num_ranks": len(rank_block_bytes),
        "rank_block_bytes": rank_block_bytes,
        "engine_id": f"{engine_id}.{epoch}",
        "identity": identity,
        "kv_dtype": kv_cache.dtype,
        "kv_layout": kv_cache.layout,
        "kv_rotation": kv_cache.rotation,
        "namespace": _namespace(identity, kv_cache, len(rank_block_bytes)),
    }


def _namespace(identity: EngineIdentity, kv_cache: KVCacheConfig, num_ranks: int) -> str:
    """Identifies everything that the stored KV of a block depends on besides its block hash. Equal
    on all ranks of an engine; `num_blocks` and the layers of a pipeline stage do not count."""
    fields = (
        identity.protocol_version,
        identity.model_fingerprint,
        identity.dtype,
        identity.hash_seed_digest,
        identity.block_size,
        identity.decode_context_parallel_size,
        identity.cp_kv_cache_interleave_size,
        kv_cache.dtype,
        kv_cache.layout,
        kv_cache.rotation,
        [group.spec for group in kv_cache.groups],
        num_ranks,
    )
    return hashlib.sha256(msgspec.msgpack.encode(fields)).hexdigest()[:32]


def check_connector(name: str, options: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError if `load_scheduler_connector` could not load this name, if its class names
    no worker half, or if its `check_options` rejects the options. Imports the module, but
    constructs nothing."""
    found = _scheduler_class(name)
    if issubclass(found, SchedulerConnector):
        _worker_path(name, found)
        if options is not None:
            with _naming_missing_packages(name, found.__module__):
                found.check_options(options)


def check_worker_half(name: str) -> None:
    """Raise ConfigError if `load_worker_connector` could not load this name. Imports the modules of
    both halves, but constructs nothing."""
    _worker_class(name)


def uses_shared_memory(name: str) -> bool:
    """Whether the worker halves of this connector share memory. Raises ConfigError."""
    found = _scheduler_class(name)
    return issubclass(found, SchedulerConnector) and found.uses_shared_memory


def opens_nothing(name: str) -> bool:
    """Whether building the scheduler half of this connector has no effect outside it. Raises
    ConfigError."""
    found = _scheduler_class(name)
    return issubclass(found, SchedulerConnector) and found.opens_nothing


def check_verify_kv(name: str) -> None:
    """Raise ConfigError if this connector has no option `verify_kv`."""
    found = _scheduler_class(name)
    if not (issubclass(found, SchedulerConnector) and found.has_verify_kv):
        hint = " Set it in the options of its connectors." if name == "multi" else " Remove it."
        raise ConfigError(
            f"--verify-kv is not an option of --kv-connector {name}, which verifies no checksums "
            f"itself.{hint}"
        )


def parse_options(text: str, setting: str = "--kv-connector-config") -> dict[str, Any]:
    """Parse the value of a setting: a JSON object, or the path of a TOML file, whose table it is.
    Raises ConfigError if it is neither."""
    if text.endswith(".toml"):
        try:
            return tomllib.loads(read_bytes(Path(text)).decode())
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{setting} {text} cannot be read: {error}") from None
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise ConfigError(
            f"{setting} is neither a JSON object nor the path of a .toml file: {error}"
        ) from None


def installed_connectors() -> list[str]:
    """Names of all installed connectors, sorted; none of them is imported."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))})


def _entry_point(name: str) -> EntryPoint:
    module, colon, attribute = name.partition(":")
    if colon and module and attribute:
        return EntryPoint(name, name, ENTRY_POINT_GROUP)
    if name in BUILT_IN:
        return EntryPoint(name, BUILT_IN[name], ENTRY_POINT_GROUP)
    found = {entry.value: entry for entry in entry_points(group=ENTRY_POINT_GROUP, name=name)}
    if len(found) == 1:
        return found.popitem()[1]
    if found:
        raise ConfigError(
            f"--kv-connector {name} is provided by several packages: {', '.join(sorted(found))}. "
            "Use one of these package.module:Class names."
        )
    installed = ", ".join(
        f"{each} (not verified against the library)" if each in UNVERIFIED else each
        for each in installed_connectors()
    )
    raise ConfigError(
        f"--kv-connector {name} is unknown. Installed connectors: {installed}. "
        "For a class of your own use package.module:Class."
    )


def _scheduler_class(name: str) -> _SchedulerClass:
    entry_point = _entry_point(name)
    found = _load(name, entry_point.module, entry_point.attr)
    if not (isinstance(found, type) and issubclass(found, SchedulerConnector | OneClassConnector)):
        raise ConfigError(
            f"--kv-connector {name} is neither a SchedulerConnector nor a OneClassConnector. "
            "Inherit from one of them; see docs/connectors.md."
        )
    _check_version(name, found)
    return found


def _worker_class(name: str) -> _WorkerClass:
    scheduler_class = _scheduler_class(name)
    if issubclass(scheduler_class, OneClassConnector):
        return scheduler_class
    module, attribute = _worker_path(name, scheduler_class)
    found = _load(name, module, attribute)
    if not (isinstance(found, type) and issubclass(found, WorkerConnector)):
        raise ConfigError(
            f"--kv-connector {name}: its worker half {scheduler_class.worker_half} is not a "
            "WorkerConnector. Inherit from it; see docs/connectors.md."
        )
    _check_version(name, found)
    return found


def _worker_path(name: str, scheduler_class: type[SchedulerConnector]) -> tuple[str, str]:
    """Module and class name of the worker half. Raises ConfigError if there is none."""
    module, colon, attribute = scheduler_class.worker_half.partition(":")
    if colon and module and attribute:
        return module, attribute
    raise ConfigError(
        f"--kv-connector {name} has no worker half, so nothing would move its blocks: "
        f"{scheduler_class.__name__}.worker_half is {scheduler_class.worker_half!r}. Set it to the "
        "package.module:Class of a WorkerConnector."
    )


def _check_version(name: str, found: _SchedulerClass | _WorkerClass) -> None:
    if found.contract_version not in SUPPORTED_VERSIONS:
        raise ConfigError(
            f"--kv-connector {name}: {found.__name__} was written for version "
            f"{found.contract_version} of the connector contract, and this is version "
            f"{CONTRACT_VERSION}. Install a release of the connector that supports it."
        )


def _load(name: str, module: str, attributes: str) -> Any:
    """What `module:attributes` names. Raises ConfigError if it does not exist."""
    with _naming_missing_packages(name, module):
        found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError:
            raise ConfigError(
                f"--kv-connector {name}: module {module} has no {attributes}"
            ) from None
    return found


@contextmanager
def _naming_missing_packages(name: str, module: str) -> Iterator[None]:
    """Turn the error for a module that cannot be imported into a ConfigError."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise _missing_module(name, module, error) from error


def _missing_module(name: str, module: str, error: ModuleNotFoundError) -> ConfigError:
    missing = error.name or str(error)
    if module == missing or module.startswith(f"{missing}."):
        return ConfigError(
            f"--kv-connector {name}: there is no module {missing}. Install its package, or correct "
            "the name."
        )
    package = missing.partition(".")[0]
    extra = EXTRAS.get(package)
    command = f"pip install {package}" if extra is None else install_command(extra)
    return ConfigError(
        f"--kv-connector {name} needs the package {package}, which is not installed. Install it: "
        f"{command}"
    )
