"""Old import paths of public names work for one release, and say so."""

from importlib import import_module
from pathlib import Path
from typing import Final

import pytest

import longshore
from longshore.connectors.base import StorableBlocks
from longshore.protocol.moved import MOVED, REMOVED_IN

CHANGELOG: Final = (Path(__file__).parents[2] / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("module", "name", "path"),
    [(module, name, path) for module, names in MOVED.items() for name, path in names.items()],
)
def test_an_old_path_gives_what_the_new_one_does_with_a_warning(
    module: str, name: str, path: str
) -> None:
    home, _, new = path.partition(":")
    with pytest.warns(DeprecationWarning, match=f"{module}.{name} is now {home}.{new}") as caught:
        found = getattr(import_module(module), name)
    assert caught[0].filename == __file__
    assert found is getattr(import_module(home), new)
    assert f"`{module}.{name}`" in CHANGELOG


def test_an_import_statement_warns_where_it_is() -> None:
    with pytest.warns(DeprecationWarning, match="CachedBlocks") as caught:
        from longshore.connectors.base import CachedBlocks  # type: ignore[attr-defined]
    assert CachedBlocks is StorableBlocks
    assert caught[0].filename == __file__


def test_other_names_are_missing_as_ever() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Missing'"):
        from longshore.connectors.base import Missing  # type: ignore[attr-defined]  # noqa: F401


def test_old_paths_are_gone_in_the_release_that_they_name() -> None:
    def numbers(version: str) -> list[int]:
        return [int(part) for part in version.split(".")]

    assert numbers(longshore.__version__) < numbers(REMOVED_IN), "remove MOVED's entries"
