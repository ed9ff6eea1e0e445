"""The example connector passes the conformance suite, also with loads within the step and as it was
written for version 1 of the contract."""

from pathlib import Path
from typing import Any

import pytest

from longshore.testing.connectors import KINDS_OF_FAULTS, ConnectorConformance
from longshore.testing.prompts import known_prompts


@pytest.mark.req("CRG-01")
class TestExample(ConnectorConformance):
    connector = "example"
    is_variant = True
    num_seeds = 1
    survives_restart = True

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(tmp_path / "kv")}


@pytest.mark.long
class TestExampleWithEveryFault(TestExample):
    is_variant = False


@pytest.mark.slow
class TestExampleWithinTheStep(TestExample):
    connector = "tests.testing.sync_example:SyncExample"


@pytest.mark.long
class TestVersion1(TestExample):
    connector = "tests.testing.version_1_connector:Version1"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("suite", [TestExample, TestExampleWithinTheStep])
@pytest.mark.parametrize("kind", KINDS_OF_FAULTS)
def test_many_more_random_requests(
    kind: str, suite: type[ConnectorConformance], tmp_path: Path
) -> None:
    more = suite()
    more.num_seeds = 100  # type: ignore[misc]
    prompts = known_prompts(more.model, more.settings)
    more.test_random_requests_get_their_tokens_and_nothing_is_left(kind, prompts, tmp_path)
