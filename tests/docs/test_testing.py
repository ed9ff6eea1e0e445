"""The table of broken rules in docs/testing.md mentions files and tests that exist."""

import re

import pytest

from tests.conftest import ROOT

_CELLS = re.compile(r"^\| .* \| `(\w+/[^`]+\.py)` \| .* \| `([^`]+\.py)`: `(\w+)", re.M)
BROKEN = _CELLS.findall((ROOT / "docs" / "testing.md").read_text(encoding="utf-8"))


def test_the_page_has_its_table() -> None:
    assert len(BROKEN) >= 40


@pytest.mark.parametrize(("broken", "file", "name"), BROKEN, ids=[name for _, _, name in BROKEN])
def test_a_broken_file_and_the_test_that_failed_exist(broken: str, file: str, name: str) -> None:
    assert (ROOT / broken).is_file()
    text = (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert re.search(rf"^(async )?def {name}\(|^{name} = ", text, re.M)
