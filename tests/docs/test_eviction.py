"""The example of docs/eviction.md, installed as a reader would install it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from longshore.connectors.offloading.ledger import OffloadLedger
from longshore.connectors.offloading.policies.policy import EvictionPolicy
from longshore.connectors.offloading.policies.registry import POLICIES, load_eviction_policy
from tests.conftest import ROOT
from tests.docs.installing import installed_example

PAGE = ROOT / "docs" / "eviction.md"


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Path]:
    with installed_example(PAGE, tmp_path) as folder:
        yield folder


def prompt(name: int, length: int) -> list[bytes]:
    return [f"{name}/{position}".encode() for position in range(length)]


def store(ledger: OffloadLedger, keys: list[bytes]) -> list[bytes]:
    """The keys that were evicted."""
    ledger.touch(keys)
    prepared = ledger.prepare_store(keys)
    assert prepared is not None
    ledger.complete_store(prepared.keys)
    ledger.check()
    return prepared.evicted_keys


@pytest.mark.req("POL-01")
@pytest.mark.parametrize("name", ["first-blocks", "first_blocks:FirstBlocks"])
def test_example_keeps_the_first_blocks_of_prompts(installed: Path, name: str) -> None:
    policy = load_eviction_policy(name, 20, {"keep_first": 2})
    assert sys.modules["first_blocks"].__file__ == str(installed / "first_blocks.py")
    ledger = OffloadLedger(20, policy)
    for number in range(4):
        store(ledger, prompt(number, 5))
    assert store(ledger, prompt(4, 5)) == [
        *prompt(0, 5)[:1:-1],
        *prompt(1, 5)[:2:-1],
    ]
    assert ledger.lookup(prompt(0, 5)) == 2
    ledger.prepare_load(prompt(1, 3))
    store(ledger, prompt(5, 5))
    assert ledger.lookup(prompt(1, 5)) == 3  # pinned
    for number in range(6, 30):
        store(ledger, prompt(number, 5))
    assert ledger.lookup(prompt(29, 5)) == 5


def test_table_lists_the_policies_and_the_methods_of_the_interface() -> None:
    text = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)`.*\|$", text.split("## How")[0], re.M)
    assert listed == list(POLICIES)
    interface = text.split("## The interface")[1]
    named = set(re.findall(r"`(\w+)(?:\(|`)", interface))
    methods = {name for name, value in vars(EvictionPolicy).items() if callable(value)}
    assert methods - {"__init__"} <= named
