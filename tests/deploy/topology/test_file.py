"""Reading a topology file."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from longshore.deploy.topology.file import Topology, read_topology
from longshore.protocol.errors import ConfigError

FILE = """\
[settings]
max_model_len = 2048
api_key_file = "/etc/longshore/keys.toml"

[nodes.a]
address = "10.0.0.1"

[[engines]]
node = "a"
block_size = 32
tensor_parallel_size = 2

[[gateways]]
node = "a"
port = 8000
"""


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Topology]:
    """Reads FILE with one text replaced."""

    def change(old: str = "", new: str = "") -> Topology:
        assert old in FILE
        path = tmp_path / "topology.toml"
        path.write_text(FILE.replace(old, new) if old else FILE)
        return read_topology(path)

    return change


def test_engines_have_the_common_settings_and_their_own(read: Callable[..., Topology]) -> None:
    topology = read(
        "block_size = 32",
        'kv_connector = "nixl"\nkv_connector_config = {lease_s = 3}\n'
        'ec_connector = "nixl"\nec_connector_config = {host = "10.0.0.1"}',
    )
    (engine,) = topology.engines
    assert engine.options.ec_connector_config == '{"host":"10.0.0.1"}'
    assert (engine.options.max_model_len, engine.options.tensor_parallel_size) == (2048, 2)
    assert engine.options.kv_connector_config == '{"lease_s":3}'
    assert topology.settings.tensor_parallel_size == 1
    assert (engine.number, engine.node, engine.role, engine.port) == (0, "a", "unified", None)
    # A node without gateways does not have the key file, but schedules as the others.
    assert engine.options.scheduling_policy == "fair"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("block_size", "blok_size", r"engines\[0\].blok_size is not a setting; did you mean block"),
        ("max_model_len", "max_len", r"settings.max_len is not a setting"),
        ("address", "adress", r"nodes.a: Object .*`adress`|nodes.a: .*missing.*address"),
        ("port = 8000", "port = 8000\nhosts = 1", r"gateways\[0\]: .*unknown field `hosts`"),
        ("[settings]", "[setings]\n[settings]", r"unknown field `setings`"),
        ("port = 8000", "port = 70000", r"gateways\[0\].port: Expected `int` <= 65535"),
        ("block_size = 32", 'block_size = "32"', r"engines\[0\].block_size: Expected `int"),
        ("block_size = 32", 'role = "both"', r"engines\[0\].role: Invalid enum value 'both'"),
        ("block_size = 32", 'kv_role = "x"', r"engines\[0\].kv_role: Invalid enum value 'x'"),
        ("block_size = 32", "pipeline_parallel_size = 65", r"engines\[0\]: pipeline_parallel_size"),
        ("block_size = 32", "devices = [0]", r"engines\[0\].devices has 1 GPUs, but .* need 2"),
        (
            "block_size = 32",
            'devices = [0, 1]\ndevice = "cpu"',
            r"engines\[0\].devices are numbers of GPUs, but device is 'cpu'",
        ),
        (
            'node = "a"\nblock',
            'node = ["a", "b"]\nblock',
            "ranks of one engine must be on one node",
        ),
        ("block_size = 32", 'ranks = ["a:0", "b:0"]', "ranks of one engine must be on one node"),
        ("block_size = 32", "max_model_len = 8", r"engines\[0\].max_model_len cannot be set here"),
        (
            "max_model_len = 2048",
            "replicas = 2",
            r"settings.replicas cannot be set here: write one",
        ),
        (
            "max_model_len = 2048",
            'api_key = ["k"]',
            "settings.api_key cannot be set here: keys are",
        ),
        ("nodes.a", 'nodes."a b"', "'a b' is not a name of a node"),
        ("[settings]", "[settings", "is not valid TOML"),
    ],
)
def test_an_error_names_the_key(
    read: Callable[..., Topology], old: str, new: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(old, new)


def test_a_missing_file_and_a_large_one_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_topology(path)
    path.write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="has more than 1048576 bytes"):
        read_topology(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="cannot be read: it is not a regular file"):
        read_topology(path)
