"""docs/protocol.md lists the messages of each direction, and what workers report."""

import re
from typing import Any, get_args

import pytest

from longshore.protocol.commands import Command, NumberedCommand
from longshore.protocol.grammars import FromGrammarProcess, ToGrammarProcess
from longshore.protocol.handshake import Feature, FromWorker, ToClient, ToEngine, ToWorker
from longshore.protocol.transport.lifeline import LifelineReport, Restarting, TakeOver
from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
MESSAGES = {
    "scheduler → worker": get_args(ToWorker),
    "worker → scheduler": get_args(FromWorker),
    "client → scheduler": get_args(ToEngine),
    "scheduler → client": get_args(ToClient),
    "scheduler → grammar process": get_args(ToGrammarProcess),
    "grammar process → scheduler": get_args(FromGrammarProcess),
    "process → supervisor": get_args(LifelineReport),
    "supervisor → process": (Restarting, TakeOver, NumberedCommand, *get_args(Command)),
}


@pytest.mark.parametrize("direction", MESSAGES)
def test_the_table_has_every_message_of_a_direction(direction: str) -> None:
    messages: tuple[Any, ...] = MESSAGES[direction]
    (row,) = re.findall(rf"^\| {direction} \| (.*) \|$", TEXT, re.M)
    named = re.findall(r"`(\w+)`", row)
    assert sorted(named) == sorted(message.__name__ for message in messages)


def test_the_table_has_every_direction() -> None:
    assert set(re.findall(r"^\| (.* → .*?) \|", TEXT, re.M)) == MESSAGES.keys()


def test_features_that_no_worker_reports_are_named() -> None:
    (paragraph,) = re.findall(r"^\*\*Features\.\*\*(.*?)\n\n", TEXT, re.M | re.S)
    reported, unreported = paragraph.split("No worker\nreports")
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "worker").rglob("*.py")]
    names = set(re.findall(r"\bFeature\.([A-Z_]+)", "".join(sources)))
    values = {feature.value for feature in Feature if feature.name in names}
    assert set(re.findall(r"`([a-z_]+)`", reported)) == values
    assert set(re.findall(r"`([a-z_]+)`", unreported)) == {f.value for f in Feature} - values
