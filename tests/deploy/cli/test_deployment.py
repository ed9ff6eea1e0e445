"""What a node runs, up to the configuration of its processes."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from longshore.deploy.cli.deployment import Deployment, prepare
from longshore.deploy.cli.options import ServeOptions
from longshore.deploy.gateway.config import GatewayConfig
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.supervisor.engine_config import engine_processes
from longshore.deploy.supervisor.replica import Replica
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.topology.file import read_topology
from longshore.deploy.topology.keys import create_node_keys, create_transfer_secret
from longshore.deploy.topology.node_plan import plan_node, whole_deployment
from longshore.protocol.errors import ConfigError

FILE = """\
[keys]
transfer_secret = "{folder}/transfer.key"

[settings]
device = "cpu"
state_dir = "{folder}/state"
kv_connector = "nixl"

[nodes.a]
address = "10.0.0.1"
public_key = "{a}"
keys = {{node = "{folder}/a.json"}}

[nodes.b]
address = "10.0.0.2"
public_key = "{b}"
keys = {{node = "{folder}/b.json"}}

[nodes.router]
address = "10.0.0.3"
public_key = "{router}"
keys = {{node = "{folder}/router.json"}}

[[engines]]
node = "a"
role = "prefill"
port = 9000
kv_connector_config = {{max_leased_share = 0.2}}

[[engines]]
node = "b"
role = "decode"
port = 9000
{engine}
[[gateways]]
node = "router"
port = 8000

[[gateways]]
node = "a"
port = 8000
count = 3
"""


def deployment_of(folder: Path, name: str, engine: str = "") -> Deployment:
    nodes = ("a", "b", "router")
    keys = {node: create_node_keys(folder / f"{node}.json") for node in nodes}
    create_transfer_secret(folder / "transfer.key")
    path = folder / "topology.toml"
    path.write_text(FILE.format(folder=folder, engine=engine, **keys))
    return prepare(read_model_folder(DEMO_MODEL_DIR), plan_node(read_topology(path), name))


@pytest.fixture
def runtime_dir() -> Iterator[RuntimeDir]:
    found = RuntimeDir()
    yield found
    found.remove()


def gateway_of(deployment: Deployment, runtime_dir: RuntimeDir) -> GatewayConfig:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        *_, spec = deployment.processes(runtime_dir, [listener])
    assert isinstance(spec.config, GatewayConfig)
    assert spec.config_after is not None
    again = spec.config_after(spec.config)
    assert isinstance(again, GatewayConfig)
    assert again.current_members == spec.config.current_members
    assert not again.awaits_all_engines
    return spec.config


def test_a_gateway_without_engines_on_its_node_divides_requests_among_those_of_others(
    tmp_path: Path, runtime_dir: RuntimeDir
) -> None:
    config = gateway_of(deployment_of(tmp_path, "router"), runtime_dir)
    assert [(member.number, member.role) for member in config.current_members] == [
        (0, "prefill"),
        (1, "decode"),
    ]
    addresses = [member.clients.address for member in config.current_members]
    assert addresses == ["tcp://10.0.0.1:9000", "tcp://10.0.0.2:9000"]
    assert config.transfers.hosts == ("10.0.0.1", "10.0.0.2")
    assert (config.awaits_engines, config.num_elsewhere) == (False, 3)


def test_engines_of_one_host_are_local_to_its_gateways(
    tmp_path: Path, runtime_dir: RuntimeDir
) -> None:
    options = ServeOptions(
        device="cpu", replicas=2, routing_policy="prefix_aware", state_dir=tmp_path / "state"
    )
    node = whole_deployment(options)
    config = gateway_of(prepare(read_model_folder(DEMO_MODEL_DIR), node), runtime_dir)
    clients = [runtime_dir.endpoint(f"clients-{number}") for number in range(2)]
    assert [member.clients for member in config.current_members] == clients
    assert all(member.events is not None for member in config.current_members)
    assert config.transfers.hosts == ()
    assert (config.awaits_engines, config.num_elsewhere) == (True, 0)


def test_engines_with_different_limits_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="different values of max_model_len "):
        deployment_of(tmp_path, "router", engine="num_blocks = 20\n")


def test_a_router_key_that_no_engine_needs_is_rejected(tmp_path: Path) -> None:
    options = ServeOptions(device="cpu", state_dir=tmp_path, router_key_file=tmp_path / "key")
    nodes = [whole_deployment(options)]
    file = tmp_path / "topology.toml"
    file.write_text(
        f'[settings]\ndevice = "cpu"\nrouter_key_file = "{tmp_path}/key"\n[nodes.a]\n'
        'address = "127.0.0.1"\n[[engines]]\nnode = "a"\n[[gateways]]\nnode = "a"\nport = 8000\n'
    )
    nodes.append(plan_node(read_topology(file), "a"))
    for node in nodes:
        with pytest.raises(ConfigError, match=r"router_key_file=.* has no effect"):
            prepare(read_model_folder(DEMO_MODEL_DIR), node)


@pytest.mark.parametrize("count", [1, 2])
def test_workers_use_the_gpus_of_the_topology(runtime_dir: RuntimeDir, count: int) -> None:
    node = whole_deployment(ServeOptions(device="cpu"))
    plan = replace(prepare(read_model_folder(DEMO_MODEL_DIR), node).plan, device="cuda")
    (worker, _), _ = engine_processes(plan, runtime_dir, Replica(0, count, devices=(5,)))
    assert worker.config.device == "cuda:5"  # type: ignore[attr-defined]
