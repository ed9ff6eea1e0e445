"""The files of docs/topology.md are valid."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from longshore.deploy.topology.checks import check_topology
from longshore.deploy.topology.file import PORTS_PER_ENGINE, read_topology
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "topology.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_the_examples_can_work(number: int, tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(blocks("toml")[number])
    topology = read_topology(path)
    check_topology(topology)
    assert [engine.role for engine in topology.engines] == ["prefill", "decode"]


def test_the_table_has_every_key_of_the_example() -> None:
    read = tomllib.loads(blocks("toml")[-1])
    for key in (*read["keys"], *read["nodes"]["a"], *read["gateways"][0]):
        assert re.search(rf"^\|.*[`.]{key}`", PAGE.read_text(), re.MULTILINE), key


def test_the_table_of_ports_has_all_ports() -> None:
    offsets = re.findall(
        r"^\| `engines.port`(.*?) \| (?:all|engines)", PAGE.read_text(), re.MULTILINE
    )
    assert offsets == ["", " + 1, + 2", f" + {PORTS_PER_ENGINE - 1}"], offsets


def test_the_values_are_those_of_the_chart() -> None:
    chart = ROOT / "deploy" / "kubernetes" / "chart"
    (text,) = blocks("yaml")
    topology = yaml.safe_load(text)["topology"]
    assert topology.keys() == yaml.safe_load((chart / "values.yaml").read_text())["topology"].keys()
    tomllib.loads(topology["file"])
    template = (chart / "templates" / "topology.yaml").read_text()
    used = set(re.findall(r"\$node\.(\w+)", template))
    assert {key for node in topology["nodes"].values() for key in node} == used
