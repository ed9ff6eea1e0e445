"""Both schedulers make the plans that were worked out by hand."""

import pytest

from tests.oracle.fast_adapter import FastAdapter
from tests.oracle.scenarios import SCENARIOS
from tests.oracle.script import Scenario, play
from tests.oracle.textbook import TextbookScheduler
from tests.oracle.workloads import FEATURES


@pytest.mark.parametrize("kind", [TextbookScheduler, FastAdapter])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario_goes_as_computed_by_hand(
    scenario: Scenario, kind: type[TextbookScheduler] | type[FastAdapter]
) -> None:
    if kind is FastAdapter and scenario.feature not in (None, *FEATURES):
        pytest.skip(f"the scheduler lacks {scenario.feature}")
    connector = scenario.make_connector()
    scheduler = kind(
        scenario.scheduler,
        scenario.cache,
        num_blocks=scenario.num_blocks,
        eos_token_ids=scenario.eos_token_ids,
        connector=connector,
        num_ranks=scenario.num_ranks,
    )
    play(scheduler, scenario, connector)


def test_scenario_names_are_unique() -> None:
    names = [scenario.name for scenario in SCENARIOS]
    assert len(names) == len(set(names))
