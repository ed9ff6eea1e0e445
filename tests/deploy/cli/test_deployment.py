"""What a node runs, up to the configuration of its processes."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longshore.deploy.cli.deployment import Deployment, prepare
from longshore.deploy.gateway.api.sealed_reasoning import ReasoningSeal
from longshore.deploy.gateway.config import GatewayConfig
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.deploy.model.folder import read_model_folder
from longshore.deploy.settings.options import ServeOptions
from longshore.deploy.supervisor.engine_config import engine_processes
from longshore.deploy.supervisor.replica import Replica
from longshore.deploy.supervisor.runtime_dir import RuntimeDir
from longshore.deploy.supervisor.state_dir import reasoning_key
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
    return prepare([read_model_folder(DEMO_MODEL_DIR)], plan_node(read_topology(path), name))


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
    for before, after in zip(spec.config.models, again.models, strict=True):
        assert after.members == before.members
    assert not again.awaits_all_engines
    return spec.config


def test_a_gateway_without_engines_on_its_node_divides_requests_among_those_of_others(
    tmp_path: Path, runtime_dir: RuntimeDir
) -> None:
    config = gateway_of(deployment_of(tmp_path, "router"), runtime_dir)
    assert [(member.number, member.role) for member in config.models[0].members] == [
        (0, "prefill"),
        (1, "decode"),
    ]
    addresses = [member.clients.address for member in config.models[0].members]
    assert addresses == ["tcp://10.0.0.1:9000", "tcp://10.0.0.2:9000"]
    assert config.transfers.hosts == ("10.0.0.1", "10.0.0.2")
    assert (config.awaits_engines, config.num_elsewhere) == (False, 3)


def test_gateways_have_a_key_for_reasoning_but_not_the_seed_that_it_is_derived_from(
    tmp_path: Path, runtime_dir: RuntimeDir
) -> None:
    deployment = deployment_of(tmp_path, "router")
    seed, key = deployment.plan.hash_seed, gateway_of(deployment, runtime_dir).reasoning_key
    assert key == reasoning_key(seed).hex() != seed.hex()
    assert reasoning_key(b"another seed") != reasoning_key(seed)
    assert (
        ReasoningSeal(reasoning_key(seed)).open(ReasoningSeal(bytes.fromhex(key)).seal("a")) == "a"
    )


def test_engines_of_one_host_are_local_to_its_gateways(
    tmp_path: Path, runtime_dir: RuntimeDir
) -> None:
    options = ServeOptions(
        device="cpu", replicas=2, routing_policy="prefix_aware", state_dir=tmp_path / "state"
    )
    node = whole_deployment(options)
    config = gateway_of(prepare([read_model_folder(DEMO_MODEL_DIR)], node), runtime_dir)
    clients = [runtime_dir.endpoint(f"clients-{number}") for number in range(2)]
    assert [member.clients for member in config.models[0].members] == clients
    assert all(member.events is not None for member in config.models[0].members)
    assert config.transfers.hosts == ()
    assert (config.awaits_engines, config.num_elsewhere) == (True, 0)


def test_several_models_have_engines_with_consecutive_numbers_and_gpus(
    tmp_path: Path, runtime_dir: RuntimeDir
) -> None:
    def settings(name: str, **values: Any) -> ServeOptions:
        state_dir = tmp_path / "state"
        return ServeOptions(served_model_name=(name,), state_dir=state_dir, **values)

    of_models = [
        settings("a", device="cpu"),
        settings("b", replicas=2, num_blocks=300, device="cpu"),
    ]
    node = whole_deployment(of_models[0], of_models)
    folder = read_model_folder(DEMO_MODEL_DIR)
    deployment = prepare([folder, folder], node)
    config = gateway_of(deployment, runtime_dir)
    found = [(each.name, [m.number for m in each.members]) for each in config.models]
    assert found == [("a", [0]), ("b", [1, 2])]
    plans = [deployment.plan_of(engine) for engine in node.engines]
    assert [each.options.num_blocks for each in plans] == [None, 300, 300]
    with pytest.raises(ConfigError, match="2 models have the name 'a'"):
        prepare([folder, folder], whole_deployment(of_models[0], of_models[:1] * 2))
    split = ServeOptions(prefill=1, decode=1)
    with pytest.raises(ConfigError, match="are for a server of one model, and 2 are given"):
        whole_deployment(split, [split, split])
    on_gpus = [
        settings("a", tensor_parallel_size=2),
        settings("b", device="cpu"),
        settings("c", replicas=2),
    ]
    devices = [each.devices for each in whole_deployment(on_gpus[0], on_gpus).replicas]
    assert devices == [(0, 1), (), (2,), (3,)]


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
            prepare([read_model_folder(DEMO_MODEL_DIR)], node)


@pytest.mark.parametrize("count", [1, 2])
def test_workers_use_the_gpus_of_the_topology(runtime_dir: RuntimeDir, count: int) -> None:
    node = whole_deployment(ServeOptions(device="cpu"))
    plan = replace(prepare([read_model_folder(DEMO_MODEL_DIR)], node).plan, device="cuda")
    (worker, _), _ = engine_processes(plan, runtime_dir, Replica(0, count, devices=(5,)))
    assert worker.config.worker.device == "cuda:5"  # type: ignore[attr-defined]
