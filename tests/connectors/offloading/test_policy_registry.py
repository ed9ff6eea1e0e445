"""Eviction policies by name, and the errors for those that cannot be loaded."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from longshore.connectors.offloading.ledger import OffloadLedger
from longshore.connectors.offloading.options import read_options
from longshore.connectors.offloading.policies.lru import LRU
from longshore.connectors.offloading.policies.registry import (
    POLICIES,
    load_eviction_policy,
)
from longshore.protocol.errors import ConfigError

THEIRS = """
from longshore.connectors.offloading.policies.lru import LRU

class Newest(LRU):
    def evict(self, num_blocks, protected):
        evicted = list(protected.evictable(reversed(list(self))))[:num_blocks]
        if len(evicted) < num_blocks:
            return None
        self.remove(evicted)
        return evicted

class NotAPolicy:
    def __init__(self, capacity):
        pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Installs a package with this module, and an entry point for its class."""

    def install(source: str) -> None:
        (tmp_path / "their_policies.py").write_text(source)
        info = tmp_path / "their_policies-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\n")
        (info / "entry_points.txt").write_text(
            "[longshore.eviction_policies]\nnewest = their_policies:Newest\n"
        )

    monkeypatch.syspath_prepend(tmp_path)
    yield install
    sys.modules.pop("their_policies", None)


@pytest.mark.req("POL-01")
@pytest.mark.parametrize("name", ["newest", "their_policies:Newest"])
def test_a_policy_of_another_package_is_used(package: Callable[[str], None], name: str) -> None:
    package(THEIRS)
    ledger = OffloadLedger(2, load_eviction_policy(name, 2))
    for key in (b"a", b"b"):
        ledger.prepare_store([key])
        ledger.complete_store([key])
    prepared = ledger.prepare_store([b"c"])
    assert prepared is not None
    assert prepared.evicted_keys == [b"b"]
    ledger.check()


def test_lru_is_the_default_and_all_built_in_policies_have_their_capacity() -> None:
    assert POLICIES[read_options({"cpu_bytes_to_use": 1}).eviction_policy] is LRU
    for name, chosen in POLICIES.items():
        policy = load_eviction_policy(name, 7)
        assert type(policy) is chosen
        assert policy.capacity == 7


def test_an_unknown_name_fails_with_the_names_that_exist(package: Callable[[str], None]) -> None:
    package(THEIRS)
    names = "lru, arc, s3fifo, reuse_rate, newest or package.module:Class"
    with pytest.raises(ConfigError, match=f"unknown eviction policy 'fifo'; use one of {names}"):
        load_eviction_policy("fifo", 4)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_module:Policy", {}, "cannot be loaded: ModuleNotFoundError"),
        ("their_policies:Missing", {}, "cannot be loaded: AttributeError"),
        ("their_policies:NotAPolicy", {}, "is a NotAPolicy; it must extend"),
        ("newest", {"speed": 3}, r"\(their_policies:Newest\) cannot be created with options"),
        ("lru", {"speed": 3}, "'lru' cannot be created with options {'speed': 3}: TypeError"),
        ("reuse_rate", {"cost_doubles_at": -1}, "cost_doubles_at=-1 must be more than 0"),
    ],
)
def test_a_policy_that_cannot_be_created_is_rejected(
    package: Callable[[str], None], name: str, options: dict[str, int], message: str
) -> None:
    package(THEIRS)
    with pytest.raises(ConfigError, match=message):
        load_eviction_policy(name, 4, options)
