"""The topology file: which engines and gateways run on which nodes, in TOML.

    model = "/models/llama"

    [nodes.a]
    address = "10.0.0.1"
    public_key = "..."

    [[engines]]
    node = "a"
    role = "prefill"
    port = 9000
    tensor_parallel_size = 2

    [[gateways]]
    node = "a"
    port = 8000

All nodes have the same file. It contains no secret: keys are files on each node.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.settings.options import EngineOptions, ServeOptions
from longshore.deploy.settings.tables import read_toml, readable, with_table
from longshore.protocol.commands import Role
from longshore.protocol.errors import ConfigError

MAX_NODES: Final = 256
MAX_ENGINES: Final = 256
PORTS_PER_ENGINE: Final = 4
"""An engine uses consecutive ports: for requests, KV events, their replays, and its connector."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535 - PORTS_PER_ENGINE + 1)]
_FilePath = Annotated[str, msgspec.Meta(min_length=1)]

_ELSEWHERE: Final = {
    "replicas": "write one [[engines]] table for each engine",
    "prefill": "write an [[engines]] table with role = 'prefill' for each engine",
    "decode": "write an [[engines]] table with role = 'decode' for each engine",
    "gateways": "set count in [[gateways]]",
    "host": "set host in [[gateways]]",
    "port": "set port in [[gateways]]",
    "api_key": "keys are secrets, and this file has none; use api_key_file or LONGSHORE_API_KEY",
    "kv_events_endpoint": "events are published at the address of the node",
    "kv_events_replay_endpoint": "events are published at the address of the node",
    "idle_sleep_s": "use `longshore admin sleep` and `wake` on the nodes of the engines",
    "topology": "it is this file",
    "launcher": "it is an option of `longshore serve`",
}
"""Settings of `longshore serve` that this file has in another form."""
_COMMON_ONLY: Final = (
    "max_model_len",
    "state_dir",
    "log_level",
    "enable_kv_cache_events",
    "kv_events_topic",
    "kv_events_buffer",
    "kv_events_format",
    "kv_events_hashes",
)
"""Settings of engines that must be the same for all."""


class KeyPaths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Files with keys, on each node.

    node:            the node's CURVE keys, from `longshore keys node`.
    transfer_secret: what engines must know to pull KV from each other; the same on all nodes.
    block_hash_seed: the seed of block hashes; the same on all nodes.
    """

    node: _FilePath | None = None
    transfer_secret: _FilePath | None = None
    block_hash_seed: _FilePath | None = None


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One host.

    address:    at which other nodes reach it, on a private network.
    public_key: that of its key file.
    keys:       paths that differ from those of all nodes.
    model:      folder of the model on this node, if it differs.
    """

    address: str
    public_key: Annotated[str, msgspec.Meta(min_length=40, max_length=40)] | None = None
    keys: KeyPaths = KeyPaths()
    model: _FilePath | None = None


class Gateways(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateways of one node, which share a port. count: number of processes."""

    node: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    host: _FilePath = "127.0.0.1"
    count: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1


class _EngineEntry(msgspec.Struct, frozen=True, kw_only=True):
    node: str | list[str]
    role: Role = "unified"
    port: _Port | None = None
    devices: tuple[Annotated[int, msgspec.Meta(ge=0, le=1023)], ...] = ()


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nodes: Annotated[dict[str, dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_NODES)]
    engines: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_ENGINES)]
    gateways: Annotated[list[Gateways], msgspec.Meta(min_length=1, max_length=MAX_NODES)]
    model: _FilePath | None = None
    keys: KeyPaths = KeyPaths()
    settings: dict[str, Any] = {}


@dataclass(frozen=True)
class Engine:
    """One engine; all its ranks are on one node.

    number:  its place in the file, from 0.
    port:    the first of its ports; None: only gateways of its node use it.
    devices: GPUs of its ranks; empty: those after the ones of the engines before it.
    options: all its settings.
    """

    number: int
    node: str
    role: Role
    port: int | None
    devices: tuple[int, ...]
    options: ServeOptions

    @property
    def where(self) -> str:
        """Its table in the file."""
        return f"engines[{self.number}]"


@dataclass(frozen=True)
class Topology:
    """The content of a file, read but not checked as a whole.

    model:    folder or id of the model; None: the bundled demo model.
    settings: of all engines and gateways.
    digest:   SHA-256 of the file.
    """

    path: Path
    model: str | None
    nodes: dict[str, Node]
    engines: tuple[Engine, ...]
    gateways: tuple[Gateways, ...]
    settings: ServeOptions
    keys: KeyPaths
    digest: str

    def error(self, where: str, message: str) -> ConfigError:
        """An error about one key of the file."""
        return ConfigError(f"topology {self.path}: {where}: {message}")

    def model_of(self, node: str) -> Path:
        """Folder or id of the model on a node."""
        return Path(self.nodes[node].model or self.model or DEMO_MODEL_DIR)

    def key_paths(self, node: str) -> KeyPaths:
        """The paths of a node."""
        own, common = self.nodes[node].keys, self.keys
        return KeyPaths(
            node=own.node or common.node,
            transfer_secret=own.transfer_secret or common.transfer_secret,
            block_hash_seed=own.block_hash_seed or common.block_hash_seed,
        )

    def engines_of(self, node: str) -> list[Engine]:
        return [engine for engine in self.engines if engine.node == node]

    def gateways_of(self, node: str) -> Gateways | None:
        return next((each for each in self.gateways if each.node == node), None)

    def is_remote(self, engine: Engine) -> bool:
        """Whether gateways of other nodes use the engine."""
        return any(gateways.node != engine.node for gateways in self.gateways)

    @property
    def gateway_nodes(self) -> list[str]:
        return [gateways.node for gateways in self.gateways]


def read_topology(path: Path) -> Topology:
    """Raises ConfigError, with the path of the key, for a file that cannot be read, unknown keys
    and values of wrong types. `check_topology` finds the other errors."""
    read, content = read_toml(path, _File, "topology")
    settings = _settings(path, "settings", read.settings, ServeOptions(topology=path))
    if settings.api_key_file is not None and settings.scheduling_policy is None:
        settings = replace(settings, scheduling_policy="fair")  # nodes of engines lack the file
    if settings.routing_policy == "prefix_aware":
        settings = replace(settings, enable_kv_cache_events=True)
    return Topology(
        path,
        read.model,
        {name: _node(path, name, entry) for name, entry in read.nodes.items()},
        tuple(_engine(path, number, entry, settings) for number, entry in enumerate(read.engines)),
        tuple(read.gateways),
        settings,
        read.keys,
        hashlib.sha256(content).hexdigest(),
    )


def _node(path: Path, name: str, entry: dict[str, Any]) -> Node:
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"topology {path}: nodes: {name[:100]!r} is not a name of a node. Use up to 63 "
            "letters, digits, dots and dashes."
        )
    try:
        return msgspec.convert(entry, Node)
    except msgspec.ValidationError as error:
        raise ConfigError(f"topology {path}: {readable(error, f'nodes.{name}')}") from error


def _engine(path: Path, number: int, entry: dict[str, Any], common: ServeOptions) -> Engine:
    where = f"engines[{number}]"
    own = {name: entry[name] for name in _EngineEntry.__struct_fields__ if name in entry}
    if "ranks" in entry or isinstance(own.get("node"), list):
        raise ConfigError(
            f"topology {path}: {where}: the ranks of one engine must be on one node, because the "
            "connections between ranks are neither encrypted nor authenticated. Set node to one "
            "name, and devices to the GPUs of the ranks, or write one [[engines]] table per node."
        )
    try:
        read = msgspec.convert(own, _EngineEntry)
    except msgspec.ValidationError as error:
        raise ConfigError(f"topology {path}: {readable(error, where)}") from error
    assert isinstance(read.node, str)
    others = {name: value for name, value in entry.items() if name not in own}
    options = _settings(path, where, others, common)
    if read.devices and len(read.devices) != options.num_ranks:
        raise ConfigError(
            f"topology {path}: {where}.devices has {len(read.devices)} GPUs, but "
            f"tensor_parallel_size={options.tensor_parallel_size} and pipeline_parallel_size="
            f"{options.pipeline_parallel_size} need {options.num_ranks}"
        )
    if read.devices and (options.device == "cpu" or ":" in options.device):
        raise ConfigError(
            f"topology {path}: {where}.devices are numbers of GPUs, but device is "
            f"{options.device!r}. Use device = 'cuda', or remove devices."
        )
    return Engine(number, read.node, read.role, read.port, read.devices, options)


def _settings(
    path: Path,
    where: str,
    values: Mapping[str, Any],
    base: ServeOptions,
) -> ServeOptions:
    """`base` with the values of a table of settings."""
    is_engine = where != "settings"
    known = fields(EngineOptions if is_engine else ServeOptions)
    elsewhere = dict(_ELSEWHERE)
    if is_engine:
        advice = "it is the same for all engines; set it in [settings]"
        elsewhere |= dict.fromkeys(_COMMON_ONLY, advice)
    return with_table(
        base,
        values,
        f"topology {path}: {where}",
        known=[each.name for each in known],
        others=_EngineEntry.__struct_fields__ if is_engine else (),
        elsewhere=elsewhere,
    )
