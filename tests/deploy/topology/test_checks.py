"""What cannot work in a topology is found before anything starts."""

import re
from pathlib import Path

import pytest

from longshore.deploy.topology.checks import check_topology
from longshore.deploy.topology.file import read_topology
from longshore.protocol.errors import ConfigError

KEYS = {"a": "a" * 40, "b": "b" * 40}
FILE = f"""\
[keys]
node = "node.json"
transfer_secret = "transfer.key"

[nodes.a]
address = "10.0.0.1"
public_key = "{KEYS["a"]}"

[nodes.b]
address = "10.0.0.2"
public_key = "{KEYS["b"]}"

[[engines]]
node = "a"
role = "prefill"
port = 9000

[[engines]]
node = "b"
role = "decode"
port = 9000

[[gateways]]
node = "a"
port = 8000
"""


def check(tmp_path: Path, old: str = "", new: str = "") -> None:
    assert old in FILE
    path = tmp_path / "topology.toml"
    path.write_text(FILE.replace(old, new, 1) if old else FILE)
    check_topology(read_topology(path))


def test_a_good_file_passes(tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("10.0.0.1", "0.0.0.0", "nodes.a.address: 0.0.0.0 is not the address of one host"),
        ("10.0.0.1", "host-a", "nodes.a.address: 'host-a' is not an IP address"),
        ("10.0.0.1", "127.0.0.1", "nodes.a.address: 127.0.0.1 is a loopback address, which node b"),
        (
            'node = "b"',
            'node = "c"',
            r"engines\[1\].node: there is no node 'c'; the nodes are a, b",
        ),
        (
            "[keys]",
            '[nodes.c]\naddress = "10.0.0.3"\n[keys]',
            "nodes.c: it has neither engines nor",
        ),
        (
            "[[gateways]]",
            '[[gateways]]\nnode = "a"\nport = 8001\n[[gateways]]',
            r"gateways\[1\].node: node a has gateways already",
        ),
        ('"decode"', '"prefill"', "all engines have the role prefill, so no request could be"),
        ('role = "decode"', "", r"engines\[1\].role: unified engines compute whole requests"),
        (
            'role = "decode"',
            'role = "decode"\nkv_connector = "mooncake"',
            r"engines\[1\].kv_connector: mooncake cannot pull from nixl",
        ),
        (
            'role = "decode"',
            'role = "decode"\nkv_connector = "offloading"',
            r"engines\[1\].kv_connector: 'offloading' does not pull KV",
        ),
        (
            'role = "decode"',
            'role = "decode"\nkv_connector = "multi"\n'
            'kv_connector_config = {connectors = [5, {connector = "offloading"}]}',
            r"engines\[1\].kv_connector: 'multi' does not pull KV",
        ),
        (
            'role = "decode"',
            'role = "decode"\nkv_cache_dtype = "fp8_e4m3"',
            r"engines\[1\].kv_cache_dtype: 'fp8_e4m3' is not 'auto', which engines\[0\] has",
        ),
        (
            'role = "decode"',
            'role = "decode"\nkv_connector = "nixl"\nkv_role = "kv_consumer"',
            r"engines\[1\].kv_role: 'kv_consumer' is not supported with the role decode",
        ),
        (
            "port = 8000",
            'port = 9003\nhost = "0.0.0.0"',
            r"gateways\[0\]: port 9003 \(HTTP\) is also a port of engines\[0\]",
        ),
        (
            '"b"\nrole = "decode"\nport = 9000',
            '"b"\nrole = "decode"',
            r"engines\[1\].port: gateways of other nodes than b use this engine",
        ),
        ("10.0.0.2", "10.0.0.1", r"engines\[1\]: port 9000 \(requests\) is also a port of engines"),
        (f'public_key = "{KEYS["b"]}"', "", "nodes.b.public_key: engines and gateways are on diff"),
        (KEYS["b"], "~" * 40, "nodes.b.public_key: '~~~.*' is not a key. Write the one that"),
        (KEYS["b"], "#" * 40, "nodes.b.public_key: '###.*' is not a key"),
        (KEYS["b"], KEYS["a"], "nodes.b.public_key: node a has the same key"),
        ('node = "node.json"', "", "keys.node: it is missing"),
        ('transfer_secret = "transfer.key"', "", "keys.transfer_secret: it is missing"),
        (
            "[keys]",
            '[settings]\nrouting_policy = "prefix_aware"\n[keys]',
            "keys.block_hash_seed: it is missing",
        ),
    ],
)
def test_an_error_names_the_key_and_what_to_do(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, old, new)


ENCODING = '[settings]\nec_connector = "nixl"\n[keys]'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", ""),
        ("port = 9000", 'port = 9000\nec_role = "ec_consumer"', r"engines\[1\].ec_role: 'ec_both'"),
        ('transfer_secret = "transfer.key"', "", "keys.transfer_secret: .* encoder outputs"),
    ],
)
def test_engines_that_hand_over_encoder_outputs_find_each_other(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(re.sub('role = "[a-z]*"', "", FILE.replace("[keys]", ENCODING)))
    text = path.read_text()
    path.write_text(text.replace(old, new, 1) if old else text)
    if message:
        with pytest.raises(ConfigError, match=message):
            check_topology(read_topology(path))
    else:
        check_topology(read_topology(path))


def test_an_engine_that_offers_encoder_outputs_has_a_port(tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(
        '[settings]\nec_connector = "nixl"\n[nodes.a]\naddress = "127.0.0.1"\n[[engines]]\n'
        'node = "a"\n[[engines]]\nnode = "a"\n[[gateways]]\nnode = "a"\nport = 8000\n'
    )
    with pytest.raises(ConfigError, match=r"engines\[0\].port: it offers encoder outputs by nixl"):
        check_topology(read_topology(path))


def test_settings_of_split_requests_need_engines_with_roles(tmp_path: Path) -> None:
    settings = "[settings]\ndisaggregation_min_tokens = 65\n"
    check(tmp_path, "[keys]", f"{settings}[keys]")
    path = tmp_path / "topology.toml"
    path.write_text(re.sub('role = "[a-z]*"', "", path.read_text()))
    with pytest.raises(ConfigError, match=r"settings.disaggregation_min_tokens: no engine has"):
        check_topology(read_topology(path))


def test_connectors_of_others_may_pull(tmp_path: Path) -> None:
    check(tmp_path, "[keys]", '[settings]\nkv_connector = "theirs:Mine"\n[keys]')


def test_a_topology_of_one_node_needs_neither_keys_nor_ports(tmp_path: Path) -> None:
    path = tmp_path / "topology.toml"
    path.write_text(
        '[nodes.a]\naddress = "127.0.0.1"\n[[engines]]\nnode = "a"\nrole = "prefill"\n'
        '[[engines]]\nnode = "a"\nrole = "decode"\n[[gateways]]\nnode = "a"\nport = 8000\n'
    )
    check_topology(read_topology(path))
