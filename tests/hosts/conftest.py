"""Tests on several hosts, which are network namespaces (`network.py`)."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.connectors.conftest import KINDS
from tests.deploy.tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, save_tokenizer
from tests.hosts.network import Network, missing_permission
from tests.models import make_tiny_model

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason="network namespaces need root"))


@pytest.fixture(scope="session", autouse=True)
def _permission() -> None:
    """Root that cannot make networks sees why."""
    reason = missing_permission()
    if reason is not None:
        pytest.fail(reason)


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as made:
        yield made


@pytest.fixture(scope="session")
def serving_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a kind of attention in KINDS, with a tokenizer."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            family, settings = KINDS[kind]
            path = made[kind] = tmp_path_factory.mktemp(kind)
            tokens = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
            make_tiny_model(family, path, **(settings | tokens))
            save_tokenizer(path)
        return made[kind]

    return make
