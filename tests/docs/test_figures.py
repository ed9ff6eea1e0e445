"""Measured figures of README and docs stand in tables that `scripts/figures` writes from
benchmarks/results/, and nowhere else."""

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import ROOT, load_script
from tests.docs.blocks import pages

FIGURES = load_script("figures")
RESULTS: Final = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PAGES: Final = [page.relative_to(ROOT).as_posix() for page in pages()]
NOT_MEASURED: Final = {  # what others have measured, and what a run of the reader's prints
    *("docs/requirements.md", "docs/reference/configuration.md"),
}
UNIT: Final = (
    r"(?:%|s|ms|µs|GB/s|MB/s|TFLOP/s|(?:tokens|requests|steps)(?:/s| per (?:second|minute))"
    r"|kB|MB|GB|MiB|GiB|times as (?:long|fast|much|many)|times (?:faster|slower))"
)
FIGURE: Final = re.compile(
    rf"(?<![\w.\-/§])\d[\d,]*(?:\.\d+)?(?:(?: to |–| and | / |, )\d[\d,.]*)*\s?{UNIT}(?![\w/-])"
)
MEASURED: Final = re.compile(
    r"\b(?:measured?|measurements?|took|takes|median|mean|p50|p90|p99|faster|slower|as fast as"
    r"|costs?|saves|instead of|overhead|benchmarks/\w+|on an H200|on (?:2|two) (?:CPU )?cores)\b"
)


def sentences(text: str) -> list[str]:
    """The sentences and table rows of a page, without code blocks and generated tables."""
    text = FIGURES.TABLE.sub("", text)
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.S | re.M)
    parts = re.split(r"(?<=[.!?:;])\s+(?=[A-Z*`\[-])|\n\s*\n|\n(?=\|)|\n(?=- )", text)
    return [" ".join(part.split()) for part in parts]


def figures_on(text: str) -> list[str]:
    return [each for each in sentences(text) if FIGURE.search(each) and MEASURED.search(each)]


@pytest.mark.parametrize("page", PAGES)
def test_the_tables_of_a_page_are_those_of_the_results(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    wanted = FIGURES.written(text, is_in_docs=page.startswith("docs/"))
    assert text == wanted, "run scripts/figures"


@pytest.mark.parametrize("page", [page for page in PAGES if page not in NOT_MEASURED])
def test_no_measured_figure_stands_outside_the_tables(page: str) -> None:
    found = figures_on((ROOT / page).read_text("utf-8"))
    assert not found, "put it into benchmarks/results/:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "is_measured"),
    [
        ("A step takes 3.5 ms with it.", True),
        ("Decodes are 1.2 times as fast on two cores.", True),
        ("The timeout is 30 s.", False),
        ("| chat | took 12 µs |", True),
        ("```\ntook 3 s\n```", False),
    ],
)
def test_a_measured_figure_is_found_in_a_sentence_or_a_row(text: str, is_measured: bool) -> None:
    assert bool(figures_on(text)) == is_measured


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_how_it_was_measured_and_a_page_shows_it(path: Path) -> None:
    result: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if result.keys() != {"columns", "rows"}:
        assert result.keys() - {"notes"} == {
            *("command", "commit", "date", "machine", "sides", "columns", "rows")
        }
        assert re.fullmatch(r"[0-9a-f]{8}", result["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
        assert result["machine"]
        assert all(result["sides"])
    shown = [page for page in PAGES if f"figures: {path.stem} " in (ROOT / page).read_text("utf-8")]
    assert shown


def test_a_quoted_cell_must_exist() -> None:
    with pytest.raises(ValueError, match="has no cell"):
        FIGURES._text("{offloading/tape/time to first token, s}", None, " / ")
