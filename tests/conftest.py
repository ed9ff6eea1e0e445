"""What every test shares: the `req` mark, checked against docs/requirements.md at collection."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and no verdict on how fast this machine happens to be.
settings.register_profile(
    "longshore", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("longshore")

ROOT = Path(__file__).resolve().parent.parent


def load_script(name: str) -> ModuleType:
    """Import the Python program `scripts/<name>`, which has no .py suffix, under that name."""
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.hookimpl(tryfirst=True)  # before -m and -k deselect: a wrong id is wrong in every selection
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    requirements = load_script("requirements")
    known = requirements.read_requirements()
    unknown: set[str] = set()
    for item in items:
        for mark in item.iter_markers("req"):
            for id_ in requirements.unknown_ids(mark.args, known):
                unknown.add(f"{item.nodeid} claims {id_}")
    if unknown:
        listed = "\n".join(sorted(unknown))
        raise pytest.UsageError(f"not an id of docs/requirements.md:\n{listed}")
