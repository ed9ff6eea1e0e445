"""Faults of a connector: those that a file switches on, and lookups that are put off."""

import time
from pathlib import Path

import pytest

from longshore.connectors.base import AskLater, ConnectorConfig, RequestView, SchedulerConnector
from longshore.protocol.arrays import int32_array
from longshore.testing import faults
from longshore.testing.faults import FaultyConnector, InjectedFault


class NamesAnswers(SchedulerConnector):
    contract_version = 1
    names_answers = True

    def take_answered(self, now: float) -> list[str]:
        return ["its own"]


@pytest.fixture
def switch(tmp_path: Path) -> Path:
    return tmp_path / "switch"


@pytest.fixture
def connector(switch: Path, tmp_path: Path) -> FaultyConnector:
    options = {
        "connector": "example",
        "options": {"path": str(tmp_path / "kv")},
        "faults": {"switch": str(switch)},
    }
    return FaultyConnector(ConnectorConfig(options))


def test_the_hook_that_the_file_names_raises_once(connector: FaultyConnector, switch: Path) -> None:
    assert connector.take_events() == []
    switch.write_text("raise FaultyConnector.take_events")
    connector.reset_cache()
    with pytest.raises(InjectedFault, match="take_events"):
        connector.take_events()
    assert not switch.exists()
    assert connector.take_events() == []


def test_the_file_of_the_other_half_stays(connector: FaultyConnector, switch: Path) -> None:
    switch.write_text("raise FaultyWorker.take_events")
    assert connector.take_events() == []
    assert switch.exists()


@pytest.mark.parametrize(
    ("what", "duration_s"), [("delay", faults.DELAY_S), ("hang", faults.NEVER_S)]
)
def test_a_hook_is_slow_or_never_ends(
    connector: FaultyConnector,
    switch: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    duration_s: float,
) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    switch.write_text(f"{what} FaultyConnector.take_events")
    connector.take_events()
    connector.take_events()
    assert slept_s == [duration_s]


def test_a_lookup_that_was_put_off_is_named_beside_those_of_the_connector() -> None:
    options = {"connector": f"{__name__}:NamesAnswers", "faults": {"ask_later": 2.0}}
    connector = FaultyConnector(ConnectorConfig(options))
    assert connector.names_answers
    request = RequestView("put off", int32_array([1, 2]), 2, ())
    assert isinstance(connector.get_num_new_matched_tokens(request, 0), AskLater)
    assert connector.take_answered(0.0) == ["put off", "its own"]
    assert connector.take_answered(1.0) == ["its own"]
