"""Hooks of schemathesis, which are told by SCHEMATHESIS_HOOKS.

Types are those of lenient servers (docs/api.md), which the document does not describe: it would
make clients' types worse. So values of other types are not invalid if they can be read as the right
one.
"""

import re
from typing import Any

import schemathesis
from schemathesis import Case, HookContext

_READ_AS_ANOTHER_TYPE = re.compile(r"\s*([-+]?[\d.]+([eE][-+]?\d+)?|true|false)\s*", re.IGNORECASE)


@schemathesis.hook
def filter_case(context: HookContext, case: Case) -> bool:
    """Whether to send it: not a case that is to be invalid and may be valid."""
    is_negative = case.meta is not None and case.meta.generation.mode.is_negative
    return not (is_negative and _may_be_read(case.body))


def _may_be_read(value: Any) -> bool:
    match value:
        case dict():
            return any(map(_may_be_read, value.values()))
        case list():
            return any(map(_may_be_read, value))
        case str():
            return _READ_AS_ANOTHER_TYPE.fullmatch(value) is not None
        case bool():
            return False
        case int() | float():
            return value in (0, 1) or (isinstance(value, float) and value.is_integer())
    return False
