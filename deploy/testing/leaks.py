"""Finds strings that an object still refers to, such as the ids of ended requests."""

import gc
from collections.abc import Collection
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

from longshore.connectors.base import ConnectorConfig

_CODE: Final = (type, ModuleType, FunctionType, BuiltinFunctionType)
_NOT_ITS_OWN: Final = ("longshore.scheduler.", "longshore.worker.", "torch", "threading", "logging")
"""Modules whose objects a connector uses, but does not own."""


def strings_in(root: object, wanted: Collection[str]) -> set[str]:
    """Which of the `wanted` strings the object refers to, directly or through other objects."""
    found, seen, pending = set(), {id(root)}, [root]
    while pending:
        for item in _referents(pending.pop()):
            if isinstance(item, str):
                if item in wanted:
                    found.add(item)
            elif id(item) not in seen and _is_its_own(item):
                seen.add(id(item))
                pending.append(item)
    return found


def _referents(item: object) -> list[Any]:
    if isinstance(item, dict):  # the garbage collector does not list keys that are strings
        return [*item.keys(), *item.values(), *gc.get_referents(item)]
    return gc.get_referents(item)


def _is_its_own(item: Any) -> bool:
    if isinstance(item, (*_CODE, ConnectorConfig)):
        return False
    return not type(item).__module__.startswith(_NOT_ITS_OWN)
