"""The table of broken rules in docs/testing.md mentions files and tests that exist, and the pages
say in how many processes tests run."""

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


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/testing.md"])
def test_the_number_of_processes_is_that_of_the_script(page: str) -> None:
    (number,) = re.findall(r"^exec .*pytest -n (\d+)", (ROOT / "scripts/test").read_text(), re.M)
    word = {2: "two", 3: "three", 4: "four"}[int(number)]
    text = (ROOT / page).read_text(encoding="utf-8")
    assert re.findall(r"test files (?:are divided among|in) (\w+) processes", text) == [word]
