"""The conformance suite fails for connectors with bugs, and says what is wrong."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from longshore.connectors.base import ConnectorConfig, SchedulerConnector, WorkerConnector
from longshore.deploy.llm.in_process_engine import InProcessEngine
from longshore.deploy.model.demo import DEMO_MODEL_DIR
from longshore.protocol.errors import ConfigError
from longshore.testing import engines, player
from longshore.testing.connectors import ConnectorConformance, hooks_of
from longshore.testing.engines import POOL_BLOCKS, opened, settle
from longshore.testing.faults import Faults, FaultyConnector, FaultyWorker
from longshore.testing.player import Player
from longshore.testing.prompts import known_prompts
from tests.testing.buggy_connectors import HERE

FINDINGS: Mapping[str, tuple[str, str]] = {
    "FindsTooMuch": ("none", "wrong KV|other tokens|raised"),
    "HoldsNothing": ("none", "wrong KV|other tokens"),
    "NeverReleases": ("none", "blocks, of which 0 are in quarantine"),
    "RemembersRequests": ("none", "still has the ids of requests that have ended"),
    "AlwaysHasWork": ("none", "leaked, or never ends: .*has_pending_work"),
    "MixesUpBlocks": ("none", "wrong KV|other tokens"),
    "ReportsEarly": ("none", "wrong KV|other tokens"),
    "HidesFailures": ("none", "wrong KV|other tokens"),
    "LosesLoads": ("none", "were not reported|are in quarantine"),
}
"""By connector: the kind of fault with which its bug is found, and what the error says."""


LONG_TO_FIND = ("HoldsNothing", "LosesLoads", "NeverReleases")


class Buggy(ConnectorConformance):
    num_seeds: ClassVar[int] = 50  # it ends with the first that finds the bug

    def options(self, tmp_path: Path) -> dict[str, Any]:
        return {"path": str(tmp_path / "kv")}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in LONG_TO_FIND else ())
        for name in FINDINGS
    ],
)
def test_a_bug_is_found_and_explained(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "SETTLE_TIMEOUT_S", 2.0)
    monkeypatch.setattr(player, "PLAY_TIMEOUT_S", 10.0)
    kind, words = FINDINGS[name]
    monkeypatch.setattr(Buggy, "connector", f"{HERE}:{name}")
    suite, prompts = Buggy(), known_prompts(DEMO_MODEL_DIR, {})
    with pytest.raises(Exception, match=words):
        suite.test_random_requests_get_their_tokens_and_nothing_is_left(kind, prompts, tmp_path)


# The faults


def test_faults_are_injected_and_counted(tmp_path: Path) -> None:
    class Example(Buggy):
        connector = "example"

    faults = Faults(
        failed_lookup=0.2, duplicate=0.5, unreported=0.3, max_unreported_blocks=POOL_BLOCKS // 3
    )
    with opened(Example().in_process(tmp_path, faults, 0)) as engine:
        assert isinstance(engine, InProcessEngine)
        requests = Player(engine, known_prompts(DEMO_MODEL_DIR, {}), seed=0)
        transfers = engine.scheduler._transfers
        assert transfers is not None
        for _ in range(20):
            requests.play(20)
            stats = engine.scheduler.make_stats()
            counts = (
                stats.num_quarantined_blocks,
                stats.num_bad_messages,
                transfers.num_failed_lookups,
            )
            if all(counts):
                break
        assert all(counts), counts
        assert settle(engine) >= stats.num_quarantined_blocks


@pytest.mark.req("CON-01", "CON-02", "CON-03")
@pytest.mark.parametrize(
    ("half", "contract"),
    [(FaultyConnector, SchedulerConnector), (FaultyWorker, WorkerConnector)],
)
def test_every_hook_of_the_contract_is_wrapped(half: type, contract: type) -> None:
    assert set(hooks_of(half, contract)) <= {f"{half.__name__}.{name}" for name in vars(half)}


def test_unknown_options_are_rejected() -> None:
    config = ConnectorConfig({"connector": "example", "faults": {"lat": 0.5}})
    with pytest.raises(ConfigError, match="unknown field `lat`"):
        FaultyConnector(config)


# Outside the package


CONNECTOR = """
from longshore.connectors.example.scheduler import ExampleConnector


class Outside(ExampleConnector):
    pass
"""
TESTS = """
from longshore.testing.connectors import ConnectorConformance


class TestOutside(ConnectorConformance):
    connector = "outside:Outside"

    def options(self, tmp_path):
        return {"path": str(tmp_path / "kv")}
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_connector_outside_the_package_is_tested_with_pytest_alone(tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(CONNECTOR)
    (tmp_path / "test_outside.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    selection = "evicted or none or start_load_kv"
    run = subprocess.run(
        [*command, "-k", selection, "test_outside.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout
    assert "4 passed" in run.stdout


def test_without_pytest_the_error_names_the_command_that_installs_it() -> None:
    program = "import sys; sys.modules['pytest'] = None; import longshore.testing.connectors"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1
    assert "which is not installed: pip install pytest" in run.stderr
