"""Public names that have moved: old import paths work for one more release, with a warning."""

import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

REMOVED_IN: Final = "0.2.0"

MOVED: Final[Mapping[str, Mapping[str, str]]] = {
    "longshore.connectors.base": {"CachedBlocks": "longshore.connectors.base:StorableBlocks"},
    "longshore.connectors.offloading.checksum": {
        name: f"longshore.connectors.base.checksum:{name}"
        for name in ("IDENTITY_DIGEST_BYTES", "BlockBuffer", "block_checksum")
    },
    "longshore.deploy.cli.options": {
        "EngineOptions": "longshore.deploy.settings.options:EngineOptions"
    },
}
"""By old module: what each name is now. Listed in the changelog."""


def moved_names(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that had names of `MOVED`."""

    def find(name: str) -> Any:
        if (path := MOVED[module].get(name)) is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = path.partition(":")
        warnings.warn(
            f"{module}.{name} is now {home}.{new}; the old path is removed in {REMOVED_IN}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(import_module(home), new)

    return find
