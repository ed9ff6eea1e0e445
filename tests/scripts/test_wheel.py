"""The wheel that `pip install` would take has all that runs, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGES = ("protocol", "scheduler", "worker", "connectors", "deploy")
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "site", "*.so")
SUFFIXES = {".py", ".html", ".css", ".js"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_wheel_has_every_module_page_and_model_and_no_test(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=NOT_COPIED)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, tree],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("longshore/")}
    wanted = {
        f"longshore/{path.relative_to(tree)}"
        for package in PACKAGES
        for path in (tree / package).rglob("*")
        if path.suffix in SUFFIXES or "demo_model" in path.parent.name
    }
    assert wanted <= packed
    others = {name for name in packed - wanted if not name.endswith((".so", "/py.typed"))}
    assert others == {"longshore/__init__.py"}
