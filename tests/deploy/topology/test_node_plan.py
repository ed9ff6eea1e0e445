"""What each node starts, and with which keys it talks to the others."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from longshore.deploy.topology.file import Topology, read_topology
from longshore.deploy.topology.keys import create_node_keys, create_transfer_secret
from longshore.deploy.topology.node_plan import plan_node
from longshore.protocol.errors import ConfigError

FILE = """\
[keys]
transfer_secret = "{folder}/transfer.key"

[nodes.a]
address = "10.0.0.1"
public_key = "{a}"
keys = {{node = "{folder}/a.json"}}

[nodes.b]
address = "10.0.0.2"
public_key = "{b}"
keys = {{node = "{folder}/b.json"}}

[[engines]]
node = "a"
role = "prefill"
port = 9000
tensor_parallel_size = 2

[[engines]]
node = "b"
role = "decode"
port = 9100
block_size = 32
kv_connector = "multi"

[engines.kv_connector_config]
connectors = [
  {{connector = "nixl", options = {{host = "192.168.0.2", lease_s = 3}}}},
  {{connector = "offloading", options = {{cpu_bytes = 1000}}}},
]

[[engines]]
node = "a"
role = "prefill"
port = 9010
devices = [5]

[[gateways]]
node = "a"
port = 8000
count = 2

[[gateways]]
node = "b"
port = 8000
"""


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    keys = {name: create_node_keys(tmp_path / f"{name}.json") for name in "ab"}
    create_transfer_secret(tmp_path / "transfer.key")
    path = tmp_path / "topology.toml"
    path.write_text(FILE.format(folder=tmp_path, **keys))
    return read_topology(path)


def test_a_node_starts_its_own_engines_under_their_numbers(topology: Topology) -> None:
    plan = plan_node(topology, "a")
    first, second = plan.engines
    assert [engine.replica.number for engine in plan.engines] == [0, 2]
    assert plan.roles == ("prefill", "decode", "prefill")
    assert (plan.num_gateways, plan.num_gateways_elsewhere, plan.options.gateways) == (2, 1, 2)
    assert [first.replica.gpu(rank, 2) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert second.replica.gpu(0, 1) == "cuda:5"
    assert first.replica.num_on_host == 2


def test_an_engine_without_devices_gets_those_after_the_engines_before_it(tmp_path: Path) -> None:
    engines = ["devices = [1]", "tensor_parallel_size = 2", 'device = "cpu"', "", "devices = [0]"]
    path = tmp_path / "topology.toml"
    path.write_text(
        '[nodes.a]\naddress = "127.0.0.1"\n[[gateways]]\nnode = "a"\nport = 8000\n'
        + "".join(f'[[engines]]\nnode = "a"\n{settings}\n' for settings in engines)
    )
    plan = plan_node(read_topology(path), "a")
    devices = [engine.replica.devices for engine in plan.engines]
    assert devices == [(1,), (2, 3), (), (4,), (0,)]


def test_engines_accept_the_nodes_with_gateways_and_gateways_check_the_engines_node(
    topology: Topology,
) -> None:
    keys = {name: topology.nodes[name].public_key for name in "ab"}
    (engine,) = plan_node(topology, "b").engines
    assert engine.sockets is not None
    listening = engine.sockets.clients
    assert listening.address == "tcp://10.0.0.2:9100"
    assert listening.curve is not None
    assert listening.curve.public == keys["b"]
    assert listening.curve.also_authorized == (keys["a"], keys["b"])
    assert plan_node(topology, "a").remote[1].events is None
    settings = replace(topology.settings, routing_policy="prefix_aware")
    remote = plan_node(replace(topology, settings=settings), "a").remote[1]
    assert remote.clients.address == listening.address
    assert remote.events is not None
    assert remote.events.endpoint.address == "tcp://10.0.0.2:9101"
    for endpoint in (remote.clients, remote.events.endpoint, remote.events.replay_endpoint):
        assert endpoint.curve is not None
        assert (endpoint.curve.public, endpoint.curve.server) == (keys["a"], keys["b"])


def test_pull_connectors_get_the_secret_and_the_addresses_of_the_topology(
    topology: Topology, tmp_path: Path
) -> None:
    first, _ = plan_node(topology, "a").engines
    wanted = {
        "host": "10.0.0.1",
        "port": 9003,
        "remote_hosts": ["10.0.0.1", "192.168.0.2"],
        "secret_file": f"{tmp_path}/transfer.key",
    }
    assert first.options.kv_connector == "nixl"
    assert json.loads(first.options.kv_connector_config) == wanted
    (other,) = plan_node(topology, "b").engines
    pull, offloading = json.loads(other.options.kv_connector_config)["connectors"]
    assert pull["options"] == {**wanted, "host": "192.168.0.2", "port": 9103, "lease_s": 3}
    assert offloading["options"] == {"cpu_bytes": 1000}


def test_encoder_connectors_get_the_secret_and_the_addresses_of_the_others(
    tmp_path: Path,
) -> None:
    create_transfer_secret(tmp_path / "transfer.key")
    keys = {name: create_node_keys(tmp_path / f"{name}.json") for name in "abc"}
    roles = {"a": "ec_both", "b": "ec_producer", "c": "ec_consumer"}
    tables = [
        f'[keys]\ntransfer_secret = "{tmp_path}/transfer.key"\n'
        '[settings]\nec_connector = "nixl"\n[[gateways]]\nnode = "a"\nport = 8000'
    ]
    for number, (name, role) in enumerate(roles.items(), 1):
        tables += [
            f'[nodes.{name}]\naddress = "fd00::{number}"\npublic_key = "{keys[name]}"\n'
            f'keys = {{node = "{tmp_path}/{name}.json"}}',
            f'[[engines]]\nnode = "{name}"\nport = 9000\nec_role = "{role}"',
        ]
    tables.append('ec_connector_config = {lease_s = 3, host = "fd01::3"}')
    path = tmp_path / "topology.toml"
    path.write_text("\n".join(tables))
    found = {}
    for name in roles:
        (engine,) = plan_node(read_topology(path), name).engines
        found[name] = json.loads(engine.options.ec_connector_config)
    common = {"port": 9003, "secret_file": f"{tmp_path}/transfer.key"}
    a, b = "[fd00::1]:9003", "[fd00::2]:9003"
    assert found == {
        "a": {**common, "host": "fd00::1", "peers": [b]},
        "b": {**common, "host": "fd00::2"},
        "c": {**common, "host": "fd01::3", "peers": [a, b], "lease_s": 3},
    }


def test_other_nodes_are_planned_without_their_devices_and_connectors(topology: Topology) -> None:
    first, engine, second = topology.engines
    options = replace(
        engine.options, scheduling_policy="own.package:Policy", structured_output_backend="xgrammar"
    )
    engines = (first, replace(engine, options=options), second)
    (other,) = plan_node(replace(topology, engines=engines), "a").others
    assert (other.device, other.kv_connector, other.block_size) == ("cpu", None, 32)
    assert (other.scheduling_policy, other.structured_output_backend) == (None, "auto")


def test_every_node_knows_which_engines_pull_without_their_secret(topology: Topology) -> None:
    for node in "ab":
        pulls = plan_node(topology, node).pulls
        assert [pulls[number].host for number in range(3)] == [
            "10.0.0.1",
            "192.168.0.2",
            "10.0.0.1",
        ]
        assert pulls[0].remote_hosts == ("10.0.0.1", "192.168.0.2")
        assert (pulls[1].lease_s, pulls[1].secret) == (3, None)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("a.json", "unlink", "a.json cannot be read .No such file.*longshore keys node"),
        ("a.json", "chmod", "a.json has mode 0644, so other users can use it"),
        ("a.json", "write", "a.json is damaged"),
        ("transfer.key", "unlink", "transfer.key cannot be read .*longshore keys transfer"),
        ("transfer.key", "write", "transfer.key is damaged"),
    ],
)
def test_key_files_are_checked(
    topology: Topology, tmp_path: Path, file: str, change: str, message: str
) -> None:
    path = tmp_path / file
    match change:
        case "unlink":
            path.unlink()
        case "chmod":
            path.chmod(0o644)
        case _:
            path.write_text("{}")
    with pytest.raises(ConfigError, match=message):
        plan_node(topology, "a")


def test_a_secret_key_that_is_none_is_rejected(topology: Topology, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"public": "a" * 40, "secret": "~" * 40}))
    with pytest.raises(ConfigError, match=r"a.json is damaged.*longshore keys node"):
        plan_node(topology, "a")


def test_a_key_file_of_another_node_is_rejected(topology: Topology, tmp_path: Path) -> None:
    (tmp_path / "b.json").replace(tmp_path / "a.json")
    with pytest.raises(ConfigError, match=r"but the topology has .* for this node"):
        plan_node(topology, "a")


def test_an_unknown_node_is_named(topology: Topology) -> None:
    with pytest.raises(ConfigError, match="no node 'c'; the nodes are a, b"):
        plan_node(topology, "c")
