"""What is reserved in Ray for each node; tests/integration/test_ray_launcher.py runs a cluster."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longshore.deploy.cli.main import app
from longshore.deploy.topology.file import Topology, read_topology
from longshore.deploy.topology.node_runner import NodeStatus
from longshore.deploy.topology.ray_launcher import _Watch, bundles_of
from longshore.protocol.errors import ConfigError
from longshore.protocol.install_command import install_command

FILE = """\
[keys]
node = "node.json"
[nodes.a]
address = "10.0.0.1"
public_key = "{a}"
[nodes.b]
address = "10.0.0.2"
public_key = "{b}"
[[engines]]
node = "a"
port = 9000
device = "cuda"
tensor_parallel_size = 2
{devices}
[[engines]]
node = "b"
port = 9000
[[gateways]]
node = "a"
port = 8000
"""


def topology(folder: Path, devices: str = "") -> Topology:
    path = folder / "topology.toml"
    path.write_text(FILE.format(a="a" * 40, b="b" * 40, devices=devices))
    return read_topology(path)


def host(address: str, **resources: float) -> dict[str, Any]:
    named = {name.replace("_", ":"): count for name, count in resources.items()}
    return {"NodeManagerAddress": address, "Resources": {f"node:{address}": 1.0, **named}}


def test_a_node_is_placed_by_its_address_or_its_name_with_its_gpus(tmp_path: Path) -> None:
    alive = [host("10.0.0.1", GPU=8.0), host("192.168.0.2", longshore_b=1.0)]
    assert bundles_of(topology(tmp_path), alive) == {
        "a": {"node:10.0.0.1": 0.001, "GPU": 2.0},
        "b": {"longshore:b": 0.001},
    }
    with_gpu = [alive[0], host("10.0.0.2", GPU=1.0)]
    assert bundles_of(topology(tmp_path), with_gpu)["b"] == {"node:10.0.0.2": 0.001, "GPU": 1.0}


def test_a_node_that_is_not_in_the_cluster_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nodes.b: no node of the Ray cluster has the address"):
        bundles_of(topology(tmp_path), [host("10.0.0.1", GPU=8.0)])


def test_numbers_of_gpus_that_ray_does_not_give_are_rejected(tmp_path: Path) -> None:
    alive = [host("10.0.0.1", GPU=8.0), host("10.0.0.2")]
    with pytest.raises(ConfigError, match=r"nodes.a: .* GPU 3, but .* from 0 to 1"):
        bundles_of(topology(tmp_path, "devices = [2, 3]"), alive)
    after = "devices = [1, 2]\n[[engines]]\nnode = 'a'\nport = 9100\ndevice = 'cuda'"
    with pytest.raises(ConfigError, match=r"nodes.a: .* GPU 3, but .* from 0 to 2"):
        bundles_of(topology(tmp_path, after), alive)


class FakeRay:
    """A node that does not answer until `is_answering`."""

    def __init__(self) -> None:
        self.is_answering = False
        self.num_calls = 0
        self.status = self
        self.exceptions = SimpleNamespace(RayError=OSError)

    def remote(self) -> object:
        self.num_calls += 1
        return self.num_calls

    def wait(self, answers: list[object], timeout: float) -> tuple[list[object], list[object]]:
        return (answers, []) if self.is_answering else ([], answers)

    def get(self, answer: object) -> NodeStatus:
        return NodeStatus(1, (f"answer {answer}",), None)


def test_a_node_that_does_not_answer_is_asked_once() -> None:
    ray, said = FakeRay(), list[str]()
    watch = _Watch(ray, {"a": ray}, said.append)
    for _ in range(5):
        watch.poll()
    assert ray.num_calls == 1
    ray.is_answering = True
    watch.poll()
    watch.poll()
    assert ray.num_calls == 2
    assert said == ["node a: answer 1"]


def serve(*arguments: str) -> None:
    app(["serve", *arguments], exit_on_error=False, result_action="return_value")


def test_ray_is_named_if_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    path = str(topology(tmp_path).path)
    with pytest.raises(
        ConfigError, match="needs the package ray .*" + re.escape(install_command("ray"))
    ):
        serve("--topology", path, "--launcher", "ray")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--launcher", "ray", "--api-key", "k"], "keys never pass through Ray"),
        (["--block-size", "32"], "block_size is set, but with --topology all settings come from"),
        ([], "has 2 nodes, and this command starts one"),
        (["/models/other", "--launcher", "ray"], "MODEL is /models/other, but the topology has"),
    ],
)
def test_what_the_file_decides_is_not_taken_from_flags(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        serve("--topology", str(topology(tmp_path).path), *arguments)


def test_a_launcher_without_a_topology_is_rejected() -> None:
    with pytest.raises(ConfigError, match="starts the nodes of a topology, and topology is not"):
        serve("--launcher", "ray")
