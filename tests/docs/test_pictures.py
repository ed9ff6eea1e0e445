"""The drawings of docs/images: each is on a page, readable on any background, and has true
words."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from longshore.scheduler.request import RequestStatus
from tests.conftest import ROOT
from tests.docs.blocks import pages

PICTURES = sorted((ROOT / "docs" / "images").glob("*.svg"))
DRAWINGS = [path for path in PICTURES if path.name != "top.svg"]  # a terminal is black
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_picture_is_shown_with_words_for_those_who_do_not_see_it(path: Path) -> None:
    shown = rf"!\[[^\]]{{20,}}\]\(images/{path.name}\)"
    assert any(re.search(shown, page.read_text(encoding="utf-8")) for page in pages())


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_drawing_brings_its_own_background_and_needs_nothing_else(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    background = next(root.iter(f"{SVG}rect"))
    assert background.get("class") == "bg"
    assert (background.get("width"), background.get("height")) == (
        root.get("width"),
        root.get("height"),
    )
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"href=|src=|@import|url\((?!#)", text)


def test_the_states_drawn_are_those_of_a_request() -> None:
    root = ElementTree.parse(ROOT / "docs" / "images" / "request_states.svg").getroot()
    words = [element.text or "" for element in root.iter(f"{SVG}text")]
    drawn = set(re.findall(r"\b[A-Z_]{7,}\b", " ".join(words).replace("_ ", "_")))
    assert {status.name for status in RequestStatus} <= drawn
    assert drawn <= {status.name for status in RequestStatus} | {"IGNORED"}
