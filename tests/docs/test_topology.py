"""The files of docs/topology.md are valid."""

import re
import tomllib
from pathlib import Path

import yaml

from longshore.deploy.topology.checks import check_topology
from longshore.deploy.topology.file import PORTS_PER_ENGINE, read_topology
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "topology.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_example_can_work(tmp_path: Path) -> None:
    (text,) = blocks("toml")
    path = tmp_path / "topology.toml"
    path.write_text(text)
    topology = read_topology(path)
    check_topology(topology)
    assert [engine.role for engine in topology.engines] == ["prefill", "decode"]
    # Every key of the example is in the table.
    read = tomllib.loads(text)
    for key in (*read["keys"], *read["nodes"]["a"], *read["gateways"][0]):
        assert re.search(rf"^\|.*[`.]{key}`", PAGE.read_text(), re.MULTILINE), key


def test_the_table_of_ports_has_all_ports() -> None:
    offsets = re.findall(
        r"^\| `engines.port`(.*?) \| (?:all|engines)", PAGE.read_text(), re.MULTILINE
    )
    assert offsets == ["", " + 1, + 2", f" + {PORTS_PER_ENGINE - 1}"], offsets


def test_the_deployment_is_yaml_with_the_command() -> None:
    (text,) = blocks("yaml")
    (container,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["node", "--topology"]
