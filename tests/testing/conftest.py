"""Marks the tests of the conformance suite that repeat what others test as slow."""

import pytest

ONLY_ALL = ("one worker", "two stages", "evicted", "hook_that_raises")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "TestExampleWithinTheStep" in item.nodeid and any(
            name in item.name for name in ONLY_ALL
        ):
            item.add_marker(pytest.mark.slow)
