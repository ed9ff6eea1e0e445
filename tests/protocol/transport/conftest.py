"""Fixtures of the tests with real sockets."""

from collections.abc import Iterator

import pytest

from tests.harness.sockets import Sockets


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    opened = Sockets()
    yield opened
    opened.close()
