"""The options of the offloading connector."""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from longshore.connectors.base import ConnectorConfig
from longshore.connectors.offloading.host_spec import CPUOffloadingSpec
from longshore.connectors.offloading.options import parse_size, read_options
from longshore.connectors.offloading.spec import OffloadingSpec, load_spec
from longshore.connectors.registry import load_scheduler_connector
from longshore.protocol.errors import ConfigError
from tests.conftest import ROOT
from tests.harness.kv_groups import full

ONE_GROUP: dict[str, Any] = {
    "specs": (full(16),),
    "hash_block_size": 16,
    "rank_block_bytes": (1000, 500),
}


def build(**options: Any) -> object:
    """The scheduler half, as the command line makes it."""
    config = ConnectorConfig({"cpu_bytes_to_use": "1MiB"} | options, **ONE_GROUP)
    return load_scheduler_connector("offloading", config)


@pytest.mark.req("CFG-04", "OFF-02")
def test_only_the_size_of_host_memory_must_be_given() -> None:
    options = read_options({"cpu_bytes_to_use": 1 << 20})
    assert options.host_bytes == 1 << 20
    assert (options.spec_name, options.spec_module_path) == ("CPUOffloadingSpec", None)
    assert (options.block_size, options.eviction_policy) == (None, "lru")
    assert (options.store_threshold, options.max_tracker_size) == (0, 64_000)
    assert isinstance(load_spec(ConnectorConfig(**ONE_GROUP), options), CPUOffloadingSpec)


@pytest.mark.req("CFG-05")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_bytes_to_use": 0}, "cpu_bytes_to_use=0 must be at least one byte"),
        ({"cpu_bytes_to_use": "8 apples"}, "cpu_bytes_to_use='8 apples' is not a size"),
        ({"cpu_bytes_to_use": 1499}, "cpu_bytes_to_use"),
        ({"cpu_bytes": 1}, "no option 'cpu_bytes'; its options are cpu_bytes_to_use, "),
        ({"block_size": 24}, "block_size=24 of the offloading connector must be a multiple of the"),
        ({"block_size": -16}, "block_size=-16"),
        ({"block_size": "16"}, "block_size"),
        ({"eviction_policy": "random"}, "eviction policy 'random'"),
        ({"store_threshold": -1}, "store_threshold=-1"),
        ({"store_threshold": 2, "max_tracker_size": 0}, "max_tracker_size=0"),
        ({"verify_kv": "often"}, "verify_kv"),
        ({"prefetch": "always"}, "prefetch"),
        ({"prefetch": "timeout"}, "prefetch_timeout_ms belong together"),
        ({"prefetch_timeout_ms": 5}, "prefetch_timeout_ms belong together"),
        ({"prefetch": "timeout", "prefetch_timeout_ms": 0}, "prefetch_timeout_ms"),
        ({"write_policy": "around"}, "$.write_policy`; use one of 'through', 'selective', 'back'"),
        ({"write_policy": "back"}, 'write_policy="back" writes blocks to disk'),
        ({"write_policy": "selective", "store_threshold": 1}, "store_threshold=1 stores all"),
        ({"disk_path": "/tmp/tier"}, "disk_path and disk_bytes belong together"),
        ({"disk_path": "", "disk_bytes": 1}, "disk_path is empty"),
        ({"disk_bytes": 1}, "disk_path and disk_bytes belong together"),
        ({"disk_path": "/tmp/tier", "disk_bytes": "-1"}, "disk_bytes='-1' is not a size"),
        ({"disk_path": "", "disk_bytes": "1GiB"}, "disk_path is empty"),
        ({"disk_path": "/tmp/tier", "disk_bytes": "9" * 400}, "is more than 1 EiB"),
        ({"cpu_bytes_to_use": "2000000TiB"}, "is more than 1 EiB"),
        ({"cpu_bytes_to_use": 10**30}, "cpu_bytes_to_use"),
        ({"remote_url": "memory://", "remote_retry_s": 0}, "remote_retry_s"),
        ({"spec_name": "Missing"}, "spec_name='Missing' is not an OffloadingSpec"),
        ({"spec_name": "TieredManager"}, "spec_name='TieredManager' is not an OffloadingSpec"),
        ({"spec_module_path": "no_such.module"}, "spec_module_path='no_such.module'"),
    ],
)
def test_a_wrong_option_is_rejected_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build(**options)
    assert message in str(raised.value)


@pytest.mark.req("CFG-05")
def test_a_missing_size_is_rejected_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"needs cpu_bytes_to_use, .*8GiB"):
        read_options({})


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (7, 7),
        ("7", 7),
        ("8GiB", 8 << 30),
        ("8 gb", 8 << 30),
        ("1.5K", 1536),
        ("2MiB", 2 << 20),
        (" 1TiB ", 1 << 40),
        ("12B", 12),
    ],
)
def test_sizes_have_units_of_1024(text: int | str, num_bytes: int) -> None:
    assert parse_size("size", text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1.GiB", "8XiB", "8iB iB", "0.2", 0, -5])
def test_text_that_is_no_size_is_rejected(text: int | str) -> None:
    with pytest.raises(ConfigError, match="size="):
        parse_size("size", text)


@pytest.mark.req("OFF-11")
def test_capacity_is_the_memory_over_the_bytes_of_one_block_of_all_ranks() -> None:
    """Ranks whose blocks have 1,000 and 500 bytes."""
    config = ConnectorConfig(**ONE_GROUP)
    spec = load_spec(config, read_options({"cpu_bytes_to_use": 14_999}))
    assert isinstance(spec, CPUOffloadingSpec)
    assert (spec.slot_bytes, spec.num_slots) == (1500, 9)
    spec = load_spec(config, read_options({"cpu_bytes_to_use": 14_999, "block_size": 64}))
    assert isinstance(spec, CPUOffloadingSpec)
    assert (spec.slot_bytes, spec.num_slots) == (6000, 2)


@pytest.mark.req("OFF-01", "OFF-02")
def test_a_spec_of_another_package_is_loaded_by_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_tier.py").write_text(
        "from longshore.connectors.offloading.spec import OffloadingSpec\n\n"
        "class TheirSpec(OffloadingSpec):\n"
        "    def make_manager(self): ...\n"
        "    def make_handlers(self, config, kv_caches, queues): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    options = read_options(
        {"cpu_bytes_to_use": 1, "spec_name": "TheirSpec", "spec_module_path": "their_tier"}
    )
    try:
        spec = load_spec(ConnectorConfig(**ONE_GROUP), options)
    finally:
        sys.modules.pop("their_tier", None)
    assert isinstance(spec, OffloadingSpec)
    assert spec.options is options


@pytest.mark.req("OFF-01")
def test_the_connector_layer_imports_no_memory_and_specs_import_no_scheduler() -> None:
    folder = ROOT / "connectors" / "offloading"
    package = "longshore.connectors.offloading"
    parts = ("connector", "stores", "gaps", "jobs", "swap", "worker")
    layer = {f"{package}.{name}" for name in parts}
    seam = {f"{package}.{name}" for name in ("spec", "messages", "groups", "options")}
    for path in folder.rglob("*.py"):
        module = ".".join([package, *path.relative_to(folder).with_suffix("").parts])
        imported = {
            node.module
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.module is not None
        }
        ours = {each for each in imported if each.startswith(package)}
        assert not any(each.startswith("longshore.scheduler") for each in imported), module
        if module in layer:
            assert ours <= seam | layer, module
        else:
            assert not ours & layer, module
