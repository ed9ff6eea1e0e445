"""The example of docs/tiers.md, installed as a reader would install it: in engines of one and of
several processes, and in the conformance suite."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from longshore.connectors.base import ConnectorConfig
from longshore.connectors.offloading.options import read_options
from longshore.connectors.offloading.spec import (
    OffloadingHandlers,
    OffloadingManager,
    OffloadingSpec,
    load_spec,
)
from longshore.protocol.errors import ConfigError
from longshore.protocol.kv_cache_spec import FullAttentionSpec
from longshore.testing.connectors import ConnectorConformance
from tests.conftest import ROOT
from tests.connectors.engine import check_tokens_of_demo_model
from tests.docs.installing import installed_example

PAGE = ROOT / "docs" / "tiers.md"
OPTIONS = {"cpu_bytes_to_use": "1MiB", "spec_name": "zlib"}


@pytest.fixture(autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed_example(PAGE, tmp_path_factory.mktemp("site")):
        yield


def spec_of(**options: Any) -> OffloadingSpec:
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype_bytes=4)
    config = ConnectorConfig(
        specs=(attention,), hash_block_size=16, num_blocks=10, rank_block_bytes=(512,)
    )
    return load_spec(config, read_options({"cpu_bytes_to_use": 4096} | options))


@pytest.mark.req("OFF-02", "CFG-04")
@pytest.mark.parametrize(
    "chosen",
    [{"spec_name": "zlib"}, {"spec_name": "ZlibSpec", "spec_module_path": "zlib_tier"}],
    ids=["entry point", "module"],
)
def test_a_spec_of_another_package_gets_its_options(chosen: dict[str, Any]) -> None:
    spec = spec_of(**chosen, spec_options={"level": 7})
    assert (type(spec).__module__, spec.level) == ("zlib_tier", 7)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="only 'level', from 0 to 9"):
        spec_of(**chosen, spec_options={"level": 12})


@pytest.mark.req("OFF-02")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spec_name": "gzip"}, "Installed ones: CPUOffloadingSpec, zlib"),
        ({"spec_options": {"level": 1}}, "spec_options are for a spec of another package"),
        ({"spec_name": "ZlibManager", "spec_module_path": "zlib_tier"}, "not an OffloadingSpec"),
        ({"spec_name": "A", "spec_module_path": "no_such"}, "spec_module_path='no_such'"),
    ],
)
def test_a_spec_that_cannot_be_used_is_rejected_by_name(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        spec_of(**options)


@pytest.mark.timeout(300)
@pytest.mark.req("OFF-02")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"in_process": True}, id="one process"),
        pytest.param({"tensor_parallel_size": 2}, id="two ranks", marks=pytest.mark.slow),
    ],
)
def test_an_engine_with_it_gives_the_tokens_of_one_without(settings: dict[str, Any]) -> None:
    check_tokens_of_demo_model(
        kv_connector="offloading",
        kv_connector_config=json.dumps({**OPTIONS, "cpu_bytes_to_use": "8MiB"}),
        **settings,
    )


@pytest.mark.slow
@pytest.mark.req("OFF-02")
class TestZlibTier(ConnectorConformance):
    connector = "offloading"
    is_variant = True
    num_seeds = 1

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return dict(OPTIONS)


def test_the_page_names_every_method_of_the_interface() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"(\w+)", text.split("## The interface")[1]))
    for interface in (OffloadingManager, OffloadingHandlers):
        methods = {name for name in vars(interface) if not name.startswith("_")}
        assert methods <= named | {"close"}
    assert "def options(self, tmp_path):" in text.split("## Test it")[1]
