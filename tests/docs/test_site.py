"""The site of mkdocs.yml builds without a warning, and its pages load nothing from elsewhere."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.conftest import ROOT, load_script
from tests.integration.browser import open_browser

# Elements that make a browser load something at once.
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}


class Fetches(HTMLParser):
    """Addresses that a browser would load to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(FETCHED[tag]) if tag in FETCHED else None
        if tag == "link" and values.get("rel") != "canonical":
            address = values.get("href")
        if address:
            self.addresses.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    mkdocs = Path(sys.executable).with_name("mkdocs")
    built = subprocess.run(
        [mkdocs, "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_in_the_site_and_can_be_searched(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        built = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert (site / built).exists()
        assert f'"location":"{built}' in index


@pytest.mark.slow
def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetches = Fetches()
        fetches.feed(page.read_text(encoding="utf-8"))
        assert fetches.addresses
        elsewhere = [each for each in fetches.addresses if re.match(r"(\w+:)?//", each)]
        assert elsewhere == [], page
        for address in fetches.addresses:
            if page.name != "404.html" and not address.startswith("data:"):
                assert (page.parent / address.partition("?")[0]).exists(), (page, address)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_the_python_api_lists_the_fields_of_a_setting(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("LLM", "SamplingParams", "SchedulingPolicy", "SchedulerConnector"):
        assert re.search(rf'id="longshore\.[\w.]+\.{name}"', page), name
    assert "<li><code>temperature</code>: 0 is greedy" in page


NAMES_AND_MEANINGS = """
const isOut = (each) => each.getBoundingClientRect().right > innerWidth;
const isBroken = (each) => each.getClientRects().length > 1;
const names = [...document.querySelectorAll('td:first-child code')];
const meanings = [...document.querySelectorAll('td:nth-child(2)')];
const words = (found) => found.map((each) => each.innerText);
const broken = names.filter((each) => isBroken(each) || isOut(each));
return [words(broken), words(meanings.filter(isOut)), names.length];
"""


@pytest.mark.services
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("page", ["metrics", "reference/configuration"])
def test_names_are_whole_and_what_they_mean_is_in_sight(
    site: Path, tmp_path: Path, page: str, width: int
) -> None:
    with open_browser(tmp_path, size=(width, 900)) as driver:
        driver.get((site / f"{page}.html").as_uri())
        broken, hidden, total = driver.execute_script(NAMES_AND_MEANINGS)
    assert total > 30
    assert broken == []
    assert hidden == []


@pytest.mark.services
def test_drawings_can_be_read_on_a_phone(site: Path, tmp_path: Path) -> None:
    with open_browser(tmp_path, size=(390, 800)) as driver:
        for page in ("index", "architecture"):
            driver.get((site / f"{page}.html").as_uri())
            pictures = driver.execute_script(
                "return [...document.querySelectorAll('article img')].map((each) =>"
                " [each.width, each.parentElement.scrollWidth > each.parentElement.clientWidth])"
            )
            assert pictures
            assert all(width >= 640 and scrolls for width, scrolls in pictures)
            assert driver.execute_script("return document.documentElement.scrollWidth") == 390


def test_explained_fields_become_a_list_and_nothing_else_does() -> None:
    fields_as_list = load_script("griffe_fields.py").fields_as_list
    said = "What it is: a thing.\n\nfirst: one,\n    and more.\nsecond, third: two.\nAnd so on.\n"
    assert fields_as_list(said).split("\n") == [
        "What it is: a thing.",
        "",
        "",
        "- `first`: one,",
        "    and more.",
        "- `second`, `third`: two.",
        "",
        "And so on.",
    ]
    prose = "One line.\n\nThe other\nnumber: none."
    assert fields_as_list(prose) == prose


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_of_the_pages_beside_the_site_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", (ROOT / page).read_text("utf-8")):
        assert (ROOT / target).exists(), target
