"""Where the engines of a deployment publish KV events; checked before any process starts."""

import re
import socket
from pathlib import Path
from typing import Final

import msgspec

from longshore.deploy.settings.options import EngineOptions
from longshore.deploy.supervisor.event_keys import EventKeys
from longshore.deploy.supervisor.replica import Replica
from longshore.deploy.supervisor.runtime_dir import RuntimeDir, check_socket_path
from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import EventSource, KVEventsConfig
from longshore.protocol.private_files import check_private
from longshore.protocol.settings import part_of
from longshore.protocol.transport.channel import Endpoint, is_loopback
from longshore.protocol.transport.security import CurveKeys

_EVERY_INTERFACE: Final = re.compile(r"^tcp://(\*|0\.0\.0\.0|\[::\]):")
_TCP: Final = re.compile(r"(tcp://(?:[\w.*-]+|\[[0-9A-Fa-f:.]+\])):(\d{1,5})")


def kv_events_config(
    options: EngineOptions, runtime_dir: RuntimeDir, replica: Replica
) -> KVEventsConfig | None:
    """The configuration of one engine; None if events are disabled. Raises ConfigError."""
    if not options.enable_kv_cache_events:
        return None
    event_keys = EventKeys(StateDir(options.state_dir))
    keys = event_keys.of_engines()
    if keys is not None:
        keys = msgspec.structs.replace(keys, also_authorized=(runtime_dir.client_keys.public,))

    def endpoint(setting: str, file_name: str) -> Endpoint:
        address: str | None = getattr(options, setting)
        if address is None:
            path = runtime_dir.socket_path(replica.file_name(file_name))
            return Endpoint(f"ipc://{path}", keys)
        return _endpoint(setting, address, replica, keys, event_keys.folder)

    _check_distinct(options, max(replica.count, replica.number + 1))
    return part_of(
        KVEventsConfig,
        options,
        endpoint=endpoint("kv_events_endpoint", "events"),
        replay_endpoint=endpoint("kv_events_replay_endpoint", "replay"),
        engine_number=replica.number,
    )


def event_source(config: KVEventsConfig, runtime_dir: RuntimeDir) -> EventSource:
    """How a gateway of the same deployment connects to what `config` describes."""
    return EventSource(
        _connecting(config.endpoint, runtime_dir),
        _connecting(config.replay_endpoint, runtime_dir),
        config.kv_events_topic,
    )


def _connecting(endpoint: Endpoint, runtime_dir: RuntimeDir) -> Endpoint:
    keys = None
    if endpoint.curve is not None:
        keys = msgspec.structs.replace(runtime_dir.client_keys, server=endpoint.curve.public)
    return Endpoint(_EVERY_INTERFACE.sub("tcp://127.0.0.1:", endpoint.address), keys)


def _check_distinct(options: EngineOptions, num_engines: int) -> None:
    """Raise ConfigError if two sockets of the deployment would have the same address."""
    first, second = options.kv_events_endpoint, options.kv_events_replay_endpoint
    if first is None or second is None:
        return
    ports = [int(match[2]) for match in map(_TCP.fullmatch, (first, second)) if match]
    if first == second or (len(ports) == 2 and abs(ports[0] - ports[1]) < num_engines):
        raise ConfigError(
            f"kv_events_endpoint={first!r} and kv_events_replay_endpoint={second!r} overlap: each "
            f"of {num_engines} engines uses one port, or one file, after the given one. Use "
            "addresses further apart."
        )


def _endpoint(
    name: str, address: str, replica: Replica, keys: CurveKeys | None, key_folder: Path
) -> Endpoint:
    """The address of one engine: engines of a deployment have consecutive ports, or files with
    their numbers."""
    if address.startswith("ipc://"):
        path = Path(replica.file_name(address.removeprefix("ipc://")))
        _check_socket(name, path)
        return Endpoint(f"ipc://{path}", keys)
    match = _TCP.fullmatch(address)
    if match is None or not 0 < (port := int(match[2]) + replica.number) < 65536:
        raise ConfigError(f"{name}={address!r} must be ipc://PATH or tcp://ADDRESS:PORT")
    endpoint = Endpoint(f"{match[1]}:{port}", keys)
    if keys is None and not is_loopback(endpoint):
        raise ConfigError(
            f"{name}={address!r} can be reached from other hosts, and the events contain the "
            f"tokens of all prompts, but there are no keys in {key_folder}. Make them with "
            "`longshore keys create NAME`, or use ipc:// or tcp://127.0.0.1:PORT."
        )
    return endpoint


def _check_socket(name: str, path: Path) -> None:
    """Raise ConfigError if other users could connect, or if another process listens there: ZMQ
    would replace its socket."""
    check_socket_path(path)
    try:
        check_private(path.parent)
    except (OSError, ConfigError) as error:
        raise ConfigError(
            f"{name}={str(path)!r}: the events contain the tokens of all prompts, so the socket "
            f"must be in an existing directory that only you can use (mode 0700): {error}"
        ) from error
    with socket.socket(socket.AF_UNIX) as probe:
        if path.exists() and probe.connect_ex(str(path)) == 0:
            raise ConfigError(f"{name}={str(path)!r} is used by another process")
