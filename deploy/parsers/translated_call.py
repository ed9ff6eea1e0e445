"""Tool calls whose arguments are not written as JSON, given as JSON as they arrive.

As with calls in JSON, one of at most MAX_HELD_CHARACTERS is given once it is complete and valid,
and the arguments of a longer one are passed on as they arrive.
"""

import ast
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from longshore.deploy.parsers.json_text import (
    MAX_HELD_CHARACTERS,
    is_json_object,
    read_json,
    write_json,
)
from longshore.deploy.parsers.parser import MoreArguments, Source, Steps, ToolCall, Translation

MAX_REFERENCES: Final = 16

_COMBINED: Final = ("anyOf", "oneOf", "allOf")
_CONSTANTS: Final = {"True": True, "False": False, "None": None}
_TYPES: Final = (
    ("null", type(None)),
    ("boolean", bool),
    ("number", int | float),
    ("string", str),
    ("array", list),
    ("object", dict),
)


def translated_call(
    source: Source, start: int, name: str, translate: Callable[[Source], Translation]
) -> Steps[bool]:
    """A call of `name` with the arguments at `start`. Takes it with the text before it; False: it
    is not one, and nothing is taken.

    translate: reads the arguments, with what ends them, from a source that begins with them.
    """
    inner = Source()
    steps = translate(inner)
    num_fed, limit = start, start + MAX_HELD_CHARACTERS
    arguments, has_begun = "", False
    while True:
        end = len(source.text) if has_begun else min(len(source.text), limit)
        inner.text += source.text[num_fed:end]
        num_fed = end
        is_over = source.is_complete and end == len(source.text)
        inner.is_complete = is_over and not source.is_cut
        added, is_valid = _translated(steps)
        arguments += added
        if not has_begun:
            if is_valid is False or (is_valid and not is_json_object(arguments)):
                return False
            if is_valid is None and not source.is_complete and len(source.text) <= limit:
                yield None
                continue
        is_cut = is_valid is None and is_over
        num_taken = num_fed - (0 if is_cut else len(inner.text))
        source.take(num_taken)
        num_fed -= num_taken
        if arguments or not has_begun:
            yield MoreArguments(arguments) if has_begun else ToolCall(name, arguments)
        if is_cut or is_valid is not None:
            return True
        if has_begun:
            yield None
        arguments, has_begun = "", True


def _translated(steps: Translation) -> tuple[str, bool | None]:
    """What the translation gives now, and what it returns; None: it needs more text."""
    parts = []
    try:
        while (part := next(steps)) is not None:
            parts.append(part)
    except StopIteration as stop:
        return "".join(parts), stop.value
    return "".join(parts), None


def escaped(text: str) -> str:
    """The text within a string of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted_text(
    source: Source, end: str, followers: tuple[str, ...] = (), *, has_lines: bool = False
) -> Translation:
    """A string of JSON from the text before `end`, which is taken, too. Returns False at the end of
    the text.

    followers: one of them follows `end`, after white space; else `end` is part of the text.
    has_lines: one line break at the beginning and one at the end are not part of it.
    """
    yield '"'
    if has_lines and (yield from source.begins_with(0, "\n")) is not None:
        source.take(1)
    searched = 0
    while True:
        index = source.text.find(end, searched)
        if index < 0 and source.is_complete:
            yield escaped(source.take())
            return False
        num_shown = index if index >= 0 else len(source.text) - _num_held(source.text, end)
        if has_lines and source.text[:num_shown].endswith("\n"):
            num_shown -= 1
        yield escaped(source.take(num_shown))
        if index < 0:
            searched = 0
            yield None
            continue
        after = index - num_shown + len(end)
        if not followers:
            is_end = True
        else:
            following = yield from source.space(after)
            is_end = following == len(source.text)
            is_end |= (yield from source.begins_with(following, *followers)) is not None
        if is_end:
            source.take(after)
            yield '"'
            return True
        searched = after


def _num_held(text: str, end: str) -> int:
    """The length of the longest end of `text` with which `end` begins."""
    lengths = range(min(len(end) - 1, len(text)), 0, -1)
    return next((length for length in lengths if end.startswith(text[-length:])), 0)


def types_of(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The types of JSON values that a schema allows; empty: it does not say. An integer is a
    number. root: the schema to which references refer."""
    return frozenset(_types(schema, root, MAX_REFERENCES))


def _types(schema: object, root: Mapping[str, Any], num_left: int) -> set[str]:
    if not isinstance(schema, Mapping) or num_left == 0:
        return set()
    given = schema.get("type")
    if given is not None:
        names = given if isinstance(given, list) else [given]
        return {"number" if name == "integer" else name for name in names if isinstance(name, str)}
    if isinstance(reference := schema.get("$ref"), str):
        return _types(referred(reference, root), root, num_left - 1)
    if "const" in schema:
        return {_type_of(schema["const"])}
    if isinstance(values := schema.get("enum"), list):
        return {_type_of(value) for value in values}
    parts = [part for key in _COMBINED for part in _listed(schema.get(key))]
    return set().union(*(_types(part, root, num_left - 1) for part in parts))


def _listed(value: object) -> Iterable[object]:
    return value if isinstance(value, list) else ()


def referred(reference: str, root: Mapping[str, Any]) -> object:
    """The schema to which a reference refers; None: there is none."""
    node: object = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _type_of(value: object) -> str:
    return next((name for name, kind in _TYPES if isinstance(value, kind)), "")


def json_of(text: str, types: frozenset[str]) -> str:
    """The value that a text stands for, as JSON: of one of these types, or else the text itself.
    No types: JSON is a value, and other text is a text."""
    written = text.strip()
    if read_json(written) is None and written != "null":
        written = _literal(written) if types else ""
    if written and (not types or _type_of(read_json(written)) in types):
        return written
    return json.dumps(text, ensure_ascii=False)


def _literal(text: str) -> str:
    """A Python literal as JSON, because models know more Python than JSON; empty: it is none."""
    try:
        return write_json(_CONSTANTS[text] if text in _CONSTANTS else ast.literal_eval(text))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ""
