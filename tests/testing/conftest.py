"""Marks the tests of the conformance suite that repeat what others test as slow."""

from typing import Final

import pytest

from tests.integration.forks import forked_engines as forked_engines  # a fixture

ONLY_ALL: Final = {  # parts of names, by class
    "TestExample": ("two stages", "two shards", "test_a_hook_that_raises"),
    "TestOffloading": ("two stages", "test_a_hook_that_raises"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        suite = item.parent
        slow = () if suite is None else ONLY_ALL.get(suite.name, ())
        if any(part in item.name for part in slow):
            item.add_marker(pytest.mark.slow)
