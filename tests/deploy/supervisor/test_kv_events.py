"""Where KV events are published: settings, defaults, and what is not private."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longshore.deploy.settings.options import EngineOptions
from longshore.deploy.supervisor.event_keys import EventKeys
from longshore.deploy.supervisor.kv_events import event_source, kv_events_config
from longshore.deploy.supervisor.replica import Replica, replicas
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.state_dir import StateDir
from longshore.protocol.errors import ConfigError
from longshore.protocol.events import EventSource, KVEventsConfig
from longshore.protocol.transport.channel import Endpoint
from longshore.protocol.transport.security import CurveKeys

ONLY = Replica()


@pytest.fixture
def runtime_dir() -> Iterator[RuntimeDir]:
    folder = RuntimeDir()
    yield folder
    folder.remove()


@pytest.fixture
def private(tmp_path: Path) -> Path:
    path = tmp_path / "p"
    path.mkdir(mode=0o700)
    return path


def config_of(runtime_dir: RuntimeDir, replica: Replica = ONLY, **settings: Any) -> KVEventsConfig:
    settings.setdefault("state_dir", runtime_dir.path / "state")  # not this user's
    options = EngineOptions(enable_kv_cache_events=True, **settings)
    config = kv_events_config(options, runtime_dir, replica)
    assert config is not None
    return config


def keys_with_gateways(runtime_dir: RuntimeDir, state_dir: Path) -> CurveKeys:
    """The engines' keys, with which the gateways of their deployment are accepted, too."""
    keys = EventKeys(StateDir(state_dir)).of_engines()
    assert keys is not None
    return msgspec.structs.replace(keys, also_authorized=(runtime_dir.client_keys.public,))


def test_sockets_are_in_the_private_directory_by_default(runtime_dir: RuntimeDir) -> None:
    assert kv_events_config(EngineOptions(), runtime_dir, ONLY) is None
    config = config_of(runtime_dir)
    assert config == KVEventsConfig(
        endpoint=Endpoint(f"ipc://{runtime_dir.path}/events.sock"),
        replay_endpoint=Endpoint(f"ipc://{runtime_dir.path}/replay.sock"),
    )
    second = config_of(runtime_dir, replicas(("unified",) * 2)[1])
    assert second.endpoint != config.endpoint
    assert second.engine_number == 1
    assert event_source(config, runtime_dir) == EventSource(
        config.endpoint, config.replay_endpoint, "kv-events"
    )


def test_every_setting_reaches_the_engine(runtime_dir: RuntimeDir) -> None:
    config = config_of(
        runtime_dir,
        kv_events_endpoint="tcp://127.0.0.1:5557",
        kv_events_replay_endpoint="tcp://[::1]:5657",
        kv_events_topic="kv@host@model",
        kv_events_buffer=77,
        kv_events_format="maps",
        kv_events_hashes="int",
    )
    assert config == KVEventsConfig(
        endpoint=Endpoint("tcp://127.0.0.1:5557"),
        replay_endpoint=Endpoint("tcp://[::1]:5657"),
        kv_events_topic="kv@host@model",
        kv_events_buffer=77,
        kv_events_format="maps",
        kv_events_hashes="int",
    )


def test_each_engine_has_ports_and_files_of_its_own(runtime_dir: RuntimeDir, private: Path) -> None:
    addresses = {
        "kv_events_endpoint": "tcp://127.0.0.1:5557",
        "kv_events_replay_endpoint": f"ipc://{private}/replay",
    }
    configs = [
        config_of(runtime_dir, replica, **addresses) for replica in replicas(("unified",) * 3)
    ]
    assert [config.endpoint.address for config in configs] == [
        f"tcp://127.0.0.1:{port}" for port in (5557, 5558, 5559)
    ]
    assert [config.replay_endpoint.address for config in configs] == [
        f"ipc://{private}/replay-{number}" for number in range(3)
    ]


@pytest.mark.parametrize(
    ("replay", "num_engines"),
    [("tcp://127.0.0.1:5557", 1), ("tcp://127.0.0.1:5558", 2), ("tcp://127.0.0.1:5556", 2)],
)
def test_ports_that_overlap_are_rejected(
    runtime_dir: RuntimeDir, replay: str, num_engines: int
) -> None:
    with pytest.raises(ConfigError, match="overlap"):
        config_of(
            runtime_dir,
            replicas(("unified",) * num_engines)[0],
            kv_events_endpoint="tcp://127.0.0.1:5557",
            kv_events_replay_endpoint=replay,
        )


@pytest.mark.parametrize("address", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://host:5557"])
def test_tcp_beyond_this_host_needs_keys(
    runtime_dir: RuntimeDir, private: Path, address: str
) -> None:
    with pytest.raises(ConfigError, match=r"tokens of all prompts.*longshore keys create"):
        config_of(runtime_dir, kv_events_endpoint=address, state_dir=private)
    EventKeys(StateDir(private)).authorize("router", is_new=True, today="2026-01-31")
    config = config_of(runtime_dir, kv_events_endpoint=address, state_dir=private)
    assert config.endpoint.curve == keys_with_gateways(runtime_dir, private)
    source = event_source(config, runtime_dir)
    assert source.endpoint.address in ("tcp://127.0.0.1:5557", "tcp://host:5557")
    assert source.replay_endpoint.address == config.replay_endpoint.address
    for ours, theirs in (
        (source.endpoint, config.endpoint),
        (source.replay_endpoint, config.replay_endpoint),
    ):
        assert ours.curve is not None
        assert theirs.curve is not None
        assert ours.curve.server == theirs.curve.public
        assert ours.curve.public in theirs.curve.also_authorized
        assert ours.curve.secret == runtime_dir.client_keys.secret


def test_with_keys_every_socket_of_events_has_them(runtime_dir: RuntimeDir, private: Path) -> None:
    keys = EventKeys(StateDir(private / "state"))
    keys.authorize("router", is_new=True, today="2026-01-31")
    for address in (None, "tcp://127.0.0.1:5557", f"ipc://{private}/events"):
        config = config_of(runtime_dir, kv_events_endpoint=address, state_dir=private / "state")
        expected = keys_with_gateways(runtime_dir, private / "state")
        assert config.endpoint.curve == config.replay_endpoint.curve == expected


@pytest.mark.parametrize("address", ["5557", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "udp://a:1",
                                     "tcp://127.0.0.1:65536", "inproc://events"])  # fmt: skip
def test_other_addresses_are_rejected(runtime_dir: RuntimeDir, address: str) -> None:
    with pytest.raises(ConfigError, match="must be ipc://PATH or tcp://ADDRESS:PORT"):
        config_of(runtime_dir, kv_events_endpoint=address)


def test_socket_in_a_directory_of_others_is_rejected(
    runtime_dir: RuntimeDir, private: Path
) -> None:
    for path in (Path("/tmp/events"), private / "missing" / "events"):
        with pytest.raises(ConfigError, match="must be in an existing directory that only you"):
            config_of(runtime_dir, kv_events_endpoint=f"ipc://{path}")


def test_socket_of_another_process_is_not_replaced(runtime_dir: RuntimeDir, private: Path) -> None:
    path = private / "events"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match="is used by another process"):
            config_of(runtime_dir, kv_events_endpoint=f"ipc://{path}")
    assert config_of(runtime_dir, kv_events_endpoint=f"ipc://{path}")  # left by one that ended


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_events_endpoint": "ipc:///a"}, "kv_events_endpoint is set, but"),
        ({"kv_events_replay_endpoint": "ipc:///a"}, "kv_events_replay_endpoint is set, but"),
        (
            {"enable_kv_cache_events": True, "enable_prefix_caching": False},
            "needs enable_prefix_caching",
        ),
        ({"kv_events_buffer": 0}, "kv_events_buffer=0"),
        ({"kv_events_format": "json"}, "kv_events_format='json' is unknown"),
        ({"kv_events_hashes": "hex"}, "kv_events_hashes='hex' is unknown"),
    ],
)
def test_settings_that_contradict_each_other_are_rejected(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**settings)
