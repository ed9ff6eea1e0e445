"""Client libraries with a real server: each has a program that uses its features."""

from pathlib import Path

import pytest

from tests.clients.compatibility import (
    CLIENTS,
    PAGE,
    NotInstalledError,
    clients_of,
    use_client,
)
from tests.integration.deployment import Deployment

HEAVY = ("guidellm", "lm_eval")
"""They load torch and measure for a while."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in HEAVY else ()) for name in CLIENTS],
)
def test_features_that_work_are_those_of_the_docs(
    server: Deployment, tmp_path: Path, name: str
) -> None:
    try:
        used = use_client(name, server.url, tmp_path)
    except NotInstalledError:
        pytest.skip(f"{name} is not installed; scripts/test --all installs it")
    documented = clients_of(PAGE.read_text("utf-8"))[CLIENTS.index(name)]
    assert (documented.package, documented.version) == (used.package, used.version)
    assert set(documented.features) == set(used.features), "run scripts/compatibility"
