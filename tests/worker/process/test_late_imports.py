import importlib
import sys
from pathlib import Path

import pytest

from longshore.worker.process.late_imports import import_all, imported_since


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package whose module `works` can be imported, and `fails` cannot."""
    folder = tmp_path / "late_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "works.py").touch()
    (folder / "fails.py").write_text("raise OSError('there is no device')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("late_package", "late_package.works"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "late_package"


def test_what_was_imported_since_is_told_in_order(package: str) -> None:
    before = frozenset(sys.modules)
    importlib.import_module(f"{package}.works")
    assert imported_since(before) == (package, f"{package}.works")
    assert imported_since(sys.modules) == ()


def test_a_module_that_cannot_be_imported_is_left_out(package: str) -> None:
    import_all([f"{package}.fails", f"{package}.is_not_there", f"{package}.works"])
    assert f"{package}.works" in sys.modules
    assert f"{package}.fails" not in sys.modules
