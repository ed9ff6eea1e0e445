"""The tests that docs/reliability.md names exist."""

import re

import pytest

from tests.conftest import ROOT

TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
TABLE = TEXT.partition("\n## What a loop")[0]
CELLS = [row.split(" | ")[2] for row in re.findall(r"^\| (?!event|---).*$", TABLE, re.M)]
NAMED = sorted(
    {
        (file, name)
        for cell in CELLS
        for file, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", cell)
        for name in re.findall(r"\w+", names)
    }
)


def test_every_event_names_its_tests() -> None:
    assert len(CELLS) == 23
    assert len(NAMED) >= 9


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_exists(file: str, name: str) -> None:
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert re.search(rf"^(async )?def {name}\(", text, re.M)
