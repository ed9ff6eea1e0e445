"""Connectors by name, and the errors for connectors that cannot be loaded."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from longshore.connectors.adapter import OneClassAdapter, OneClassWorkerAdapter
from longshore.connectors.base import ConnectorConfig, SchedulerConnector, WorkerConnectorConfig
from longshore.connectors.registry import (
    UNVERIFIED,
    check_connector,
    check_worker_half,
    installed_connectors,
    load_scheduler_connector,
    load_worker_connector,
    parse_options,
)
from longshore.protocol.errors import ConfigError

NO_RANK = WorkerConnectorConfig()

TWO_CLASSES = """
from longshore.connectors.base import SchedulerConnector, WorkerConnector

class Half(WorkerConnector):
    pass

class Mine(SchedulerConnector):
    worker_half = "theirs:Half"

    class Inner(SchedulerConnector):
        pass

class Wide(SchedulerConnector):
    worker_half = "needy_half:Half"
    supports_hma = True
"""
ONE_CLASS = """
from longshore.connectors.adapter import ConnectorRole, OneClassConnector, SupportsHMA

class Both(OneClassConnector):
    def __init__(self, config, role):
        super().__init__(config, role)
        if role is ConnectorRole.WORKER:
            import torch
        self.half = role.name

class Wide(Both, SupportsHMA):
    def request_finished_all_groups(self, request, block_ids):
        return True, {"groups": len(block_ids)}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write modules into a folder on the import path; `names` become entry points."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(names: dict[str, str] | None = None, **modules: str) -> None:
        for module, source in modules.items():
            (tmp_path / f"{module}.py").write_text(source)
        for number, (name, value) in enumerate((names or {}).items()):
            info = tmp_path / f"package_{number}_{len(value)}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: package-{number}\n")
            (info / "entry_points.txt").write_text(
                f"[longshore.connectors]\n{name.rstrip('!')} = {value}\n"
            )

    yield write
    for module in set(sys.modules) - before:
        del sys.modules[module]


@pytest.mark.req("CON-16")
def test_a_connector_outside_the_tree_is_loaded_by_its_path(package: Callable[..., None]) -> None:
    package(theirs=TWO_CLASSES)
    connector = load_scheduler_connector("theirs:Mine", ConnectorConfig({"depth": 3}))
    assert isinstance(connector, SchedulerConnector)
    assert type(connector).__name__ == "Mine"
    assert connector.config.options == {"depth": 3}
    nested = load_scheduler_connector("theirs:Mine.Inner", ConnectorConfig())
    assert type(nested).__name__ == "Inner"


def test_an_installed_package_gives_its_connector_a_name(package: Callable[..., None]) -> None:
    package({"mine": "theirs:Mine"}, theirs=TWO_CLASSES)
    assert "mine" in installed_connectors()
    assert type(load_scheduler_connector("mine", ConnectorConfig())).__name__ == "Mine"


@pytest.mark.req("CRG-14")
def test_only_the_chosen_connector_is_imported(package: Callable[..., None]) -> None:
    needy = "import a_missing_transport"
    package({"mine": "theirs:Mine", "needy": "needy:Needy"}, theirs=TWO_CLASSES, needy=needy)
    load_scheduler_connector("mine", ConnectorConfig())
    assert "needy" not in sys.modules
    with pytest.raises(ConfigError, match="needs the package a_missing_transport"):
        load_scheduler_connector("needy", ConnectorConfig())


def test_a_dependency_missing_at_construction_is_reported_by_name(
    package: Callable[..., None],
) -> None:
    source = TWO_CLASSES + "    def __init__(self, config):\n        import a_missing_package\n"
    package(theirs=source)
    with pytest.raises(ConfigError, match="needs the package a_missing_package"):
        load_scheduler_connector("theirs:Wide", ConnectorConfig())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "unheard-of",
            "unheard-of is unknown. Installed connectors: .*mine.* package.module:Class",
        ),
        ("theirs:", "theirs: is unknown"),
        (":Mine", ":Mine is unknown"),
        ("theirs", "theirs is unknown"),
        ("no_such_module:Mine", "there is no module no_such_module"),
        ("theirs.deeper:Mine", "there is no module theirs.deeper"),
        ("theirs:Missing", "module theirs has no Missing"),
        ("theirs:Mine.Missing", "module theirs has no Mine.Missing"),
        ("theirs:number", "neither a SchedulerConnector nor a OneClassConnector"),
        ("theirs:Plain", "neither a SchedulerConnector nor a OneClassConnector"),
    ],
)
def test_a_name_that_leads_to_no_connector_is_rejected(
    package: Callable[..., None], name: str, message: str
) -> None:
    package({"mine": "theirs:Mine"}, theirs=TWO_CLASSES + "\nnumber = 3\nclass Plain: pass\n")
    with pytest.raises(ConfigError, match=message):
        load_scheduler_connector(name, ConnectorConfig())
    with pytest.raises(ConfigError, match=message):
        check_connector(name)


def test_a_name_is_checked_without_constructing_anything(package: Callable[..., None]) -> None:
    source = TWO_CLASSES + "    def __init__(self, config):\n        raise RuntimeError\n"
    package(theirs=source)
    check_connector("theirs:Wide")
    with pytest.raises(RuntimeError):
        load_scheduler_connector("theirs:Wide", ConnectorConfig())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("offloading", {}, "needs cpu_bytes_to_use"),
        ("offloading", {"cpu_bytes_to_use": 1, "eviction_policy": "lfu"}, "eviction policy 'lfu'"),
        ("simple_cpu", {"cpu_bytes_to_use": "8 apples"}, "is not a size"),
        ("lmcache", {}, "needs 'cpu_bytes_to_use'"),
        ("example", {}, "needs the option 'path'"),
        ("hidden_states", {"path": "/tmp/states", "requests": "some"}, "'requests' to be"),
        ("decode_bench", {"fill": 1}, "no option 'fill'"),
        ("multi", {"connectors": [{"connector": "example"}] * 2}, "needs the option 'path'"),
    ],
)
def test_wrong_options_are_found_without_constructing_anything(
    name: str, options: dict[str, Any], message: str
) -> None:
    check_connector(name)
    with pytest.raises(ConfigError, match=message):
        check_connector(name, options)


def test_the_options_of_a_connector_without_a_check_are_accepted(
    package: Callable[..., None],
) -> None:
    package(theirs=TWO_CLASSES)
    check_connector("theirs:Wide", {"any": "thing"})


def test_a_name_that_two_packages_provide_is_rejected_with_both(
    package: Callable[..., None],
) -> None:
    package({"mine": "theirs:Mine", "mine!": "others:Theirs"}, theirs=TWO_CLASSES)
    with pytest.raises(ConfigError, match="several packages: others:Theirs, theirs:Mine"):
        load_scheduler_connector("mine", ConnectorConfig())


@pytest.mark.req("CON-12")
def test_several_cache_groups_need_a_connector_that_supports_them(
    package: Callable[..., None],
) -> None:
    package(theirs=TWO_CLASSES, one=ONE_CLASS)
    config = ConnectorConfig(num_groups=2)
    for name in ("theirs:Mine", "one:Both"):
        with pytest.raises(
            ConfigError, match="supports only one KV cache group, but the model has 2"
        ):
            load_scheduler_connector(name, config)
        load_scheduler_connector(name, ConnectorConfig())
    for name in ("theirs:Wide", "one:Wide"):
        assert load_scheduler_connector(name, config).supports_hma


@pytest.mark.req("CON-01")
def test_a_class_with_a_role_sets_up_only_its_scheduler_half(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(ONE_CLASS)
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from longshore.connectors.base import ConnectorConfig\n"
        "from longshore.connectors.registry import load_scheduler_connector\n"
        "assert 'one' not in sys.modules\n"
        "connector = load_scheduler_connector('one:Both', ConnectorConfig())\n"
        "print(connector.connector.half, 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "SCHEDULER False\n", run.stderr


def test_a_connector_of_one_class_is_wrapped(package: Callable[..., None]) -> None:
    package(one=ONE_CLASS)
    connector = load_scheduler_connector("one:Both", ConnectorConfig(block_size=8))
    assert isinstance(connector, OneClassAdapter)
    assert connector.config.block_size == 8


def test_options_are_a_json_object_or_a_toml_file(tmp_path: Path) -> None:
    table = tmp_path / "options.toml"
    table.write_text('depth = 3\n[tier]\npath = "/kv"\n')
    assert parse_options(str(table)) == {"depth": 3, "tier": {"path": "/kv"}}
    table.write_text("depth =")
    os.mkfifo(tmp_path / "pipe.toml")
    for path in (table, tmp_path / "missing.toml", tmp_path / "pipe.toml"):
        with pytest.raises(ConfigError, match=f"{path} cannot be read"):
            parse_options(str(path))
    assert parse_options('{"depth": 3, "path": "/kv"}') == {"depth": 3, "path": "/kv"}
    assert parse_options("") == {}
    for text in ("[1]", "3", "{", '{"a": }', "\ud800"):
        with pytest.raises(ConfigError, match="--kv-connector-config is neither a JSON object"):
            parse_options(text)


@pytest.mark.req("CON-01", "CON-16")
def test_the_worker_half_is_loaded_by_the_name_in_the_scheduler_half(
    package: Callable[..., None],
) -> None:
    package({"mine": "theirs:Mine"}, theirs=TWO_CLASSES, one=ONE_CLASS)
    config = WorkerConnectorConfig({"depth": 3}, rank=2)
    for name in ("mine", "theirs:Mine"):
        check_worker_half(name)
        half = load_worker_connector(name, config)
        assert type(half).__name__ == "Half"
        assert half.config == config
    one = load_worker_connector("one:Both", config)
    assert isinstance(one, OneClassWorkerAdapter)
    assert one.connector.half == "WORKER"  # type: ignore[attr-defined]


@pytest.mark.req("CRG-14")
def test_a_package_that_only_the_worker_half_needs_is_named_with_the_command_to_install_it(
    package: Callable[..., None],
) -> None:
    package(theirs=TWO_CLASSES, needy_half="import a_missing_transport.api")
    check_connector("theirs:Wide")
    for load in (check_worker_half, lambda name: load_worker_connector(name, NO_RANK)):
        with pytest.raises(ConfigError, match="Install it: pip install a_missing_transport"):
            load("theirs:Wide")


@pytest.mark.parametrize(
    ("half", "message"),
    [
        ("", "has no worker half, so nothing would move its blocks"),
        ("theirs", "has no worker half"),
        ("theirs:Missing", "module theirs has no Missing"),
        ("theirs:Mine", "worker half theirs:Mine is not a WorkerConnector"),
        ("no_such_half:Half", "there is no module no_such_half"),
        ("theirs:Old", "Old was written for version 0 of the connector contract"),
    ],
)
def test_a_worker_half_that_cannot_be_loaded_is_rejected(
    package: Callable[..., None], half: str, message: str
) -> None:
    old = "class Old(Half):\n    contract_version = 0\n"
    package(theirs=TWO_CLASSES.replace("needy_half:Half", half) + old)
    with pytest.raises(ConfigError, match=message):
        load_worker_connector("theirs:Wide", NO_RANK)
    with pytest.raises(ConfigError, match=message):
        check_worker_half("theirs:Wide")


def test_a_connector_of_another_contract_version_is_rejected(package: Callable[..., None]) -> None:
    package(theirs=TWO_CLASSES + "class Old(Mine):\n    contract_version = 9\n")
    with pytest.raises(ConfigError, match="version 9 of the connector contract, and this is vers"):
        check_connector("theirs:Old")


@pytest.mark.req("CRG-14")
def test_no_connector_of_this_package_is_imported_before_it_is_chosen() -> None:
    program = (
        "import sys\n"
        "from longshore.connectors.registry import BUILT_IN, check_connector\n"
        "modules = {path.partition(':')[0] for path in BUILT_IN.values()}\n"
        "assert not modules & set(sys.modules)\n"
        "for name in BUILT_IN: check_connector(name)\n"
        "print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert run.stdout == "False\n", run.stderr


@pytest.mark.parametrize("name", sorted(UNVERIFIED))
def test_a_connector_that_was_tested_with_a_fake_only_says_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with suppress(Exception):  # it lacks options and a model, but has warned before
        load_scheduler_connector(name, ConnectorConfig())
    assert f"{name} is not verified against the library" in caplog.text
    with pytest.raises(ConfigError, match=rf"{name} \(not verified against the library\)"):
        check_connector("unheard-of")
