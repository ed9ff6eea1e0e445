"""The page and the picture are up to date with scripts/reference."""

import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from longshore.deploy.bench.options import ServeBenchOptions, ThroughputOptions
from longshore.deploy.cli.client_options import (
    CachePlanOptions,
    ChatOptions,
    DoctorOptions,
    TopOptions,
)
from longshore.deploy.settings.options import ServeOptions
from tests.conftest import ROOT, load_script

PAGE = ROOT / "docs" / "reference" / "configuration.md"
PICTURE = ROOT / "docs" / "images" / "request_states.svg"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == load_script("reference").page(), (
        "run .venv/bin/python scripts/reference"
    )


def test_picture_of_the_statuses_is_up_to_date() -> None:
    assert PICTURE.read_text(encoding="utf-8") == load_script("reference").picture(), (
        "run .venv/bin/python scripts/reference"
    )


def test_script_writes_what_it_says(tmp_path: Path) -> None:
    """In a copy of the tree, because other processes read the page meanwhile."""
    script = tmp_path / "scripts" / "reference"
    for path in (PAGE, PICTURE):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True)
    script.parent.mkdir()
    shutil.copy(ROOT / "scripts" / "reference", script)
    subprocess.run([sys.executable, script], check=True, timeout=60)
    for path in (PAGE, PICTURE):
        assert (tmp_path / path.relative_to(ROOT)).read_bytes() == path.read_bytes()


def test_page_is_the_same_on_every_machine() -> None:
    assert str(ROOT) not in PAGE.read_text("utf-8")
    assert "/demo_model`" not in PAGE.read_text("utf-8")


@pytest.mark.parametrize(
    "options",
    [
        ServeOptions,
        ChatOptions,
        TopOptions,
        DoctorOptions,
        CachePlanOptions,
        ThroughputOptions,
        ServeBenchOptions,
    ],
)
def test_every_setting_is_on_the_page_with_an_explanation(options: type) -> None:
    with_variables, _, _ = PAGE.read_text("utf-8").partition("## longshore kv")
    rows = [line for line in with_variables.splitlines() if line.startswith("| `--")]
    for field in fields(options):
        flag = "--" + field.name.replace("_", "-")
        of_setting = [row for row in rows if row.startswith(f"| `{flag}`")]
        assert of_setting, flag
        for row in of_setting:
            names, explanation, _, _ = row[2:-2].split(" | ")
            assert names.endswith(f"<br>`LONGSHORE_{field.name.upper()}`")
            assert explanation, f"{flag} is not explained"
