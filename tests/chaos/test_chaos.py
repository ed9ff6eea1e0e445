"""The short form of the chaos suite: most faults once, and all with --long. `scripts/chaos` runs
them at random."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.endings import ENDINGS, Endings
from tests.chaos.run import run_faults
from tests.chaos.setups import SETUPS, make_model
from tests.chaos.streams import make_prompts

SEED = 14
TIMEOUT_S = 900

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


@pytest.fixture
def folder() -> Iterator[Path]:
    """Its path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as path:
        yield Path(path)


@pytest.mark.parametrize(
    "name",
    [
        "replicas",
        pytest.param("tiers", marks=pytest.mark.services),
        pytest.param(
            "loads", marks=pytest.mark.req("MET-05", "MET-06", "MET-07", "MET-08", "SPD-07")
        ),
        pytest.param("drafts", marks=pytest.mark.req("SPD-03")),
        "links",
        pytest.param("grammars", marks=pytest.mark.req("FEA-01")),
    ],
)
def test_streams_survive_every_fault_and_nothing_is_lost(
    name: str, model: Path, folder: Path, long_run: bool
) -> None:
    setup, faults = SETUPS[name]
    chosen = [fault for fault in faults if fault.is_short or long_run]
    run_faults(setup, chosen, model, folder / "d", SEED)


def test_nothing_is_left_of_a_deployment_that_ends_with_a_fault(
    model: Path, folder: Path, long_run: bool
) -> None:
    endings = Endings(model, folder, make_prompts(SEED), SEED)
    for ending in ENDINGS:
        if ending.is_short or long_run:
            endings.run(ending)


def test_the_short_form_has_many_faults_of_many_kinds() -> None:
    faults = [fault for _, listed in SETUPS.values() for fault in listed if fault.is_short]
    endings = [ending for ending in ENDINGS if ending.is_short]
    assert len(faults) + len(endings) >= 24
    assert len({fault.kind for fault in faults}) >= 8
