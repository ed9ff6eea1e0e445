"""One server of the demo model for all clients."""

from collections.abc import Iterator

import pytest

from longshore.deploy.model.demo import DEMO_MODEL_DIR
from tests.clients.compatibility import HERE, TIMEOUT_S
from tests.integration.deployment import Deployment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.services)
            item.add_marker(pytest.mark.timeout(2 * TIMEOUT_S))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(DEMO_MODEL_DIR, tmp_path_factory.mktemp("run")) as shared:
        yield shared.wait_until_ready()
