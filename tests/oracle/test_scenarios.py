"""Both schedulers make the plans that were worked out by hand."""

import pytest

from tests.oracle.fast_adapter import FastAdapter
from tests.oracle.scenarios import SCENARIOS
from tests.oracle.script import Scenario, play
from tests.oracle.textbook import TextbookScheduler


@pytest.mark.parametrize("kind", [TextbookScheduler, FastAdapter])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario_goes_as_computed_by_hand(
    scenario: Scenario, kind: type[TextbookScheduler] | type[FastAdapter]
) -> None:
    scheduler = kind(
        scenario.scheduler,
        scenario.cache,
        num_blocks=scenario.num_blocks,
        eos_token_ids=scenario.eos_token_ids,
    )
    play(scheduler, scenario)


def test_scenario_names_are_unique() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(names) == len(set(names))
